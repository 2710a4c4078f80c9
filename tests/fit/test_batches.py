"""Batches and steps as people have them: what a model, a loss or a step is called with."""

from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import recollect
from recollect._fit.batches import read_batch, read_step
from recollect._fit.loaders import find_largest

X, Y = torch.ones(3, 2), torch.zeros(3, 1)
MODEL = nn.Linear(2, 1)
Pair = namedtuple("Pair", "input target")


class Whole(nn.Module):
    """Takes all of a batch as one argument."""

    def forward(self, batch: Any) -> Any:
        return batch


class Two(nn.Module):
    """Takes two inputs, the second one if it is there."""

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        return first if second is None else first + second


def test_tensors_tuples_and_dicts_become_arguments_and_keywords() -> None:
    assert read_batch(X, None, MODEL).args == (X,)
    assert read_batch((X, Y), None, Two()).args == (X, Y)
    assert read_batch([X], None, MODEL).args == (X,)
    assert dict(read_batch({"input": X}, None, MODEL).kwargs) == {"input": X}
    assert dict(read_batch(UserDict(input=X), None, MODEL).kwargs) == {"input": X}
    assert read_batch(None, None, MODEL).args == ()


@pytest.mark.parametrize("batch", [(X, Y), {"x": X, "y": Y}, Pair(X, Y)])
def test_a_model_of_one_argument_gets_the_whole_batch(batch: Any) -> None:
    call = read_batch(batch, None, Whole())
    assert call.args == (batch,)
    assert "the whole batch" in call.doubt


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        [X, Y],
        Pair(X, Y),
        ({"input": X}, Y),
        ((X,), Y),
        {"input": X, "labels": Y},
        {"input": X, "target": Y},
        {"input": X, "anything": Y},
    ],
)
@pytest.mark.parametrize("loss", [nn.MSELoss(), F.mse_loss, lambda output, target: (output - target).square().mean()])
def test_a_loss_of_two_arguments_gets_the_targets_which_the_model_does_not(batch: Any, loss: Any) -> None:
    call = read_batch(batch, loss, MODEL)
    assert [*call.args, *call.kwargs.values()] == [X]
    assert call.loss is not None
    assert torch.equal(call.loss(Y + 1), torch.tensor(1.0))


def test_a_loss_gets_the_whole_dict_if_nothing_in_it_is_a_target() -> None:
    call = read_batch({"input": X}, lambda output, batch: (output - batch["input"]).sum(), MODEL)
    assert call.loss is not None
    assert call.loss(X).item() == 0


def test_what_a_model_cannot_be_called_with_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Bilinear.forward\(input1, input2\) cannot be called with a tuple of 3.\nIf "
    ):
        read_batch((X, X, Y), None, nn.Bilinear(2, 2, 1))
    with pytest.raises(ValueError, match=r"a dict with 'input1', 'input2', 'idx': it does not take 'idx'.\nLeave out"):
        read_batch({"input1": X, "input2": X, "idx": 0, "labels": Y}, F.mse_loss, nn.Bilinear(2, 2, 1))


def test_a_model_that_fails_on_a_whole_batch_says_how_it_was_called() -> None:
    with pytest.raises(TypeError) as caught:
        recollect.fit(nn.Sequential(nn.Linear(2, 1)), (X, Y), budget="min")
    (note,) = caught.value.__notes__
    assert note.startswith("recollect.fit gave Sequential.forward(input) the whole batch, a tuple of 2: if it has tar")
    assert note.endswith("pass loss=, a function of the output and the targets")


@pytest.mark.parametrize(
    ("step", "batch", "args", "kwargs"),
    [
        (lambda batch: batch, (X, Y), ((X, Y),), {}),
        (lambda x, y: x, (X, Y), (X, Y), {}),
        (lambda batch: batch, {"x": X}, ({"x": X},), {}),
        (lambda x, y: x, {"x": X, "y": Y}, (), {"x": X, "y": Y}),
        (lambda x=None, y=None: x, {"x": X, "y": Y}, (), {"x": X, "y": Y}),
        (lambda **batch: batch, {"x": X, "y": Y}, (), {"x": X, "y": Y}),
        (lambda batch, **options: batch, {"x": X, "y": Y}, ({"x": X, "y": Y},), {}),
        (lambda: None, (X, Y), (), {}),
        (lambda: None, None, (), {}),
        (lambda x=None: x, None, (), {}),
    ],
)
def test_a_step_is_called_with_the_batch_or_its_parts(
    step: Callable[..., Any], batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    call = read_step(batch, step)
    assert (call.args, dict(call.kwargs)) == (args, kwargs)


def test_a_step_that_fails_on_a_whole_batch_says_how_it_was_called() -> None:
    model = nn.Linear(2, 2)

    def step(x: Any, y: Any = None) -> Tensor:
        return (model(x) - y).sum()  # type: ignore[no-any-return]

    with pytest.raises(TypeError) as caught:
        recollect.fit(model, (torch.ones(3, 2), torch.ones(3, 2)), step=step, budget="1GiB")
    (note,) = caught.value.__notes__
    assert (
        "called step=step(x, y) with the whole batch, a tuple of 2: if it is to get the parts, let it take them" in note
    )


def test_a_step_may_accumulate_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())

    def step(x: Tensor) -> None:
        for part in x.chunk(2):
            model(part).sum().backward()

    assert recollect.fit(model, torch.ones(4, 2), step=step, budget="1GiB").plan.regions == ()


def test_a_step_that_cannot_be_called_is_refused() -> None:
    def advance(x: Tensor, y: Tensor, lr: float) -> None:
        """Take more than there is."""

    with pytest.raises(ValueError, match=r"step=advance\(x, y, lr\) cannot be called with this batch, a tuple of 2"):
        read_step((X, Y), advance)


def test_of_a_loader_the_largest_batch_is_taken_and_random_numbers_are_put_back() -> None:
    sizes: list[Tensor] = [torch.ones(2), torch.ones(5), torch.ones(3)]
    own = torch.Generator()
    state, before = torch.get_rng_state(), own.get_state()
    found = find_largest(DataLoader(sizes, batch_size=None, shuffle=True, generator=own))  # type: ignore[arg-type]
    assert found.numel() == 5
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(before, own.get_state())


def test_a_loader_of_equal_batches_is_not_read_to_its_end() -> None:
    class Counted(torch.utils.data.Dataset[Tensor]):
        read = 0

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Tensor:
            self.read += 1
            return torch.ones(2)

    data = Counted()
    find_largest(DataLoader(data, batch_size=4))
    assert data.read <= 40


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(ValueError, match="the DataLoader yields no batch"):
        find_largest(DataLoader(TensorDataset(torch.ones(0, 1))))
