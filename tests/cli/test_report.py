"""`recollect report`: reads profiles, refuses what is none, and hands them to `recollect.report`."""

import json
from pathlib import Path
from typing import Any

import pytest

from recollect._core.profiles import Profile
from tests.cli.conftest import Invoke
from tests.report.steps import transformer_step

pytest.importorskip("typer")


@pytest.fixture
def step(folder: Path) -> Profile:
    """A profile, and three files: it, one with more layers, and none at all."""
    profile, other = transformer_step(layers=2), transformer_step(layers=3)
    (folder / "step.json").write_text(profile.to_json(), "utf-8")
    (folder / "other.json").write_text(other.to_json(), "utf-8")
    return profile


@pytest.mark.usefixtures("step")
def test_a_profile_is_printed_without_escape_codes_where_it_is_piped(invoke: Invoke) -> None:
    done = invoke("report", "step.json")
    assert (done.code, done.err) == (0, "")
    assert "peak" in done.out
    assert "recollect profile ... --dry --device H100" in " ".join(done.out.split())
    assert "\x1b" not in done.out


@pytest.mark.usefixtures("step")
@pytest.mark.parametrize("to", ["x.html", "x.png", "x.svg", "x.trace.json", "x.txt", "x.json"])
@pytest.mark.parametrize("other", [[], ["other.json"]], ids=["one", "two"])
def test_a_report_is_written_in_the_form_that_the_ending_says(
    invoke: Invoke, folder: Path, to: str, other: list[str]
) -> None:
    if to.endswith((".png", ".svg")):
        pytest.importorskip("matplotlib.pyplot")
    done = invoke("report", "step.json", *other, "--to", to)
    if other and to.endswith(".json"):
        expected = "a file of this kind holds one profile; two are compared in text, .html, .png, .svg or .pdf"
        assert (done.code, done.err) == (2, f"error: {to}: {expected}\n")
        return
    assert (done.code, done.out, done.err) == (0, "", f"wrote {to}\n")
    assert (folder / to).stat().st_size > 100


def test_with_two_profiles_the_second_is_compared_with_the_first(
    invoke: Invoke, step: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def report(profile: Profile, to: Path | None = None, **options: Any) -> None:
        asked.append((profile, to, options))

    monkeypatch.setattr("recollect._cli.report.make_report", report)
    invoke("report", "step.json", "other.json", "--top", "5")
    invoke("report", "step.json", "--to", "x.html")
    (after, to, options), (alone, page, rest) = asked
    assert (to, options) == (None, {"against": step, "top": 5})
    assert after != step
    assert (alone, page, rest["against"]) == (step, Path("x.html"), None)


@pytest.mark.usefixtures("step")
def test_quiet_says_nothing_of_the_file(invoke: Invoke) -> None:
    assert invoke("report", "step.json", "--to", "x.json", "--quiet").err == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"recollect": "profile", ', "expected a recollect profile as JSON: "),
        ("[1, 2]", "expected a recollect profile, found something else"),
        ('{"recollect": "plan", "version": 1}', "expected a recollect profile, found a recollect plan"),
        (
            '{"recollect": "profile", "version": 99}',
            "this profile has version 99, but this recollect reads versions up to 4: upgrade recollect, ",
        ),
        ('{"recollect": "profile", "version": 1}', "profile: storages, calls missing"),
    ],
    ids=["damaged", "foreign", "other kind", "later version", "incomplete"],
)
def test_a_file_that_is_no_profile_is_refused_with_exit_code_2(
    invoke: Invoke, folder: Path, content: str, message: str
) -> None:
    (folder / "odd.json").write_text(content, "utf-8")
    done = invoke("report", "odd.json")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: odd.json: {message}")


def test_a_file_that_is_no_text_is_refused(invoke: Invoke, folder: Path) -> None:
    (folder / "odd.json").write_bytes(b"\x80\x02}q\x00.")
    done = invoke("report", "odd.json")
    expected = "error: odd.json: expected a recollect profile as JSON, but this is not text\n"
    assert (done.code, done.err) == (2, expected)


def test_a_file_that_is_not_there_is_refused(invoke: Invoke) -> None:
    done = invoke("report", "none.json")
    assert (done.code, done.err) == (2, "error: none.json cannot be read: No such file or directory\n")


def test_a_target_in_place_of_a_profile_is_sent_to_the_other_command(invoke: Invoke) -> None:
    done = invoke("report", "train.py:make")
    assert done.code == 2
    assert done.err == (
        "error: train.py:make cannot be read: No such file or directory; to take a profile, use `recollect profile "
        "train.py:make --json step.json`\n"
    )


@pytest.mark.usefixtures("step")
def test_the_case_of_an_ending_does_not_matter(invoke: Invoke, folder: Path) -> None:
    done = invoke("report", "step.json", "--to", "STEP.TXT", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert (folder / "STEP.TXT").is_file()


@pytest.mark.usefixtures("step")
def test_an_ending_that_says_nothing_is_refused(invoke: Invoke) -> None:
    done = invoke("report", "step.json", "--to", "x.doc")
    expected = (
        "error: x.doc: the extension says what to write; expected .html, .png, .svg, .pdf, .trace.json, .txt, .json\n"
    )
    assert (done.code, done.err) == (2, expected)


@pytest.mark.usefixtures("step")
def test_a_library_that_is_missing_is_named_without_a_traceback(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(*args: Any, **kwargs: Any) -> None:
        raise ImportError('plots need matplotlib: pip install "recollect[plot]"')

    monkeypatch.setattr("recollect._cli.report.make_report", report)
    done = invoke("report", "step.json", "--to", "x.png")
    assert (done.code, done.err) == (2, 'error: plots need matplotlib: pip install "recollect[plot]"\n')


@pytest.mark.usefixtures("step")
def test_a_place_that_cannot_be_written_is_named(invoke: Invoke, folder: Path) -> None:
    (folder / "x.json").mkdir()
    done = invoke("report", "step.json", "--to", "x.json")
    assert (done.code, done.err) == (2, "error: x.json is a folder: name a file in it\n")


@pytest.mark.usefixtures("step")
def test_a_folder_without_an_ending_is_said_to_be_one(invoke: Invoke) -> None:
    done = invoke("report", "step.json", "--to", ".")
    assert (done.code, done.err) == (2, "error: . is a folder: name a file in it\n")


@pytest.mark.usefixtures("step")
def test_a_link_to_itself_is_refused(invoke: Invoke, folder: Path) -> None:
    (folder / "x.html").symlink_to("x.html")
    done = invoke("report", "step.json", "--to", "x.html")
    assert (done.code, done.err) == (2, "error: x.html cannot be written: Too many levels of symbolic links\n")


@pytest.mark.usefixtures("step")
def test_that_a_report_cannot_be_written_is_said_once(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise PermissionError(13, "Permission denied", f"{path}.part")

    monkeypatch.setattr("recollect._inspect.report._write", refuse)
    done = invoke("report", "step.json", "--to", "x.html")
    assert (done.code, done.err) == (2, "error: cannot write a report to 'x.html': Permission denied\n")


def test_a_profile_taken_here_is_read_here(invoke: Invoke, folder: Path) -> None:
    assert invoke("profile", "train.py:make_model", "--json", "step.json").code == 0
    assert json.loads((folder / "step.json").read_text("utf-8"))["name"] == "Sequential"
    assert invoke("report", "step.json").code == 0
