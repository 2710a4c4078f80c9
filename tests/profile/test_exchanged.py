"""Parameters that a step gives other memory: their old memory is gone in the profile as it is in the step."""

import torch
from torch import Tensor, nn

import recollect
from recollect._profile.memory import LiveBytes


class Averaged(nn.Module):
    """A model and the average of its weights, which is made anew at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(requires_grad=False)
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, mean in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                mean.data = mean.data * 0.9 + own.data * 0.1
            target = self.teacher(x)
        found: Tensor = (self.student(x) - target).square().mean()
        return found


def measure(model: nn.Module, x: Tensor) -> int:
    with LiveBytes(include=[model, x]) as meter:
        model(x).backward()
    model.zero_grad()
    return meter.peak_bytes


def test_memory_that_a_step_has_exchanged_does_not_count_twice() -> None:
    model, x = Averaged(), torch.randn(8, 64)
    before = [parameter.clone() for parameter in model.parameters()]
    seen = recollect.profile(model, x)
    assert all(map(torch.equal, model.parameters(), before))
    assert seen.peak_bytes == measure(model, x)


def test_memory_that_somebody_else_has_is_given_back() -> None:
    model, x = Averaged(), torch.randn(8, 64)
    others = [parameter.data for parameter in model.teacher.parameters()]
    seen = recollect.profile(model, x)
    assert [one.data_ptr() for one in model.teacher.parameters()] == [one.data_ptr() for one in others]
    assert seen.peak_bytes == measure(model, x)
