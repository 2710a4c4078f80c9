"""When memory runs out: what was alive, where it ran out, and what would have made room."""
