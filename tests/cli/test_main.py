"""The command line as a program: help, version, completion, exit codes, and what it does when it is cut short."""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recollect._cli import main as entry
from recollect._cli.endings import FAILED, INTERRUPTED, PIPE_CLOSED, WRONG_USAGE, end_quietly
from tests.cli.commands import environment, recollect
from tests.cli.conftest import Invoke
from tests.report.steps import transformer_step

ESCAPE = "\x1b"
COMMANDS = ("profile", "report", "plan", "fit", "bench", "doctor", "demo")

pytest.importorskip("typer")


def test_the_program_says_its_version_and_that_of_torch(folder: Path) -> None:
    done = recollect("--version", folder=folder)
    assert done.code == 0
    assert re.fullmatch(rf"recollect .+, torch {re.escape(torch.__version__)}\n", done.out)


def test_piped_help_names_all_commands_and_has_no_escape_codes(invoke: Invoke) -> None:
    done = invoke("--help")
    assert done.code == 0
    assert all(command in done.out for command in COMMANDS)
    assert "Exit codes" in done.out
    assert ESCAPE not in done.out + done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself_with_examples(invoke: Invoke, command: str) -> None:
    done = invoke(command, "--help")
    assert done.code == 0
    examples = done.out.partition("Examples")[2].splitlines()
    shown = [line for line in examples if f"recollect {command}" in line]
    assert shown
    assert all(line.count(f"recollect {command}") == 1 for line in shown)  # each on a line of its own


def test_help_of_profile_tells_the_convention_and_the_exit_codes(invoke: Invoke) -> None:
    text = " ".join(re.sub(r"[│•]", " ", invoke("profile", "--help").out).split())
    assert "a model, or (model, *inputs)" in text
    assert "anything else, such as a loss: the function itself was the step" in text
    assert "Exit codes: 0 done, 1 the target's code failed or has no step to profile, 2 wrong usage." in text


def test_help_is_about_what_the_command_takes(invoke: Invoke) -> None:
    plan, fit, report = (
        " ".join(invoke(name, "--help").out.replace("│", " ").split()) for name in ("plan", "fit", "report")
    )
    assert "path/to/script.py, or a profile, step.json." in plan
    assert "script.py" not in fit
    assert "--dry" not in fit
    assert report.count("Exit codes") == 1


def test_no_command_at_all_shows_the_help(invoke: Invoke) -> None:
    assert "Usage: recollect" in invoke().out


@pytest.mark.parametrize("args", [["no-such-command"], ["profile"], ["profile", "train.py", "--no-such-option"]])
def test_wrong_usage_has_exit_code_2(invoke: Invoke, args: list[str]) -> None:
    done = invoke(*args)
    assert done.code == WRONG_USAGE
    assert done.out == ""
    assert done.err != ""


def test_a_terminal_without_colours_gets_none(folder: Path) -> None:
    coloured = recollect("--help", folder=folder, variables={"FORCE_COLOR": "1"})
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", coloured.out)
    plain = recollect("--help", folder=folder, variables={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", plain.out)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_printed(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("_RECOLLECT_COMPLETE", f"source_{shell}")
    done = invoke()
    assert done.code == 0
    assert "_RECOLLECT_COMPLETE" in done.out


def test_the_shell_completes_commands(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"_RECOLLECT_COMPLETE": "complete_bash", "COMP_WORDS": "recollect d", "COMP_CWORD": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert invoke().out.split() == ["doctor", "demo"]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_libraries_the_program_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == WRONG_USAGE
    expected = f'the command line needs {missing}, which is not installed. Run: pip install "recollect[cli]"\n'
    assert capsys.readouterr().err == expected


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes started here can be interrupted, even where a shell started the tests with SIGINT ignored.

    A shell does so for what it runs in the background, and a process hands it on; a handler it does not.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_command_ends_with_130_and_no_traceback(folder: Path) -> None:
    (folder / "slow.py").write_text("import time\nprint('running', flush=True)\ntime.sleep(60)\n", "utf-8")
    command = [sys.executable, "-m", "recollect", "profile", "slow.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (INTERRUPTED, "", "")


def test_an_interrupt_while_the_commands_are_loaded_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == INTERRUPTED


def test_closed_streams_lead_nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "step.json").write_text(transformer_step(layers=2).to_json(), "utf-8")
    monkeypatch.setattr(sys, "argv", ["recollect", "report", "step.json"])
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 0
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        assert stream.name == os.devnull
        stream.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("buffering", [-1, 1], ids=["noticed at the end", "noticed at once"])
def test_output_that_finds_no_room_is_an_error_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], buffering: int
) -> None:
    (folder / "step.json").write_text(transformer_step(layers=2).to_json(), "utf-8")
    monkeypatch.setattr(sys, "argv", ["recollect", "report", "step.json"])
    with Path("/dev/full").open("w", buffering, encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            entry.main()
    assert ended.value.code == FAILED
    assert capsys.readouterr().err == "error: standard output cannot be written: No space left on device\n"


def test_output_that_nobody_reads_ends_the_command_quietly(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "recollect", "profile", "train.py:make_model", "--json", "-"]
    with open(writer, "wb") as out:  # noqa: PTH123 (a number, no path)
        done = subprocess.run(
            command, cwd=folder, env=environment(), stdout=out, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (PIPE_CLOSED, "")


def test_other_errors_pass_through_the_quiet_ending() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        end_quietly(broken)()


@pytest.mark.parametrize("args", [["--help"], ["profile", "--help"], ["demo", "--html", "no.txt"], ["report", "none"]])
def test_help_and_wrong_usage_do_not_wait_for_torch(folder: Path, args: list[str]) -> None:
    program = f"""
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules))
sys.argv = ["recollect", *{args!r}]
from recollect._cli.main import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment(), cwd=folder
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("after", ["import typer", "import torch"])
def test_an_interrupt_while_libraries_are_loaded_shows_nothing(folder: Path, after: str) -> None:
    module = after.split()[1]
    program = f"""
import importlib.abc, os, signal, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            print("loading", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
sys.argv = ["recollect", "demo"]
from recollect._cli.main import main
main()
"""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (INTERRUPTED, "", "")


def test_the_program_loads_no_command_line_library_before_it_runs() -> None:
    program = "import sys, recollect, recollect._cli.main; print({'typer', 'rich', 'click'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment()
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("write", ["say", "fail"])
def test_messages_show_text_as_it_is(capsys: pytest.CaptureFixture[str], write: str) -> None:
    import typer

    from recollect._cli import screen

    with contextlib.suppress(typer.Exit):
        getattr(screen, write)("module x:x: has [bold]no[/] :smile:")
    assert capsys.readouterr().err.endswith("module x:x: has [bold]no[/] :smile:\n")


def test_progress_shows_only_where_there_is_a_terminal_and_patience_is_used_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from recollect._cli import screen

    monkeypatch.setattr(screen, "_PATIENCE_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for is_terminal, quiet in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setenv("FORCE_COLOR", "1") if is_terminal else monkeypatch.delenv("FORCE_COLOR")
        with screen.show_progress("counting a[1]:x:", quiet=quiet) as show:
            time.sleep(0.1)
            show(1, 2)
        shown[is_terminal, quiet] = "counting a[1]:x:" in capfd.readouterr().err
    assert shown == {(True, False): True, (True, True): False, (False, False): False}
