"""Digests tell values apart to the bit, and evidence is taken when the operator that saved is done."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import recollect
from recollect._recompute.values import Evidence, digest
from tests.watching import backward

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.complex64]
floats = st.lists(st.floats(width=32), min_size=1, max_size=64)


@given(values=floats)
def test_equal_bytes_have_equal_digests(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert torch.equal(digest(tensor), digest(tensor.clone()))


@given(values=floats, data=st.data())
def test_one_changed_bit_changes_the_digest(values: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(values)
    changed = tensor.clone()
    raw = changed.view(torch.uint8)
    place = data.draw(st.integers(0, raw.numel() - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    assert not torch.equal(digest(tensor), digest(changed))


@given(values=st.lists(st.integers(0, 255), min_size=2, max_size=64), data=st.data())
def test_exchanged_values_change_the_digest(values: list[int], data: st.DataObject) -> None:
    i, j = data.draw(st.tuples(st.integers(0, len(values) - 1), st.integers(0, len(values) - 1)))
    changed = list(values)
    changed[i], changed[j] = changed[j], changed[i]
    one, other = (torch.tensor(v, dtype=torch.uint8) for v in (values, changed))
    assert torch.equal(digest(one), digest(other)) is (values == changed)


def test_exchanged_pieces_of_a_large_tensor_change_the_digest() -> None:
    tensor = torch.arange(3 * (1 << 16), dtype=torch.int32)
    first, second, third = tensor.split(1 << 16)
    assert not torch.equal(digest(tensor), digest(torch.cat([second, first, third])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, (1 << 16) // 4, (1 << 16) + 5])
def test_every_dtype_and_size_has_a_digest_of_sixteen_bytes(dtype: torch.dtype, size: int) -> None:
    tensor = torch.zeros(size, dtype=dtype)
    found = digest(tensor)
    assert found.untyped_storage().nbytes() == 16
    if size:
        tensor[-1] = 1
        assert not torch.equal(digest(tensor), found)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
        lambda t: t.to_sparse(),
        lambda t: t.requires_grad_() * 1,
    ],
    ids=["strides", "slice", "sparse", "tracked"],
)
def test_the_digest_is_of_values_not_of_layout(change: object) -> None:
    tensor = torch.randn(3, 4)
    assert callable(change)
    assert torch.equal(digest(change(tensor.clone())), digest(tensor))


@pytest.mark.parametrize("signs", list(itertools.product((-1.0, 1.0), repeat=4)), ids=str)
def test_conjugates_are_told_apart(signs: tuple[float, ...]) -> None:
    z = torch.complex(torch.randn(4), torch.rand(4) * torch.tensor(signs))
    assert not torch.equal(digest(z), digest(z.conj()))
    assert torch.equal(digest(z.conj()), digest(z.conj().resolve_conj()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_changes_that_follow_a_pattern_do_not_cancel_out(dtype: torch.dtype) -> None:
    x = torch.arange(1, 65, dtype=dtype)
    rows = x.view(8, 8)
    changed = [-x, x.flip(0), x.roll(1), rows.t().reshape(64), rows.flip(1).reshape(64), x * (-1) ** torch.arange(64)]
    found = {tuple(digest(one.to(dtype)).tolist()) for one in [x, *changed]}
    assert len(found) == 7


def test_nan_equals_itself_and_signed_zeros_differ() -> None:
    nan = torch.tensor([float("nan")])
    assert torch.equal(digest(nan), digest(nan.clone()))
    assert not torch.equal(digest(torch.tensor([0.0])), digest(torch.tensor([-0.0])))


# Tolerances


@pytest.mark.parametrize(
    ("check", "other", "differs"),
    [
        (recollect.ValueCheck(), 1.0000001, True),
        (recollect.ValueCheck(atol=1e-3), 1.0005, False),
        (recollect.ValueCheck(atol=1e-3), 1.002, True),
        (recollect.ValueCheck(rtol=1e-3), 1.0005, False),
        (recollect.ValueCheck(rtol=1e-3, atol=1.0), 1.9, False),
        (recollect.ValueCheck(atol=0.0), 1.0000001, True),
    ],
)
def test_values_differ_beyond_the_tolerance(check: recollect.ValueCheck, other: float, differs: bool) -> None:
    pieces = [check.evidence(torch.tensor([value, float("nan")])) for value in (1.0, other)]
    assert check.differs(*pieces) is differs


@pytest.mark.parametrize("tolerance", [None, 0.5])
def test_integers_are_compared_to_the_bit(tolerance: float | None) -> None:
    check = recollect.ValueCheck(atol=tolerance)
    assert check.differs(check.evidence(torch.tensor([1])), check.evidence(torch.tensor([2])))


def test_shapes_that_differ_are_values_that_differ() -> None:
    check = recollect.ValueCheck(atol=1.0)
    assert check.differs(torch.ones(2), torch.ones(3))


# What is kept


def evidence_of(check: recollect.ValueCheck, tensors: list[Tensor]) -> Evidence:
    evidence = Evidence(check)
    for tensor in tensors:
        evidence.note(tensor)
    evidence.flush()
    return evidence


@pytest.mark.parametrize(("every", "kept"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (5, [0])])
def test_only_every_nth_tensor_is_kept(every: int, kept: list[int]) -> None:
    evidence = evidence_of(recollect.ValueCheck(every=every), [torch.ones(3)] * 5)
    assert sorted(evidence.kept) == kept


def test_a_bitwise_check_keeps_no_copies_and_a_tolerance_says_its_bytes() -> None:
    tensors = [torch.ones(1000), torch.ones(10)]
    bitwise = evidence_of(recollect.ValueCheck(), tensors)
    assert bitwise.host_bytes == 0
    assert sum(kept.untyped_storage().nbytes() for kept in bitwise.kept.values()) == 32
    assert evidence_of(recollect.ValueCheck(atol=0.1), tensors).host_bytes == 4040


def test_a_copy_does_not_follow_later_writes() -> None:
    tensor = torch.ones(3)
    evidence = evidence_of(recollect.ValueCheck(atol=0.0), [tensor])
    tensor.add_(1)
    assert torch.equal(evidence.kept[0], torch.ones(3))


@pytest.mark.parametrize("check", ["values", recollect.ValueCheck(atol=1e-6)], ids=str)
def test_a_random_number_that_is_not_preserved_is_seen(check: recollect.ValueCheck) -> None:
    x = torch.ones(8, requires_grad=True)
    loss = recollect.checkpoint(lambda x: (x * torch.rand(8)).sin(), check=check, preserve_rng=False)(x).sum()
    with pytest.raises(recollect.MismatchError, match="has different values"):
        backward(loss)


def test_the_first_differing_tensor_is_named() -> None:
    x = torch.ones(8, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        for step in range(6):
            x = (x * (1 + (step == 3 and recollect.is_recomputing()))).sin()
        return x

    loss = recollect.checkpoint(fn, check="values", name="f")(x).sum()
    with pytest.raises(recollect.MismatchError, match=r"^region 'f': saved tensor 3 ") as caught:
        backward(loss)
    assert "Also" not in str(caught.value)


@pytest.mark.parametrize("policy", [None, recollect.policies.save_nothing])
def test_noise_that_a_kernel_fills_is_compared_when_it_is_there_on_whatever_thread(policy: Any) -> None:
    """Nodes are numbered by thread: one that the function closes over looks later than all of another thread."""
    outer = torch.ones(64, 64, requires_grad=True) * 2 - 3
    noisy = recollect.checkpoint(lambda: torch.rrelu(outer, training=True), check="values", policy=policy)
    for junk in range(3):
        loss = noisy().sum()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(torch.full, (64, 64), float(junk)).result()  # what unfilled memory holds next
            threads.submit(loss.backward, retain_graph=True).result()
