"""A profile for people: as text, plots, traces and pages. Nothing here imports torch, or runs or changes a model."""
