"""Where backward recomputes, Inductor holds no buffer back for a later one of its size."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.codegen import wrapper
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V

import recollect
from recollect._compile import inductor
from recollect._core.torch_private.partitioner import DECISION, REGION
from tests.compile.graphs import transformer
from tests.compile.test_ordering import measure_peak

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed once in a process is taken back after each test."""
    for module, name in (
        (compile_fx, "min_cut_rematerialization_partition"),
        (wrapper, "EfficientPeakEstimate"),
    ):
        found: Any = getattr(module, name)
        monkeypatch.setattr(module, name, getattr(found, "__wrapped__", found))


class Estimate:
    """As Inductor's."""

    overall_peak_memory = 12


def graph_with(note: dict[str, Any], *, is_backward: bool) -> Any:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.sin.default, (x,)).meta.update(note)
    return SimpleNamespace(is_backward=is_backward, module=SimpleNamespace(graph=graph))


@pytest.mark.parametrize(
    ("note", "is_backward", "peak"),
    [
        ({REGION: "block"}, True, 0),
        ({DECISION: "recompute"}, True, 0),
        ({DECISION: "save"}, True, 12),
        ({REGION: "block", "partitioner_tag": "is_backward"}, True, 12),
        ({}, True, 12),
        ({REGION: "block"}, False, 12),
    ],
)
def test_only_a_backward_that_recomputes_may_not_fill_up_to_the_estimated_peak(
    monkeypatch: pytest.MonkeyPatch, note: dict[str, Any], is_backward: bool, peak: int
) -> None:
    monkeypatch.setattr(wrapper, "EfficientPeakEstimate", Estimate)
    inductor.arrange_backward()
    estimate: Any = wrapper.EfficientPeakEstimate
    with V.set_graph_handler(graph_with(note, is_backward=is_backward)):
        assert estimate().overall_peak_memory == peak


def test_it_is_installed_once() -> None:
    inductor.arrange_backward()
    found: Any = wrapper.EfficientPeakEstimate
    inductor.arrange_backward()
    assert wrapper.EfficientPeakEstimate is found


@pytest.mark.long
@pytest.mark.kernels
@pytest.mark.parametrize("way", ["regions", "plan"])
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11, at its first use
def test_a_step_takes_less_than_where_buffers_wait_to_be_reused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "plan":
        pytest.importorskip("scipy")
    x = torch.randn(2, 256, 64)

    def peak() -> int:
        torch._dynamo.reset()
        model = transformer(layers=2, width=64)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        options: dict[str, Any] = {}
        if way == "plan":
            options["custom_partitioner_fn"] = recollect.partitioner(budget="min")
        else:
            recollect.apply(model)
        compiled = torch.compile(model, options=options)

        def step() -> None:
            loss: Tensor = compiled(x).square().mean()
            torch.autograd.backward(loss)

        for _ in range(2):
            step()
        return measure_peak(step)

    theirs: Any = wrapper.EfficientPeakEstimate
    with inductor_config.patch(compile_threads=1), fresh_cache():
        ours_bytes = peak()
        monkeypatch.setattr(wrapper, "EfficientPeakEstimate", theirs)
        assert ours_bytes < 0.95 * peak()
