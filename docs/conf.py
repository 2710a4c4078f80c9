"""Sphinx configuration."""

import sys
from importlib import metadata
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

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
html_static_path = ["_static"]
html_css_files = ["recollect.css"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
myst_heading_anchors = 3
smartquotes = False  # errors quote code, which readers search for and copy

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


def _end_examples_without_empty_lines(app: Sphinx, page: nodes.document) -> None:
    """In Markdown, an example that is tested ends with an empty line; pages need not show it."""
    del app
    for block in page.findall(nodes.literal_block):
        if block.rawsource == block.astext():  # else it is highlighted already
            block.rawsource = block.rawsource.rstrip()
            block.children = [nodes.Text(block.rawsource)]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", _end_examples_without_empty_lines)
