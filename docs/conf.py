"""Sphinx configuration."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the index of errors

project = "recollect"
author = "The recollect authors"
copyright = "2026, The recollect authors"
release = metadata.version("recollect")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "error_index"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"recollect {release}"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
myst_heading_anchors = 3

# No inventories are fetched, so that the build needs no network: names of other projects cannot be resolved, nor can
# our own type variables and other private names that appear in public signatures.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|collections|contextlib|types|typing|typing_extensions|os|pathlib|enum|logging)(\..*)?"),
    (r"py:.*", r"recollect\._.*"),
    (r"py:.*", r"recollect\.compat\.composable\.contract\..*"),
    (r"py:class", r"Frame"),
    (r"py:class", r"_[A-Z]\w*"),
    (r"py:class", r"[A-Z]"),
]
