"""Solvers: each finds choices, none judges them; see `rehearse`."""
