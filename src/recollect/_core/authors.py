"""Whose code runs: the user's, torch's, Python's or ours; and what modules of ours say about themselves.

A module of ours that reports must treat in a special way says so itself, by a line at its top::

    __recollect_role__ = Role.RUNNER
"""

from __future__ import annotations

import enum
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any

import torch

_ROLE = "__recollect_role__"
_OURS = f"{PurePath(__file__).parents[1]}{os.sep}"
_TORCH = f"{PurePath(torch.__file__).parent}{os.sep}"
_LAYERS = f"{PurePath(torch.__file__).parent / 'nn' / 'modules'}{os.sep}"
_STANDARD = f"{PurePath(os.__file__).parent}{os.sep}"
_PACKAGES = frozenset({"site-packages", "dist-packages"})  # where packages lie, which is below the standard library
_SKIPPED = "typing_extensions.py"  # its wrapper around what torch has renamed


class Role(enum.Enum):
    """What a module of ours is to those who read the stack.

    RUNNER: runs the user's step; its callers are not part of the step. PROGRAM: is a user's program that comes with
    the library. REGION: runs a region's function; what is above it is outside of the region.
    """

    RUNNER = "runner"
    PROGRAM = "program"
    REGION = "region"


def role_of(frame: FrameType) -> Role | None:
    """What the module of this frame says that it is; None for all others."""
    return frame.f_globals.get(_ROLE) if frame.f_code.co_filename.startswith(_OURS) else None


def is_of_torch(filename: str) -> bool:
    """Whether a file is torch's."""
    return filename.startswith(_TORCH)


@functools.lru_cache(maxsize=2**12)
def is_a_layers(filename: str) -> bool:
    """Whether a file is torch's and holds layers, whose code calls torch as a user's does."""
    return filename.startswith(_LAYERS)


def is_ours(filename: str) -> bool:
    """Whether a file is this library's."""
    return filename.startswith(_OURS)


def is_of_user(code: CodeType, names: Mapping[str, Any]) -> bool:
    """Whether code is the user's.

    Args:
        code: of a function or frame.
        names: of its module: ``function.__globals__``, ``frame.f_globals``.
    """
    file = code.co_filename
    return is_users_file(file) or (file.startswith(_OURS) and names.get(_ROLE) is Role.PROGRAM)


@functools.lru_cache(maxsize=2**12)
def is_users_file(filename: str) -> bool:
    """Whether a file is neither torch's nor ours nor Python's own; installed packages are the user's.

    >>> import json
    >>> is_users_file("/home/me/model.py"), is_users_file(json.__file__), is_users_file(torch.nn.__file__)
    (True, False, False)
    """
    if filename.startswith((_OURS, _TORCH, "<frozen ")) or filename.endswith(_SKIPPED):
        return False
    return not filename.startswith(_STANDARD) or not _PACKAGES.isdisjoint(PurePath(filename).parts)


@functools.lru_cache(maxsize=2**12)
def is_users_own(module: str) -> bool:
    """Whether a module, by its name, is the user's own: a script, a notebook, a package that is not installed.

    >>> is_users_own("__main__"), is_users_own("json"), is_users_own("numpy")
    (True, False, False)
    """
    if module == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_users_file(file) and _PACKAGES.isdisjoint(PurePath(file).parts)
