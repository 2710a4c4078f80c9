"""Layer 3: a policy or plan meets a function, a module, a model."""
