"""What would make a step fit that ran out of memory, judged by the whole step."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._inspect.oom.alive import Alive
from recollect._inspect.oom.error import Shortage
from recollect._inspect.oom.judged import ALLOWANCE, Judged, Judgement, judge
from recollect._inspect.oom.report import _judge
from recollect._inspect.oom.text import _format_judgement
from recollect._profile.given_arguments import GivenArguments
from recollect._profile.memory import LiveBytes
from recollect._profile.tracks import Tracks
from tests.models import GPT


class Trained(nn.Module):
    """A model that gives its loss."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.net = GPT(width=64, layers=layers, dropout=0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens)
        return logits.float().logsumexp(-1).mean()


TOKENS = torch.zeros(4, 64, dtype=torch.long)


def metered_peak(model: nn.Module, steps: int = 4) -> int:
    peak = 0
    for _ in range(steps):
        model.zero_grad()
        with LiveBytes([model, TOKENS]) as meter:
            model(TOKENS).backward()
        peak = meter.peak_bytes
    model.zero_grad()
    return peak


def judged(model: nn.Module, capacity_bytes: int, **options: Any) -> Judgement:
    return judge(model, GivenArguments((TOKENS,), {}), device="cpu", capacity_bytes=capacity_bytes, **options)


def test_what_is_judged_is_what_happens() -> None:
    model = Trained()
    plain = metered_peak(model)
    found = judged(model, int(0.7 * plain))
    assert found.plain_bytes == pytest.approx(plain, rel=0.01)
    sure = [choice for choice in found.choices if choice.is_enough is not None]
    assert any(choice.is_enough for choice in sure)
    for choice in sure:
        handle = eval(choice.code, {"recollect": recollect, "model": model, "batch": TOKENS})
        peak = metered_peak(model)
        handle.remove()
        assert peak <= 1.01 * choice.peak_bytes, choice
        if choice.is_enough:
            assert peak <= 0.7 * plain


def test_what_people_use_is_offered_best_first() -> None:
    model = Trained()
    found = judged(model, metered_peak(model))
    codes = [choice.code for choice in found.choices]
    assert codes[0].startswith("recollect.fit(model, batch")
    assert 'recollect.apply(model, {"net.layers.*": "full"})' in codes
    assert 'recollect.apply(model, {"net.layers.*": "full"}, every=2)' in codes
    assert 'recollect.apply(model, {"net.layers.*": "selective"})' in codes
    enough = [choice.recompute_s for choice in found.choices if choice.is_enough]
    assert enough == sorted(enough)  # type: ignore[type-var]


def test_nothing_is_enough_where_there_is_too_little() -> None:
    found = judged(Trained(), 1000)
    assert found.choices
    assert all(choice.is_enough is False for choice in found.choices)
    text = "\n".join(_format_judgement(found))
    assert "none of these is enough: make the batch or the sequence shorter" in text


def test_a_loss_outside_of_the_model_makes_it_less_sure() -> None:
    found = judged(GPT(width=64, layers=6), 2**40)
    assert {choice.is_enough for choice in found.choices} == {None}
    assert "should be enough, but not all of the step was seen" in "\n".join(_format_judgement(found))


def test_what_else_is_alive_and_the_optimizer_count() -> None:
    model = Trained()
    alone = judged(model, 2**40)
    optimizer = torch.optim.AdamW(model.parameters())
    more = judged(model, 2**40, beside_bytes=10**6, optimizer=optimizer)
    states = 2 * sum(parameter.nbytes for parameter in model.parameters())
    assert more.plain_bytes - alone.plain_bytes >= states + 10**6 - TOKENS.nbytes
    assert not optimizer.state


def test_the_model_is_as_it_was() -> None:
    model = Trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    judged(model, 2**30)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(part._forward_hooks for part in model.modules())
    assert "forward" not in vars(model.net.layers[0])


def shortage(capacity_bytes: int) -> Shortage:
    return Shortage(
        message="out of memory",
        device="cpu",
        requested_bytes=capacity_bytes,
        free_bytes=0,
        allocated_bytes=capacity_bytes,
        unused_bytes=0,
    )


def test_the_call_that_failed_is_the_one_that_is_judged() -> None:
    model, tracks = Trained(), Tracks()
    tracks.start()
    try:
        model(tokens=TOKENS)
    finally:
        tracks.stop()
    judgement, why_not = _judge(Alive(root=weakref.ref(model)), shortage(2**30), tracks)
    assert not why_not
    assert judgement is not None
    assert judgement.plain_bytes == judged(model, 2**30).plain_bytes


def test_arguments_that_cannot_be_given_again_are_said_to_be() -> None:
    class Config:
        pass

    class Odd(nn.Linear):
        def forward(self, x: Tensor, config: Config) -> Tensor:  # type: ignore[override]
            del config
            return super().forward(x)

    model, tracks = Odd(4, 4), Tracks()
    tracks.start()
    try:
        model(torch.ones(2, 4), Config())
    finally:
        tracks.stop()
    judgement, why_not = _judge(Alive(root=weakref.ref(model)), shortage(2**30), tracks)
    assert judgement is None
    assert "called with objects that cannot be passed a second time" in why_not


def test_what_a_model_was_called_with_holds_no_tensor() -> None:
    x = torch.ones(4, 4)
    gone = weakref.ref(x)
    given = GivenArguments(([x, {"y": x}],), {"scale": 2.0})
    gc.disable()
    try:
        del x
        assert gone() is None
    finally:
        gc.enable()
    (values,), kwargs = given.again()
    assert values[0].shape == values[1]["y"].shape == (4, 4)
    assert values[0].is_meta
    assert kwargs == {"scale": 2.0}


def test_the_text_of_choices() -> None:
    choices = (
        Judged(
            what="recompute layers.* (12 Block)",
            code="recollect.apply(model)",
            peak_bytes=2**30,
            recompute_s=0.05,
            is_enough=True,
        ),
        Judged(what="send it away", code="x", peak_bytes=2**31, recompute_s=None, is_enough=False),
    )
    text = list(_format_judgement(Judgement(capacity_bytes=2**30, plain_bytes=2**32, choices=choices)))
    assert text[0] == "what would make the step fit: it needs 4.00 GiB as it is, and has 1.00 GiB"
    assert text[1] == "  recompute layers.* (12 Block): peak 1.00 GiB, at most 50.0 ms more a step,"
    assert text[2] == "    enough"
    assert text[3] == "      recollect.apply(model)"
    assert text[4] == "  send it away: peak 2.00 GiB, not enough alone"
    assert 0 < ALLOWANCE < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_on_a_device_what_is_enough_runs() -> None:
    model = Trained(layers=12).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(256, 512, dtype=torch.long, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()

    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    needs = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    reports: list[Any] = []
    torch.cuda.set_per_process_memory_fraction(0.7 * needs / total)
    try:
        with pytest.raises(torch.OutOfMemoryError), recollect.on_oom(to=reports.append):
            step()
        judgement = reports[0].judgement
        assert judgement is not None
        enough = [choice for choice in judgement.choices if choice.is_enough]
        assert enough
        for choice in enough:
            optimizer.zero_grad()
            torch.cuda.empty_cache()
            handle = eval(
                choice.code, {"recollect": recollect, "model": model, "batch": tokens, "optimizer": optimizer}
            )
            for _ in range(4):
                step()
            handle.remove()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
