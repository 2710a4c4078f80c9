"""One-call workflows: from a profile to a plan, from a model to one that fits."""
