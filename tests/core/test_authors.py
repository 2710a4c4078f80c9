"""Whose code runs, and what modules of the library say about themselves."""

import contextlib
import json
import os
import pathlib
import sys
import sysconfig
import types

import pytest
import torch

import recollect
from recollect._cli import small_gpt
from recollect._core.authors import Role, is_of_user, is_users_file, role_of
from recollect._core.places import Places


@pytest.mark.parametrize("file", [__file__, "<ipython-input-3>", "/home/me/train.py", pytest.__file__])
def test_scripts_notebooks_and_packages_are_the_users(file: str) -> None:
    assert is_users_file(file)


@pytest.mark.parametrize(
    "file", [torch.__file__, recollect.__file__, contextlib.__file__, json.__file__, json.decoder.__file__]
)
def test_torch_this_library_and_the_standard_library_are_not_the_users(file: str) -> None:
    assert not is_users_file(file)


def test_what_python_has_frozen_is_not_the_users() -> None:
    assert not is_users_file("<frozen runpy>")


def test_packages_below_the_standard_library_are_the_users() -> None:
    assert is_users_file(os.path.join(sysconfig.get_path("stdlib"), "site-packages", "model", "net.py"))  # noqa: PTH118


def test_a_package_whose_name_begins_with_torch_is_not_torch() -> None:
    beside = pathlib.Path(torch.__file__).parent.with_name("torchvision") / "models.py"
    assert is_users_file(str(beside))


def test_a_program_that_comes_with_the_library_counts_as_the_users() -> None:
    forward = small_gpt.Block.forward
    assert is_of_user(forward.__code__, forward.__globals__)
    assert not is_of_user(forward.__code__, {})


def test_only_modules_of_the_library_have_roles() -> None:
    names = {"__recollect_role__": Role.RUNNER, "sys": sys}
    exec(compile("frame = sys._getframe()", "/home/me/train.py", "exec"), names)
    frame = names["frame"]
    assert isinstance(frame, types.FrameType)
    assert role_of(frame) is None


def test_a_line_of_the_standard_library_is_not_taken_for_the_users() -> None:
    places = Places()
    found: list[tuple[str, str]] = []

    def note(pairs: list[tuple[str, int]]) -> dict[str, int]:
        found.append(places.locate(0))
        return dict(pairs)

    json.loads('{"a": 1}', object_pairs_hook=note)
    found.append(places.locate(0))
    json.loads("[1]", parse_int=lambda _: found.append(places.locate(1)))  # asked from the caller of the lambda up
    assert [line.partition(":")[0] for _, line in found] == ["test_authors.py"] * 3
