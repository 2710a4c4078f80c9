"""Layer 0: vocabulary, scope, errors, units, and the seam to torch."""
