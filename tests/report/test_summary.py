"""The tables behind every report, on steps that are known."""

from __future__ import annotations

import dataclasses

from hypothesis import given

from recollect._core.calls import Category, Lifetime, OpCall, Phase, Saved, Storage, Value
from recollect._core.profiles import ModuleEntry, Profile
from recollect._report.curve import find_stretches, follow_categories
from recollect._report.summary import find_peak, list_modules, list_ops, list_saved
from recollect._report.tree import fold_modules
from tests.plan.steps import steps
from tests.report.steps import transformer_step

EMPTY = Profile(storages=(), calls=())


# The peak.


def test_the_peak_is_that_of_the_timeline_and_its_categories_add_up() -> None:
    for step in (transformer_step(), transformer_step(recomputes=True), transformer_step(optimizer="")):
        peak = find_peak(step)
        assert peak.bytes == step.peak_bytes == sum(peak.by_category.values())
        assert step.timeline.bytes_at[peak.call] == peak.bytes
        assert (peak.op, peak.phase) == (step.calls[peak.call].op, step.calls[peak.call].phase)


def test_the_peak_is_told_in_words() -> None:
    assert find_peak(transformer_step(tokens=512)).sentence == (
        "in backward (aten._log_softmax_backward.default, model.py:66)"
    )
    step = transformer_step(32, vocabulary=16, recomputes=True)
    assert find_peak(step).sentence == "in backward of layers.0.mlp.down (aten.mm_backward.default, model.py:32)"
    call = OpCall(op="aten.mul_.Tensor", phase=Phase.OPTIMIZER, source="train.py:9", workspace_bytes=1)
    assert find_peak(Profile(storages=(), calls=(call,))).sentence == (
        "in the optimizer's step (aten.mul_.Tensor, train.py:9)"
    )
    assert find_peak(EMPTY).sentence == "before the first call"


def test_what_was_recomputed_is_counted_at_the_peak() -> None:
    step = transformer_step(4, vocabulary=16, tokens=2048, recomputes=True)
    peak = find_peak(step)
    assert peak.region == "layers.3"
    again = {made.storage for made in step.made() if step.calls[made.call].phase is Phase.RECOMPUTATION}
    alive = again & set(step.timeline.alive_at(peak.call))
    assert peak.recomputed_bytes == sum(step.storages[at].bytes for at in alive) > 0
    assert find_peak(transformer_step()).recomputed_bytes == 0


# Saved tensors.


def test_saved_tensors_are_there_once_and_largest_first() -> None:
    step = transformer_step(2)
    rows = list_saved(step)
    assert [row.bytes for row in rows] == sorted((row.bytes for row in rows), reverse=True)
    assert len({row.storage for row in rows}) == len(rows)
    kept = {edge.storage for edge in step.saved}
    expected = {at for at in kept if step.storages[at].category in (Category.ACTIVATION, Category.LOSS_HEAD)}
    assert {row.storage for row in rows} == expected


def test_a_saved_tensor_has_its_place_and_its_holders() -> None:
    rows = {(row.module, row.op): row for row in list_saved(transformer_step(1))}
    row = rows["layers.0.mlp.up", "aten.mm.default"]
    assert (row.shape, row.dtype, row.bytes, row.source) == ((128, 256), "float32", 128 * 256 * 4, "model.py:31")
    assert row.holders == ("aten.gelu.default",)
    logs = rows["", "aten._log_softmax.default"]
    assert logs.category is Category.LOSS_HEAD
    assert logs.holders == ("aten._log_softmax.default", "aten.nll_loss_forward.default")


def test_what_is_on_another_device_or_made_again_is_not_saved() -> None:
    value = Value(storage=0)
    saved = (Saved(storage=0, by=0),)

    def count(call: OpCall, storage: Storage) -> int:
        return len(list_saved(Profile(storages=(storage,), calls=(call,), saved=saved)))

    storage = Storage(bytes=8, category=Category.ACTIVATION)
    made = OpCall(op="op", outputs=(value,))
    assert count(made, storage) == 1
    assert count(made, dataclasses.replace(storage, device="cpu")) == 0
    assert count(made, dataclasses.replace(storage, category=Category.INPUT)) == 0
    assert count(dataclasses.replace(made, phase=Phase.RECOMPUTATION), storage) == 0


def test_sizes_are_those_on_the_device() -> None:
    step = Profile(
        storages=(Storage(bytes=1, category=Category.ACTIVATION),),
        calls=(OpCall(op="op", outputs=(Value(storage=0),)),),
        saved=(Saved(storage=0, by=0),),
        rounding_bytes=512,
    )
    assert [row.bytes for row in list_saved(step)] == [512]
    assert list_modules(step)[0].saved_bytes == list_ops(step)[0].made_bytes == 512


# Modules.


def test_modules_are_a_tree_and_parents_hold_what_their_children_do() -> None:
    rows = {row.path: row for row in list_modules(transformer_step(2))}
    assert list(rows)[:5] == ["", "embed", "layers", "layers.0", "layers.0.norm"]
    for path, row in rows.items():
        below = [other for other in rows.values() if path == other.path or other.path.startswith(path and f"{path}.")]
        assert row.saved_bytes == sum(other.own_saved_bytes for other in below)
    saved = list_saved(transformer_step(2))
    assert rows[""].saved_bytes == sum(row.bytes for row in saved)
    assert rows["layers.0.mlp"].depth == 3
    assert rows["layers.0"].parameter_bytes == 4 * (64 + 64 * 192 + 2 * 64 * 256)


def test_times_of_modules_are_by_phase() -> None:
    step = transformer_step(2, recomputes=True)
    row = list_modules(step)[0]
    assert row.forward_s is not None
    assert row.backward_s is not None
    assert row.recompute_s is not None
    other = sum(call.seconds or 0 for call in step.calls if call.phase is Phase.OPTIMIZER)
    assert abs(row.forward_s + row.backward_s + row.recompute_s + other - (step.step_s or 0)) < 1e-9
    assert list_modules(transformer_step(2, has_times=False))[0].forward_s is None


def test_modules_that_only_calls_name_are_there_and_so_are_those_above() -> None:
    step = Profile(storages=(), calls=(OpCall(op="op", module="a.b.c"),), modules=(ModuleEntry(path="x", kind="X"),))
    assert [(row.path, row.depth) for row in list_modules(step)] == [
        ("", 0),
        ("x", 1),
        ("a", 1),
        ("a.b", 2),
        ("a.b.c", 3),
    ]
    assert [row.calls for row in list_modules(step)] == [1, 0, 1, 1, 1]


def test_parameters_with_two_names_count_once_and_foreign_ones_for_the_model() -> None:
    named = Storage(bytes=4, category=Category.PARAMETER, lifetime=Lifetime.STEP, name="elsewhere.weight")
    step = Profile(storages=(named,), calls=(), modules=(ModuleEntry(path="a", kind="A"),))
    assert [row.parameter_bytes for row in list_modules(step)] == [4, 0]


# Operators.


def test_operators_are_counted_over_the_step() -> None:
    step = transformer_step(3)
    rows = {row.op: row for row in list_ops(step)}
    assert rows["aten.gelu.default"].calls == 3
    assert rows["aten.gelu.default"].saved_bytes == 3 * 128 * 256 * 4
    assert sum(row.calls for row in rows.values()) == len(step.calls)
    assert sum(row.flops for row in rows.values()) == sum(call.flops for call in step.calls)
    saved = [row.saved_bytes for row in list_ops(step)]
    assert saved == sorted(saved, reverse=True)


def test_nothing_makes_empty_tables() -> None:
    assert list_saved(EMPTY) == []
    assert list_ops(EMPTY) == []
    assert [row.path for row in list_modules(EMPTY)] == [""]
    assert find_peak(EMPTY).phase is None


# The folded tree.


def test_alike_layers_are_one_branch_with_the_sums_of_all() -> None:
    rows = list_modules(transformer_step(32))
    branches = {branch.path: branch for branch in fold_modules(rows)}
    layer = branches["layers.0"]
    assert (layer.label, layer.count, layer.kind) == ("0 ... 31", 32, "Block")
    assert layer.saved_bytes == branches["layers"].saved_bytes
    assert (branches["layers.0.mlp.up"].label, branches["layers.0.mlp.up"].count) == ("up", 32)
    assert "layers.1" not in branches
    assert len(branches) == 13
    for depth in {branch.depth for branch in branches.values()}:
        whole = sum(row.own_saved_bytes for row in rows if row.depth >= depth)
        assert sum(branch.saved_bytes for branch in branches.values() if branch.depth == depth) == whole


def test_layers_that_differ_are_branches_of_their_own() -> None:
    step = transformer_step(4)
    some = tuple(edge for edge in step.saved if step.calls[edge.by].module != "layers.2.mlp.act")
    branches = fold_modules(list_modules(dataclasses.replace(step, saved=some)))
    assert [branch.label for branch in branches if branch.depth == 2] == ["0 ... 1", "2", "3"]


def test_one_module_is_one_branch() -> None:
    assert [branch.label for branch in fold_modules(list_modules(EMPTY))] == [""]
    assert fold_modules([]) == []


# The curve.


@given(steps())
def test_categories_add_up_at_every_call(step: Profile) -> None:
    sizes = follow_categories(step)
    for number, now in enumerate(step.timeline.bytes_at):
        assert sum(values[number] for values in sizes.values()) == now
        assert {category: values[number] for category, values in sizes.items() if values[number]} == (
            step.timeline.bytes_by_category(number)
        )


def test_stretches_cover_the_step() -> None:
    step = transformer_step(2, recomputes=True)
    found = find_stretches(step)
    assert [first for _, first, _ in found] == [0, *(last for _, _, last in found[:-1])]
    assert found[-1][2] == len(step.calls)
    assert [phase.value for phase, _, _ in found] == [
        "forward",
        "backward",
        "recomputation",
        "backward",
        "recomputation",
        "backward",
        "optimizer",
    ]
    assert find_stretches(EMPTY) == []
