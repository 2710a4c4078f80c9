"""One file for a browser: complete in itself, and it loads nothing. All pages are made here. No torch here.

Everything that a page shows travels as one block of JSON; the scripts in `page/` turn it into elements. No text of the
user's model is ever written as markup, on either side.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

# Inside of a script element only these can end it or open another; JSON may spell them as it likes.
_UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_page(name: str, *, title: str, headline: str, scripts: Sequence[str], data: Mapping[str, Any]) -> str:
    """A page, as text to be written to a file in UTF-8.

    Args:
        name: of the page's own elements: ``page/<name>.html``.
        title: what the browser's tab says.
        headline: what is said where scripts may not run.
        scripts: files in ``page/``; they become one script, in which each file uses only what stands before it.
        data: what the scripts show.
    """
    script = "\n".join(map(_read, scripts))
    style = _read("page.css")
    return _fill(
        _read("page.html"),
        {
            "title": _as_text(title),
            "body": _fill(_read(f"{name}.html"), {"headline": _as_text(headline)}),
            "style": style,
            "style_hash": _hash(style),
            "script": script,
            "script_hash": _hash(script),
            # Only ASCII, so that a name that is not valid Unicode does not keep the page from being written.
            "data": json.dumps(data, separators=(",", ":"), ensure_ascii=True).translate(_UNSAFE),
        },
    )


def _read(name: str) -> str:
    return resources.files("recollect._report").joinpath("page", name).read_text(encoding="utf-8")


def _fill(template: str, parts: Mapping[str, str]) -> str:
    """A template with its parts put in, in one pass: a part that looks like a place for another stays as it is."""
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def _as_text(text: str) -> str:
    return escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _hash(text: str) -> str:
    """What the page's policy knows a script or style by; a browser runs no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
