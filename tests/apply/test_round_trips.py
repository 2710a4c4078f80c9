"""Models with regions applied behave as if nothing was there, and are as they were once it is removed."""

import copy
import functools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import Decision, policies
from tests.models import MODELS

pytestmark = [
    pytest.mark.filterwarnings("ignore:policy .* this step"),
    pytest.mark.filterwarnings("ignore:'selective' keeps nothing"),  # in single convolutions
]

NAMES: dict[str, str] = {
    "gpt": "layers.*",
    "moe": "blocks.*",
    "unet": "re:(down|up)[12]",
    "vit": "encoder.*",
    "stages": "stages.*.blocks.*",
    "tagger": "re:lstm|rnn|cell",
    "translator": "transformer.*coder.layers.*",
    "convolutional": "[013]",
    "looped": "block",
}


def is_out_of_place(module: nn.Module) -> bool:
    """A module that writes into its input can be no region."""
    return not isinstance(module, nn.ReLU)


RULES: dict[str, Callable[[str], Any]] = {
    "recompute": lambda name: {name: Decision.RECOMPUTE},
    "policy": lambda name: {name: policies.save_matmuls},
    "selective": lambda name: {name: "selective"},
    "options": lambda name: {name: {"check": "values", "early_stop": False}},
    "nested": lambda name: {name: Decision.RECOMPUTE, is_out_of_place: Decision.RECOMPUTE},
    "saved in nested": lambda name: {
        (nn.Linear, nn.Conv2d, nn.LSTM): Decision.SAVE,
        is_out_of_place: Decision.RECOMPUTE,
    },
    "inner saved": lambda name: {name: Decision.RECOMPUTE, (nn.Linear, nn.Conv2d, nn.LSTM): Decision.SAVE},
}


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def build(kind: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(1)
    return MODELS[kind]()


def step(model: nn.Module, inputs: tuple[Any, ...], seed: int = 0) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    """The output of a step, the gradients it leaves, and where it leaves buffers and the generator."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(*inputs)
    output.square().sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return output.detach(), gradients, [*(b.clone() for b in model.buffers()), torch.get_rng_state()]


@functools.cache
def plain_steps(kind: str) -> list[tuple[Tensor, list[Tensor | None], list[Tensor]]]:
    """What three steps of the model give that nothing was applied to."""
    model, inputs = build(kind)
    return [step(model, inputs, seed) for seed in range(3)]


def assert_same(one: Any, other: Any) -> None:
    for mine, theirs in zip(one, other, strict=True):
        if isinstance(mine, list):
            assert_same(mine, theirs)
        else:
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def shape_of(model: nn.Module) -> Any:
    """All that shows of a model from outside."""
    return (
        [(name, type(module)) for name, module in model.named_modules()],
        [(name, id(p)) for name, p in model.named_parameters()],
        [(name, id(b)) for name, b in model.named_buffers()],
        list(model.state_dict()),
        repr(model),
    )


def insides(model: nn.Module) -> list[dict[str, Any]]:
    return [{key: value for key, value in vars(module).items() if key != "training"} for module in model.modules()]


@pytest.mark.parametrize("rules", RULES)
def test_steps_give_the_plain_results_to_the_bit(kind: str, rules: str) -> None:
    model, inputs = build(kind)
    recollect.apply(model, RULES[rules](NAMES[kind]))
    for seed, expected in enumerate(plain_steps(kind)):
        assert_same(step(model, inputs, seed), expected)


def test_a_model_shows_nothing_of_it(kind: str) -> None:
    model, inputs = build(kind)
    before, loaded = shape_of(model), copy.deepcopy(model.state_dict())
    handle = recollect.apply(model, {NAMES[kind]: Decision.RECOMPUTE})
    assert shape_of(model) == before
    step(model, inputs)
    assert shape_of(model) == before
    assert model.load_state_dict(loaded) == nn.Module().load_state_dict({})
    handle.remove()
    assert shape_of(model) == before


@pytest.mark.parametrize("rules", RULES)
def test_removing_restores_the_model_exactly(kind: str, rules: str) -> None:
    model, inputs = build(kind)
    model(*inputs)  # some modules set attributes at their first call
    before = insides(model)
    for _ in range(2):
        handle = recollect.apply(model, RULES[rules](NAMES[kind]))
        assert insides(model) != before
        step(model, inputs)
        handle.remove()
        after = insides(model)
        assert [list(one) for one in after] == [list(one) for one in before]
        assert all(
            one[key] is two[key] or one[key] == two[key] for one, two in zip(before, after, strict=True) for key in one
        )
        handle.remove()  # again does nothing


def test_a_copy_has_regions_of_its_own(kind: str) -> None:
    model, inputs = build(kind)
    plain = copy.deepcopy(model)
    handle = recollect.apply(model, {NAMES[kind]: Decision.RECOMPUTE})
    twin = copy.deepcopy(model)
    assert_same(step(twin, inputs), step(plain, inputs))
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    assert flops_of_step(twin, inputs) > flops_of_step(model, inputs)
    recollect.remove(twin)
    assert flops_of_step(twin, inputs) == flops_of_step(model, inputs)


def test_a_pickled_model_is_the_plain_one(kind: str) -> None:
    model, inputs = build(kind)
    plain = copy.deepcopy(model)
    recollect.apply(model, {NAMES[kind]: lambda site: Decision.SAVE})  # a policy that cannot be pickled
    data = pickle.dumps(model)
    assert b"recollect" not in data
    loaded = pickle.loads(data)
    assert_same(step(loaded, inputs), step(plain, inputs))


def test_in_evaluation_mode_it_gives_the_plain_results(kind: str) -> None:
    model, inputs = build(kind)
    plain = copy.deepcopy(model)
    recollect.apply(model, {NAMES[kind]: Decision.RECOMPUTE})
    assert_same(step(model.eval(), inputs), step(plain.eval(), inputs))
    assert_same(step(model.train(), inputs), step(plain.train(), inputs))


def test_without_grad_mode_nothing_is_kept(kind: str) -> None:
    model, inputs = build(kind)
    plain = copy.deepcopy(model)
    recollect.apply(model, {NAMES[kind]: Decision.RECOMPUTE})
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        with mode():
            output = model(*inputs)
        assert output.grad_fn is None
        torch.manual_seed(0)
        with mode():
            assert torch.equal(output, plain(*inputs))


def test_hooks_of_the_modules_fire_once(kind: str) -> None:
    model, inputs = build(kind)
    recollect.apply(model, {NAMES[kind]: Decision.RECOMPUTE})
    fired: Counter[str] = Counter()
    applied = [module for module in model.modules() if "forward" in vars(module)]
    expected: Counter[str] = Counter()

    def count(event: str) -> Callable[..., None]:
        return lambda *_: fired.update([event])

    for module in applied:
        module.register_forward_pre_hook(count("before"))
        module.register_forward_hook(count("after"))
    step(model, inputs)
    calls = list(recorded_calls(kind))
    expected["before"] = expected["after"] = len(calls)
    assert fired == expected
    assert fired["before"] > 0


def recorded_calls(kind: str) -> Iterator[str]:
    """The calls of the named modules in a plain step."""
    model, inputs = build(kind)
    handle = recollect.apply(model, {NAMES[kind]: Decision.RECOMPUTE})
    applied = [module for module in model.modules() if "forward" in vars(module)]
    handle.remove()
    calls: list[str] = []
    for module in applied:
        module.register_forward_hook(lambda *_: calls.append("call"))
    step(model, inputs)
    yield from calls


def flops_of_step(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    with FlopCounterMode(display=False) as counter:
        step(model, inputs)
    return int(counter.get_total_flops())


def flops_of_forward(module: nn.Module, inputs: tuple[Any, ...]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*inputs)
    return int(counter.get_total_flops())


def test_flops_run_again_are_those_of_the_modules_named() -> None:
    model, inputs = build("gpt")
    layer = (torch.randn(2, 6, 16),)
    first = model.get_submodule("layers.0")
    once, attention = flops_of_forward(first, layer), flops_of_forward(first.get_submodule("attn"), layer)
    # Nothing saved needs the result of a layer's last product, so recomputation stops before it.
    last = 2 * 12 * 64 * 16
    plain = flops_of_step(model, inputs)
    for rules, expected in (
        ({"layers.*": Decision.RECOMPUTE}, 4 * (once - last)),
        ({"layers.*": Decision.RECOMPUTE, "layers.*.attn": Decision.SAVE}, 4 * (once - last - attention)),
        ({"layers.[01]": Decision.SAVE, "layers.*": Decision.RECOMPUTE}, 2 * (once - last)),
        ({"layers.*.mlp": Decision.RECOMPUTE}, 4 * last),
    ):
        with recollect.apply(model, rules):
            assert flops_of_step(model, inputs) - plain == expected
    for every, among, count in ((2, None, 2), (None, 3, 3), (2, 3, 2), (4, None, 1)):
        with recollect.apply(model, every=every, first=among):
            assert flops_of_step(model, inputs) - plain == count * (once - last)
    assert flops_of_step(model, inputs) == plain


def test_a_saved_module_is_not_run_again_by_any_region_around_it() -> None:
    model, inputs = build("gpt")
    runs: list[bool] = []
    for name, module in model.named_modules():
        if name.endswith("qkv"):
            module.register_forward_pre_hook(lambda *_: runs.append(recollect.is_recomputing()))
    rules = {"**.qkv": Decision.SAVE, "layers.*": Decision.RECOMPUTE, "layers.*.attn": Decision.RECOMPUTE}
    with recollect.apply(model, rules):
        for _ in range(3):
            runs.clear()
            step(model, inputs)
            assert runs == [False] * 4
