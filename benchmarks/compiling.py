"""What benchmarks of compiled steps share: one compilation, its time, its peak and its gradients."""

import sys
import time

import torch
from torch import Tensor, nn

from recollect._bench.alternate import Step


def timed(step: Step, device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def gradients_after(model: nn.Module, step: Step) -> list[Tensor]:
    torch.manual_seed(1)
    step()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def largest_difference(left: list[Tensor], right: list[Tensor]) -> float:
    """Of any parameter's gradient, relative to the largest number in it."""
    pairs = zip(left, right, strict=True)
    return max(((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in pairs)


def peak_bytes(step: Step, device: torch.device) -> int:
    """Above what was there before."""
    if device.type != "cpu":
        held = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        timed(step, device)
        return torch.accelerator.max_memory_allocated(device) - held
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    # Inductor's code allocates past the dispatcher: only the profiler sees it.
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def warm_up(device: torch.device) -> None:
    """Start what the first compilation would: imports, and the pool of processes that compile kernels."""
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    torch.compile(lambda x: (x @ x).softmax(-1).sin().sum())(weight).backward()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
