"""Steps of a model of the zoo, what they leave behind, and what torch's own switch does to the same blocks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as rival
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect._profile.memory import LiveBytes
from tests.zoo.catalogue import ZOO, Kind

RULES: dict[str, dict[str, Any]] = {"full": {}, "selective": {"rules": "selective"}, "every 2nd": {"every": 2}}


def build(kind: Kind) -> Any:
    torch.manual_seed(0)
    return kind.build()


def build_plain(kind: Kind) -> Any:
    """What the others are compared with: it fills no cache of keys and values either, which would round otherwise."""
    model = build(kind)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
    return model


def take_step(kind: Kind, model: Any, call: Callable[..., Any] | None = None, *, seed: int = 1) -> dict[str, Any]:
    """Forward and backward; everything that one can see of them afterwards."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = (model if call is None else call)(**kind.inputs())  # held through backward, as most loops do
    loss = kind.loss(output)
    torch.autograd.backward(loss)
    return {
        "loss": loss.detach(),
        "random state": torch.get_rng_state(),
        **{f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.requires_grad},
        **{f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()},
    }


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    def is_same(one: Tensor | None, other: Tensor | None) -> bool:
        return one is other is None or (one is not None and other is not None and torch.equal(one, other))

    assert found.keys() == expected.keys()
    return [name for name in expected if not is_same(found[name], expected[name])]


STEPS = 4
_ACCUMULATED = 2  # steps before parameters move: what is learned in them must hold afterwards


def train(name: str, model: Any) -> list[dict[str, Any]]:
    """Take steps; between the later ones the parameters move, as an optimizer would move them."""
    found = []
    for number in range(STEPS):
        seen = take_step(ZOO[name], model, seed=number)
        found.append({key: value.clone() if isinstance(value, Tensor) else value for key, value in seen.items()})
        if number + 1 >= _ACCUMULATED:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad.sign(), alpha=-1e-3)
    return found


@functools.cache
def plain_steps(name: str) -> list[dict[str, Any]]:
    return train(name, build_plain(ZOO[name]))


@functools.cache
def trained_under(name: str, rule: str) -> tuple[Any, list[dict[str, Any]]]:
    """A model that took steps under a rule, which is removed again, and what they show."""
    model = build(ZOO[name])
    with recollect.apply(model, **RULES[rule]):
        return model, train(name, model)


@functools.cache
def trained_plainly(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a model is that took as many plain steps, and what its next step shows."""
    model = build_plain(ZOO[name])
    train(name, model)
    for module, other in zip(model.modules(), build(ZOO[name]).modules(), strict=True):
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = other.config.use_cache
    return look_of(model), take_step(ZOO[name], model)


def look_of(model: nn.Module) -> dict[str, Any]:
    """What a model is, besides its tensors: modules, what is set on them, their hooks and modes, its config."""
    look: dict[str, Any] = {}
    for path, module in model.named_modules():
        hooks = {name: len(value) for name, value in vars(module).items() if name.endswith("_hooks") and value}
        look[path] = (type(module), sorted(vars(module)), hooks, module.training)
    config: Any = getattr(model, "config", None)
    look["config"] = config.to_dict() if hasattr(config, "to_dict") else config
    return look


def switch_torchs_on(kind: Kind, model: Any) -> None:
    """Torch's non-reentrant checkpoint, as the model's package switches it on; by hand where there is no switch."""
    options: dict[str, Any] = {"use_reentrant": False}
    if not kind.has_switch:
        for module in regions_of(model):
            module.forward = functools.partial(_checkpoint, module.forward, options)
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    else:
        model.enable_gradient_checkpointing()


def _checkpoint(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    # Torch gives recomputation the list that forward was given, whatever a dense net has added to it since.
    copies = (list(value) if isinstance(value, list) else value for value in args)
    return rival.checkpoint(forward, *copies, **options, **kwargs)


def regions_of(model: nn.Module) -> list[Any]:
    with recollect.apply(model) as handle:
        return [model.get_submodule(place.name) for place in handle.places]


@functools.cache
def first_step(name: str) -> dict[str, Any]:
    """What the first step of a plain model shows."""
    return take_step(ZOO[name], build_plain(ZOO[name]))


@functools.cache
def look_after_a_step(name: str) -> dict[str, Any]:
    """What a model is that took one plain step."""
    model = build(ZOO[name])
    take_step(ZOO[name], model)
    return look_of(model)


@functools.cache
def peak_under(name: str, rule: str = "") -> int:
    """The live bytes of a step at their most, under a rule of ours, or plain."""
    model = build(ZOO[name])
    if not rule:
        return peak_of(ZOO[name], model)
    with recollect.apply(model, **RULES[rule]):
        return peak_of(ZOO[name], model)


def peak_of(kind: Kind, model: Any) -> int:
    """The same of a model, once two steps have shown what there is to learn."""
    for _ in range(2):
        take_step(kind, model)
    model.zero_grad()
    with LiveBytes(include=model) as meter:
        take_step(kind, model)
    return meter.peak_bytes


def flops_of(kind: Kind, model: Any, *, learns: bool = False) -> int:
    """What a step computes, once two steps have shown what there is to learn, if there is."""
    for _ in range(2 * learns):
        take_step(kind, model)
    with FlopCounterMode(display=False) as counter:
        take_step(kind, model)
    return int(counter.get_total_flops())
