"""`recollect report`: shows profiles that were written before, or writes them in another form."""

import os
from pathlib import Path
from typing import Annotated

import typer

from recollect._cli.endings import loading, writing_output
from recollect._cli.screen import fail, say, show_progress
from recollect._core.profiles import Profile
from recollect._core.spelling import options_typed

ENDINGS = (".html", ".png", ".svg", ".pdf", ".trace.json", ".txt", ".json")


def report(
    profile: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="A profile, as `recollect profile --json` writes it.")
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="OTHER", help="A second profile to compare with: the first is before, this one after."),
    ] = None,
    *,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FILE",
            help="File to write instead of the text on the screen. Its extension says what to write: .html, .png, "
            ".svg, .pdf, .txt, .trace.json (for chrome://tracing or Perfetto), .json (the profile).",
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Rows in each table of the text.")] = 20,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages.")] = False,
) -> None:
    """Show a profile, or compare two: what is in memory at the peak, what put it there, and what would help.

    A profile is a file that `recollect profile --json` has written. Nothing is run. The report is printed; --to writes
    it to a file, as a page, a picture or a trace.

    **Exit codes**: 0 done, 2 wrong usage, or a file cannot be read or written.

    **Examples**

        recollect report step.json
        recollect report before.json after.json
        recollect report before.json after.json --to compare.html
        recollect report step.json --to step.trace.json
    """
    if to is not None:
        check_path(to)
        if other is not None and to.name.lower().endswith(".json"):
            fail(f"{to}: a file of this kind holds one profile; two are compared in text, .html, .png, .svg or .pdf")
    with show_progress("reading", quiet=quiet):
        read = [read_profile(path) for path in (profile, other) if path is not None]
    # The report is about the last one; the first is what it is compared with.
    before = read[0] if other is not None else None
    if to is None:
        print_report(read[-1], against=before, top=top)
    else:
        write_report(read[-1], to, against=before, top=top, quiet=quiet)


def check_path(path: Path, endings: tuple[str, ...] = ENDINGS) -> None:
    """Refuse a file before the work is done: its ending says nothing, or it cannot be written.

    Raises:
        typer.Exit: said on standard error.
    """
    try:
        if path.is_dir():
            fail(f"{path} is a folder: name a file in it")
        if not path.name.lower().endswith(endings):
            fail(f"{path}: the extension says what to write; expected {', '.join(endings)}")
        if not path.parent.is_dir():
            fail(f"{path}: there is no folder {path.parent}")
        needed = path
        try:
            path.stat()
        except FileNotFoundError:
            needed = path.parent
    except OSError as error:  # the name is too long, a link leads to itself, a folder may not be looked into
        fail(f"{path} cannot be written: {error.strerror}")
    if not os.access(needed, os.W_OK):
        fail(f"{path} cannot be written: no permission to write to {needed}")


def read_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        typer.Exit: there is none, or it is damaged; said on standard error.
    """
    try:
        return Profile.from_json(path.read_text("utf-8"))
    except OSError as error:
        is_target = path.suffix.startswith(".py") and isinstance(error, FileNotFoundError)
        instead = f"; to take a profile, use `recollect profile {path} --json step.json`" if is_target else ""
        fail(f"{path} cannot be read: {error.strerror}{instead}")
    except UnicodeDecodeError:
        fail(f"{path}: expected a recollect profile as JSON, but this is not text")
    except ValueError as error:
        fail(f"{path}: {error}")


def write_file(path: Path, text: str, *, quiet: bool, called: Path | None = None) -> None:
    """Write text to a file and say so.

    Args:
        path: of the file.
        text: that it is to have.
        quiet: whether to say nothing.
        called: the path as the user gave it, which messages use; by default `path`.

    Raises:
        typer.Exit: it cannot be written; said on standard error.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        fail(f"{called or path} cannot be written: {error.strerror}")
    if not quiet:
        say(f"wrote {called or path}")


def make_report(profile: Profile, to: Path | None = None, *, against: Profile | None, top: int) -> None:
    """As `recollect.report`, loaded when it is needed: it brings torch along."""
    with loading():
        from recollect._inspect.report import report as make

    with options_typed():
        make(profile, to, against=against, top=top)


def print_report(profile: Profile, *, against: Profile | None, top: int) -> None:
    """Print a report.

    Raises:
        typer.Exit: what writes it is not installed; said on standard error.
        SystemExit: standard output cannot be written; said on standard error.
    """
    try:
        with writing_output():
            make_report(profile, against=against, top=top)
    except (ImportError, ValueError) as error:
        fail(str(error))


def write_report(
    profile: Profile, to: Path, *, against: Profile | None, top: int, quiet: bool, called: Path | None = None
) -> None:
    """Write a report to a file and say so.

    Args:
        profile: to show.
        to: path of the file.
        against: with which it is compared.
        top: rows of each table.
        quiet: whether to say nothing.
        called: the path as the user gave it, which messages use; by default `to`.

    Raises:
        typer.Exit: the file cannot be written, or what writes it is not installed; said on standard error.
    """
    try:
        with show_progress(f"writing {called or to}", quiet=quiet):
            make_report(profile, to, against=against, top=top)
    except BrokenPipeError:
        raise
    except OSError as error:
        fail(error.strerror or str(error))
    except (ImportError, ValueError) as error:
        fail(str(error))
    if not quiet:
        say(f"wrote {called or to}")
