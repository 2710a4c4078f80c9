"""Which values to keep, recompute or offload: the problem, the judge of all answers, and the solvers. No torch here."""
