"""Under torch.compile: regions as operators of our own, tags on nodes, and a partitioner that obeys a plan."""
