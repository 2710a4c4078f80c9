"""Which modules are alike."""

import pytest

from recollect._core.families import Families, paths_above
from recollect._core.profiles import ModuleEntry


def families(**kinds: str) -> Families:
    return Families(ModuleEntry(path=path.replace("_", "."), kind=kind) for path, kind in kinds.items())


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("h", "h"),
        ("h.0", "h.*"),
        ("h.1.mlp.0", "h.*.mlp.0"),
        ("", ""),
        ("other.0", "other.0"),
        ("h.2.not.there", "h.*.not.there"),
    ],
)
def test_numbers_of_parts_that_are_alike_become_stars(path: str, name: str) -> None:
    assert families(h="ModuleList", h_0="Block", h_1="Block", other="Sequential", other_0="Linear").name(path) == name


def test_parts_of_several_classes_are_not_alike() -> None:
    assert families(h="Sequential", h_0="Linear", h_1="GELU", h_2="Linear").name("h.0") == "h.0"


def test_lists_in_lists_have_two_stars() -> None:
    kinds = {f"s_{outer}_{inner}": "Block" for outer in range(2) for inner in range(2)}
    assert families(s_0="Stage", s_1="Stage", **kinds).name("s.1.0.conv") == "s.*.*.conv"


def test_the_model_is_above_all() -> None:
    assert list(paths_above("")) == [""]
    assert list(paths_above("a.b")) == ["a.b", "a", ""]
