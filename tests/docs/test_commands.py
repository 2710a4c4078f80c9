"""Every command that a page names exists, and takes the options that it is given there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
STARTS = ("recollect", "python", "torchrun", "pytest", "make")


def find_commands() -> list[str]:
    """What stands in code, inline or in a block, and begins with the name of a program."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text("utf-8")
        blocks = re.findall(r"^```(?:console|shell)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        lines += (" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))
        for line in lines:
            command = line.removeprefix("$ ").removeprefix("PYTHONPATH=src ").partition("#")[0].partition(" > ")[0]
            if command.split(" ")[0] in STARTS and len(command.split()) > 1:
                found[command.strip()] = None
    return list(found)


COMMANDS = find_commands()
OURS = [command for command in COMMANDS if command.startswith("recollect ")]
SCRIPTS = [
    command
    for command in COMMANDS
    if command not in OURS and re.search(r"\b(benchmarks|examples|docs)/\w+\.py", command)
]


def test_commands_are_found_on_the_pages() -> None:
    assert len(OURS) > 20
    assert len(SCRIPTS) > 15


@pytest.mark.parametrize("command", OURS)
def test_a_command_of_ours_takes_the_options_it_is_shown_with(command: str) -> None:
    typer = pytest.importorskip("typer")
    from recollect._cli.app import app

    name, *arguments = shlex.split(command)[1:]
    if name.startswith("-") or name == "COMMAND":
        return
    known = typer.main.get_command(app).commands
    assert name in known
    if arguments:  # else it is only named
        known[name].make_context(name, arguments)


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_takes_the_options_it_is_shown_with(command: str) -> None:
    words = shlex.split(command)
    at = next(at for at, word in enumerate(words) if word.endswith(".py"))
    source = _read_with_imports(ROOT / words[at])
    for option in (word.partition("=")[0] for word in words[at + 1 :] if word.startswith("--")):
        assert f'"{option}"' in source, option
    for option, value in zip(words[at + 1 :], words[at + 2 :], strict=False):
        if option in ("--case", "--only"):
            assert re.search(rf"\b{value}\b", source), f"{option} {value}"


def _read_with_imports(script: Path) -> str:
    """A script, and the files beside it that it imports."""
    source = script.read_text("utf-8")
    beside = (script.with_name(f"{name}.py") for name in re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    return "\n".join([source, *(path.read_text("utf-8") for path in beside if path.exists())])


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(("pytest ", "make "))])
def test_a_test_or_target_that_is_named_exists(command: str) -> None:
    program, target, *_ = command.split()
    if program == "pytest" and not target.startswith("-"):
        assert (ROOT / target).exists()
    elif program == "make":
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def test_an_option_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_a_command_of_ours_takes_the_options_it_is_shown_with("recollect plan step.json --budget 1GiB --bugdet")
    with pytest.raises(AssertionError):
        test_a_script_takes_the_options_it_is_shown_with("python benchmarks/offload.py --cases disk")
