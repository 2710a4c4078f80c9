"""How values that a policy keeps are held, and skipped by recomputation."""
