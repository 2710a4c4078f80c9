"""The README: its links work in the repository, and on package indexes, which show it alone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hook of the build; the tool that calls it need not be installed here."""
    names = ["hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "MetadataHookInterface", object, raising=False)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_in_what_is_built_every_link_is_absolute(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/recollect")
    monkeypatch.setenv("GITHUB_SHA", "abc123")
    builder, metadata = hook.CustomMetadataHook(), dict[str, dict[str, str]]()
    builder.root = str(ROOT)
    builder.update(metadata)
    text = metadata["readme"]["text"]
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)
    assert "](https://raw.githubusercontent.com/somebody/recollect/abc123/docs/images/frontier.svg)" in text
    assert "[Fit](https://github.com/somebody/recollect/blob/abc123/docs/fit.md)" in text
    assert metadata["urls"]["Source"] == "https://github.com/somebody/recollect"


def test_nothing_but_links_changes(hook: ModuleType) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    built = hook.make_absolute(text, "somebody/recollect", "HEAD")
    assert (
        built.replace("https://raw.githubusercontent.com/somebody/recollect/HEAD/", "").replace(
            "https://github.com/somebody/recollect/blob/HEAD/", ""
        )
        == text
    )
    for kept in ("[a](https://example.org)", "[b](#part)"):
        assert hook.make_absolute(kept, "somebody/recollect", "HEAD") == kept


@pytest.mark.parametrize(
    "address", ["https://github.com/some-body/recollect.git", "git@github.com:some-body/recollect.git"]
)
def test_a_clone_knows_its_repository(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert hook.find_repository(tmp_path) == ""
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", address], check=True)
    assert hook.find_repository(tmp_path) == "some-body/recollect"
