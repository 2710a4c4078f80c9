"""Profiles against the truth: peaks and step times, real and dry, of held-out models, and what profiling costs.

    python benchmarks/profiles.py               on a CUDA device: about 4 minutes
    python benchmarks/profiles.py GPT-2 LSTM    some models
    python benchmarks/profiles.py --fit         also what would make the estimates right: host and operators
    python benchmarks/profiles.py --small       small models on the CPU: peaks by the meter of live bytes
    python benchmarks/profiles.py --dry-only    anywhere: estimates for an H200, and Llama-8B's with its time and memory

Targets: real time within 5% of the plain step, real peak within 2% of the allocator's; dry time within 15%, dry peak
within 3%; a profile at most 5 plain steps and 1 s, and 1% of extra device memory; Llama-8B at 8k tokens in 60 s and
4 GB of the host. What misses its target is marked with a star.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import held_out
import torch
from torch import Tensor, nn

import recollect
from recollect import Profile
from recollect._bench.cases import Case, list_cases, llama_8b
from recollect._core.calls import Phase
from recollect._profile.memory import LiveBytes

GIB = 2**30


def make_step(case: Case, device: str = "cuda") -> Callable[..., None]:
    kind = "cpu" if device == "cpu" else "cuda"

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> None:
        with torch.autocast(kind, dtype=case.autocast or torch.bfloat16, enabled=case.autocast is not None):
            loss = model(*inputs)
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    return step


def estimate(case: Case, device: str) -> tuple[Profile, float]:
    model, inputs, optimizer = case.make("meta")
    started = time.perf_counter()
    profile = recollect.profile(make_step(case, device), model, optimizer, *inputs, dry=True, device=device)
    return profile, time.perf_counter() - started


def measure(case: Case, device: str) -> tuple[dict[str, Any], Profile]:
    """Plain steps and a profile on the device."""
    gc.collect()
    on_cuda = device == "cuda"
    model, inputs, optimizer = case.make(device)
    step = make_step(case, device)

    def wait() -> None:
        if on_cuda:
            torch.cuda.synchronize()

    def run_plainly() -> tuple[float, float]:
        wait()
        started = time.perf_counter()
        step(model, optimizer, *inputs)
        host_s = time.perf_counter() - started
        wait()
        return time.perf_counter() - started, host_s

    for _ in range(3):
        run_plainly()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        run_plainly()
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        states = [state for one in optimizer.state.values() for state in one.values() if isinstance(state, Tensor)]
        with LiveBytes([model, *inputs, *states]) as meter:
            run_plainly()
        peak_bytes = meter.peak_bytes
    before = [run_plainly() for _ in range(6)]
    started = time.perf_counter()
    profile = recollect.profile(step, model, optimizer, *inputs)
    profiled_s = time.perf_counter() - started
    extra_bytes = torch.cuda.max_memory_allocated() - peak_bytes if on_cuda else 0
    times = [*before, *(run_plainly() for _ in range(6))]
    plain_s = statistics.median(wall_s for wall_s, _ in times)
    row = {
        "peak_bytes": peak_bytes,
        "plain_s": plain_s,
        "plain_best_s": min(wall_s for wall_s, _ in times),
        "plain_host_s": statistics.median(host_s for _, host_s in times),
        "profile_bytes": profile.peak_bytes,
        "profile_step_s": profile.step_s,
        "profile_host_s": profile.host_s,
        "profile_device_s": profile.device_s,
        "profiled_s": profiled_s,
        "extra_bytes": extra_bytes,
        "calls": len(profile.calls),
    }
    return row, profile


def mark(ratio: float, most: float) -> str:
    """A ratio, with a star where it is off by more than it may be."""
    return f"{ratio:.3f}{' ' if abs(ratio - 1) <= most else '*'}"


def show(name: str, row: dict[str, Any]) -> None:
    if "peak_bytes" not in row:
        print(
            f"{name:18s} estimate {row['dry_bytes'] / GIB:7.3f} GiB, step {row['dry_step_s'] * 1e3:7.1f} ms (host "
            f"{(row['dry_host_s'] or 0) * 1e3:.1f}, device {row['dry_device_s'] * 1e3:.1f}) in {row['dry_s']:4.1f} s",
            flush=True,
        )
        return
    true, plain = row["peak_bytes"], row["plain_s"]
    cost = (row["profiled_s"] - 1) / plain
    print(
        f"{name:18s} {true / GIB:7.3f} GiB {plain * 1e3:7.1f} ms (best {row['plain_best_s'] * 1e3:.1f}, host "
        f"{row['plain_host_s'] * 1e3:.1f}) | real peak {mark(row['profile_bytes'] / true, 0.02)} time "
        f"{mark(row['profile_step_s'] / plain, 0.05)} (host {(row['profile_host_s'] or 0) * 1e3:.1f}, device "
        f"{row['profile_device_s'] * 1e3:.1f}) | dry peak {mark(row['dry_bytes'] / true, 0.03)} time "
        f"{mark(row['dry_step_s'] / plain, 0.15)} (host {(row['dry_host_s'] or 0) * 1e3:.1f}, device "
        f"{row['dry_device_s'] * 1e3:.1f}) | profile {row['profiled_s']:.2f} s = 1 s + {cost:.1f} steps"
        f"{'' if cost <= 5 else '*'} | extra memory {row['extra_bytes'] / true:+.1%}",
        flush=True,
    )


def show_fit(name: str, real: Profile, dry: Profile) -> None:
    """Measured against estimated: the host by phase, the device by operator, the operators that are most off first."""
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        sums = [sum(call.host_s or 0 for call in one.calls if call.phase is phase) * 1e3 for one in (real, dry)]
        print(f"    host {phase.value}: measured {sums[0]:.2f} ms, estimated {sums[1]:.2f}")
    measured: defaultdict[str, float] = defaultdict(float)
    estimated: defaultdict[str, float] = defaultdict(float)
    for one, into in ((real, measured), (dry, estimated)):
        for call in one.calls:
            into[call.op if call.phase is not Phase.OPTIMIZER else "optimizer"] += (call.device_s or 0) * 1e3
    off = sorted({*measured, *estimated}, key=lambda op: -abs(measured[op] - estimated[op]))
    for op in off[:8]:
        print(f"    {op:58s} measured {measured[op]:8.3f} ms, estimated {estimated[op]:8.3f}")


def show_reserve() -> None:
    """What cuDNN reserves for the backward of recurrent nets, in values for each token, unit and layer."""
    for kind, units in ((nn.LSTM, 1024), (nn.LSTM, 512), (nn.GRU, 512), (nn.RNN, 512)):
        for dtype in (torch.float32, torch.bfloat16):
            net = kind(units, units, 2, batch_first=True).to("cuda", dtype)
            x = torch.randn(32, 128, units, device="cuda", dtype=dtype, requires_grad=True)
            net(x)[0].sum().backward()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out, _ = net(x)
            held = torch.cuda.memory_allocated() - before
            most = torch.cuda.max_memory_allocated() - before
            tokens = 32 * 128 * units * 2 * dtype.itemsize
            print(
                f"    {kind.__name__} {units} {dtype}: held {held / tokens:.3f}, at most {most / tokens:.3f}",
                flush=True,
            )
            torch.cuda.reset_peak_memory_stats()
            out.sum().backward()
            del out
            print(f"      backward at most {(torch.cuda.max_memory_allocated() - before) / tokens:.3f}")


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--dry-only", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--device", default="H200", help="what to estimate for where there is no CUDA")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    cases = (
        held_out.SMALL
        if options.small
        else {**held_out.CASES, **{f"our {k}": v for k, v in list_cases("cuda", "large").items()}}
    )
    runs = not options.dry_only and (options.small or torch.cuda.is_available())
    device = "cpu" if options.small else "cuda" if runs else options.device
    rows: dict[str, dict[str, Any]] = {}
    for name in options.models or cases:
        try:
            rows[name] = row = compare(name, cases[name], device, runs=runs, fits=options.fit)
        except Exception as error:  # the others are of interest all the same
            print(f"{name:18s} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        show(name, row)
    if options.fit and device == "cuda":
        show_reserve()
    if not runs:
        show_llama_8b(device)
    if options.json:
        options.json.write_text(json.dumps({"torch": str(torch.__version__), "host": os.cpu_count(), "rows": rows}))


def compare(name: str, case: Case, device: str, *, runs: bool, fits: bool) -> dict[str, Any]:
    dry, seconds = estimate(case, device)
    row = {
        "dry_bytes": dry.peak_bytes,
        "dry_step_s": dry.step_s,
        "dry_host_s": dry.host_s,
        "dry_device_s": dry.device_s,
        "dry_s": seconds,
    }
    if runs:
        measured, real = measure(case, device)
        row |= measured
        if fits:
            print(name)
            show_fit(name, real, dry)
    if device == "cuda":
        torch.cuda.empty_cache()
    return row


if __name__ == "__main__":
    main()
