"""How long `recollect.fit` takes from the call to the first fitted step, and whether it does what it promises.

    python benchmarks/fitting.py --device cuda                                  large models, bf16
    python benchmarks/fitting.py --width 256 --layers 8 --tokens 256 --batch 8  on the CPU
    python benchmarks/fitting.py --only t5 --shares 0.5

Each model of `packaged.py` is fitted at shares of its plain peak. A row tells the time in plain steps and in seconds,
what took it, how many plans were run, what was predicted and measured, and what is not as promised: gradients that are
not those of the plain step to the last bit, a measured peak above the budget, a model that is not as it was found.
Gradients are compared by kernels that add in the same order each time.
Times are the processor's, so that others on the machine disturb them less; on a device they are wall time.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import packaged
import torch
from devices import refuse_missing
from packaged import MODELS, Packaged, Size, available
from phases import watched
from torch import Tensor, nn

import recollect
from recollect import BudgetError

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its products may add in any order
FIGURES = ("llama", "mixtral", "gpt2", "t5", "whisper", "vit", "convnext", "unet")
ALLOWED_STEPS, ALLOWED_S = 30, 10


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What a fit must leave as it was: parameters and buffers, and the generator; no gradients, no optimizer state.

    On the host: on the device it would count, as all does that the process has there.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [
        tensor.to("cpu", copy=True) for tensor in (*model.state_dict().values(), torch.get_rng_state(), *gradients)
    ] + [torch.tensor(len(optimizer.state))]


def structure_of(model: nn.Module) -> list[Any]:
    """What a removal must leave as it was: modes, hooks and attributes of modules."""
    return [
        (part.training, sorted(vars(part)), len(part._forward_hooks), len(part._forward_pre_hooks))
        for part in model.modules()
    ]


def is_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def gradients_of(model: nn.Module, step: Callable[[], None]) -> dict[str, Tensor]:
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(mode=True)
    try:
        step()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    found = {name: one.grad.cpu() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def without_cache(model: Any) -> None:
    """A plain step that fills no cache: with one, some models round otherwise."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model that is to fit, and its plain step."""

    model: Any
    inputs: dict[str, Tensor]
    loss: Callable[[Any], Tensor] | None
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]
    plain_s: float
    peak_bytes: int


def prepare(kind: Packaged, size: Size, device: str, clock: Callable[[], float]) -> Case:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = kind.build(size).to(dtype).train()
        inputs = kind.inputs(size)
    without_cache(model)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    loss = None if "labels" in inputs else kind.loss

    def step() -> None:
        kind.loss(model(**inputs)).backward()
        if device == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(4):
        started = clock()
        step()
        times.append(clock() - started)
        model.zero_grad(set_to_none=True)
    peak = recollect.profile(model, kwargs=inputs, loss=loss, optimizer=optimizer, timed=False).peak_bytes
    gc.collect()
    return Case(
        model=model, inputs=inputs, loss=loss, optimizer=optimizer, step=step, plain_s=min(times), peak_bytes=peak
    )


def fit_once(case: Case, share: float, levers: tuple[str, ...], clock: Callable[[], float]) -> str:
    model, optimizer, budget = case.model, case.optimizer, int(case.peak_bytes * share)
    plain = gradients_of(model, case.step)
    values, structure = values_of(model, optimizer), structure_of(model)
    allowed_s = ALLOWED_STEPS * case.plain_s + ALLOWED_S
    started = clock()
    with watched(clock) as phases:
        try:
            fitted = recollect.fit(
                model, case.inputs, loss=case.loss, optimizer=optimizer, budget=budget, levers=levers
            )
        except BudgetError as error:
            total_s = clock() - started
            is_as_found = is_same(values, values_of(model, optimizer)) and structure == structure_of(model)
            fault = "" if is_as_found else "; NOT AS FOUND"
            return f"{total_s:5.1f} s of {allowed_s:5.1f}, refused; {phases}{fault}: {str(error).partition(chr(10))[0]}"
    in_fit_s = clock() - started
    faults = {"VALUES NOT AS FOUND": not is_same(values, values_of(model, optimizer))}
    del values
    resumed = clock()
    case.step()
    total_s = in_fit_s + clock() - resumed
    model.zero_grad(set_to_none=True)
    found = gradients_of(model, case.step)
    fitted.remove()
    forecast = fitted.plan.forecast
    assert forecast is not None
    assert forecast.measured_peak_bytes is not None
    faults["MODULES NOT AS FOUND"] = structure != structure_of(model)
    faults["GRADIENTS DIFFER"] = not levers and not is_same([*plain.values()], [*found.values()])
    faults["OVER BUDGET"] = forecast.measured_peak_bytes > budget
    faults["MORE THAN ONE CORRECTION"] = fitted.tries > 2
    faults["TOO SLOW"] = total_s > allowed_s
    rest_s = in_fit_s - sum(phases.seconds.values())
    return (
        f"{total_s:5.1f} s of {allowed_s:5.1f} (plain step {case.plain_s:.2f} s), tries {fitted.tries}, "
        f"predicted {forecast.peak_bytes / case.peak_bytes:.3f}, "
        f"measured {forecast.measured_peak_bytes / case.peak_bytes:.3f}; {phases}, rest {rest_s:.1f} s"
        + "".join(f"; {fault}" for fault, is_so in faults.items() if is_so)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="*", default=FIGURES)
    parser.add_argument("--shares", nargs="*", type=float, default=(0.7, 0.5, 0.3))
    parser.add_argument("--levers", nargs="*", default=())
    parser.add_argument("--vocab", type=int, default=packaged.VOCAB, help="few words leave the peak to the blocks")
    for name, value in (("width", 256), ("layers", 8), ("tokens", 256), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    refuse_missing(parser, options.device)
    packaged.VOCAB = options.vocab
    small = Size(options.width, options.layers, options.tokens, options.batch)
    clock = time.perf_counter if options.device == "cuda" else time.process_time
    for name in available():
        if name in options.only:
            size = MODELS[name].large if options.device == "cuda" else small
            case = prepare(MODELS[name], size, options.device, clock)
            for share in options.shares:
                print(f"{name:9s} {share:.0%}: {fit_once(case, share, tuple(options.levers), clock)}", flush=True)


if __name__ == "__main__":
    main()
