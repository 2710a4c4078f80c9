"""A star stays within one part of a path, two cross parts, and a pattern matches whole paths only."""

from typing import Any

import pytest

from recollect._core.patterns import compile_pattern, nearest, nearest_paths


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("layers", ["layers"], ["", "layers.0", "my.layers", "layersx"]),
        ("layers.*", ["layers.0", "layers.attn"], ["layers", "layers.", "layers.0.attn", "layersx0"]),
        ("*.attn", ["layers.attn"], ["attn", ".attn", "layers.0.attn"]),
        ("layers.*.attn", ["layers.0.attn"], ["layers.attn", "layers.0.1.attn"]),
        ("l*s", ["ls", "layers"], ["l.s", "lay"]),
        ("layers.?", ["layers.0"], ["layers.10", "layers.."]),
        ("layers.[0-3]", ["layers.0", "layers.3"], ["layers.4", "layers.10"]),
        ("layers.[!0-3]", ["layers.4", "layers.x"], ["layers.0", "layers.."]),
        ("a.[^]", ["a.^"], ["a.x", "a.[^]"]),
        ("a.[^b]", ["a.^", "a.b"], ["a.c"]),
        ("a[", ["a["], ["a"]),
        ("**", ["a", "a.b", "a.b.c"], [""]),
        ("**.attn", ["attn", "a.attn", "a.b.attn"], ["a.attn.q", "xattn"]),
        ("layers.**", ["layers.0", "layers.0.attn"], ["layers", "layers."]),
        ("layers.**.q", ["layers.q", "layers.0.q", "layers.0.attn.q"], ["layersq", "layers.0.qq"]),
        ("lay**", ["lay", "layers.0.attn"], ["my.layers"]),
        (r"re:layers\.(0|1)", ["layers.0", "layers.1"], ["layers.10", "x.layers.0"]),
        ("re:.*", ["", "a", "a.b"], []),
        ("<lambda>", ["<lambda>"], ["lambda"]),
        ("f(x)+", ["f(x)+"], ["fx"]),
    ],
)
def test_a_pattern_matches_these_and_not_those(pattern: str, matching: list[str], others: list[str]) -> None:
    matches = compile_pattern(pattern)
    assert [path for path in [*matching, *others] if matches(path)] == matching


@pytest.mark.parametrize(
    ("pattern", "error", "text"),
    [
        ("", ValueError, "pattern '' is empty; '**' matches every path"),
        ("re:", ValueError, "pattern 're:' is empty; '**' matches every path"),
        (
            "re:(a",
            ValueError,
            "pattern 're:(a' is not a valid regular expression: missing ), unterminated subpattern at position 0",
        ),
        (
            "a.[z-a]",
            ValueError,
            "pattern 'a.[z-a]' is not a valid pattern: bad character range z-a at position 4",
        ),
        (3, TypeError, "expected a pattern as a string, not int 3"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        compile_pattern(pattern)
    assert str(caught.value) == text


PATHS = ["", "embed", "layers", "layers.0", "layers.0.attn", "layers.1", "layers.1.attn", "head"]


def test_the_nearest_names_are_those_that_read_alike() -> None:
    assert nearest("layer.0", PATHS) == nearest("Layer.0", PATHS) == ["layers.0", "layers.1"]
    assert nearest("re:layers.0", PATHS)[0] == "layers.0"
    assert nearest("zzz", PATHS) == []


def test_paths_of_the_same_depth_are_suggested_too() -> None:
    assert nearest_paths("blocks.*.zzz", PATHS) == ["layers.0.attn", "layers.1.attn"]
    assert nearest_paths("zzz", PATHS) == ["embed", "layers", "head"]
    assert nearest_paths("zzz", ["deep.inside"]) == ["deep.inside"]
    assert nearest_paths("zzz", [""]) == []
