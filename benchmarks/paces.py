"""What plans wait for: predicted and measured times of full recomputation and of plans, phase by phase.

    python benchmarks/paces.py                          GPT, a small Llama and ViT on the GPU, about a minute
    python benchmarks/paces.py GPT --shares 75 50       one model, other budgets
    python benchmarks/paces.py --device cpu             small models, whose host is all there is

Of each phase of a step (forward, backward, the optimizer's) the times are those at which the host and the device were
done with it, from the start of the step: steps take turns, nothing waits in between, and the shortest counts. Predicted
times are those of `recollect._core.queues`, with what regions cost the host here, which is printed as well.
"""

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from devices import refuse_missing

import recollect
from recollect import BudgetError, Plan, Profile
from recollect._bench.cases import Case, list_cases
from recollect._core.calls import Phase
from recollect._fit.plan import plan_full
from recollect._fit.work import Work, work_for
from recollect._plan.rehearse import rehearse

CASES = {"GPT": ("GPT", "large"), "Llama small": ("Llama", "small"), "ViT": ("ViT", "large")}
PHASES = ("forward", "backward", "optimizer")
Times = tuple[list[float], list[float]]
"""When the host was done with each phase, and when the device was; of a CPU the second is empty."""


class Bench:
    """One model on one device."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        self.model, self.inputs, self.optimizer = case.make(device)

    def step(self, mark: Callable[[], None] = lambda: None) -> None:
        with torch.autocast(
            self.device, dtype=self.case.autocast or torch.bfloat16, enabled=self.case.autocast is not None
        ):
            loss = self.model(*self.inputs)
        mark()
        loss.backward()
        del loss
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()

    def time(self) -> Times:
        host: list[float] = []
        events: list[Any] = []

        def mark() -> None:
            host.append(time.perf_counter())
            if self.device == "cuda":
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                events.append(event)

        if self.device == "cuda":
            torch.cuda.synchronize()
        mark()
        self.step(mark)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return [at - host[0] for at in host[1:]], [events[0].elapsed_time(one) / 1e3 for one in events[1:]]


def predict(work: Work, plan: Plan | None) -> Times:
    """The same, as it is predicted."""
    problem, frontier = work.problem, work.frontier()
    points = [] if plan is None else [*frontier.points, *frontier.candidates]
    choice = next((one.choice for one in points if plan and one.peak_bytes == plan.peak_bytes), ())
    found = rehearse(problem, [pair for segment, option in choice for pair in option.treat(problem, segment)])
    phases = [problem.calls[call].phase for call in found.calls]
    first = [found.places[problem.forward_count], len(phases)]
    if Phase.OPTIMIZER in phases:
        first.insert(1, phases.index(Phase.OPTIMIZER))
    else:
        first.append(len(phases))
    host, device = [], []
    for stop in first:
        more = [([step for step in some if step < stop], seconds) for some, seconds in found.host_s]
        done = problem.prices.queue(found.calls[:stop], more)
        host.append(done.host_s)
        device.append(done.wall_s)
    return (device, []) if problem.prices.plain is None else (host, device)


def run(name: str, bench: Bench, options: argparse.Namespace) -> None:
    for _ in range(3):
        bench.step()
    seen: Profile = recollect.profile(bench.step)
    work, held = work_for(seen, None), seen.timeline.held_bytes
    plans: dict[str, Plan | None] = {"plain": None, "full": plan_full(seen, budget="min")}
    for share in options.shares:
        budget = held + (seen.peak_bytes - held) * share // 100
        try:
            plans[f"plan {share}%"] = recollect.plan(seen, budget=budget)
        except BudgetError as error:
            print(f"{share}%: {str(error).splitlines()[0]}")
    print(f"\n{name}: {seen}, pace: {work.problem.prices.pace.value}")
    for way, one in work.problem.overheads.items():
        print(
            f"  {way:8s} costs the host {one.forward_s(20) * 1e6:.0f} µs in forward for 20 calls, "
            f"{one.random_forward_s * 1e6:.0f} µs for each draw; {one.backward_s(20, 10) * 1e6:.0f} µs in backward if "
            f"10 are made again, {one.random_again_s * 1e6:.0f} µs for each draw that is"
        )
    measured: dict[str, list[Times]] = {label: [] for label in plans}
    gc.collect()
    for _ in range(options.rounds):
        for label, plan in plans.items():
            with nullcontext() if plan is None else recollect.apply(bench.model, plan):
                for _ in range(1 if plan is None else 4):
                    bench.step()
                measured[label] += [bench.time() for _ in range(options.repeats)]
    plain_s = min(max((*host, *device)) for host, device in measured["plain"])
    for label, plan in plans.items():
        hosts, devices = (
            [min(times) for times in zip(*some, strict=True)] for some in zip(*measured[label], strict=True)
        )
        expected = predict(work, plan)
        wall_s = min(max((*host, *device)) for host, device in measured[label])
        told = work.problem.plain_s if plan is None else plan.step_s
        ways = Counter() if plan is None else Counter(region.way for region in plan.regions)
        print(
            f"  {label:10s} {wall_s * 1e3:7.1f} ms {wall_s / plain_s:.3f} x plain, predicted {told * 1e3:7.1f} ms "
            f"{told / work.problem.plain_s:.3f} ({told / wall_s:.3f} of measured)  {dict(ways)}"
        )
        for what, found, wanted in (("host", hosts, expected[0]), ("device", devices, expected[1])):
            cells = (
                f"{phase} {one * 1e3:6.1f} / {other * 1e3:6.1f}"
                for phase, one, other in zip(PHASES, found, wanted, strict=False)
            )
            print(f"    {what:6s} done, measured / predicted: {',  '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shares", type=int, nargs="+", default=[75, 60, 50])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    refuse_missing(parser, options.device)
    for name in options.models:
        case, size = CASES[name]
        run(
            name,
            Bench(list_cases(options.device, "small" if options.device == "cpu" else size)[case], options.device),
            options,
        )


if __name__ == "__main__":
    main()
