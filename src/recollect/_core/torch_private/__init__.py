"""The seam to torch's private names: one file per facility, and nothing else in the package touches them.

Each file says which public API would replace it and which torch versions it was run on.
"""
