"""What offloading costs and frees: the figures of docs/offload.md, each with its target.

On a device (about 4 minutes on an H200), peers and ours taking turns in one process:

    python benchmarks/offload.py

What the host does for each value, on a device or with a link that carries nothing:

    python benchmarks/offload.py --case host
    python benchmarks/offload.py --case host --device cpu

The disk tier against ``dd`` with direct I/O and the same block size, on any machine:

    python benchmarks/offload.py --case disk --disk /path/on/the/disk --gib 8
"""

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from devices import refuse_missing
from llama_like import LlamaLike
from offload_disk import measure_disk
from offload_host import MOST_US, measure_host
from peers import plain as call_plain
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from training import COMPUTE, SMALL, Model, each_block, train

import recollect
from recollect._bench.alternate import alternate
from recollect._bench.rivals import Call, StashingOffloader
from recollect._offload.disk import CHUNK_BYTES
from recollect._offload.offload import Offload
from recollect._offload.streams import DeviceClock
from recollect._profile.links import measure_copies

GIB = 2**30
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, its input, and what to run it under."""

    model: LlamaLike
    ids: Tensor

    def step(self, context: Context, call: Call = call_plain) -> Callable[[], None]:
        run = each_block(call)

        def go() -> None:
            self.model.zero_grad(set_to_none=False)
            with context():
                loss = self.model(self.ids, run)
            torch.autograd.backward(loss)

        return go


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    return recollect.checkpoint(function)(*args)


def say(what: str, value: str, target: str = "", *, is_met: bool | None = None) -> None:
    mark = {None: " ", True: "+", False: "-"}[is_met]
    print(f"{mark} {what:58} {value:>16}  {target}", flush=True)


def measure_phases(subject: Subject, repeats: int = 5) -> tuple[float, float]:
    """Seconds of forward and of backward, the fastest of several."""
    clock = DeviceClock(subject.ids.device)
    found = []
    for _ in range(repeats):
        subject.model.zero_grad(set_to_none=False)
        stream = torch.accelerator.current_stream()
        start = clock.mark(stream)
        loss = subject.model(subject.ids)
        middle = clock.mark(stream)
        loss.backward()
        end = clock.mark(stream)
        clock.wait(end)
        found.append((clock.seconds(start, middle), clock.seconds(middle, end)))
    return min(forward for forward, _ in found), min(backward for _, backward in found)


def measure_link(device: torch.device) -> tuple[float, float]:
    links = {link.name: link.bytes_per_s for link in measure_copies(device, 512 * 2**20)}
    out = next(speed for name, speed in links.items() if name.startswith(str(device)) and "pinned" in name)
    back = next(speed for name, speed in links.items() if name.startswith("host to") and "pinned" in name)
    return out, back


def warm(step: Callable[[], None], steps: int = 6) -> None:
    for _ in range(steps):
        step()
    torch.accelerator.synchronize()


def on_device(model: Model, device: torch.device) -> None:
    network, ids = model.build(device, torch.bfloat16)
    subject = Subject(model=network, ids=ids)
    train(network, ids, each_block(call_plain))
    forward_s, backward_s = measure_phases(subject)
    out, back = measure_link(device)
    print(f"{model} on {torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    say("forward, backward", f"{forward_s * 1e3:.1f}, {backward_s * 1e3:.1f} ms")
    say("link out, back", f"{out / 1e9:.1f}, {back / 1e9:.1f} GB/s")
    floor = torch.accelerator.memory_allocated(device)
    hidden(subject, floor, out * forward_s)
    region_inputs(subject)
    everything(subject, (forward_s, backward_s), (out, back))


def hidden(subject: Subject, floor: int, carried: float) -> None:
    """What the link can carry during forward."""
    away = recollect.offload(wait=False)
    steps = {"plain": subject.step(nullcontext), "hidden": subject.step(lambda: away)}
    warm(steps["hidden"])
    timings = alternate(steps, device=subject.ids.device, rounds=4, repeats=5)
    report = away.report()
    plain, ours = timings["plain"], timings["hidden"]
    assert plain.peak_bytes is not None
    assert ours.peak_bytes is not None
    ratio, sent = ours.median_s / plain.median_s, report.out_bytes
    freed = plain.peak_bytes - ours.peak_bytes
    print("\nwhat the link can carry during forward: offload(wait=False)")
    say(
        "plain step",
        f"{plain.median_s * 1e3:.1f} ms",
        f"peak {(plain.peak_bytes - floor) / GIB:.2f} GiB of activations",
    )
    say("sent", f"{sent / GIB:.2f} GiB", f">= {0.85 * carried / GIB:.2f} GiB (85%)", is_met=sent >= 0.85 * carried)
    say("step / plain", f"{ratio:.3f}", "<= 1.03", is_met=ratio <= 1.03)
    say("peak lower by, of the bytes sent", f"{freed / max(sent, 1):.0%}", ">= 90%", is_met=freed >= 0.9 * sent)
    print(f"  {report}")
    steady_state(away, steps["hidden"])


def region_inputs(subject: Subject) -> None:
    around, inside = recollect.offload(), recollect.offload()

    def with_inputs_away(function: Callable[..., Any], *args: Any) -> Any:
        return recollect.checkpoint(function, offload_inputs=True, offload_to=inside)(*args)

    steps = {
        "recompute": subject.step(nullcontext, recomputed),
        "offload() around regions": subject.step(lambda: around, recomputed),
        "offload_inputs=True": subject.step(nullcontext, with_inputs_away),
    }
    for step in list(steps.values())[1:]:
        warm(step)
    timings = alternate(steps, device=subject.ids.device, rounds=4, repeats=4)
    full = timings["recompute"]
    print("\nfull recompute, region inputs offloaded")
    for name, away in (("offload() around regions", around), ("offload_inputs=True", inside)):
        report, timing = away.report(), timings[name]
        ratio = timing.median_s / full.median_s
        freed = (full.peak_bytes or 0) - (timing.peak_bytes or 0)
        say(f"{name}: step / full recompute", f"{ratio:.3f}", "<= 1.03", is_met=ratio <= 1.03)
        say("sent", f"{report.out_bytes / GIB:.2f} GiB")
        is_gone = freed >= 0.9 * report.out_bytes
        say("peak lower by", f"{freed / GIB:.2f} GiB", "their bytes", is_met=is_gone)
        print(f"  {report}")


def everything(subject: Subject, phases_s: tuple[float, float], links: tuple[float, float]) -> None:
    away = recollect.offload()
    stash = StashingOffloader()
    steps = {
        "plain": subject.step(nullcontext),
        "everything": subject.step(lambda: away),
        "save_on_cpu": subject.step(lambda: save_on_cpu(pin_memory=True)),
        "TRL style": subject.step(lambda: stash),
        "full recompute": subject.step(nullcontext, recomputed),
    }
    warm(steps["everything"], 4)
    timings = alternate(steps, device=subject.ids.device, rounds=2, repeats=3)
    report = away.report()
    bound_s = max(phases_s[0], report.out_bytes / links[0]) + max(phases_s[1], report.out_bytes / links[1])
    ours = timings["everything"].median_s
    print("\neverything offloaded: offload()")
    for name, timing in timings.items():
        peak = (timing.peak_bytes or 0) / GIB
        say(
            name,
            f"{timing.median_s * 1e3:.1f} ms",
            f"{timing.median_s / timings['plain'].median_s:.2f} x, {peak:.2f} GiB",
        )
    say("step / (link and compute bound)", f"{ours / bound_s:.3f}", "<= 1.05", is_met=ours <= 1.05 * bound_s)
    rival = timings["save_on_cpu"].median_s
    say("step / save_on_cpu", f"{ours / rival:.2f}", "< 1", is_met=ours < rival)
    print(f"  {report}")


@contextmanager
def counted_waits() -> Iterator[list[int]]:
    """How often the host waits for a device."""
    waits = [0]
    real = DeviceClock.wait

    def wait(self: DeviceClock, mark: Any) -> None:
        waits[0] += 1
        real(self, mark)

    torch.cuda.set_sync_debug_mode("error")
    try:
        with mock.patch.object(DeviceClock, "wait", wait):
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steady_state(away: Offload, step: Callable[[], None]) -> None:
    host = away._session.transfers.host
    assert host is not None
    before = host.pool.allocations
    with counted_waits() as waits:
        for _ in range(3):
            step()
    say(
        "pinned allocations in 3 steady steps",
        str(host.pool.allocations - before),
        "0",
        is_met=host.pool.allocations == before,
    )
    say("host waits in them", str(waits[0]), "0", is_met=waits[0] == 0)


def host_cost(device: torch.device) -> None:
    """What the host does for each value, by part."""
    cost = measure_host(device)
    print(f"\nhost cost for each of {cost.values} values on {device}, torch {torch.__version__}")
    for name, spent_us in cost.parts.items():
        say(name, f"{spent_us:.2f} µs")
    say("copies themselves", f"{cost.copies_us:.2f} µs")
    say("host time without them", f"{cost.own_us:.1f} µs", f"<= {MOST_US} µs", is_met=cost.own_us <= MOST_US)
    if device.type != "cpu":
        nothing = measure_host(torch.device("cpu"))
        say("the same on this host, with a link that carries nothing", f"{nothing.own_us:.1f} µs")


def on_disk(folder: Path, total: int) -> None:
    """The disk tier against dd, both directions, past the page cache."""
    print(f"\ndisk tier in {folder}: {total / GIB:.1f} GiB in blocks of {CHUNK_BYTES // 2**20} MiB")
    for way, speeds in measure_disk(folder, total).items():
        fastest = f"{max(speeds.dd) / 1e9:.2f}, {max(speeds.tier) / 1e9:.2f} GB/s"
        say(f"{way}: dd, tier, the fastest of {len(speeds.dd)} rounds", fastest)
        say(f"{way}: tier / dd, in the middle", f"{speeds.ratio:.0%}", ">= 70%", is_met=speeds.ratio >= 0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["all", "step", "host", "disk"], default="all", help="what to measure")
    parser.add_argument("--device", default="cuda", help="whose figures: cuda; for the case host also cpu")
    parser.add_argument("--disk", type=Path, help="directory on the disk to measure, for the case disk")
    parser.add_argument("--gib", type=float, default=4.0, help="how much to write there")
    parser.add_argument("--small", action="store_true", help="a small model, to see that everything runs")
    options = parser.parse_args()
    refuse_missing(parser, options.device)
    device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, 0)
    if options.case in ("all", "step"):
        on_device(SMALL if options.small else COMPUTE, device)
        gc.collect()
    if options.case in ("all", "host"):
        host_cost(device)
    if options.case == "disk" or options.disk is not None:
        on_disk(options.disk or Path.cwd(), int(options.gib * GIB))


if __name__ == "__main__":
    main()
