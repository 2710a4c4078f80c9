"""Makes the links of the README absolute in what is built: package indexes show it without the files beside it.

In the repository they stay relative, so that they work in any branch, clone and fork. The repository is the one that
GitHub's workflow runs in, or else that of ``origin``; where there is none, the README is taken as it is.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")
_GITHUB = re.compile(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?$")


class CustomMetadataHook(MetadataHookInterface):
    """What the build asks for the README, and for where the project lives."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what pyproject.toml calls dynamic."""
        root = Path(self.root)
        text = (root / "README.md").read_text("utf-8")
        repository, revision = find_repository(root), os.environ.get("GITHUB_SHA", "HEAD")
        if repository:
            text = make_absolute(text, repository, revision)
            address = f"https://github.com/{repository}"
            metadata["urls"] = {
                "Source": address,
                "Documentation": f"{address}/blob/{revision}/docs/index.md",
                "Changelog": f"{address}/blob/{revision}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def make_absolute(text: str, repository: str, revision: str) -> str:
    """A page whose pictures and links lead to a revision of a repository on GitHub."""
    raw, pages = "https://raw.githubusercontent.com", "https://github.com"

    def write(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        start = f"{raw}/{repository}/{revision}" if picture else f"{pages}/{repository}/blob/{revision}"
        return f"{picture}{words}({start}/{path})"

    return _LINK.sub(write, text)


def find_repository(root: Path) -> str:
    """``owner/name`` on GitHub; nothing if nobody knows."""
    if "GITHUB_REPOSITORY" in os.environ:
        return os.environ["GITHUB_REPOSITORY"]
    try:
        command = ["git", "-C", str(root), "remote", "get-url", "origin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    found = _GITHUB.search(done.stdout.strip())
    return found[1] if found else ""
