"""The longest sequence that trains within a budget: torch's full checkpointing beside `recollect.fit` with levers.

    python benchmarks/longest.py --device cuda                          d2048 L16 B4 within 40 GiB, bf16, AdamW
    python benchmarks/longest.py --device cuda --tokens 38912           whether that trains, and how fast
    python benchmarks/longest.py --dry H200                             the same as dry profiles predict it; no device
    python benchmarks/longest.py --dim 128 --layers 4 --budget 300MiB   small, on the CPU

Lengths are multiples of 1024 (64 on the CPU). A length counts if a step stays within the budget as it runs: the
allocator's peak on a device, live bytes on the CPU. Dry profiles say where to begin. The time per token is that of the
longest of each, beside that of the plain step at its own longest.
"""

import argparse
import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from devices import refuse_missing
from llama_like import LlamaLike
from torch import nn
from torch.utils.checkpoint import checkpoint

import recollect
from recollect import BudgetError
from recollect._core.levers import PlannedLever
from recollect._core.profiles import Profile
from recollect._core.units import parse_bytes
from recollect._fit.largest import FULL, PLAIN, PLANNED, Largest, Sizes, search_largest
from recollect._inspect.oom.error import read_shortage

LEVERS = ("chunked_loss", "chunked_mlp")
Way = Callable[[nn.Module, Callable[[], None], int], AbstractContextManager[object]]


def make(options: argparse.Namespace, tokens: int) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.device(options.device):  # not on the host first: it is made anew for each length
        model = LlamaLike(options.dim, options.layers, tokens).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=options.device == "cuda")
    ids = torch.randint(0, 32000, (options.batch, tokens), device=options.device)

    def step() -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@contextmanager
def torch_full(model: nn.Module, step: Callable[[], None], budget: int) -> Iterator[None]:
    """torch's checkpointing around each block."""
    del step, budget
    for layer in model.layers:  # type: ignore[union-attr]
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    yield


def fit(model: nn.Module, step: Callable[[], None], budget: int) -> AbstractContextManager[object]:
    """Ours, with levers."""
    return recollect.fit(model, step=step, budget=budget, levers=LEVERS)


def plain(model: nn.Module, step: Callable[[], None], budget: int) -> AbstractContextManager[object]:
    """As it is."""
    del model, step, budget
    return nullcontext()


def try_length(options: argparse.Namespace, way: Way, tokens: int, budget: int) -> tuple[int, float]:
    """The peak of a step of this length, and how long it takes; the budget and more if it does not run."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        model, step = make(options, tokens)
        with way(model, step, budget):
            for _ in range(2):
                step()
            return measure(options.device, model, step)
    except BudgetError as error:
        return max(error.smallest_bytes, budget + 1), 0.0
    except RuntimeError as error:
        if read_shortage(error) is None:
            raise
        return 2 * budget, 0.0


def measure(device: str, model: nn.Module, step: Callable[[], None]) -> tuple[int, float]:
    times = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        started = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    if device == "cuda":
        return torch.cuda.max_memory_allocated(), min(times)
    return recollect.profile(step, timed=False).peak_bytes, min(times)


def predict(options: argparse.Namespace, device: str, unit: int) -> Iterator[tuple[str, Largest]]:
    """The longest of each way, from dry profiles alone; 3% are kept free for what they do not see."""
    budget = parse_bytes(options.budget)

    def profile_at(tokens: int, levers: tuple[PlannedLever, ...] = ()) -> Profile:
        with torch.device("meta"):
            model = LlamaLike(options.dim, options.layers, tokens).to(torch.bfloat16)
            ids = torch.zeros(options.batch, tokens, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=True)
        with recollect.apply(model, recollect.Plan(levers=levers)):
            return recollect.profile(model, ids, dry=True, device=device, optimizer=optimizer)

    plain = Sizes(profile_at, budget)
    yield "plain", plain.find_largest(PLAIN, start=4 * unit, multiple_of=unit)
    yield "torch full", plain.find_largest(FULL, start=8 * unit, multiple_of=unit)
    mlps = tuple(f"layers.{layer}.mlp" for layer in range(options.layers))
    levers = (
        PlannedLever(name="chunked_loss", paths=("head",)),
        PlannedLever(name="chunked_mlp", paths=mlps, parts=8),
    )
    chunked = Sizes(lambda tokens: profile_at(tokens, levers), budget)
    yield "fit with levers", chunked.find_largest(PLANNED, start=16 * unit, multiple_of=unit)


def walk(excess: Callable[[int], int], start: int) -> int:
    """The largest number whose excess is not above 0, from one nearby."""
    if excess(start) <= 0:
        while excess(start + 1) <= 0:
            start += 1
        return start
    while start > 1 and excess(start - 1) > 0:
        start -= 1
    return start - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dry", metavar="DEVICE", help="only predict, for a device such as H200")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--budget", default="40GiB")
    parser.add_argument("--only", nargs="*", help="which ways")
    parser.add_argument("--tokens", type=int, nargs="*", help="run `fit` with levers at these lengths, search nothing")
    options = parser.parse_args()
    if not options.dry:
        refuse_missing(parser, options.device)
    unit = 1024 if options.device == "cuda" or options.dry else 64
    budget = parse_bytes(options.budget)
    ways: dict[str, Way] = {"plain": plain, "torch full": torch_full, "fit with levers": fit}
    for tokens in options.tokens or ():
        peak, seconds_each = try_length(options, fit, tokens, budget)
        per_token = seconds_each / (tokens * options.batch)
        print(
            f"fit with levers {tokens:7d} tokens, {per_token * 1e6:8.2f} µs a token, {peak / 2**30:.1f} GiB", flush=True
        )
    if options.tokens:
        return
    device = options.dry or options.device
    starts: dict[str, int] = {}
    for name, found in predict(options, device, unit) if device != "cpu" else ():
        starts[name] = max(1, found.value // unit)
        per_token = found.step_s / max(1, found.value * options.batch)
        gib = f"{found.peak_bytes / 2**30:.1f} GiB"
        print(f"{name:16s} {found.value:7d} tokens, {per_token * 1e6:8.2f} µs a token, {gib}, predicted", flush=True)
    for name, way in ways.items() if not options.dry else ():
        if options.only and name not in options.only:
            continue
        seconds: dict[int, float] = {}

        def excess(count: int, way: Way = way, seconds: dict[int, float] = seconds) -> int:
            peak, seconds[count] = try_length(options, way, count * unit, budget)
            return peak - budget

        longest = walk(excess, starts[name]) if name in starts else search_largest(excess, start=4)
        per_token = seconds.get(longest, 0.0) / max(1, longest * unit * options.batch)
        print(f"{name:16s} {longest * unit:7d} tokens, {per_token * 1e6:8.2f} µs a token", flush=True)


if __name__ == "__main__":
    main()
