"""What recomputing modules would free: against brute force, against steps that do recompute, and by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import recollect
from recollect._core.calls import Category, Lifetime, OpCall, Phase, Saved, Storage, Value
from recollect._core.decisions import Decision, Site
from recollect._core.gains import Gain
from recollect._core.held import find_cached
from recollect._core.profiles import ModuleEntry, Profile
from recollect._core.torch_private.pytree import tree_leaves
from recollect._plan.gains import find_gains
from tests.models import MODELS
from tests.report.steps import transformer_step


def by_path(profile: Profile) -> dict[str, Gain]:
    """Those in which all of a path's modules are recomputed, and all of each."""
    return {gain.path: gain for gain in find_gains(profile) if gain.every == 1 and gain.policy == "full"}


# Against steps in which layers are recomputed.


@pytest.mark.parametrize("tokens", [128, 512, 4096])
@pytest.mark.parametrize("vocabulary", [16, 1024])
@pytest.mark.parametrize("layers", [2, 5])
def test_the_peak_is_that_of_the_step_which_recomputes_them(layers: int, vocabulary: int, tokens: int) -> None:
    plain = transformer_step(layers, vocabulary=vocabulary, tokens=tokens)
    gain = by_path(plain)["layers.*"]
    again = transformer_step(layers, vocabulary=vocabulary, tokens=tokens, recomputes=True)
    assert gain.count == layers
    assert gain.peak_bytes == again.peak_bytes
    assert gain.recompute_flops == sum(call.flops for call in again.calls if call.phase is Phase.RECOMPUTATION)
    start = plain.forward_count
    assert gain.freed_bytes == plain.timeline.bytes_at[start] - again.timeline.bytes_at[start]


def test_a_layer_frees_as_much_wherever_it_is() -> None:
    gains = by_path(transformer_step(4))
    layer = gains["layers.0"].freed_bytes
    assert [gains[f"layers.{number}"].freed_bytes for number in range(4)] == [layer] * 4
    assert gains["layers.*"].freed_bytes == 4 * layer


def test_what_is_recomputed_already_frees_nothing_more() -> None:
    assert not any(gain.path.startswith("layers") for gain in find_gains(transformer_step(4, recomputes=True)))


# Against real steps.


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_peak_is_that_of_the_model_whose_modules_are_recomputed(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()

    def take() -> Profile:
        return recollect.profile(model, *inputs, loss=lambda output: tree_sum(output))

    before = take()
    gains = find_gains(before)
    largest = sorted(gains, key=lambda gain: gain.peak_bytes)[:3]
    assert largest
    assert largest[0].peak_bytes < before.peak_bytes
    for gain in largest:
        recollect.apply(model, {gain.path: recollect.Decision.RECOMPUTE}, every=gain.every)
        after = take()
        recollect.remove(model)
        assert gain.peak_bytes == pytest.approx(after.peak_bytes, rel=0.01), gain.path


@pytest.mark.parametrize("uses_cache", [True, False])
def test_a_cache_of_keys_and_values_does_not_mislead(uses_cache: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=4,
        use_cache=uses_cache,
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 64, (8, 64))

    def take() -> Profile:
        return recollect.profile(model, ids, kwargs={"labels": ids}, timed=False)

    before = take()
    assert bool(find_cached(before)) == uses_cache
    gain = by_path(before)["model.layers.*"]
    with recollect.apply(model, {"model.layers.*": "full"}):
        assert gain.peak_bytes == pytest.approx(take().peak_bytes, rel=0.01)


def tree_sum(output: Any) -> torch.Tensor:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


# By hand.


def values(*storages: int) -> tuple[Value, ...]:
    return tuple(Value(storage=storage) for storage in storages)


def forward(module: str, reads: list[int], makes: list[int], *, flops: int = 1, seconds: float | None = None) -> OpCall:
    return OpCall(op="op", module=module, inputs=values(*reads), outputs=values(*makes), flops=flops, seconds=seconds)


def backward(of: int, reads: list[int], makes: list[int] | None = None) -> OpCall:
    return OpCall(op="back", phase=Phase.BACKWARD, inputs=values(*reads), outputs=values(*(makes or [])), forward=of)


def modules(*paths: str) -> tuple[ModuleEntry, ...]:
    return tuple(ModuleEntry(path=path, kind="Net" if not path else "Part") for path in paths)


def test_inputs_that_nobody_saved_are_taken_off() -> None:
    # "a" makes 1, which nobody saves; "b" makes and saves 2 (100 bytes) from it, and 3.
    storages = [Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=30), Storage(bytes=100), Storage(bytes=1)]
    calls = [
        forward("a", [0], [1]),
        forward("b", [1], [2]),
        forward("b", [2], [3]),
        forward("", [3], []),
        backward(2, [2]),
    ]
    step = Profile(
        storages=tuple(storages),
        calls=tuple(calls),
        saved=(Saved(storage=2, by=2, reader=4),),
        modules=modules("", "a", "b"),
    )
    assert by_path(step)["b"].freed_bytes == 100 - 30
    # With the input alive for other reasons, all of it is gain.
    other = dataclasses.replace(
        step, calls=(*step.calls, backward(0, [1])), saved=(*step.saved, Saved(storage=1, by=0))
    )
    assert by_path(other)["b"].freed_bytes == 100


def test_results_that_others_save_stay() -> None:
    storages = [Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=100), Storage(bytes=1)]
    calls = (forward("a", [0], [1]), forward("b", [1], [2]), backward(1, [1]), backward(0, [1]))
    saved = (Saved(storage=1, by=0, reader=3), Saved(storage=1, by=1, reader=2))
    step = Profile(storages=tuple(storages), calls=calls, saved=saved, modules=modules("", "a", "b"))
    assert find_gains(step) == []


def test_an_output_that_only_its_own_module_saves_goes_after_its_last_use() -> None:
    # "a" saves its own output, as tanh does; "b" reads and does not save it.
    storages = [Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=100), Storage(bytes=10), Storage(bytes=50)]
    calls = (forward("a", [0], [1]), forward("b", [1], [2]), backward(1, [2], [3]), backward(0, [1, 3]))
    saved = (Saved(storage=1, by=0, reader=3), Saved(storage=2, by=1, reader=2))
    step = Profile(storages=tuple(storages), calls=calls, saved=saved, modules=modules("", "a", "b"))
    [gain] = find_gains(step)
    assert (gain.path, gain.freed_bytes) == ("a", 100)
    assert step.peak_bytes == 161
    # Recomputation stands before backward of "a", where the gradient of its output is there already.
    assert gain.peak_bytes == 151


def test_what_must_run_once_is_not_freed_and_costs_nothing() -> None:
    storages = [Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=7), Storage(bytes=100), Storage(bytes=1)]
    once = dataclasses.replace(forward("a", [0], [1], flops=1000), runs_once=True)
    inside = [once, forward("a", [1], [2], flops=3), forward("a", [2], [3], flops=4)]
    calls = (*inside, forward("", [3], []), backward(2, [2]), backward(1, [1]))
    saved = (Saved(storage=1, by=1, reader=5), Saved(storage=2, by=2, reader=4))
    step = Profile(storages=tuple(storages), calls=calls, saved=saved, modules=modules("", "a"))
    [gain] = find_gains(step)
    assert (gain.freed_bytes, gain.recompute_flops) == (100, 7)


def test_statistics_may_be_run_again() -> None:
    # Batch norm writes into buffers: a region runs it again, and they are not written twice.
    storages = [
        Storage(bytes=8, lifetime=Lifetime.STEP, category=Category.BUFFER),
        *(Storage(bytes=size) for size in (100, 100, 1)),
    ]
    norm = dataclasses.replace(forward("a", [1], [2]), writes=(0,), runs_once=True)
    calls = (
        forward("a", [], [1]),
        norm,
        forward("a", [2], [3]),
        forward("", [3], []),
        backward(2, [2]),
        backward(1, [1]),
    )
    saved = (Saved(storage=1, by=1, reader=5), Saved(storage=2, by=2, reader=4))
    step = Profile(storages=tuple(storages), calls=calls, saved=saved, modules=modules("", "a"))
    [gain] = find_gains(step)
    assert (gain.freed_bytes, gain.recompute_flops) == (200, 3)


def test_what_a_region_runs_again_already_is_not_paid_twice() -> None:
    # A region keeps 1 and makes 2 again; to recompute it whole takes only the call that makes 1.
    storages = [Storage(bytes=1, lifetime=Lifetime.STEP), *(Storage(bytes=size) for size in (100, 50, 1, 50))]

    def inside(reads: list[int], makes: list[int], flops: int) -> OpCall:
        return dataclasses.replace(forward("a", reads, makes, flops=flops), region="a")

    again = dataclasses.replace(inside([1], [4], 3), phase=Phase.RECOMPUTATION, forward=1)
    calls = (
        inside([0], [1], 7),
        inside([1], [2], 3),
        inside([2], [3], 5),
        forward("", [3], []),
        again,
        backward(2, [4]),
    )
    saved = (Saved(storage=1, by=0, reader=4),)
    step = Profile(storages=tuple(storages), calls=calls, saved=saved, modules=modules("", "a"))
    [gain] = find_gains(step)
    assert (gain.freed_bytes, gain.recompute_flops) == (100, 7 + 5)


def test_a_price_is_in_seconds_and_in_operations_without_times() -> None:
    def step(seconds: dict[str, float | None], flops: dict[str, int]) -> Profile:
        storages = [Storage(bytes=1, lifetime=Lifetime.STEP), *(Storage(bytes=100) for _ in range(4))]
        calls = [
            forward("a", [0], [1], seconds=seconds["a"], flops=flops["a"]),
            forward("a", [1], [2], seconds=seconds["a"], flops=flops["a"]),
            forward("b", [0], [3], seconds=seconds["b"], flops=flops["b"]),
            forward("b", [3], [4], seconds=seconds["b"], flops=flops["b"]),
            forward("", [2, 4], []),
            backward(3, [3]),
            backward(1, [1]),
        ]
        saved = (Saved(storage=1, by=1, reader=6), Saved(storage=3, by=3, reader=5))
        return Profile(storages=tuple(storages), calls=tuple(calls), saved=saved, modules=modules("", "a", "b"))

    timed = sorted(find_gains(step({"a": 2.0, "b": 1.0}, {"a": 1, "b": 2})), key=lambda gain: gain.price)
    assert [(gain.path, gain.recompute_s) for gain in timed] == [("b", 2.0), ("a", 4.0)]
    assert [gain.price for gain in timed] == [0.02, 0.04]
    counted = sorted(find_gains(step({"a": None, "b": None}, {"a": 1, "b": 2})), key=lambda gain: gain.price)
    assert [(gain.path, gain.recompute_s, gain.price) for gain in counted] == [("a", None, 0.02), ("b", None, 0.04)]


def test_what_gives_most_comes_first() -> None:
    gains = find_gains(transformer_step(6, tokens=1024))
    assert [gain.peak_bytes for gain in gains] == sorted(gain.peak_bytes for gain in gains)
    assert (gains[0].path, gains[0].count) == ("layers.*", 6)


def test_every_second_of_repeated_blocks_is_a_choice() -> None:
    plain = transformer_step(6, tokens=1024)
    [gain] = [gain for gain in find_gains(plain) if gain.every == 2]
    alone = by_path(plain)
    assert (gain.path, gain.count) == ("layers.*", 3)
    assert gain.freed_bytes == sum(alone[f"layers.{number}"].freed_bytes for number in (0, 2, 4))
    assert not any(gain.every == 2 for gain in find_gains(transformer_step(3)))


def test_a_policy_keeps_what_it_saves_and_does_not_pay_for_it() -> None:
    plain = transformer_step(4, tokens=1024)
    everything, nothing, products = (
        next((gain for gain in find_gains(plain, policies={"some": policy}) if gain.policy == "some"), None)
        for policy in (
            lambda site: Decision.SAVE,
            lambda site: None,
            lambda site: Decision.SAVE if site.op == "aten.mm.default" else None,
        )
    )
    full = by_path(plain)["layers.*"]
    assert everything is None
    assert nothing is not None
    assert (nothing.freed_bytes, nothing.peak_bytes) == (full.freed_bytes, full.peak_bytes)
    assert nothing.recompute_flops < full.recompute_flops  # of a block's last product nobody needs the result
    assert products is not None
    assert 0 < products.freed_bytes < full.freed_bytes
    again = {"aten._scaled_dot_product_flash_attention.default", "aten.gelu.default"}
    in_layers = [call for call in plain.calls if call.phase is Phase.FORWARD and "layers" in call.module]
    assert products.recompute_flops == sum(call.flops for call in in_layers if call.op in again)


def test_a_policy_sees_calls_counted_as_in_a_region() -> None:
    seen: list[tuple[str, str, int]] = []

    def note(site: Site) -> None:
        seen.append((site.region, site.op, site.call))

    find_gains(transformer_step(2), policies={"some": note})
    assert {call for _, op, call in seen if op == "aten.mm.default"} == {0, 1, 2}
    assert {region for region, _, _ in seen} == {"layers.*"}


def test_what_something_else_holds_is_not_freed() -> None:
    plain = transformer_step(4, tokens=1024)
    keys = [
        made.storage
        for made in plain.made()
        if plain.calls[made.call].module == "layers.0.attn.qkv" and plain.calls[made.call].phase is Phase.FORWARD
    ]
    spans = plain.timeline.spans
    storages = tuple(
        dataclasses.replace(storage, made_at=max(spans[at][0], 0), freed_at=len(plain.calls)) if at in keys else storage
        for at, storage in enumerate(plain.storages)
    )
    cached = dataclasses.replace(plain, storages=storages)
    less = by_path(plain)["layers.0"].freed_bytes - by_path(cached)["layers.0"].freed_bytes
    assert less == sum(plain.storages[storage].bytes for storage in keys) > 0


def test_the_model_itself_is_there_if_it_has_no_parts() -> None:
    storages = (Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=100), Storage(bytes=1))
    clear = OpCall(op="zeros", phase=Phase.BACKWARD)
    calls = (forward("", [0], [1]), forward("", [1], [2]), clear, backward(1, [1]))
    saved = (Saved(storage=1, by=1, reader=3),)
    step = Profile(storages=storages, calls=calls, saved=saved, modules=modules(""))
    assert [gain.path for gain in find_gains(step)] == [""]


def test_a_profile_of_nothing_gains_nothing() -> None:
    assert find_gains(Profile(storages=(), calls=())) == []
    assert find_gains(Profile(storages=(), calls=(), modules=modules("", "a"))) == []


def test_lists_of_modules_that_differ_are_no_family() -> None:
    kinds = {"": "Net", "list": "Sequential", "list.0": "Linear", "list.1": "GELU", "list.2": "Linear"}
    entries = tuple(ModuleEntry(path=path, kind=kind) for path, kind in kinds.items())
    step = dataclasses.replace(small_step(["list.0", "list.1", "list.2"]), modules=entries)
    assert sorted(gain.path for gain in find_gains(step)) == ["list", "list.0", "list.1", "list.2"]


def test_parts_of_repeated_modules_are_families_too() -> None:
    kinds = {"": "Net", "h": "ModuleList"}
    for number in range(2):
        kinds |= {f"h.{number}": "Block", f"h.{number}.mlp": "MLP", f"h.{number}.mlp.0": "Linear"}
    entries = tuple(ModuleEntry(path=path, kind=kind) for path, kind in kinds.items())
    step = dataclasses.replace(small_step(["h.0.mlp.0", "h.1.mlp.0"]), modules=entries)
    assert {gain.path for gain in find_gains(step) if gain.count == 2} == {"h.*", "h.*.mlp", "h.*.mlp.0"}
    assert "h" not in {gain.path for gain in find_gains(step)}


def small_step(paths: list[str]) -> Profile:
    """Each module makes two values from its input and saves the first."""
    storages = [Storage(bytes=1, lifetime=Lifetime.STEP)]
    calls: list[OpCall] = []
    saved = []
    for path in paths:
        at = len(storages)
        storages += [Storage(bytes=10), Storage(bytes=1)]
        calls += [forward(path, [at - 1], [at]), forward(path, [at], [at + 1])]
        saved.append((at, len(calls) - 1))
    calls.append(forward("", [len(storages) - 1], []))
    edges = []
    for storage, by in reversed(saved):
        edges.append(Saved(storage=storage, by=by, reader=len(calls)))
        calls.append(backward(by, [storage]))
    return Profile(storages=tuple(storages), calls=tuple(calls), saved=tuple(edges))


def test_the_work_grows_with_the_step_not_with_its_square() -> None:
    few, many = (count_lines(transformer_step(layers)) for layers in (50, 200))
    assert many < 5 * few


def count_lines(profile: Profile) -> int:
    """How many lines `find_gains` runs."""
    seen = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        seen += event == "line"
        return count if frame.f_code.co_filename == find_gains.__code__.co_filename else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        find_gains(profile)
    finally:
        sys.settrace(before)
    return seen


# Against brute force.

PATHS = ["", "a", "h.0", "h.0.x", "h.1", "h.1.x"]


@st.composite
def modular_steps(draw: st.DrawFn) -> Profile:
    """A step whose calls are in modules, which may run more than once; values are saved and read at random."""
    storages = [Storage(bytes=draw(st.integers(0, 9)), lifetime=Lifetime.STEP)]
    calls: list[OpCall] = []
    for _ in range(draw(st.integers(1, 9))):
        reads = draw(st.lists(st.integers(0, len(storages) - 1), max_size=3, unique=True))
        made = list(range(len(storages), len(storages) + draw(st.integers(0, 2))))
        lifetimes = st.sampled_from([Lifetime.VALUE] * 5 + [Lifetime.RETURNED])
        storages += [Storage(bytes=draw(st.integers(0, 9)), lifetime=draw(lifetimes)) for _ in made]
        call = forward(draw(st.sampled_from(PATHS)), reads, made)
        more = draw(st.integers(0, 3))
        calls.append(dataclasses.replace(call, workspace_bytes=more, runs_once=draw(st.integers(0, 9)) == 9))
    count = len(calls)
    saved: list[Saved] = []
    for by in reversed(range(count)):
        if not draw(st.booleans()):
            continue
        usable = [*(value.storage for value in calls[by].inputs), *(value.storage for value in calls[by].outputs)]
        kept = draw(st.lists(st.sampled_from(usable), max_size=2, unique=True)) if usable else []
        saved += [Saved(storage=storage, by=by, reader=len(calls)) for storage in kept]
        storages.append(Storage(bytes=draw(st.integers(0, 9))))
        link = by if draw(st.integers(0, 5)) else None
        call = dataclasses.replace(backward(by, kept, [len(storages) - 1]), forward=link)
        calls.append(dataclasses.replace(call, workspace_bytes=draw(st.integers(0, 3))))
    entries = [
        ModuleEntry(path="", kind="Net"),
        ModuleEntry(path="a", kind="A"),
        ModuleEntry(path="h", kind="ModuleList"),
    ]
    entries += [ModuleEntry(path=f"h.{at}{part}", kind=f"B{part}") for at in (0, 1) for part in ("", ".x")]
    return Profile(
        storages=tuple(storages), calls=tuple(calls), saved=tuple(saved), modules=tuple(entries), fixed_bytes=2
    )


@given(modular_steps())
def test_gains_are_those_of_brute_force(profile: Profile) -> None:
    gains = by_path(profile)
    families = {"h.*": ["h.0", "h.1"], "h.*.x": ["h.0.x", "h.1.x"]}
    single = {path: [path] for path in PATHS if path}
    for path, members in (single | families).items():
        slow = Slow(profile, members)
        if slow.freed_bytes() <= 0:
            assert path not in gains
        else:
            assert (gains[path].freed_bytes, gains[path].peak_bytes) == (slow.freed_bytes(), slow.peak_bytes())


class Slow:
    """Asks of every storage at every moment whether it is there. Call ``n`` runs at ``n``; ``n - 0.5`` is before it."""

    def __init__(self, profile: Profile, paths: list[str]) -> None:
        found = [run for path in paths for run in find_runs(profile, path)]
        self.profile, self.made = profile, {one.storage: one.call for one in profile.made()}
        self.starts = [find_start(profile, run) for run in found]
        self.runs = [[number for number in run if not profile.calls[number].runs_once] for run in found]

    def was_there(self, storage: int, moment: float) -> bool:
        start, end = self.profile.timeline.spans[storage]
        return start <= moment and (end is None or end > max(math.ceil(moment), start))

    def is_input(self, storage: int, moment: float) -> bool:
        """Whether a run that has not run again yet reads it, and does not make it."""
        return any(
            first is not None
            and self.profile.timeline.spans[storage][0] <= moment <= first - 0.5
            and self.made.get(storage) not in run
            and any(storage in self.profile.calls[number].reads for number in run)
            for run, first in zip(self.runs, self.starts, strict=True)
        )

    def is_gone(self, storage: int, moment: float) -> bool:
        """Whether it waits to be made again."""
        owners = [at for at, run in enumerate(self.runs) if self.made.get(storage) in run]
        if not owners or self.profile.storages[storage].lifetime is not Lifetime.VALUE:
            return False
        users = self.find_users(storage)
        if not users or not users <= set(self.runs[owners[0]]):
            return False
        calls = enumerate(self.profile.calls)
        uses = [at for at, call in calls if call.phase is Phase.FORWARD and storage in {*call.reads, *makes(call)}]
        start = self.starts[owners[0]]
        return moment > max(uses) and (start is None or moment < start)

    def find_users(self, storage: int) -> set[int | None]:
        """The forward calls whose gradients need it; None for one that is not known."""
        edges = [edge for edge in self.profile.saved if edge.storage == storage]
        by_reader = {edge.reader: edge.by for edge in edges}
        users: set[int | None] = {edge.by for edge in edges}
        for number, call in enumerate(self.profile.calls):
            if call.phase is not Phase.FORWARD and storage in call.reads:
                users.add(by_reader.get(number, call.forward))
        return users

    def level(self, moment: float) -> int:
        return self.profile.fixed_bytes + sum(
            size
            for storage, size in enumerate(self.profile.timeline.sizes)
            if self.is_input(storage, moment) or (self.was_there(storage, moment) and not self.is_gone(storage, moment))
        )

    def freed_bytes(self) -> int:
        sizes = self.profile.timeline.sizes
        moments = [len(self.profile.calls) - 1 if start is None else start - 1 for start in self.starts]
        was = [sum(size for at, size in enumerate(sizes) if self.was_there(at, moment)) for moment in moments]
        less = [then + self.profile.fixed_bytes - self.level(at) for then, at in zip(was, moments, strict=True)]
        return max(less, default=0)

    def peak_bytes(self) -> int:
        peaks = [self.level(number) + call.workspace_bytes for number, call in enumerate(self.profile.calls)]
        for run, start in zip(self.runs, self.starts, strict=True):
            if start is not None:
                base = self.level(start - 0.5)
                peaks += [base + self.again_bytes(run, start, number) for number in run]
        return max(peaks)

    def again_bytes(self, run: list[int], start: int, number: int) -> int:
        """What there is of a run while one of its calls runs again."""
        found = self.profile.calls[number].workspace_bytes
        for storage, call in self.made.items():
            end = self.profile.timeline.spans[storage][1]
            stays = end is None or max(end, call + 1) > number or self.is_gone(storage, start - 0.5)
            if call in run and call <= number and stays:
                found += self.profile.timeline.sizes[storage]
        return found


def makes(call: OpCall) -> set[int]:
    return {value.storage for value in call.outputs}


def find_runs(profile: Profile, path: str) -> Iterator[list[int]]:
    run: list[int] = []
    for number, call in itertools.chain(enumerate(profile.calls), [(-1, None)]):
        inside = call is not None and call.phase is Phase.FORWARD and f"{call.module}.".startswith(f"{path}.")
        if inside:
            run.append(number)
        elif run:
            yield run
            run = []


def find_start(profile: Profile, run: list[int]) -> int | None:
    linked = [number for number, call in enumerate(profile.calls) if call.forward in run]
    readers = [edge.reader for edge in profile.saved if edge.by in run and edge.reader is not None]
    return min([*linked, *readers], default=None)
