"""Memory that is made and copied with little work for the host."""

import pytest
import torch

from recollect._core.torch_private import copies
from recollect._core.torch_private.copies import copy_all, memory_maker
from tests.waiting import refusing_to_wait

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.complex64])
@pytest.mark.parametrize(
    ("shape", "stride"), [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((4,), (1,)), ((), ()), ((1, 5), (7, 1))]
)
def test_what_is_made_is_of_the_kind_that_was_asked_for(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> None:
    make = memory_maker(CPU, torch.Size(shape), stride, dtype)
    first, second = make(), make()
    for made in (first, second):
        assert (made.shape, made.stride(), made.dtype, made.device) == (torch.Size(shape), stride, dtype, CPU)
        assert not made.requires_grad
        assert made.data_ptr() % 16 == 0
    assert first.data_ptr() != second.data_ptr()


def test_a_torch_without_the_quick_way_makes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_guards", object())
    made = memory_maker(CPU, (2, 3), (1, 2), torch.float16)()
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.float16)


def test_other_devices_have_the_public_way() -> None:
    assert memory_maker(torch.device("meta"), (2, 3), (3, 1), torch.float32)().is_meta


def test_copies_go_each_to_its_target() -> None:
    targets = [torch.zeros(3), torch.zeros(2, 2).t(), torch.zeros(1, dtype=torch.int32)]
    sources = [torch.arange(3.0), torch.randn(2, 2), torch.ones(1, dtype=torch.int32)]
    copy_all(targets, sources)
    assert all(torch.equal(one, other) for one, other in zip(targets, sources, strict=True))


@pytest.mark.gpu
def test_memory_is_of_the_device_that_was_asked_for_and_not_of_the_current_one() -> None:
    last = torch.accelerator.device_count() - 1
    for index in {0, last}:
        with torch.cuda.device(last - index):
            made = memory_maker(torch.device("cuda", index), (2, 3), (1, 2), torch.float16)()
        assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.float16)
        assert made.device == torch.device("cuda", index)


@pytest.mark.gpu
def test_copies_between_device_and_host_do_not_wait() -> None:
    here = [torch.randn(2**16, device="cuda") for _ in range(4)]
    there = [torch.empty(2**16, pin_memory=True) for _ in here]
    back = [torch.empty_like(one) for one in here]
    with refusing_to_wait():
        copy_all(there, here)
        copy_all(back, there)
    assert all(torch.equal(one, other) for one, other in zip(here, back, strict=True))
