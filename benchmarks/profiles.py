"""Profiles against the allocator: six models' estimated, profiled and true peaks, and what profiling costs.

    python benchmarks/profiles.py               on a CUDA device: estimate, profile and plain step of each model
    python benchmarks/profiles.py --dry-only    anywhere: estimates for an H200, and Llama-8B's with its time and memory

Targets: the estimate within 5% of the allocator's peak, the profile within 2%, a profiled step at most 5 plain ones
and 1% of extra device memory; Llama-8B at 8k tokens in 60 s and 4 GB of the host.
"""

import argparse
import gc
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo import CASES, Case, llama_8b

import recollect
from recollect import Profile

GIB = 2**30


def build(case: Case, device: str) -> tuple[nn.Module, tuple[Tensor, ...], torch.optim.Optimizer]:
    with torch.device(device):
        model = case.build()
        inputs = case.inputs()
    model.to(case.dtype)
    if case.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = tuple(i.to(memory_format=torch.channels_last) if i.dim() == 4 else i for i in inputs)
    return model, inputs, case.optimizer(model.parameters(), **case.options)


def make_step(case: Case) -> Callable[..., None]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> None:
        with torch.autocast("cuda", dtype=case.autocast or torch.bfloat16, enabled=case.autocast is not None):
            loss = model(*inputs)
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    return step


def estimate(case: Case, device: str) -> tuple[Profile, float]:
    model, inputs, optimizer = build(case, "meta")
    started = time.perf_counter()
    profile = recollect.profile(make_step(case), model, optimizer, *inputs, dry=True, device=device)
    return profile, time.perf_counter() - started


def measure(case: Case) -> dict[str, Any]:
    """A plain step and a profiled one on the device."""
    gc.collect()
    torch.cuda.empty_cache()
    model, inputs, optimizer = build(case, "cuda")
    step = make_step(case)

    def run_plainly() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(model, optimizer, *inputs)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(2):
        run_plainly()
    torch.cuda.reset_peak_memory_stats()
    run_plainly()
    peak_bytes = torch.cuda.max_memory_allocated()
    plain_s = sorted(run_plainly() for _ in range(5))[2]
    recollect.profile(step, model, optimizer, *inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    profile = recollect.profile(step, model, optimizer, *inputs)
    profiled_s = time.perf_counter() - started
    return {
        "peak_bytes": peak_bytes,
        "profile_bytes": profile.peak_bytes,
        "plain_s": plain_s,
        "profiled_s": profiled_s,
        "step_s": profile.step_s,
        "extra_bytes": torch.cuda.max_memory_allocated() - peak_bytes,
        "calls": len(profile.calls),
    }


def show(name: str, row: dict[str, Any]) -> None:
    said = [f"{name:8s} estimate {row['estimate_bytes'] / GIB:7.3f} GiB in {row['estimate_s']:4.1f} s"]
    if "peak_bytes" in row:
        true = row["peak_bytes"]
        said += [
            f"allocator {true / GIB:7.3f} GiB",
            f"estimate/allocator {row['estimate_bytes'] / true:.4f}",
            f"profile/allocator {row['profile_bytes'] / true:.4f}",
            f"profiled/plain step {row['profiled_s'] / row['plain_s']:.2f} ({row['plain_s'] * 1e3:.0f} ms)",
            f"extra memory {row['extra_bytes'] / true:+.2%}",
            f"roofline/plain time {row['estimated_step_s'] / row['plain_s']:.2f}",
        ]
    print(" | ".join(said), flush=True)


def show_llama_8b(device: str) -> None:
    case = Case(
        build=llama_8b,
        inputs=lambda: (torch.randint(0, 128256, (1, 8192)), torch.randint(0, 128256, (1, 8192))),
        dtype=torch.bfloat16,
    )
    profile, seconds = estimate(case, device)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        f"Llama-8B 1 x 8192 bfloat16, AdamW: estimate {profile.peak_bytes / GIB:.1f} GiB, {len(profile.calls)} calls, "
        f"in {seconds:.1f} s (at most 60) with {peak_gb:.2f} GB of the host (at most 4)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--dry-only", action="store_true")
    parser.add_argument("--device", default="H200", help="what to estimate for where there is no CUDA")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    on_device = torch.cuda.is_available() and not options.dry_only
    device = "cuda" if on_device else options.device
    rows: dict[str, dict[str, Any]] = {}
    for name in options.models:
        profile, seconds = estimate(CASES[name], device)
        row = {"estimate_bytes": profile.peak_bytes, "estimate_s": seconds, "estimated_step_s": profile.step_s}
        rows[name] = row | (measure(CASES[name]) if on_device else {})
        show(name, rows[name])
    if not on_device:
        show_llama_8b(device)
    if options.json:
        options.json.write_text(json.dumps({"torch": str(torch.__version__), "host": os.cpu_count(), "rows": rows}))


if __name__ == "__main__":
    main()
