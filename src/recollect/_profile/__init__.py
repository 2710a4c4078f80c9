"""What a step really does: the bytes it holds alive, and later its times and its graph."""
