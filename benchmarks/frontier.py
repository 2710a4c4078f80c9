"""Plans against measurement: for each model and budget the predicted peak and time beside those of real steps.

    python benchmarks/frontier.py --device cuda                     all six models, budgets 90 to 20%, about 5 minutes
    python benchmarks/frontier.py --device cuda --quick Llama       one model, a look
    python benchmarks/frontier.py --device cuda --tiers host Llama  values may go to host memory as well
    python benchmarks/frontier.py Llama --device cuda --levers --shares 69 63 44 30 26  chunked loss and MLPs, by `fit`
    python benchmarks/frontier.py                                   small models on the CPU, live bytes
    python benchmarks/frontier.py --dry H200                        runs nothing: overheads of plans and of bounds
    python benchmarks/frontier.py --dry H200 --tiers host           the same of plans, with and without host memory

A budget of 40% is what is there before the step, and 40% of what the plain step takes beyond that at its peak. Plain,
planned and torch's own steps take turns; peaks are the allocator's on a device, live bytes on the CPU. Targets: peak
within 2% (CPU 1%) and never above the budget, time within 5%.
"""

import argparse
import functools
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from devices import refuse_missing
from phases import watched
from profiles import make_step
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import recollect
from recollect import BudgetError, Profile
from recollect._apply.blocks import find_blocks
from recollect._bench.cases import Case, list_cases
from recollect._fit.work import work_for

GIB = 2**30
CASES, SMALL = list_cases("cuda", "large"), list_cases("cpu", "small")
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
LEVERS = ("chunked_loss", "chunked_mlp")
HEAT_S = 1.5
Step = Callable[[], None]


class Bench:
    """One model on one device: its steps, and how they are measured."""

    def __init__(self, case: Case, device: str) -> None:
        gc.collect()
        self.device, self.case = device, case
        if device == "cuda":
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        self.model, self.inputs, self.optimizer = case.make(device)
        self.step: Step = functools.partial(make_step(case), self.model, self.optimizer, *self.inputs)
        for _ in range(3):
            self.step()

    def profile(self) -> Profile:
        return recollect.profile(make_step(self.case), self.model, self.optimizer, *self.inputs)

    def fit(self, budget: int, tiers: str | None) -> recollect.Plan:
        """The plan that `fit` finds with levers; says how long that took, and what for."""
        started = time.perf_counter()
        with (
            watched(time.perf_counter) as phases,
            recollect.fit(self.model, step=self.step, budget=budget, tiers=tiers, levers=LEVERS) as fitted,
        ):
            took_s = time.perf_counter() - started
            print(f"  fitted in {took_s:.1f} s, {fitted.tries} tries: {phases}", flush=True)
            return fitted.plan

    def measure(self, repeats: int, warm: int) -> tuple[float, int]:
        """The time of a step among others, and its peak."""
        if self.device == "cpu":
            for _ in range(warm):
                self.step()
            times = [self._time(1) for _ in range(repeats)]
            return min(times), self.profile().peak_bytes
        self._heat(warm)
        torch.cuda.reset_peak_memory_stats()
        return self._time(repeats), torch.cuda.max_memory_allocated()

    def _heat(self, warm: int) -> None:
        """Keep the device busy for a while: one that has rested runs at a higher clock, by up to 3% on an H200."""
        started = time.perf_counter()
        while warm > 0 or time.perf_counter() - started < HEAT_S:
            self.step()
            torch.cuda.synchronize()
            warm -= 1

    def _time(self, steps: int) -> float:
        """One after the other, as in training: the host may be ahead."""
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps

    @contextmanager
    def torchs(self, *, selective: bool) -> Iterator[None]:
        """torch's own checkpointing around the repeated blocks."""
        blocks = find_blocks(self.model)
        forwards = {block: block.forward for block in blocks}
        contexts: dict[str, Any] = {"context_fn": _selective_contexts} if selective else {}
        for block, own in forwards.items():
            block.forward = functools.partial(torch.utils.checkpoint.checkpoint, own, use_reentrant=False, **contexts)
        try:
            yield
        finally:
            for block in forwards:
                del block.forward


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(list(_KEPT))


def run(name: str, case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    bench = Bench(case, options.device)
    started = time.perf_counter()
    seen = bench.profile()
    profiled_s = time.perf_counter() - started
    held = seen.timeline.held_bytes
    span = seen.peak_bytes - held
    candidates: dict[str, Any] = {"plain": None}
    plans: dict[str, Any] = {}
    started = time.perf_counter()
    for share in options.shares:
        budget = held + span * share // 100
        with suppress(BudgetError):
            if options.levers:
                plans[f"levers {share}%"] = bench.fit(budget, options.tiers)
            else:
                plans[f"plan {share}%"] = recollect.plan(seen, budget=budget, tiers=options.tiers)
    if not options.levers:
        plans["plan min"] = recollect.plan(seen, budget="min", tiers=options.tiers)
    planned_s = time.perf_counter() - started
    candidates |= plans
    candidates |= {"torch full": False, "torch matmuls and attention": True}
    rows: dict[str, dict[str, Any]] = {label: {"times": [], "peak": 0, "sent": ""} for label in candidates}
    for _ in range(options.rounds):
        for label, what in candidates.items():
            gc.collect()
            if what is None:
                seconds, peak = bench.measure(options.repeats, 1)
            elif isinstance(what, bool):
                with bench.torchs(selective=what):
                    seconds, peak = bench.measure(options.repeats, 1)
            else:
                with recollect.apply(bench.model, what) as handle:
                    seconds, peak = bench.measure(options.repeats, 3)
                    rows[label]["sent"] = tell_sent(handle, what)
            rows[label]["times"].append(seconds)
            rows[label]["peak"] = max(rows[label]["peak"], peak)
    plain = rows["plain"]
    plain_s = statistics.median(plain["times"])
    print(
        f"\n{name}: plain {plain['peak'] / GIB:.3f} GiB {plain_s * 1e3:.1f} ms; profile says "
        f"{seen.peak_bytes / GIB:.3f} GiB "
        f"({seen.peak_bytes / plain['peak']:.4f}) {(seen.step_s or 0) * 1e3:.1f} ms "
        f"({(seen.step_s or 0) / plain_s:.3f}); "
        f"profiled in {profiled_s:.1f} s, {len(plans)} plans in {planned_s:.1f} s; held {held / GIB:.3f} GiB",
        flush=True,
    )
    found = []
    for label, row in rows.items():
        measured_s, peak = statistics.median(row["times"]), row["peak"]
        line = f"  {label:28s} {(peak - held) / max(span, 1):6.1%} of activations, {measured_s / plain_s:6.3f} x plain"
        entry = {"model": name, "label": label, "peak": peak, "seconds": measured_s, "plain_s": plain_s}
        if label in plans:
            plan = plans[label]
            share = plan.step_s / plan.forecast.plain_step_s
            limit = plan.forecast.budget_bytes
            entry |= {"predicted_peak": plan.peak_bytes, "predicted": share, "bound": plan.lower_bound_s}
            line += (
                f" | predicted {plan.peak_bytes / peak:.4f} of the peak, "
                f"{share / (measured_s / plain_s):.3f} of the time"
                f" | bound {(plan.lower_bound_s or 0) / plan.forecast.plain_step_s:.3f}"
                f" | {'within' if limit is None or peak <= limit else 'OVER'} budget, {len(plan.regions)} regions"
                + "".join(f", {lever.name}" for lever in plan.levers)
            )
        print(line + row["sent"], flush=True)
        found.append(entry)
    return found


def tell_sent(handle: Any, plan: recollect.Plan) -> str:
    """A line of what the link did in a step, and what became of how many regions; empty if nothing was sent."""
    ways = Counter(f"{region.way}{' and send' if region.tier else ''}" for region in plan.regions)
    if not any(region.tier for region in plan.regions):
        return ""
    said = handle.report()
    speeds = ", ".join(
        f"{(speed or 0) / 1e9:.1f} GB/s {way}"
        for way, speed in (("out", said.out_bytes_per_s), ("back", said.back_bytes_per_s))
    )
    return f"\n    {', '.join(f'{count} {way}' for way, count in ways.items())}; {said}; {speeds}"


def show_gaps(name: str, case: Case, options: argparse.Namespace) -> None:
    """Overhead of the plan and of the bound in percent of the plain step, from a dry profile."""
    model, inputs, optimizer = case.make("meta")
    seen = recollect.profile(make_step(case), model, optimizer, *inputs, dry=True, device=options.dry)
    started = time.perf_counter()
    work = work_for(seen, None)
    frontier, held = work.frontier(), seen.timeline.held_bytes
    planned_s = time.perf_counter() - started
    cells = []
    for share in options.shares:
        budget = held + (seen.peak_bytes - held) * share // 100
        point, bound = frontier.fastest_within(budget), work.bound.seconds(budget) or 0.0
        plain_s = work.problem.plain_s
        found = "-" if point is None else f"{(point.step_s / plain_s - 1) * 100:.1f}"
        cells.append(f"{share}% {found} / {(bound / plain_s - 1) * 100:.1f}")
    least = frontier.smallest
    lowest = (least.peak_bytes - held) / (seen.peak_bytes - held)
    cells.append(f"min {lowest:.1%} {(least.step_s / work.problem.plain_s - 1) * 100:.1f}")
    print(f"{name}: {', '.join(cells)}; planned in {planned_s:.1f} s", flush=True)


def show_sent(name: str, case: Case, options: argparse.Namespace) -> None:
    """Overheads of plans without and with host memory, as `recollect.plan` makes them, and what is sent."""
    model, inputs, optimizer = case.make("meta")
    seen = recollect.profile(make_step(case), model, optimizer, *inputs, dry=True, device=options.dry)
    held, cells = seen.timeline.held_bytes, []
    for share in options.shares:
        budget = held + (seen.peak_bytes - held) * share // 100
        found = [_describe_overhead(seen, budget, tiers) for tiers in (None, options.tiers)]
        cells.append(f"{share}% {' / '.join(found)}")
    print(f"{name}: {', '.join(cells)}", flush=True)


def _describe_overhead(seen: Profile, budget: int, tiers: str | None) -> str:
    try:
        plan = recollect.plan(seen, budget=budget, tiers=tiers)
    except BudgetError:
        return "-"
    sent = sum(region.offloaded_bytes for region in plan.regions)
    assert plan.forecast is not None
    return f"{plan.forecast.overhead * 100:.1f}" + (f" ({sent / GIB:.1f} GiB sent)" if sent else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shares", type=int, nargs="+", default=[90, 75, 60, 45, 30, 20])
    parser.add_argument("--tiers", choices=("host",), help="plans may also send values to host memory (cuda, dry)")
    parser.add_argument("--dry", metavar="DEVICE", help="only what plans and bounds would take there; runs nothing")
    parser.add_argument("--levers", action="store_true", help="by `fit`, with a chunked loss and chunked MLPs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one round of few steps: a look, not a measurement")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), metavar="SECONDS", help="begin no model after that"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.dry:
        refuse_missing(parser, options.device)
    if options.quick:
        options.rounds, options.repeats = 1, 3
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    cases = CASES if options.device == "cuda" else SMALL
    for name in options.models:
        if time.perf_counter() - started > options.limit:
            print(f"\n{name}: left out, the time is up")
            continue
        if options.dry:
            (show_sent if options.tiers else show_gaps)(name, CASES[name], options)
            continue
        rows += run(name, cases[name], options)
    if options.json:
        options.json.write_text(json.dumps({"torch": str(torch.__version__), "rows": rows}))


if __name__ == "__main__":
    main()
