"""A profiled step: exact bytes, right places, and everything as it was found."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import Profile, compat, policies
from recollect._core.calls import Category, OpCall, Phase
from recollect._core.profiles import Clock
from recollect._core.timeline import Timeline
from recollect._core.torch_private.pytree import tree_leaves
from recollect._inspect.saved import describe_saved
from recollect._inspect.step import StepProfiler
from recollect._profile.memory import LiveBytes
from recollect._report.answer import answer
from tests.corpus import CASES, Call, Case
from tests.inspect.states import assert_same, state_of
from tests.models import GPT, MODELS

RULES: dict[str, Any] = {
    "plain": None,
    "full": "full",
    "policy": policies.save_matmuls,
}


def loss_of(output: Any) -> Tensor:
    tensors = output if isinstance(output, tuple) else (output,)
    total: Tensor = sum(tensor.sum() for tensor in tensors if tensor.requires_grad)
    return total


def metered_peak(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    model.zero_grad()
    with LiveBytes([model, *(value for value in inputs if isinstance(value, Tensor))]) as meter:
        output = model(*inputs)
        loss = loss_of(output)
        loss.backward()
    model.zero_grad()
    return meter.peak_bytes


def seen_peak(profile: Profile) -> int:
    """The peak without what the meter cannot see: numbers as tensors, what a function closes over, regions' copies."""
    known = [
        replace(storage, bytes=0) if storage.category is Category.INPUT and not storage.name else storage
        for storage in profile.storages
    ]
    return Timeline(known, profile.calls).peak_bytes


def calls(profile: Profile, phase: Phase) -> list[OpCall]:
    return [call for call in profile.calls if call.phase is phase]


# Bytes.


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("kind", MODELS)
def test_the_peak_is_the_meters_to_the_byte(kind: str, rules: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[kind]()
    if RULES[rules] is not None:
        if kind in ("tagger", "looped"):
            recollect.apply(model, {name: RULES[rules] for name in ("lstm", "rnn", "block") if hasattr(model, name)})
        else:
            recollect.apply(model, RULES[rules])
        for _ in range(3):  # learn
            loss_of(model(*inputs)).backward()
        model.zero_grad()
    found = recollect.profile(model, *inputs, loss=loss_of)
    assert seen_peak(found) == metered_peak(model, inputs)
    if rules == "plain":
        assert found.peak_bytes == seen_peak(found)
    assert sum(found.timeline.bytes_by_category(found.timeline.peak_call).values()) == found.peak_bytes
    assert bool(calls(found, Phase.RECOMPUTATION)) == (rules != "plain")
    assert Profile.from_json(found.to_json()) == found


def step_of(case: Case, call: Call) -> Callable[..., None]:
    def step(*_watched: Any) -> None:
        with case.around():
            result = call.fn(*call.args, **call.kwargs)
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    return step


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_function_has_its_exact_peak(case: Case) -> None:
    torch.manual_seed(0)
    call = case.build()
    step, watched = step_of(case, call), list(call.watched())
    found = recollect.profile(step, *watched)
    again = case.build()
    step, watched = step_of(case, again), list(again.watched())
    with LiveBytes(watched) as meter:
        step()
    assert seen_peak(found) == meter.peak_bytes
    assert Profile.from_json(found.to_json()) == found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_profile_of_any_function_changes_nothing(case: Case) -> None:
    def gradients(*, profiled: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        call = case.build()
        step = step_of(case, call)
        if profiled:
            recollect.profile(step, *call.watched(), *call.generators())
            assert all(parameter.grad is None for parameter in call.parameters())
            if case.name == "inputs that are not leaves":  # whose graph a step uses up
                return gradients(profiled=False)
        step()
        return [parameter.grad for parameter in call.parameters()] + call.buffers()

    for one, other in zip(gradients(profiled=True), gradients(profiled=False), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


def test_saved_bytes_are_those_of_the_graph() -> None:
    model = GPT()
    ids = torch.arange(16).reshape(2, 8) % 8
    graph = describe_saved(model(ids).sum())
    found = recollect.profile(model, ids, loss=torch.sum)
    kept = {edge.storage for edge in found.saved}
    categories = {Category.ACTIVATION, Category.LOSS_HEAD}
    ours = sum(found.storages[at].bytes for at in kept if found.storages[at].category in categories)
    inputs = sum(found.storages[at].bytes for at in kept if found.storages[at].category is Category.INPUT)
    assert ours + inputs == graph.held_bytes
    parameters = {at for at in kept if found.storages[at].category is Category.PARAMETER}
    assert sum(found.storages[at].bytes for at in parameters) == graph.parameter_bytes


def test_what_a_region_holds_is_saved_and_what_it_forgets_is_not() -> None:
    model = GPT()
    ids = torch.arange(16).reshape(2, 8) % 8
    plain = recollect.profile(model, ids, loss=torch.sum)
    with recollect.apply(model, "full"):
        graph = describe_saved(model(ids).sum())
        full = recollect.profile(model, ids, loss=torch.sum)

    def saved_bytes(profile: Profile) -> int:
        wanted = {Category.ACTIVATION, Category.LOSS_HEAD, Category.INPUT}
        kept = {edge.storage for edge in profile.saved}
        return sum(profile.storages[at].bytes for at in kept if profile.storages[at].category in wanted)

    assert saved_bytes(full) < saved_bytes(plain)
    assert saved_bytes(full) == graph.held_bytes


# Places.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 32), nn.LayerNorm(32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(32, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).sin()
        for block in self.blocks:
            x = x + block(x)
        return functional.cross_entropy(self.head(x), torch.zeros(x.shape[0], dtype=torch.long))


def test_calls_know_their_module_line_and_forward_call() -> None:
    found = recollect.profile(Net(), torch.randn(4, 8))
    sin = next(call for call in found.calls if call.op == "aten.sin.default")
    assert (sin.module, sin.phase, sin.forward) == ("", Phase.FORWARD, None)
    assert sin.source.startswith("test_profile.py:")
    gradient = next(call for call in found.calls if call.op == "aten.cos.default")
    assert gradient.phase is Phase.BACKWARD
    assert gradient.forward is not None
    assert (found.calls[gradient.forward], gradient.source) == (sin, sin.source)
    gelus = [call for call in found.calls if "gelu" in call.op]
    assert [call.module for call in gelus] == [f"blocks.{n}.1" for n in (0, 1, 2, 2, 1, 0)]
    assert {call.source for call in gelus} == {gelus[0].source}
    assert all(call.module for call in found.calls if "mm" in call.op)
    assert {entry.path: entry.kind for entry in found.modules}["blocks.1.0"] == "Linear"
    assert (found.name, found.clock, found.is_dry, found.device) == ("Net", Clock.HOST, False, "CPU")
    assert found.step_s is not None
    assert found.step_s > 0


def test_backward_belongs_to_the_module_that_forward_was_in() -> None:
    found = recollect.profile(Net(), torch.randn(4, 8))
    lost = [
        call for call in calls(found, Phase.BACKWARD) if call.forward is None and call.op != "aten.ones_like.default"
    ]
    assert [call.op for call in lost] == []


def test_memory_is_told_apart_by_what_it_is_for() -> None:
    model, x = Net(), torch.randn(4, 8)
    found = recollect.profile(model, x)
    by_category: Counter[Category] = Counter()
    for storage in found.storages:
        by_category[storage.category] += storage.bytes
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert by_category[Category.PARAMETER] == by_category[Category.GRADIENT] == parameters
    assert by_category[Category.INPUT] == x.nbytes
    head = [storage.bytes for storage in found.storages if storage.category is Category.LOSS_HEAD]
    assert 4 * 100 * 4 in head  # the log-probabilities
    assert {storage.name for storage in found.storages if storage.category is Category.PARAMETER} == {
        name for name, _ in model.named_parameters()
    }


def test_what_is_recomputed_is_linked_to_forward() -> None:
    model = Net()
    recollect.apply(model, {"blocks.*": recollect.Decision.RECOMPUTE})
    found = recollect.profile(model, torch.randn(4, 8))
    again = calls(found, Phase.RECOMPUTATION)
    assert again
    assert {call.region for call in again} == {"blocks.0", "blocks.1", "blocks.2"}
    for call in again:
        assert call.forward is not None
        origin = found.calls[call.forward]
        assert (origin.op, origin.module, origin.phase) == (call.op, call.module, Phase.FORWARD)


def test_values_made_again_from_a_plan_are_recomputation_too() -> None:
    model = GPT()
    recollect.apply(model, policies.save_matmuls)
    ids = torch.arange(16).reshape(2, 8) % 8
    for _ in range(3):
        model(ids).sum().backward()
    found = recollect.profile(model, ids, loss=torch.sum)
    again = calls(found, Phase.RECOMPUTATION)
    assert again
    assert all(call.module.startswith("layers.") and call.source for call in again if call.forward is not None)
    assert not any("mm" in call.op for call in again)
    assert {rule.rule for rule in found.rules} >= {"save_matmuls", "no rule"}
    saving = next(rule for rule in found.rules if rule.rule == "save_matmuls")
    assert (saving.regions, saving.decision) == (4, recollect.Decision.SAVE)
    assert saving.values > 0
    assert saving.bytes > 0


def test_named_blocks_show() -> None:
    @recollect.region("attn")
    def attention(x: Tensor) -> Tensor:
        return x.sin()

    weight = torch.ones(4, requires_grad=True)
    found = recollect.profile(lambda: attention(weight).cos().sum().backward())
    scopes = {call.op: call.scopes for call in calls(found, Phase.FORWARD)}
    assert (scopes["aten.sin.default"], scopes["aten.cos.default"]) == (("attn",), ())


# Steps of all kinds.


def test_a_step_with_an_optimizer_shows_its_phase_and_state() -> None:
    model, x = Net(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    step()
    before = state_of(model, optimizer)
    found = recollect.profile(step)
    assert_same(state_of(model, optimizer), before)
    assert calls(found, Phase.OPTIMIZER)
    assert found.optimizer == "AdamW"
    state = sum(storage.bytes for storage in found.storages if storage.category is Category.OPTIMIZER)
    assert state == sum(tensor.nbytes for one in optimizer.state.values() for tensor in one.values())
    assert "head.weight.exp_avg" in {storage.name for storage in found.storages}


@pytest.mark.parametrize("steps_before", [0, 1])
def test_where_optimizers_step_on_fake_tensors_the_profile_is_the_same(steps_before: int) -> None:
    model, x = Net(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    real = recollect.profile(step)
    if not steps_before:
        optimizer = torch.optim.AdamW(model.parameters())
    before = state_of(model, optimizer)
    profiler = StepProfiler([model], [optimizer], inputs=x)
    profiler._is_cuda = True  # as on a device, where copying what is written would take too long
    with profiler:
        step()
    assert_same(state_of(model, optimizer), before)
    shadow = profiler.profile
    assert "the step of AdamW was not run: its memory and time are estimated" in shadow.notes
    assert shadow.optimizer == real.optimizer == "AdamW"
    lasting = [storage for storage in shadow.storages if storage.category is Category.OPTIMIZER]
    assert all(storage.freed_at is None for storage in lasting)
    stepped = calls(shadow, Phase.OPTIMIZER)
    assert {call.op for call in stepped} >= {"aten._foreach_addcdiv_.ScalarList"}  # as CUDA does it by default
    assert {call.module for call in stepped} >= {"first"}
    state = [storage for storage in shadow.storages if storage.category is Category.OPTIMIZER]
    assert sum(storage.bytes for storage in state if storage.made_at is None) >= 2 * sum(
        parameter.nbytes for parameter in model.parameters()
    )
    forward = [call.op for call in shadow.calls if call.phase is not Phase.OPTIMIZER]
    assert forward == [call.op for call in real.calls if call.phase is not Phase.OPTIMIZER]


def test_the_first_step_of_an_optimizer_leaves_it_without_state() -> None:
    model, x = Net(), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    before = state_of(model, optimizer)

    def step() -> None:
        model(x).backward()
        optimizer.step()

    found = recollect.profile(step)
    assert_same(state_of(model, optimizer), before)
    assert not optimizer.state
    assert any(storage.category is Category.OPTIMIZER for storage in found.storages)


def test_several_micro_batches_are_one_step() -> None:
    model = Net()

    def step() -> None:
        for _ in range(3):
            model(torch.randn(4, 8)).backward()

    found = recollect.profile(step)
    phases = [call.phase for call in found.calls]
    changes = sum(one is not other for one, other in pairwise(phases))
    assert changes == 5
    accumulated = [call for call in calls(found, Phase.BACKWARD) if call.op == "aten.add_.Tensor"]
    assert len(accumulated) == 2 * len(list(model.parameters()))
    assert {call.module for call in accumulated} == {"first", "norm", "head", "blocks.0.0", "blocks.1.0", "blocks.2.0"}


def test_a_step_of_two_models_tells_them_apart() -> None:
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1))
    found = recollect.profile(lambda: second(first(torch.ones(2, 4))).sum().backward())
    assert {call.module for call in calls(found, Phase.FORWARD) if "addmm" in call.op} == {"", "Sequential.0"}


def test_losses_are_found_in_what_models_give() -> None:
    class Output(nn.Module):
        def __init__(self, shape: str) -> None:
            super().__init__()
            self.weight, self.shape = nn.Parameter(torch.ones(3)), shape

        def forward(self) -> Any:
            y = self.weight.exp()
            return {"loss": {"loss": y.sum(), "logits": y}, "tensor": y, "pair": (y.sum(), y), "list": [y, y]}[
                self.shape
            ]

    for shape in ("loss", "tensor", "pair", "list"):
        found = recollect.profile(Output(shape))
        assert calls(found, Phase.BACKWARD), shape


def test_a_model_without_a_loss_is_refused_in_words() -> None:
    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    start = r"cannot make a loss from what {} returns \(Tensor\): no tensor in it requires grad"
    with pytest.raises(ValueError, match=start.format("Detached") + r"\. Pass `loss=`"):
        recollect.profile(Detached(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=start.format("Linear") + ", because all parameters of Linear are frozen"):
        recollect.profile(nn.Linear(2, 2).requires_grad_(requires_grad=False), torch.ones(1, 2))
    with pytest.raises(ValueError, match=start.format("ReLU") + ", because ReLU has no parameters"):
        recollect.profile(nn.ReLU(), torch.ones(1, 2))
    frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match="which has no graph behind it, because all parameters of Linear are frozen"):
        recollect.profile(frozen, torch.ones(1, 2), loss=torch.sum)
    with pytest.raises(ValueError, match="loss= returned a float, which has no graph behind it"):
        recollect.profile(nn.Linear(2, 2), torch.ones(1, 2), loss=lambda _: 1.0)  # type: ignore[arg-type, return-value]


def test_what_holds_optimizers_is_refused_with_what_to_pass() -> None:
    model, x = nn.Linear(1, 1), torch.ones(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match="several optimizers step in a function of yours: pass one that runs the whole"):
        recollect.profile(model, x, optimizer=[optimizer, optimizer])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an instance or a class; pass its optimizer, SGD"):
        recollect.profile(model, x, optimizer=torch.optim.lr_scheduler.StepLR(optimizer, 1))  # type: ignore[arg-type]


def loop_of_steps() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: recollect.profile(3),  # type: ignore[arg-type]
            TypeError,
            "recollect.profile expects a model or a function that runs a step, not 3",
        ),
        (
            lambda: recollect.profile(nn.Linear(1, 1), torch.ones(1, 1), optimizer="adam"),  # type: ignore[arg-type]
            TypeError,
            "optimizer='adam': expected an optimizer of torch.optim, an instance or a class",
        ),
        (
            lambda: recollect.profile(nn.Linear, 1, 1),
            TypeError,
            "recollect.profile expects a model, not its class Linear: pass an instance",
        ),
        (
            lambda: recollect.profile(loop_of_steps),
            TypeError,
            (
                "recollect.profile expects a function that runs a step when it is called; "
                "calling <function loop_of_steps> only starts one"
            ),
        ),
        (
            lambda: recollect.profile(len, loss=torch.sum),
            ValueError,
            "loss= is for models: <function len> is a function, which returns a loss or runs its backward",
        ),
        (
            lambda: torch.inference_mode()(recollect.profile)(nn.Linear(1, 1), torch.ones(1, 1)),
            ValueError,
            "recollect.profile runs a training step, but inference mode is on: leave torch.inference_mode() first",
        ),
        (
            lambda: recollect.profile(nn.Linear(1, 1), torch.ones(1, 1), device="cuda"),
            ValueError,
            ("device='cuda' only works with dry=True: a real step runs on the model's own device and in its own dtype"),
        ),
        (
            lambda: recollect.profile(nn.Linear(1, 1, device="meta"), torch.ones(1, 1)),
            ValueError,
            "Linear is on the meta device, where tensors have no values: only a dry profile is possible: pass dry=True",
        ),
        (
            lambda: recollect.profile(nn.Linear(1, 1), torch.ones(1, 1, device="meta")),
            ValueError,
            (
                "an input of Linear is on the meta device, where tensors have no values: only a dry profile is "
                "possible: pass dry=True, or move the input to the model's device"
            ),
        ),
        (
            lambda: recollect.profile(nn.Linear(1, 1, device="meta"), torch.ones(1, 1), dry=True),
            ValueError,
            (
                "Linear is on the meta device, where tensors have no values: pass the device to estimate for, as in "
                "device='H100'"
            ),
        ),
    ],
)
def test_wrong_arguments_are_refused_in_words(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_optimizers_inside_backward_are_told_apart_from_it() -> None:
    model = Net()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda leaf: optimizers[leaf].step())
    before = state_of(model)
    found = recollect.profile(lambda: model(torch.ones(4, 8)).backward())
    assert_same(state_of(model), before)
    assert calls(found, Phase.OPTIMIZER)


def test_a_dry_profile_of_a_model_is_its_real_one() -> None:
    model = GPT()
    ids = torch.arange(16).reshape(2, 8) % 8
    before = state_of(model)
    for rules in (None, "full"):
        if rules is not None:
            recollect.apply(model, rules)
        real = recollect.profile(model, ids, loss=torch.sum, optimizer=torch.optim.Adam)
        dry = recollect.profile(model, ids, loss=torch.sum, optimizer=torch.optim.Adam, dry=True)
        assert_same(state_of(model), before)
        count = sum(call.phase is not Phase.OPTIMIZER for call in real.calls)
        assert [call.op for call in dry.calls[:count]] == [call.op for call in real.calls[:count]]
        assert dry.timeline.bytes_at[:count] == real.timeline.bytes_at[:count]
        assert max(dry.timeline.bytes_at[count:]) == max(real.timeline.bytes_at[count:])
        assert {edge.storage for edge in dry.saved} == {edge.storage for edge in real.saved}
        assert (dry.is_dry, dry.clock, real.clock) == (True, Clock.ROOFLINE, Clock.HOST)
        assert dry.step_s is not None
        assert "estimated for CPU on fake tensors: nothing was run" in dry.notes


def test_what_keeps_a_profile_from_being_a_usual_one_is_noted() -> None:
    model = GPT()
    ids = torch.arange(16).reshape(2, 8) % 8
    recollect.apply(model, policies.save_matmuls)
    real = recollect.profile(model, ids, loss=torch.sum)
    dry = recollect.profile(model, ids, loss=torch.sum, dry=True)
    assert real.notes == ("no optimizer was given, so neither its state nor its step is counted",)
    assert any("regions under policies hold more on fake tensors" in note for note in dry.notes)


def test_a_step_without_backward_says_so() -> None:
    model = Net()
    found = recollect.profile(lambda: model(torch.ones(4, 8)).detach())
    assert "no backward ran, so it is not known what would be kept for it" in found.notes
    assert not found.saved


def test_complex_outputs_are_summed() -> None:
    class Rotate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self) -> Tensor:
            return torch.polar(self.weight, self.weight)

    assert calls(recollect.profile(Rotate()), Phase.BACKWARD)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("engine", [torch_checkpoint, compat.checkpoint])
def test_recomputation_is_told_apart_whoever_does_it(engine: Any, use_reentrant: bool) -> None:
    model = Net()

    def step(x: Tensor) -> None:
        x = model.first(x)
        for block in model.blocks:
            x = x + engine(block, x, use_reentrant=use_reentrant)
        x.sum().backward()

    found = recollect.profile(step, torch.ones(4, 8))
    again = calls(found, Phase.RECOMPUTATION)
    assert {call.module for call in again if "gelu" in call.op or "mm" in call.op} <= {
        f"blocks.{n}.{m}" for n in range(3) for m in range(2)
    }
    products = [call for call in again if "addmm" in call.op]
    assert len(products) == 3
    for call in products:
        assert call.forward is not None
        assert (found.calls[call.forward].module, found.calls[call.forward].op) == (call.module, call.op)
    backward = [call for call in calls(found, Phase.BACKWARD) if "gelu_backward" in call.op]
    assert len(backward) == 3
    is_torch = engine is torch_checkpoint
    assert any("torch.utils.checkpoint recomputes here" in note for note in found.notes) == is_torch


@pytest.mark.parametrize(
    ("width", "text"), [(2**10, "It would fit: the peak is "), (2**20, "It would not fit: the peak is ")]
)
def test_a_dry_profile_knows_what_the_device_has_and_a_report_whether_the_step_would_fit(width: int, text: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1))
    found = recollect.profile(model, torch.ones(2**14, 8), dry=True, device="H100")
    assert found.capacity_bytes == int(79.1 * 2**30)
    assert answer(found).fit.startswith(text)
    assert "79.10 GiB of NVIDIA H100 80GB HBM3" in answer(found).fit


def test_operations_are_those_of_torchs_counter() -> None:
    model, ids = GPT(), torch.arange(16).reshape(2, 8) % 8
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    model.zero_grad()
    found = recollect.profile(model, ids, loss=torch.sum)
    assert sum(call.flops for call in found.calls) == counter.get_total_flops() > 0


def test_views_are_known_as_aliases() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    found = recollect.profile(lambda: weight.sin().t().reshape(2, 8).exp().sum().backward())
    sin = next(call for call in found.calls if call.op == "aten.sin.default")
    t = next(call for call in found.calls if call.op == "aten.t.default")
    assert (t.inputs[0].storage, t.outputs[0].storage) == (sin.outputs[0].storage, sin.outputs[0].storage)
    assert not t.writes


def test_data_dependent_control_flow_is_followed() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y.exp() if y.sum().item() > 0 else y.sin()

    found = recollect.profile(Branching(), torch.randn(2, 4))
    assert len([call for call in found.calls if call.op in ("aten.exp.default", "aten.sin.default")]) == 1


def test_autocast_dropout_and_in_place_are_seen() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.dropout(self.layer(x))
            total: Tensor = y.float().relu_().sum()
            return total

    found = recollect.profile(Mixed(), torch.randn(4, 8))
    assert any(value.dtype == "bfloat16" for call in found.calls for value in call.outputs)
    assert any(call.is_random for call in found.calls)
    relu = next(call for call in found.calls if call.op == "aten.relu_.default")
    assert relu.writes == (relu.inputs[0].storage,) == (relu.outputs[0].storage,)


def test_a_profiled_step_holds_no_activation_alive() -> None:
    import gc
    import weakref

    model = Net()
    seen: list[Any] = []
    model.head.register_forward_hook(lambda _m, _a, output: seen.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        recollect.profile(model, torch.randn(4, 8))
        assert seen
        assert all(weak() is None for weak in seen)
    finally:
        gc.enable()


def test_progress_is_told() -> None:
    told: list[tuple[int, int | None]] = []
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    recollect.profile(model, torch.ones(1, 2), progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == [256 * (n + 1) for n in range(len(told))]
    assert told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "t5"])
def test_models_of_transformers_are_profiled(kind: str) -> None:
    pytest.importorskip("transformers")
    from tests.transformers_models import TOKENS, transformers_models

    torch.manual_seed(0)
    model = transformers_models()[kind]().train()
    before = state_of(model)
    found = recollect.profile(model, kwargs={"input_ids": TOKENS, "labels": TOKENS})
    assert_same(state_of(model), before)
    assert found.peak_bytes > sum(parameter.nbytes for parameter in model.parameters())
    assert any(storage.category is Category.LOSS_HEAD for storage in found.storages)
    lines = {call.source.split(":")[0] for call in found.calls if call.module}
    assert any(line.startswith("modeling_") for line in lines)


@pytest.mark.gpu
def test_times_are_measured_by_the_device() -> None:
    model = GPT().cuda()
    ids = torch.arange(16, device="cuda").reshape(2, 8) % 8
    before = torch.cuda.get_rng_state()
    found = recollect.profile(model, ids, loss=torch.sum)
    assert found.clock is Clock.DEVICE
    assert found.step_s is not None
    assert found.step_s > 0
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert found.rounding_bytes == 512
    assert found.allocators[0].peak_bytes > 0


def test_no_line_outside_of_the_step_is_taken_for_one_of_it() -> None:
    found = recollect.profile(nn.Linear(2, 2), torch.ones(2, 2), optimizer=torch.optim.AdamW)
    assert {call.source for call in found.calls} == {""}
    lined = recollect.profile(nn.Linear(2, 2), torch.ones(2, 2), loss=lambda output: output.square().mean())
    lines = {call.op: call.source for call in lined.calls if call.phase is Phase.FORWARD}
    assert lines["aten.addmm.default"] == ""
    assert lines["aten.mean.default"].startswith("test_profile.py:")


def test_gradient_accumulation_counts_what_each_micro_batch_saves() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(8)))
    recollect.apply(blocks, {str(number): "full" for number in range(8)})

    def step(x: Tensor) -> None:
        for part in x.chunk(4):
            blocks(part).sum().backward()

    seen = recollect.profile(step, torch.randn(32, 16))
    is_forward = [call.phase is Phase.FORWARD for call in seen.calls]
    starts = [at for at, now in enumerate(is_forward) if now and not (at and is_forward[at - 1])]
    ends = [*starts[1:], len(seen.calls)]
    counts = [
        len({edge.storage for edge in seen.saved if start <= edge.by < end})
        for start, end in zip(starts, ends, strict=True)
    ]
    assert len(counts) == 4
    assert len(set(counts)) == 1, counts
    assert counts[0] >= 8


def test_a_policy_that_was_removed_is_not_listed() -> None:
    model, x = GPT(), torch.randint(0, 16, (2, 8))
    handle = recollect.apply(model, {"layers.*": policies.save_matmuls})
    assert recollect.profile(model, x, loss=loss_of).rules
    for _ in range(3):
        loss_of(model(x)).backward()
    handle.remove()
    assert not recollect.profile(model, x, loss=loss_of).rules


def test_a_profile_under_a_policy_is_that_of_a_later_step_whatever_ran_before() -> None:
    ids = torch.arange(16).reshape(2, 8) % 8

    def peaks(steps_before: int) -> tuple[int, int, str]:
        model = GPT(dropout=0.0)
        recollect.apply(model, {"layers.*": policies.save_matmuls})
        for _ in range(steps_before):
            loss_of(model(ids)).backward()
        model.zero_grad()
        seen = recollect.profile(model, ids, loss=loss_of)
        for _ in range(4):
            loss_of(model(ids)).backward()
        steady = metered_peak(model, (ids,))
        return seen_peak(seen), steady, str(seen.rules)

    first, later = peaks(0), peaks(5)
    assert first == later
    assert first[0] == first[1]


@pytest.mark.parametrize("dry", [False, True])
def test_a_profile_leaves_nothing_learned(dry: bool) -> None:
    model, ids = GPT(dropout=0.0), torch.arange(16).reshape(2, 8) % 8
    recollect.apply(model, {"layers.*": policies.save_matmuls})
    recollect.profile(model, ids, loss=loss_of, dry=dry)
    said = f"GPT has {len(model.layers)} regions under a policy; none has run yet outside of compiled code"
    assert str(recollect.explain(model)) == said
    for _ in range(4):
        loss_of(model(ids)).backward()
    before = str(recollect.explain(model))
    assert "by replaying what backward asks for" in before
    recollect.profile(model, ids, loss=loss_of, dry=dry)
    assert str(recollect.explain(model)) == before


def test_a_function_that_returns_its_loss_has_its_backward_run() -> None:
    model, x = Net(), torch.ones(4, 8)
    whole = recollect.profile(model, x)
    returns: list[Callable[[], Any]] = [
        lambda: model(x),
        lambda: (model(x), x),
        lambda: {"loss": model(x), "x": x},
    ]
    for returned in returns:
        for dry in (False, True):
            found = recollect.profile(returned, dry=dry)
            assert [call.op for call in found.calls] == [call.op for call in whole.calls]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_that_ran_its_backward_and_returns_the_loss_is_left_alone() -> None:
    model = Net()

    def step() -> Tensor:
        loss: Tensor = model(torch.ones(4, 8))
        loss.backward(retain_graph=True)
        return loss

    once = recollect.profile(step)
    assert sum(call.op == "aten.addmm.default" for call in once.calls) == 5
    assert sum(call.op == "aten.gelu_backward.default" for call in once.calls) == 3


def backward_of_the_loss(scale: float, *, together: bool) -> Callable[[], Tensor]:
    """A step that runs the backward of what it returns: scaled, as by a GradScaler, or added to another loss."""
    model = Net()

    def step() -> Tensor:
        loss: Tensor = model(torch.ones(4, 8))
        total = loss + model(torch.zeros(4, 8)) if together else loss
        torch.autograd.backward(total * scale)
        return loss

    return step


def gradients_by_hand() -> Tensor:
    """The loss of a step that asks for gradients itself: the graph is gone."""
    model = Net()
    loss: Tensor = model(torch.ones(4, 8))
    torch.autograd.grad(loss, list(model.parameters()))
    return loss


def backward_from_an_edge() -> Tensor:
    model = Net()
    loss: Tensor = model(torch.ones(4, 8))
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss), torch.ones(()))
    return loss


def penalised() -> Tensor:
    """A loss that is made of gradients: nobody has run its own backward."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1)), torch.ones(4, 8, requires_grad=True)
    score: Tensor = model(x).sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    loss: Tensor = (slope.norm() - 1) ** 2 + score
    return loss


def with_an_auxiliary() -> Tensor:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 1)
    hidden = first(torch.ones(4, 8)).tanh()
    torch.autograd.backward(hidden.square().mean(), retain_graph=True)
    loss: Tensor = second(hidden).sum()
    return loss


def run_and_return_nothing(step: Callable[[], object]) -> None:
    step()


@pytest.mark.parametrize("dry", [False, True])
def test_backward_runs_once_from_the_loss_that_a_function_returns_whatever_else_it_ran(dry: bool) -> None:
    def run_whole(step: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: torch.autograd.backward(step())

    def ops(step: Callable[[], Any]) -> list[str]:
        return [call.op for call in recollect.profile(step, dry=dry).calls]

    scaled, together = backward_of_the_loss(2.0, together=False), backward_of_the_loss(1.0, together=True)
    for is_run in (scaled, together, gradients_by_hand, backward_from_an_edge):
        assert ops(is_run) == ops(functools.partial(run_and_return_nothing, is_run))
    for is_not_run in (penalised, with_an_auxiliary):
        assert ops(is_not_run) == ops(run_whole(is_not_run))


def test_a_lightning_module_without_forward_has_its_training_step_called() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return functional.mse_loss(self.layer(x), y)

    found = recollect.profile(Module(), (torch.ones(4, 8), torch.ones(4, 1)))
    assert any(call.phase is Phase.BACKWARD for call in found.calls)


def test_the_time_of_a_step_is_that_of_the_step_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    from recollect._inspect import step as step_module
    from recollect._inspect.plain import PlainTimes
    from recollect._profile.attribution import Plain

    plain = PlainTimes(body=Plain(wall_s=0.5, host_s=0.5), optimizer=None, is_apart=False)
    monkeypatch.setattr(step_module, "time_plainly", lambda *_, **__: plain)
    found = recollect.profile(Net(), torch.ones(4, 8))
    assert found.step_s == pytest.approx(0.5)
    assert found.device_s == pytest.approx(0.5)
    assert found.host_s is None


@pytest.mark.parametrize("dry", [False, True])
def test_state_that_is_counted_for_parameters_without_a_gradient_is_noted(dry: bool) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.used(x)
            return found.sum()

    told = (
        "2 of 4 parameters, 288 B, got no gradient in this step (the first is idle.weight): the state of AdamW for "
        "them is counted, because later steps may use them"
    )
    for optimizer, is_told in ((torch.optim.AdamW, True), (torch.optim.SGD, False), (None, False)):
        found = recollect.profile(Halves(), torch.ones(4, 8), optimizer=optimizer, dry=dry)
        assert (told in found.notes) is is_told


def test_a_step_that_cannot_run_again_is_profiled_and_says_so() -> None:
    model, batches = Net(), iter([torch.ones(4, 8)])

    def step() -> None:
        model(next(batches)).backward()

    found = recollect.profile(step)
    assert any("the step could not be run again (StopIteration)" in note for note in found.notes)
    assert found.step_s


def test_a_step_that_must_not_run_twice_runs_once() -> None:
    model, count = Net(), [0]

    def step() -> None:
        count[0] += 1
        model(torch.ones(4, 8)).backward()

    recollect.profile(step, timed=False)
    assert count == [1]


def test_inputs_that_were_forgotten_are_named_in_the_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        recollect.profile(nn.Linear(3, 2))
    assert caught.value.__notes__ == [
        "recollect.profile was given no inputs for Linear: write recollect.profile(model, *inputs)"
    ]


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_batch_that_a_model_takes_apart_is_named_in_the_error(kind: type) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(TypeError) as caught:
        recollect.profile(nn.Bilinear(3, 3, 2), kind((x, x)))
    (note,) = caught.value.__notes__
    assert re.search(rf"Bilinear.forward got the {kind.__name__} as its only argument.*profile\(model, \*batch\)", note)


def test_a_batch_with_keys_that_a_model_does_not_take_is_named_in_the_error() -> None:
    x = torch.ones(2, 3)
    assert recollect.profile(nn.Bilinear(3, 3, 2), {"input1": x, "input2": x}).calls
    with pytest.raises(TypeError) as caught:
        recollect.profile(nn.Bilinear(3, 3, 2), {"input1": x, "labels": x})
    (note,) = caught.value.__notes__
    assert note == (
        "Bilinear.forward got the dict as its only argument: its keys, 'input1', 'labels', are not the names of its "
        "arguments. To profile it, leave out what it does not take, or pass a function that runs the step"
    )
