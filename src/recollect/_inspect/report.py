"""A profile for people, in one call: printed, or written as a page, a picture, a trace or text."""

from __future__ import annotations

import errno
import importlib
import io
import os
import secrets
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Never

from recollect._apply.rules import parse_value
from recollect._core.argument_text import short_repr
from recollect._core.gains import Gain
from recollect._core.patterns import hint_nearest, quote_all
from recollect._core.profiles import Profile
from recollect._core.spelling import options_of, refuse_unknown
from recollect._plan.gains import find_gains
from recollect._policy.presets import ReadyMade

_KINDS = {
    ".trace.json": "trace",
    ".html": "html",
    ".htm": "html",
    ".png": "png",
    ".svg": "svg",
    ".pdf": "pdf",
    ".txt": "text",
    ".json": "json",
}
_SUFFIXES = ".html, .png, .svg, .pdf, .txt, .trace.json, .json"
_COMPARING = ("text", "html", "png", "svg", "pdf")


def report(
    profile: Profile,
    to: str | os.PathLike[str] | None = None,
    *,
    against: Profile | None = None,
    top: int = 20,
    kind: str | None = None,
    **unknown: Never,
) -> None:
    """Show a profile: does it fit, where is the peak, what would help; then what is alive there and what is saved.

    Args:
        profile: what `recollect.profile` returned.
        to: None prints the report as text. A path writes a file, whose suffix says what: ``.html`` a page that needs no
            other file, ``.png``, ``.svg`` and ``.pdf`` a picture to share, ``.trace.json`` a trace for Perfetto and
            ``chrome://tracing``, ``.txt`` text, ``.json`` the profile itself. The file is written completely or not
            at all.
        against: another profile, for example of the step before a change; text, page and picture compare the two.
        top: the most lines a table of the text may have.
        kind: what to write (``"html"``, ``"png"``, ``"svg"``, ``"pdf"``, ``"trace"``, ``"text"``, ``"json"``) if the
            suffix does not say it.
        unknown: there are no other options; the error says which one is probably meant.

    Raises:
        ValueError: neither suffix nor kind is known, or this kind of file cannot compare two profiles.
        FileNotFoundError: the directory does not exist.
        ImportError: the library that draws it is not installed.

    >>> import torch, recollect
    >>> layers = [torch.nn.TransformerEncoderLayer(32, 2, batch_first=True) for _ in range(4)]
    >>> recollect.report(recollect.profile(torch.nn.Sequential(*layers), torch.ones(8, 64, 32)))
    Sequential on CPU: peak ...
    what would help, best first
      1. recompute ...
           recollect.apply(model, ...
    alive at the peak
    ...
    """
    if unknown:
        refuse_unknown("recollect.report", unknown, options_of(report))
    _check(profile, against, top)
    if to is None:
        if kind not in (None, "text"):
            message = (
                f"a report of kind {kind!r} cannot be printed: pass a file to write, as in report(profile, 'x.html')"
            )
            raise ValueError(message)
        _print(profile, against, top)
        return
    if not isinstance(to, (str, os.PathLike)):
        hint = ". To compare two profiles, pass against=" if isinstance(to, Profile) else ""
        message = f"recollect.report: to={short_repr(to)}: expected the path of a file to write{hint}"
        raise TypeError(message)
    path = Path(to)
    if kind is None and not path.is_dir():
        kind = _find_kind(path)
    _check_place(path)
    if kind not in _KINDS.values():
        known = list(dict.fromkeys(_KINDS.values()))
        message = f"unknown kind of report: {kind!r}; expected one of {quote_all(known)}{hint_nearest(kind, known)}"
        raise ValueError(message)
    if against is not None and kind not in _COMPARING:
        message = (
            f"a file of kind {kind!r} holds one profile; to compare two (against=...), write text, HTML or a picture"
        )
        raise ValueError(message)
    assert kind is not None
    content = _render(profile, kind, against, top)
    try:
        _write(path, content)
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        message = f"cannot write a report to '{path}': {getattr(error, 'strerror', None) or error}"
        kind_of_error = type(error) if isinstance(error, OSError) else OSError
        raise kind_of_error(getattr(error, "errno", errno.ELOOP), message) from error


def _check(profile: Profile, against: Profile | None, top: int) -> None:
    for name, given in (("profile", profile), ("against", against)):
        if not isinstance(given, Profile) and (given is not None or name == "profile"):
            message = (
                f"recollect.report: {name} must be a Profile, as recollect.profile returns it, not "
                f"{type(given).__name__}. To read one from a file: recollect.Profile.from_json(path.read_text())"
            )
            raise TypeError(message)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        message = f"top={top!r}: expected a number of lines, at least 1"
        raise ValueError(message)


def _find_kind(path: Path) -> str:
    for suffix, kind in _KINDS.items():
        if path.name.lower().endswith(suffix):
            return kind
    message = (
        f"cannot tell what to write to '{path}': expected a name that ends in one of {_SUFFIXES}. Or pass kind=..."
    )
    raise ValueError(message)


def _check_place(path: Path) -> None:
    if path.is_dir():
        message = (
            f"cannot write a report to '{path}': it is a directory. Name a file in it, such as '{path / 'report.html'}'"
        )
        raise IsADirectoryError(message)
    if not path.parent.is_dir():
        message = f"cannot write a report to '{path}': the directory '{path.parent}' does not exist. Create it first"
        raise FileNotFoundError(message)


def _render(profile: Profile, kind: str, against: Profile | None, top: int) -> bytes:
    if kind == "json":
        return profile.to_json().encode()
    if kind == "trace":
        from recollect._report.trace import write_trace

        return write_trace(profile).encode()
    if kind == "html":
        from recollect._report.html import write_html

        return write_html(profile, against=against, gains=find_all_gains(profile)).encode()
    if kind == "text":
        text = _load("text").write_text(profile, against=against, gains=find_all_gains(profile), top=top)
        return str(text).encode()
    drawn = io.BytesIO()
    figure = _load("plot").draw(profile, against=against)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a module's name in other letters
        figure.savefig(drawn, format=kind, dpi=150)
    return drawn.getvalue()


def find_all_gains(profile: Profile) -> list[Gain]:
    """What recomputing would save, also under the policy that `apply` knows by a word."""
    choices, _ = parse_value("selective")
    assert choices is not None
    assert isinstance(choices.policy, ReadyMade)
    suited = choices.policy.suited(call.op for call in profile.calls)
    return find_gains(profile, policies={"selective": suited})


def _load(form: str) -> ModuleType:
    """A module of the report that needs a library which is not always there."""
    library, extra, what = {"text": ("rich", "report", "text"), "plot": ("matplotlib", "plot", "a picture")}[form]
    try:
        return importlib.import_module(f"recollect._report.{form}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        message = f'a report as {what} needs {library}, which is not installed. Run: pip install "recollect[{extra}]"'
        raise ImportError(message, name=library) from error


def _print(profile: Profile, against: Profile | None, top: int) -> None:
    text, gains = _load("text"), find_all_gains(profile)
    console = importlib.import_module("rich.console").Console(emoji=False)
    if console.is_terminal or console.is_jupyter:
        console.print(text.render_text(profile, against=against, gains=gains, top=top))
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    page = text.write_text(profile, against=against, gains=gains, top=top, width=console.width, encoding=encoding)
    sys.stdout.write(page)


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: beside its place first."""
    if path.exists() and not path.is_file():  # a pipe, or /dev/stdout: not to be replaced
        path.write_bytes(content)
        return
    place = path.resolve()  # of a link, what it points to
    part = place.with_name(f".{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(content)
        if place.exists():
            shutil.copymode(place, part)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)
