"""Integrations with training tools. Import the one you use; `import recollect` loads none of them."""
