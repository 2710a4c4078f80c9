"""Layer 1: forget a region's saved tensors in forward, make them again in backward."""
