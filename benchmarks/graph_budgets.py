"""What a compiled step takes on the CPU under `recollect.partitioner(budget=...)`, beside what was asked for.

    python benchmarks/graph_budgets.py Llama ConvNeXt --shares 90 75 60 50 40

Budgets are shares of the plain compiled step's activations: what it takes beyond parameters, gradients and inputs. The
models are those of `recollect bench` at the small size of the CPU, and a ConvNeXt of Transformers. A budget compiles
anew, which takes a minute or more.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compiling import peak_bytes, say
from packaged import MODELS, TINY
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import recollect
from recollect._bench.cases import list_cases

CPU = torch.device("cpu")
CONVNEXT = "ConvNeXt"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and how its loss is computed."""

    model: nn.Module
    lose: Callable[[Any], Tensor]


def make(name: str) -> Subject:
    torch.manual_seed(0)
    if name == CONVNEXT:
        packaged = MODELS["convnext"]
        size = TINY._replace(batch=8)
        convnext, named = packaged.build(size), packaged.inputs(size)
        return Subject(model=convnext, lose=lambda call: call(**named).loss)
    case = list_cases("cpu", "small")[name]
    model, inputs, _ = case.make("cpu")
    return Subject(model=model, lose=lambda call: case.run_forward(call, inputs, "cpu"))


def measure(subject: Subject, **options: Any) -> int:
    """The peak of a compiled step beyond what is there before it; gradients are there."""
    torch._dynamo.reset()
    compiled = torch.compile(subject.model, fullgraph=True, **options)

    def step() -> None:
        subject.model.zero_grad(set_to_none=False)
        subject.lose(compiled).backward()

    for _ in range(2):
        step()
    return peak_bytes(step, CPU)


def run(name: str, shares: list[int]) -> None:
    subject = make(name)
    plain = measure(subject)
    print(f"{name}: the plain compiled step takes {plain / 1e6:.2f} MB", flush=True)
    for share in shares:
        found: list[Any] = []
        wanted = plain * share // 100
        try:
            cut = recollect.partitioner(budget=held_bytes(subject) + wanted, report=found.append)
            taken = measure(subject, options={"custom_partitioner_fn": cut})
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, recollect.BudgetError):
                raise
            print(f"  {share}%: refused: {str(error.inner_exception).splitlines()[0]}", flush=True)
            continue
        simulation = found[0].simulation
        predicted = simulation.peak_bytes - simulation.held_bytes
        print(
            f"  {share}%, {wanted / 1e6:.2f} MB: took {100 * taken / plain:.1f}%, {taken / 1e6:.2f} MB, "
            f"{taken / predicted:.2f} of what was predicted",
            flush=True,
        )


def held_bytes(subject: Subject) -> int:
    """What a budget of the graph includes, and the peak here does not: parameters, buffers, inputs."""
    found: list[Any] = []
    torch._dynamo.reset()
    cut = recollect.partitioner(budget="fastest", report=found.append)
    with torch._inductor.config.patch(fallback_by_default=True):
        compiled = torch.compile(subject.model, fullgraph=True, options={"custom_partitioner_fn": cut})
        subject.lose(compiled).backward()
    return int(found[0].simulation.held_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=[*list_cases("cpu", "small"), CONVNEXT])
    parser.add_argument("--shares", type=int, nargs="+", default=[90, 75, 60, 50, 40])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    say(f"torch {torch.__version__}, {sys.version.split()[0]}")
    for name in asked.models:
        with fresh_cache(), torch._inductor.config.patch(compile_threads=1):
            run(name, asked.shares)


if __name__ == "__main__":
    main()
