"""A profile is plain data: it goes to JSON and back unchanged, and refuses what does not hang together."""

import json
from typing import Any

import pytest

from recollect import Site
from recollect._core.calls import Lifetime, Made, OpCall, Phase, Saved, Storage, Value
from recollect._core.profiles import Profile

STEP = Profile(
    storages=(
        Storage(bytes=64, lifetime=Lifetime.STEP, name="weight"),
        Storage(bytes=128),
        Storage(bytes=4, lifetime=Lifetime.RETURNED),
        Storage(bytes=4, lifetime=Lifetime.GIVEN),
        Storage(bytes=64, lifetime=Lifetime.RETURNED),
    ),
    calls=(
        OpCall(
            op="aten.mm.default",
            inputs=(Value(storage=0, shape=(4, 4), dtype="float32", bytes=64),),
            outputs=(Value(storage=1, shape=(8, 4), dtype="float32", bytes=128),),
            region="block",
            module="mlp.up",
            scopes=("inner",),
            call=2,
            source="model.py:41",
            flops=256,
            seconds=1e-6,
            is_random=True,
        ),
        OpCall(op="aten.t.default", inputs=(Value(storage=1),), outputs=(Value(storage=1, shape=(4, 8)),)),
        OpCall(op="aten.relu_.default", inputs=(Value(storage=1),), outputs=(Value(storage=1),), writes=(1,)),
        OpCall(op="aten.sum.default", inputs=(Value(storage=1),), outputs=(Value(storage=2),)),
        OpCall(
            op="aten.mm.default",
            phase=Phase.BACKWARD,
            inputs=(Value(storage=3), Value(storage=1)),
            outputs=(Value(storage=4),),
        ),
    ),
    saved=(Saved(storage=1, by=3, reader=4), Saved(storage=0, by=0)),
    device="NVIDIA H200",
)


def test_a_profile_goes_to_json_and_back_unchanged() -> None:
    assert Profile.from_json(STEP.to_json()) == STEP


def test_the_json_of_a_profile_says_what_it_is_and_leaves_out_defaults() -> None:
    data = json.loads(STEP.to_json())
    assert (data["recollect"], data["version"], data["storages"][1]) == ("profile", 4, {"bytes": 128})
    assert data["calls"][4]["phase"] == "backward"


def test_views_and_writes_in_place_make_no_storage() -> None:
    assert list(STEP.made()) == [
        Made(storage=1, call=0, output=0),
        Made(storage=2, call=3, output=0),
        Made(storage=4, call=4, output=0),
    ]


def test_a_call_knows_its_site() -> None:
    assert STEP.calls[0].site() == Site(
        region="block",
        op="aten.mm.default",
        call=2,
        module="mlp.up",
        scopes=("inner",),
        shape=(8, 4),
        dtype="float32",
        bytes=128,
        flops=256,
        is_random=True,
    )


def test_what_a_call_writes_into_counts_as_read() -> None:
    assert OpCall(op="aten.copy_.default", inputs=(Value(storage=2),), writes=(0,)).reads == {0, 2}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"storages": STEP.storages[:2]},
            "call 3 (aten.sum.default) refers to storage 2, but the profile has 2 storages",
        ),
        (
            {"saved": (Saved(storage=1, by=9),)},
            "Saved(storage=1, by=9, reader=None) refers to call 9, but the profile has 5 calls",
        ),
        (
            {"calls": (OpCall(op="aten.sum.default", forward=7),), "saved": ()},
            "call 0 (aten.sum.default) refers to call 7, but the profile has 1 call",
        ),
    ],
)
def test_a_profile_that_does_not_hang_together_is_refused(change: dict[str, Any], text: str) -> None:
    fields: dict[str, Any] = {"storages": STEP.storages, "calls": STEP.calls, "saved": STEP.saved, **change}
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Profile(**fields)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[", "expected a recollect profile as JSON: Expecting value: line 1 column 2 (char 1)"),
        ("[]", "expected a recollect profile, found something else"),
        ('{"recollect": "plan"}', "expected a recollect profile, found a recollect plan"),
        (
            '{"recollect": "profile", "version": 5}',
            (
                "this profile has version 5, but this recollect reads versions up to 4: upgrade recollect, or make "
                "the profile again"
            ),
        ),
        ('{"recollect": "profile", "version": 1, "storages": []}', "profile: calls missing"),
        (
            '{"recollect": "profile", "version": 1, "storages": [], "calls": [], "graph": 1}',
            (
                "profile: expected the fields storages, calls, saved, device, name, clock, is_dry, rounding_bytes, "
                "capacity_bytes, fixed_bytes, optimizer, torch, modules, rules, allocators, notes, transfers, "
                "received, under_regions; not ['graph']"
            ),
        ),
        (
            '{"recollect": "profile", "version": 1, "storages": [{"bytes": "many"}], "calls": []}',
            "profile.storages[0].bytes: expected int, not 'many'",
        ),
        (
            '{"recollect": "profile", "version": 1, "storages": [{"bytes": 1, "lifetime": "short"}], "calls": []}',
            "profile.storages[0].lifetime: expected Lifetime, not 'short'",
        ),
    ],
)
def test_text_that_is_no_profile_is_refused_in_words(text: str, error: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Profile.from_json(text)
    assert str(caught.value) == error


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fixed_bytes": -1}, "the profile has fixed_bytes=-1: expected 0 or more, and less than 2**63"),
        ({"rounding_bytes": 0}, "the profile has rounding_bytes=0: expected at least 1"),
        (
            {"storages": (Storage(bytes=2**63),)},
            f"storage 0 has bytes={2**63}: expected 0 or more, and less than 2**63",
        ),
        (
            {"storages": (Storage(bytes=1, made_at=2),)},
            "storage 0 is made at call 2 and freed at call None, but the profile has 1 call",
        ),
        (
            {"storages": (Storage(bytes=1, made_at=1, freed_at=0),)},
            "storage 0 is made at call 1 and freed at call 0, but the profile has 1 call",
        ),
        (
            {"calls": (OpCall(op="a", seconds=float("nan")),)},
            "call 0 (a) takes nan seconds: expected 0 or more, and less than 1e+09",
        ),
        (
            {"calls": (OpCall(op="a", seconds=-1.0),)},
            "call 0 (a) takes -1.0 seconds: expected 0 or more, and less than 1e+09",
        ),
        ({"calls": (OpCall(op="a", flops=-1),)}, "call 0 (a) has flops=-1: expected 0 or more, and less than 2**63"),
        (
            {"calls": (OpCall(op="a", workspace_bytes=-1),)},
            "call 0 (a) has workspace_bytes=-1: expected 0 or more, and less than 2**63",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Profile(**{"storages": (), "calls": (OpCall(op="a"),), **change})
    assert str(caught.value) == text


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "\x00"])
def test_text_that_is_damaged_in_any_way_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected a recollect profile"):
        Profile.from_json(text)


def test_what_is_found_in_place_of_a_number_is_shown_shortly() -> None:
    with pytest.raises(ValueError, match="expected int") as caught:
        Profile.from_json(
            '{"recollect": "profile", "version": 1, "storages": [{"bytes": "' + "x" * 5000 + '"}], "calls": []}'
        )
    assert len(str(caught.value)) < 120


def test_a_profile_is_one_line_where_it_is_shown() -> None:
    relu = OpCall(op="aten.relu.default", inputs=(Value(storage=0),), outputs=(Value(storage=1),), seconds=0.002)
    storages = (Storage(bytes=64, lifetime=Lifetime.STEP), Storage(bytes=64))
    step = Profile(storages=storages, calls=(relu,), name="Net<T>", device="CPU", is_dry=True)
    assert repr(step) == "<Profile of Net<T> on CPU: peak 128 B, step 2.00 ms, 1 call, estimated>"


def test_a_notebook_shows_the_peak_of_a_profile() -> None:
    relu = OpCall(op="aten.relu.default", module="act", inputs=(Value(storage=0),), outputs=(Value(storage=1),))
    storages = (Storage(bytes=64, lifetime=Lifetime.STEP), Storage(bytes=64))
    page = Profile(storages=storages, calls=(relu,), name="Net<T>", notes=("a < b",))._repr_html_()
    assert "<b>Net&lt;T&gt;: peak 128 B, 1 call</b>" in page
    assert "forward, aten.relu.default, in act" in page
    assert ">128 B</td>" in page
    assert "<li>a &lt; b</li>" in page
    empty = Profile(storages=(), calls=())
    assert "a step: peak 0 B, 0 calls" in empty._repr_html_()
