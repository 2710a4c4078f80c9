"""The meter's promise: every storage born under it counts once, with its size, until it is really freed."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from recollect._profile.memory import LiveBytes

KIB = 1024
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    """Everything here must hold by reference counting alone."""
    gc.disable()
    yield
    gc.enable()


def kib(count: int = 1) -> Tensor:
    """A tensor of `count` KiB."""
    return torch.zeros(count * KIB // 4)


def backward(y: Tensor) -> None:
    torch.autograd.backward(y)


def test_an_empty_meter_reads_zero() -> None:
    with LiveBytes() as meter:
        pass
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 0
    assert meter.live_bytes_by_device == {}
    assert meter.peak_bytes_by_device == {}


def test_a_new_tensor_counts_its_bytes_until_it_is_deleted() -> None:
    with LiveBytes() as meter:
        x = kib(3)
        assert meter.live_bytes == 3 * KIB
        del x
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 3 * KIB


def test_views_and_aliases_count_their_storage_once() -> None:
    with LiveBytes() as meter:
        x = kib()
        aliases = [x[3:], x.view(2, -1), x.detach(), x.view(torch.int32), torch.view_as_real(x.view(torch.complex64))]
        assert meter.live_bytes == KIB
    assert len(aliases) == 5
    assert meter.peak_bytes == KIB


def test_a_view_keeps_the_whole_storage_counted_after_its_base_is_gone() -> None:
    with LiveBytes() as meter:
        x = kib(4)
        view = x[:1]
        del x
        assert meter.live_bytes == 4 * KIB
        del view
        assert meter.live_bytes == 0


def test_operators_in_place_add_nothing() -> None:
    with LiveBytes() as meter:
        x = kib()
        x.add_(1).mul_(x).relu_()
        x[:4].zero_()
        torch.neg(x, out=x)
        assert meter.live_bytes == KIB
        assert meter.peak_bytes == KIB


def test_the_peak_is_the_most_bytes_alive_at_one_time() -> None:
    with LiveBytes() as meter:
        x = kib(2)
        y = x + 1
        del x
        z = y.sum(0, keepdim=True)
        del y
        assert meter.live_bytes == 4
        assert meter.peak_bytes == 4 * KIB
        meter.reset_peak()
        assert meter.peak_bytes == 4
        w = kib()
        del w
        assert meter.peak_bytes == KIB + 4
    assert z.numel() == 1


def test_an_operators_inputs_and_output_meet_in_the_peak() -> None:
    with LiveBytes() as meter:
        out = kib() + kib()
    assert meter.peak_bytes == 3 * KIB
    assert meter.live_bytes == KIB
    assert out.numel() == 256


def test_the_overlap_of_unlike_lifetimes_is_exact() -> None:
    sizes = [5, 1, 7, 2, 9, 3, 4, 8, 6]
    expected = live = 0
    held: list[tuple[int, Tensor]] = []
    with LiveBytes() as meter:
        for step, size in enumerate(sizes):
            if step % 3 == 2:
                freed, tensor = held.pop(step % len(held))
                live -= freed
                del tensor
            held.append((size, kib(size)))
            live += size
            expected = max(expected, live)
            assert meter.live_bytes == live * KIB
    assert meter.peak_bytes == expected * KIB


def test_tensors_from_before_do_not_count_nor_do_their_views_and_updates() -> None:
    x = kib()
    with LiveBytes() as meter:
        views = [x[1:], x.detach(), x.add_(1)]
        assert meter.live_bytes == 0
        y = x + 1
        assert meter.live_bytes == KIB
    assert len(views) == 3
    assert y is not x


def test_included_tensors_count_from_the_start() -> None:
    x = kib(2)
    meter = LiveBytes(include=x)
    assert meter.live_bytes == meter.peak_bytes == 2 * KIB
    with meter:
        y = x + 1
        assert meter.live_bytes == 4 * KIB
    del x
    assert meter.live_bytes == 2 * KIB
    assert y.numel() == 512


def test_an_included_module_counts_parameters_buffers_and_gradients_it_has() -> None:
    module = nn.BatchNorm1d(16)
    module.weight.grad = torch.zeros(16)
    parameters, buffers = 2 * 16 * 4, 2 * 16 * 4 + 8
    assert LiveBytes(module).live_bytes == parameters + buffers + 16 * 4


def test_included_things_may_be_mixed_overlap_and_come_from_a_generator() -> None:
    tied = nn.Linear(8, 8, bias=False)
    meter = LiveBytes(thing for thing in (tied, tied.weight, tied.weight[2:], kib()[:4]))
    assert meter.live_bytes == 8 * 8 * 4
    meter.include(tied)
    assert meter.live_bytes == 8 * 8 * 4


def test_tensors_made_from_python_and_numpy_data_count() -> None:
    numpy = pytest.importorskip("numpy")
    with LiveBytes() as meter:
        a = torch.tensor([1.0, 2.0])
        b = torch.from_numpy(numpy.zeros(4))
        assert meter.live_bytes == 8 + 32
    assert a.numel() + b.numel() == 6


def test_a_storage_resized_by_an_operator_is_measured_again() -> None:
    with LiveBytes() as meter:
        x = torch.empty(0)
        assert meter.live_bytes == 0
        x.resize_(256)
        assert meter.live_bytes == KIB
        out = torch.empty(0)
        torch.add(x, 1, out=out)
        assert meter.live_bytes == 2 * KIB
        assert meter.peak_bytes == 2 * KIB


def test_a_storage_resized_past_the_operators_is_measured_again() -> None:
    with LiveBytes() as meter:
        x = kib(4)
        x.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        y = kib(3)
        assert meter.peak_bytes == 4 * KIB
        x.untyped_storage().resize_(4 * KIB)
        x.zero_()
        assert meter.live_bytes == 7 * KIB
        x.untyped_storage().resize_(0)
        del y
    assert meter.peak_bytes == 7 * KIB
    assert meter.live_bytes == 0


def test_a_storage_emptied_past_the_operators_does_not_enter_a_later_peak() -> None:
    with LiveBytes() as meter:
        x = kib(4)
        x.untyped_storage().resize_(0)
        y = kib(5)
    assert meter.peak_bytes == 5 * KIB
    assert (x.shape, y.shape) == ((KIB,), (5 * KIB // 4,))


def test_a_tensor_that_only_autograd_holds_counts_until_the_graph_is_freed() -> None:
    x = kib().requires_grad_()
    with LiveBytes() as meter:
        y = x.exp().exp().sum()
        assert meter.live_bytes == 2 * KIB + 4
        backward(y)
        assert x.grad is not None
        assert meter.live_bytes == KIB + 4
        del y
        assert meter.live_bytes == KIB


def test_a_graph_dropped_without_backward_frees_its_bytes() -> None:
    x = kib().requires_grad_()
    with LiveBytes() as meter:
        y = x.exp().sin().sum()
        assert meter.live_bytes == KIB + 4
        del y
        assert meter.live_bytes == 0


def test_backward_counts_its_gradients_and_temporaries() -> None:
    x = kib().requires_grad_()
    with LiveBytes() as meter:
        y = x.exp().sum()
        meter.reset_peak()
        backward(y)
    # exp's result and the sum (1 KiB + 4), the one it starts from (4), and the product that becomes x.grad.
    assert meter.peak_bytes == 2 * KIB + 8
    assert meter.live_bytes == KIB + 4
    assert x.grad is not None


class _Nested(torch.autograd.Function):
    """Its backward runs another backward, `depth` deep, and leaves a KiB at each level."""

    threads: set[int]
    left: list[Tensor]

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, depth: int) -> Tensor:
        cast("Any", ctx).depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        depth = cast("Any", ctx).depth
        if depth:
            with torch.enable_grad():
                y = nested(torch.ones(1, requires_grad=True), depth - 1)
            backward(y)
        _Nested.threads.add(threading.get_ident())
        _Nested.left.append(kib())
        return gradients[0], None


def nested(x: Tensor, depth: int) -> Tensor:
    return cast("Any", _Nested).apply(x, depth)  # type: ignore[no-any-return]


def test_the_threads_of_backward_are_seen() -> None:
    # Beyond about 60 levels autograd moves a backward within a backward to a thread of its own.
    depth = 100
    _Nested.threads, _Nested.left = set(), []
    x = torch.ones(1, requires_grad=True)
    with LiveBytes() as meter:
        backward(nested(x, depth))
    assert len(_Nested.threads) > 1
    assert x.grad is not None
    assert meter.live_bytes == (depth + 1) * KIB + x.grad.untyped_storage().nbytes()
    _Nested.left.clear()
    assert meter.live_bytes == 4


def test_another_thread_is_seen_when_it_enters_the_meter_and_not_otherwise() -> None:
    meter = LiveBytes()
    kept: list[Tensor] = []

    def outside() -> None:
        kept.append(kib(1))

    def inside() -> None:
        with meter:
            kept.append(kib(2))

    with meter:
        for work in (outside, inside):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        kept.append(kib(4))
    assert meter.live_bytes == 6 * KIB
    assert meter.peak_bytes == 6 * KIB


def test_many_threads_in_one_meter_lose_no_byte() -> None:
    meter = LiveBytes()
    kept: list[list[Tensor]] = [[] for _ in range(4)]
    start = threading.Barrier(len(kept))

    def work(own: list[Tensor]) -> None:
        start.wait()
        with meter:
            own.extend(kib() + 1 for _ in range(100))

    threads = [threading.Thread(target=work, args=(own,)) for own in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.live_bytes == 400 * KIB
    kept.clear()
    del threads
    assert meter.live_bytes == 0


def test_a_tensor_freed_after_the_meter_was_left_stops_counting() -> None:
    with LiveBytes() as meter:
        x = kib()
    y = kib()
    assert meter.live_bytes == KIB
    del x
    assert meter.live_bytes == 0
    del y


def test_a_meter_entered_again_goes_on_counting() -> None:
    meter = LiveBytes()
    with meter:
        x = kib()
        with meter:
            y = kib()
        z = kib()
    with meter:
        w = kib()
    assert meter.live_bytes == 4 * KIB
    del x, y, z, w


def test_nested_meters_count_each_for_itself() -> None:
    with LiveBytes() as outer:
        x = kib()
        with LiveBytes() as inner:
            y = kib(2)
            assert inner.live_bytes == 2 * KIB
        z = kib(4)
        del y
    assert outer.live_bytes == 5 * KIB
    assert outer.peak_bytes == 7 * KIB
    assert inner.live_bytes == 0
    assert inner.peak_bytes == 2 * KIB
    del x, z


def test_an_exception_leaves_the_meter_and_no_mode_behind() -> None:
    meter = LiveBytes()
    with pytest.raises(ZeroDivisionError), meter:
        1 / 0  # noqa: B018
    x = kib()
    assert meter.live_bytes == 0
    with meter, pytest.raises(RuntimeError):
        x @ kib(2)
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 2 * KIB


def test_the_meter_keeps_no_tensor_alive_and_dies_by_reference_counting() -> None:
    meter = LiveBytes()
    with meter:
        x = kib()
        storage = weakref.ref(x.untyped_storage())
        del x
        assert storage() is None
        y = kib()
    alive = weakref.ref(meter)
    del meter
    assert alive() is None
    del y


def test_a_reused_address_is_a_new_storage() -> None:
    with LiveBytes() as meter:
        for _ in range(1000):
            x = kib()
            assert meter.live_bytes == KIB
            del x
    assert meter.peak_bytes == KIB


def test_meta_tensors_hold_no_bytes() -> None:
    with LiveBytes() as meter:
        x = torch.empty(1024, device="meta")
        y = x + 1
    assert meter.live_bytes == 0
    assert y.shape == x.shape


def test_a_sparse_gradient_counts_its_indices_and_values() -> None:
    weight = torch.zeros(100, 4, requires_grad=True)
    index = torch.arange(6)
    with LiveBytes() as meter:
        backward(nn.functional.embedding(index, weight, sparse=True).sum())
    assert weight.grad is not None
    assert weight.grad.is_sparse
    parts = (weight.grad._indices(), weight.grad._values())
    assert meter.live_bytes == sum(part.untyped_storage().nbytes() for part in parts)
    del parts
    weight.grad = None
    assert meter.live_bytes == 0


class _Pair(Tensor):
    """A wrapper made of two tensors of the same shape, the way quantised tensors carry scales."""

    first: Tensor
    second: Tensor

    @staticmethod
    def __new__(cls: type["_Pair"], first: Tensor, second: Tensor) -> "_Pair":
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        parts = [[getattr(a, name) if isinstance(a, _Pair) else a for a in args] for name in ("first", "second")]
        return _Pair(*(func(*part, **(kwargs or {})) for part in parts))


def test_a_wrapper_subclass_counts_the_tensors_it_is_made_of() -> None:
    pair = _Pair(kib(), kib())
    with LiveBytes() as meter:
        more = pair + 1
        assert meter.live_bytes == 2 * KIB
        del more
        assert meter.live_bytes == 0
        meter.include(pair)
        assert meter.live_bytes == 2 * KIB


def test_bytes_are_told_apart_by_device() -> None:
    with LiveBytes() as meter:
        x = kib()
        y = kib(2)
        del y
    assert meter.live_bytes_by_device == {CPU: KIB}
    assert meter.peak_bytes_by_device == {CPU: 3 * KIB}
    del x


def test_metering_does_not_import_dynamo() -> None:
    script = """
import sys, torch
from recollect._profile.memory import LiveBytes
with LiveBytes():
    torch.ones(2, requires_grad=True).exp().sum().backward()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.gpu
def test_an_accelerators_bytes_match_its_allocator() -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    x = torch.randn(512, 512, device=device, requires_grad=True)
    x.grad = torch.zeros_like(x)
    backward((x @ x).sum())  # the matmul's workspace is allocated once and stays
    for _ in range(2):
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        with LiveBytes() as meter:
            y = (x.sin() @ x.exp()).relu().sum()
            held = torch.accelerator.memory_allocated() - before
            assert 0 <= held - meter.live_bytes_by_device[device] < KIB  # blocks are multiples of 512 bytes
            backward(y)  # on the device's own autograd thread
            del y
    assert meter.live_bytes == 0
    allocator_peak = torch.accelerator.max_memory_allocated() - before
    assert 0 <= allocator_peak - meter.peak_bytes_by_device[device] < 2 * KIB
    assert meter.peak_bytes_by_device[device] >= 4 * x.untyped_storage().nbytes()
