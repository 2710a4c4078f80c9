"""`recollect.report`: by suffix or kind, whole or not at all, and clear about what it cannot do."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from recollect._core.profiles import Profile
from recollect._inspect import report as reporting
from recollect._inspect.report import report
from recollect._plan.gains import find_gains
from recollect._report.text import write_text
from recollect.policies import first_match, save_attention, save_every
from tests.report.steps import transformer_step

STEP = transformer_step(2)
OTHER = transformer_step(2, recomputes=True)
GAINS = find_gains(STEP, policies={"selective": first_match(save_attention, save_every("aten.mm.default", 2))})


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Forms.


def test_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(STEP) is None  # type: ignore[func-returns-value]
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("GPT on cpu: peak ")
    assert "what recomputing would save" in shown.out
    assert "\x1b" not in shown.out


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    report(STEP)
    assert "\x1b[" in capsys.readouterr().out


def test_a_pipe_without_unicode_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", pipe)
    report(transformer_step(2, name="Mod\N{LATIN SMALL LETTER E WITH ACUTE}le"))
    pipe.flush()
    pipe.seek(0)
    assert pipe.read().startswith("Mod\\xe9le on cpu: peak ")


def test_top_and_against_reach_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    report(OTHER, against=STEP, top=1)
    shown = capsys.readouterr().out
    assert "before and after" in shown
    assert "and 16 more" in shown


def check_html(content: bytes) -> None:
    assert content.lower().startswith(b"<!doctype html>")


def check_svg(content: bytes) -> None:
    assert ET.fromstring(content).tag.endswith("svg")


def check_trace(content: bytes) -> None:
    assert len(json.loads(content)["traceEvents"]) > len(STEP.calls)


def check_profile(content: bytes) -> None:
    assert Profile.from_json(content.decode()) == STEP


def check_text(content: bytes) -> None:
    assert content.decode().startswith("GPT on cpu: peak ")


CHECKS: dict[str, Any] = {
    "step.html": check_html,
    "step.HTM": check_html,
    "step.png": lambda content: content.startswith(b"\x89PNG") or pytest.fail("no PNG"),
    "step.svg": check_svg,
    "step.pdf": lambda content: content.startswith(b"%PDF") or pytest.fail("no PDF"),
    "step.trace.json": check_trace,
    "step.json": check_profile,
    "step.txt": check_text,
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_suffix_says_what_is_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(STEP, tmp_path / name)
    CHECKS[name]((tmp_path / name).read_bytes())
    assert names_in(tmp_path) == [name]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("html", "step.html"),
        ("trace", "step.trace.json"),
        ("text", "step.txt"),
        ("json", "step.json"),
        ("svg", "step.svg"),
    ],
)
def test_the_kind_goes_before_the_suffix(kind: str, name: str, tmp_path: Path) -> None:
    report(STEP, str(tmp_path / "report.md"), kind=kind)
    CHECKS[name]((tmp_path / "report.md").read_bytes())


@pytest.mark.parametrize("name", ["step.html", "step.png", "step.txt"])
def test_two_profiles_are_compared_in_a_file(name: str, tmp_path: Path) -> None:
    report(OTHER, tmp_path / name)
    alone = (tmp_path / name).read_bytes()
    report(OTHER, tmp_path / name, against=STEP)
    assert (tmp_path / name).read_bytes() != alone


def test_the_text_of_a_file_is_that_of_the_report(tmp_path: Path) -> None:
    report(STEP, tmp_path / "step.txt", top=3)
    assert (tmp_path / "step.txt").read_text(encoding="utf-8") == write_text(STEP, gains=GAINS, top=3)


# Errors.


@pytest.mark.parametrize("name", ["report", "report.docx", "report.html.gz", "html"])
def test_an_unknown_suffix_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot tell what to write") as raised:
        report(STEP, tmp_path / name)
    assert str(raised.value) == (
        f"cannot tell what to write to '{tmp_path / name}': expected a name that ends in one of .html, .png, .svg, "
        ".pdf, .txt, .trace.json, .json. Or pass kind=..."
    )
    assert names_in(tmp_path) == []


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown kind of report") as raised:
        report(STEP, tmp_path / "x.html", kind="word")
    assert str(raised.value) == (
        "unknown kind of report: 'word'; expected one of 'trace', 'html', 'png', 'svg', 'pdf', 'text', 'json'"
    )


def test_a_page_is_not_printed() -> None:
    with pytest.raises(ValueError, match="cannot be printed") as raised:
        report(STEP, kind="html")
    assert str(raised.value) == (
        "a report of kind 'html' cannot be printed: pass a file to write, as in report(profile, 'x.html')"
    )


@pytest.mark.parametrize("name", ["x.json", "x.trace.json"])
def test_what_holds_one_profile_does_not_compare(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds one profile; to compare two"):
        report(STEP, tmp_path / name, against=OTHER)
    assert names_in(tmp_path) == []


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        report(STEP, tmp_path / "none" / "x.html")
    assert str(raised.value) == (
        f"cannot write a report to '{tmp_path}/none/x.html': the directory '{tmp_path}/none' does not exist. "
        "Create it first"
    )


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.html").mkdir()
    with pytest.raises(IsADirectoryError, match=r"it is a directory. Name a file in it, such as '.*report\.html'"):
        report(STEP, tmp_path / "x.html")


@pytest.mark.parametrize("wrong", [None, {}, "step.json"])
def test_what_is_no_profile_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError) as raised:
        report(wrong)
    assert str(raised.value) == (
        f"recollect.report: profile must be a Profile, as recollect.profile returns it, not {type(wrong).__name__}. "
        "To read one from a file: recollect.Profile.from_json(path.read_text())"
    )
    if wrong is not None:
        with pytest.raises(TypeError, match="against must be a Profile"):
            report(STEP, against=wrong)


@pytest.mark.parametrize("top", [0, -1, True, 1.5])
def test_tables_have_at_least_a_line(top: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a number of lines, at least 1"):
        report(STEP, top=top)


@pytest.mark.parametrize(
    ("missing", "what", "extra", "name"),
    [
        ("rich.console", "text", "report", None),
        ("rich.console", "text", "report", "x.txt"),
        ("matplotlib.figure", "a picture", "plot", "x.png"),
    ],
)
def test_a_missing_library_names_its_extra(
    missing: str, what: str, extra: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"recollect._report.{'text' if what == 'text' else 'plot'}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    library = missing.partition(".")[0]
    with pytest.raises(ImportError) as raised:
        report(STEP, None if name is None else tmp_path / name)
    assert str(raised.value) == (
        f'a report as {what} needs {library}, which is not installed. Run: pip install "recollect[{extra}]"'
    )
    assert names_in(tmp_path) == []


def test_another_missing_library_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "recollect._report.text", raising=False)
    monkeypatch.setitem(sys.modules, "recollect._report.summary", None)
    with pytest.raises(ModuleNotFoundError, match=r"recollect\._report\.summary"):
        report(STEP)


# Whole or not at all.


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    file.write_text("before")

    def fail(*_: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="no space left"):
        report(STEP, file)
    monkeypatch.undo()
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        report(STEP, file)
    assert file.read_text() == "before"
    assert names_in(tmp_path) == ["x.json"]


def test_a_failure_while_drawing_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        message = "broken"
        raise RuntimeError(message)

    monkeypatch.setattr(reporting, "_render", fail)
    with pytest.raises(RuntimeError, match="broken"):
        report(STEP, tmp_path / "x.png")
    assert names_in(tmp_path) == []


def test_a_link_stays_a_link_and_others_may_read_the_file(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("before")
    (tmp_path / "link.json").symlink_to("real.json")
    report(STEP, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    check_profile((tmp_path / "real.json").read_bytes())
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o666 & ~umask


def test_what_is_no_plain_file_is_written_to() -> None:
    report(STEP, os.devnull, kind="json")
    assert not Path(os.devnull).is_file()
