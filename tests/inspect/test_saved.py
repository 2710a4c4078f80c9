"""`print_saved` says what the graph holds, storage by storage, and disturbs nothing."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import compat
from recollect._core.torch_private import graph
from recollect._inspect.saved import Fate, SavedEntry, SavedReport, describe_saved, format_saved, print_saved
from recollect._profile.memory import LiveBytes


def leaf(*shape: int) -> Tensor:
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).reshape(shape).requires_grad_()


def holders(report: SavedReport) -> list[list[str]]:
    return [[str(entry) for entry in entries] for entries in report.held]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(loss: Any, **options: Any) -> str:
        print_saved(loss, **options)
        return capsys.readouterr().out

    return run


# What a plain graph holds


def test_a_plain_graph_lists_what_autograd_saved(printed: Callable[..., str]) -> None:
    x = leaf(16, 16)
    assert (
        printed((x.exp().sin() * torch.ones(16, 1)).sum())
        == """\
   bytes  tensor           held by
1.00 KiB  float32[16, 16]  SinBackward0.self, ExpBackward0.result
    64 B  float32[16, 1]   MulBackward0.other
held by the graph: 1.06 KiB in 2 storages
"""
    )


def test_the_sum_is_what_the_meter_of_live_bytes_sees() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.5), nn.Linear(64, 8))
    data = torch.randn(4, 32)
    with LiveBytes(include=data) as meter:
        loss = model(data).sum()
    assert describe_saved(loss).held_bytes == meter.live_bytes - loss.nbytes


def test_parameters_and_their_views_count_apart(printed: Callable[..., str]) -> None:
    frozen, trained = nn.Linear(8, 8), nn.Linear(8, 16)
    frozen.requires_grad_(False)
    loss = frozen(trained(leaf(2, 8).exp())[:, :8]).sum()
    report = describe_saved(loss)
    assert report.parameter_bytes == trained.weight.nbytes + frozen.weight.nbytes
    assert {entry.kind for entry in report.entries} == {Fate.KEPT, Fate.PARAMETER}
    assert "(768 B more are parameters)" in printed(loss)


def test_views_of_one_storage_count_once_and_with_all_of_it() -> None:
    q, k, v = (leaf(3, 4).exp() * 1.0).unbind()
    report = describe_saved((q * k).sum() + v[:2].sin().sum())
    shared = next(entries for entries in report.held if entries[0].storage_bytes == 48)
    assert [str(entry) for entry in shared] == ["MulBackward0.other", "MulBackward0.self", "SinBackward0.self"]
    assert [entry.tensor_bytes for entry in shared] == [16, 16, 8]


def test_a_small_view_that_keeps_a_large_storage_is_marked(printed: Callable[..., str]) -> None:
    big = torch.ones(256)
    assert "1.00 KiB  float32[2] (part of its storage)  MulBackward0.other" in printed((leaf(2) * big[:2]).sum())


def test_lists_absent_tensors_and_sparse_ones_are_read() -> None:
    x = leaf(4, 4)
    indexed = x.sin()[:, torch.tensor([0, 1])]
    assert ["IndexBackward0.indices[1]"] in holders(describe_saved(indexed.sum()))
    normed = nn.functional.layer_norm(x.exp(), (4,))
    names = [entry.attribute for entry in describe_saved(normed.sum()).entries if "Norm" in entry.holder]
    assert names == ["input", "result1", "result2"]
    sparse = torch.eye(3).to_sparse()
    report = describe_saved(torch.sparse.mm(sparse, leaf(3, 3)).sum())
    assert sum(entry.storage_bytes for entry in report.entries if "Sparse" in entry.holder) == 3 * (8 + 8 + 4)


def test_several_losses_in_containers_share_what_they_share() -> None:
    x = leaf(4).exp()
    both = describe_saved({"a": x.sin().sum(), "b": [x.cos().sum(), torch.ones(1), "text"]})
    assert both.held_bytes == 16


def test_only_the_largest_are_listed_and_all_are_summed(printed: Callable[..., str]) -> None:
    loss = leaf(8).exp().sum() + leaf(4).exp().sum() + leaf(2).exp().sum()
    assert (
        printed(loss, top=1)
        == """\
bytes  tensor      held by
 32 B  float32[8]  ExpBackward0.result
and 2 smaller storages of 24 B together
held by the graph: 56 B in 3 storages
"""
    )
    assert printed(loss, top=0) == "held by the graph: 56 B in 3 storages\n"


def test_many_holders_of_one_storage_are_cut_short(printed: Callable[..., str]) -> None:
    x = leaf(4).exp()
    text = printed(x.sin().sum() + x.cos().sum() + x.log().sum())
    assert "16 B  float32[4]  SinBackward0.self, ExpBackward0.result, CosBackward0.self, 1 more\n" in text


def test_a_graph_of_thousands_of_nodes_is_walked_without_recursion() -> None:
    x = leaf(2)
    y = x
    for _ in range(20_000):
        y = y.sin()
    assert len(describe_saved(y.sum()).held) == 20_000 - 1  # the first one saved the leaf


# Custom Functions


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, None, b)
        ctx.mask = a > 0
        ctx.more = [torch.ones(2), 3]
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        a, _, b = ctx.saved_tensors
        return gradient * b, gradient * a


def test_a_custom_function_shows_its_saved_tensors_and_its_attributes() -> None:
    loss = _Scale.apply(leaf(4).exp(), torch.ones(4)).sum()  # type: ignore[no-untyped-call]
    assert sorted(holders(describe_saved(loss))) == [
        ["_ScaleBackward.mask"],
        ["_ScaleBackward.more[0]"],
        ["_ScaleBackward.saved_tensors[0]", "ExpBackward0.result"],
        ["_ScaleBackward.saved_tensors[2]"],
    ]


def test_after_backward_a_custom_function_still_holds_its_attributes(printed: Callable[..., str]) -> None:
    loss = _Scale.apply(leaf(4), torch.ones(4)).sum()  # type: ignore[no-untyped-call]
    loss.backward()
    assert (
        printed(loss)
        == """\
bytes  tensor      held by
  8 B  float32[2]  _ScaleBackward.more[0]
  4 B  bool[4]     _ScaleBackward.mask
held by the graph: 12 B in 2 storages
freed by a backward pass: what 1 node had saved
"""
    )


# Regions


def test_a_region_shows_its_inputs_and_counts_what_it_forgot(printed: Callable[..., str]) -> None:
    calls = []
    linear = nn.Linear(16, 16)

    @recollect.checkpoint(name="block")
    def block(x: Tensor, *, scale: Tensor) -> Tensor:
        calls.append(1)
        result: Tensor = linear(x).sin() * scale
        return result

    x = leaf(16, 16)
    loss = block(x.exp(), scale=torch.ones(16, 16)).sum()
    expected = """\
   bytes  tensor           held by
1.00 KiB  float32[16, 16]  region 'block' (argument 0), ExpBackward0.result
1.00 KiB  float32[16, 16]  region 'block' (argument 'scale')
held by the graph: 2.00 KiB in 2 storages
forgotten, to be recomputed: 4 tensors (4.00 KiB) of region 'block'
"""
    assert printed(loss) == expected
    assert printed(loss) == expected
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


def test_a_parameter_given_to_a_region_is_a_parameter() -> None:
    weight = nn.Parameter(torch.ones(4))
    loss = recollect.checkpoint(lambda x, w: (x * w).sin(), name="f")(leaf(4).exp(), weight).sum()
    report = describe_saved(loss)
    assert holders(report) == [["region 'f' (argument 0)", "ExpBackward0.result"]]
    assert [str(entry) for entry in report.parameters[0]] == ["region 'f' (argument 1)"]


def test_nested_regions_are_followed_to_what_the_outermost_holds(printed: Callable[..., str]) -> None:
    calls = []

    def count(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin().cos()

    inner = recollect.checkpoint(count, name="inner")
    outer = recollect.checkpoint(lambda x: inner(x.tan()), name="outer")
    loss = outer(leaf(8).exp()).sum()
    assert (
        printed(loss)
        == """\
bytes  tensor      held by
 32 B  float32[8]  region 'outer' (argument 0), ExpBackward0.result
held by the graph: 32 B in 1 storage
forgotten, to be recomputed: 4 tensors (128 B) of regions 'outer' (2), 'inner' (2)
"""
    )
    assert len(calls) == 1
    loss.backward()


def test_a_region_that_saved_only_the_inputs_of_another_is_found_through_it() -> None:
    inner = recollect.checkpoint(torch.sin, name="inner")
    outer = recollect.checkpoint(inner, name="outer")
    report = describe_saved(outer(leaf(8).exp()).sum())
    assert holders(report) == [["region 'outer' (argument 0)", "ExpBackward0.result"]]
    assert [str(entry) for entry in report.forgotten] == ["region 'inner'.argument 0", "SinBackward0.self"]


def test_values_recomputed_for_a_pass_that_still_runs_are_held() -> None:
    reports = []
    x = leaf(8)
    y = recollect.checkpoint(lambda x: x.sin().cos().exp(), name="f")(x.neg())
    loss = y.sum()

    def look(_gradients: Any) -> None:
        reports.append(describe_saved(loss))

    assert y.grad_fn is not None
    y.grad_fn.next_functions[0][0].register_prehook(look)
    loss.backward()
    (report,) = reports
    assert holders(report) == [["CosBackward0.self (region 'f')"], ["SinBackward0.self (region 'f')"]]
    assert report.forgotten == []


def test_the_reentrant_engine_shows_the_inputs_it_keeps() -> None:
    loss = compat.checkpoint(torch.sin, leaf(8).exp(), use_reentrant=True).sum()
    assert holders(describe_saved(loss)) == [["CheckpointFunctionBackward.saved_tensors[0]", "ExpBackward0.result"]]


# Hooks of others


def test_what_save_on_cpu_holds_is_not_fetched(printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = leaf(8).exp().sum()
    monkeypatch.setattr(Tensor, "to", None)  # how it would be brought back
    assert (
        printed(loss)
        == """\
bytes  tensor      held by
 32 B  float32[8]  ExpBackward0.result (packed by save_on_cpu)
held by the graph: 32 B in 1 storage
"""
    )


def test_a_region_inside_save_on_cpu_holds_what_that_gave_it() -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = recollect.checkpoint(torch.sin, name="f")(leaf(8).exp()).sum()
    report = describe_saved(loss)
    assert [entry.kind for entries in report.held for entry in entries] == [Fate.PACKED, Fate.PACKED]
    assert holders(report) == [["region 'f' (argument 0)", "ExpBackward0.result (packed by save_on_cpu)"]]


def test_hooks_are_never_called(printed: Callable[..., str]) -> None:
    unpacked: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, unpacked.append):  # type: ignore[arg-type]
        loss = leaf(8).exp().sum()
    assert (
        printed(loss)
        == """\
held by the graph: nothing
other hooks packed these into something that is not a tensor, size unknown: list (1)
"""
    )
    assert unpacked == []


def test_torchs_own_checkpoint_is_not_recomputed() -> None:
    calls = []

    def count(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin().cos()

    loss = torch.utils.checkpoint.checkpoint(count, leaf(8).exp(), use_reentrant=False).sum()
    report = describe_saved(loss)
    assert [entry.owner for entry in report.packed_away] == ["_checkpoint_hook", "_checkpoint_hook"]
    assert len(calls) == 1


# Before, after, and beyond


def test_after_backward_nothing_is_held(printed: Callable[..., str]) -> None:
    x = leaf(8)
    loss = recollect.checkpoint(torch.sin, name="f")(nn.functional.layer_norm(x.exp(), (8,))).sum()
    loss.backward(retain_graph=True)
    assert describe_saved(loss).held_bytes > 0
    loss.backward()
    assert printed(loss) == "held by the graph: nothing\nfreed by a backward pass: what 3 nodes had saved\n"


def test_nodes_that_python_cannot_look_into_are_named(printed: Callable[..., str]) -> None:
    x = leaf(4).exp()
    x[:2].mul_(2.0)
    assert printed(x.sum()) == (
        "bytes  tensor      held by\n"
        " 16 B  float32[4]  ExpBackward0.result\n"
        "held by the graph: 16 B in 1 storage\n"
        f"cannot be inspected with torch {torch.__version__}, may hold more: CopySlices (1)\n"
    )


def test_a_torch_that_shows_less_is_said_not_crashed_on() -> None:
    class FutureBackward:
        _raw_saved_self = SimpleNamespace()  # a SavedTensor without `data`

        def name(self) -> str:
            return "FutureBackward"

    contents = graph.read_node(FutureBackward())
    assert (contents.held, contents.is_opaque, contents.is_freed) == ((), True, False)


def test_a_report_keeps_nothing_alive() -> None:
    y = leaf(8).exp()
    loss = recollect.checkpoint(torch.sin)(y).sum()
    value = weakref.ref(y.untyped_storage())
    gc.disable()
    try:
        report = describe_saved(loss)
        del y, loss
        assert value() is None
    finally:
        gc.enable()
    assert report.held_bytes == 32


def test_gradients_are_those_of_a_run_without_printing(printed: Callable[..., str]) -> None:
    def step(look: Callable[[Tensor], Any]) -> Tensor:
        torch.manual_seed(0)
        x = leaf(8)
        drop = recollect.checkpoint(lambda x: nn.functional.dropout(x.sin(), 0.5).exp())
        loss = _Scale.apply(drop(x), x.cos()).sum()  # type: ignore[no-untyped-call]
        look(loss)
        loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(step(printed), step(lambda loss: None))


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        pytest.param(
            torch.ones(1),
            ValueError,
            "loss does not require grad: it was computed under torch.no_grad(), was detached, or nothing that it "
            "was computed from requires grad.\n"
            "There is no graph behind it, and nothing is held for backward.",
            id="no grad",
        ),
        pytest.param(
            leaf(1),
            ValueError,
            "loss has no graph behind it: it is a leaf, not a result. Pass what is computed from it.",
            id="leaf",
        ),
        pytest.param(
            3.0,
            TypeError,
            "loss holds no tensor: expected a tensor or a container of tensors, not float",
            id="no tensor",
        ),
    ],
)
def test_what_has_no_graph_is_refused(loss: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        print_saved(loss)
    assert str(caught.value) == text


def test_a_negative_number_of_lines_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^top=-1: expected a whole number of at least 0$"):
        print_saved(leaf(1).exp(), top=-1)


def test_several_devices_are_written_with_their_sums() -> None:
    entries = tuple(
        SavedEntry(holder="A", attribute="x", kind=Fate.KEPT, device=torch.device(name), storage=n, storage_bytes=8 * n)
        for n, name in enumerate(["cpu", "cuda:0", "cpu", "cuda:0"])
    )
    text = format_saved(SavedReport(entries=entries, freed_nodes=0, opaque_nodes=()), top=0)
    assert text == "held by the graph: 48 B in 4 storages: 32 B on cuda:0, 16 B on cpu\n"


@pytest.mark.gpu
def test_devices_are_summed_apart(printed: Callable[..., str]) -> None:
    device = torch.accelerator.current_accelerator()
    x = leaf(8).to(device).exp()
    with torch.autograd.graph.save_on_cpu():
        loss = x[:4].sin().sum()
    assert f"48 B in 2 storages: 32 B on {device}:0, 16 B on cpu" in printed(loss)


def test_classes_of_custom_functions_are_not_kept_alive() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 2

    loss = Twice.apply(leaf(8)).sum()  # type: ignore[no-untyped-call]
    assert describe_saved(loss).held_bytes == 0
    kind = weakref.ref(Twice)
    del Twice, loss
    gc.collect()
    assert kind() is None
