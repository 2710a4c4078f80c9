"""Levers: what a plan may do beyond keeping and recomputing values. The results are equal, but not bit for bit."""
