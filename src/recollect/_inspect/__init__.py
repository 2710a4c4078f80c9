"""One-call workflows and what they say about a model, built from everything below."""
