"""Sphinx configuration."""

import re
import sys
from importlib import metadata
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

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

default_role = "py:obj"  # names in docstrings link to their entry, where they have one
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes as a list, one line each
napoleon_attr_annotations = False
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
    (r"py:obj", r".*"),  # names of arguments, too, which have no entry
]


def _end_examples_without_empty_lines(app: Sphinx, page: nodes.document) -> None:
    """In Markdown, an example that is tested ends with an empty line; pages need not show it."""
    del app
    for block in page.findall(nodes.literal_block):
        if block.rawsource == block.astext():  # else it is highlighted already
            block.rawsource = block.rawsource.rstrip()
            block.children = [nodes.Text(block.rawsource)]


# Classes that users never call: the library makes their objects.
_MADE_HERE = {
    "Applied",
    "BudgetError",
    "Fitted",
    "Installation",
    "Offload",
    "OffloadReport",
    "OomReport",
    "Profile",
    "SharedRecomputation",
    "Tier",
}
# Arguments that exist to be refused in words.
_REFUSED = re.compile(r"^    (?:misplaced|unknown): .*\n(?:^     +.*\n)*", re.MULTILINE)


def _show_what_users_pass(  # noqa: PLR0917 (Sphinx says)
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    del app, obj, options
    if what == "class" and name.rpartition(".")[2] in _MADE_HERE:
        return "", None
    if signature:
        signature = re.sub(r"(?:, )?\*\*unknown: [\w.~]+", "", signature)
        signature = re.sub(r"\*misplaced: [\w.~]+", "*", signature)
    return signature, returns


def _describe_what_users_pass(  # noqa: PLR0917 (Sphinx says)
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    del app, what, name, obj, options
    text = "\n".join([*lines, ""])
    lines[:] = re.sub(r"^Args:\n(?=\n)", "", _REFUSED.sub("", text), flags=re.MULTILINE).splitlines()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("doctree-read", _end_examples_without_empty_lines)
    app.connect("autodoc-process-signature", _show_what_users_pass)
    app.connect("autodoc-process-docstring", _describe_what_users_pass, priority=400)  # before Napoleon
