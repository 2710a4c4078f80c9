"""A compiled step beside the plain one: its gradients, and its graphs' operators counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

PARTITIONERS = {"min-cut": min_cut_rematerialization_partition, "default": default_partition}


@dataclass
class Graphs:
    """What AOTAutograd gave its compilers, in order; usable as a backend of torch.compile through `backend`."""

    partition: str = "min-cut"
    decompositions: Mapping[Any, Any] | None = None
    forward: list[GraphModule] = field(default_factory=list)
    backward: list[GraphModule] = field(default_factory=list)
    inference: list[GraphModule] = field(default_factory=list)
    dynamo: list[GraphModule] = field(default_factory=list)

    @property
    def backend(self) -> Callable[..., Any]:
        def compiler(into: list[GraphModule]) -> Callable[..., Any]:
            def compile_graph(graph: GraphModule, _: Any) -> Any:
                into.append(graph)
                return make_boxed_func(graph.forward)

            return compile_graph

        compile_joint = aot_autograd(
            fw_compiler=compiler(self.forward),
            bw_compiler=compiler(self.backward),
            inference_compiler=compiler(self.inference),
            partition_fn=PARTITIONERS[self.partition],
            decompositions=self.decompositions,
        )

        def compile_whole(graph: GraphModule, examples: Any) -> Any:
            self.dynamo.append(graph)
            return compile_joint(graph, examples)

        return compile_whole

    def count(self, *names: str) -> dict[str, int]:
        """How often these operators are in the backward graphs; all of them, if none are named."""
        return count_ops(self.backward, *names)


def count_ops(graphs: Iterable[GraphModule], *names: str) -> dict[str, int]:
    """Calls by short name: ``mm`` for ``aten.mm.default``."""
    found = Counter(short_name(node) for graph in graphs for node in graph.graph.nodes if node.op == "call_function")
    return {name: found[name] for name in names} if names else dict(found)


def short_name(node: Node) -> str:
    """What an operator is called in these tests; one that is run from a random state counts as itself."""
    found: Any = node.target
    if getattr(found, "__name__", "") in ("run_and_save_rng_state", "run_with_rng_state"):
        found = next(arg for arg in node.args if callable(arg) and not isinstance(arg, Node))
    text = str(found)
    return text.split(".")[1] if text.startswith("aten.") else getattr(found, "__name__", text)


@dataclass
class Step:
    """What one step came to."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    graphs: Graphs


def run_step(call: Callable[..., Any], inputs: Sequence[Any], *, of: Sequence[Tensor] = (), seed: int = 3) -> Step:
    """Outputs and the gradients of their sum, to the inputs and to more tensors."""
    torch.manual_seed(seed)
    leaves = [tensor for tensor in [*tensors_in(inputs), *of] if tensor.requires_grad]
    outputs = tensors_in(call(*inputs))
    total = torch.stack([out.double().square().sum() for out in outputs if out.requires_grad]).sum()
    gradients: list[Tensor | None] = [*torch.autograd.grad(total, leaves, allow_unused=True)]
    return Step([out.detach() for out in outputs], gradients, Graphs())


def run_compiled(
    call: Callable[..., Any], inputs: Sequence[Any], *, of: Sequence[Tensor] = (), breaks: bool = False, **options: Any
) -> Step:
    """The same step compiled into one graph, or into several if it may break.

    Args:
        call: what runs.
        inputs: its arguments.
        of: more tensors to take gradients of.
        breaks: whether the graph may break.
        options: `partition` and `decompositions` of `Graphs`, and those of torch.compile.
    """
    torch._dynamo.reset()
    counters.clear()
    graphs = Graphs(options.pop("partition", "min-cut"), options.pop("decompositions", None))
    compiled = torch.compile(call, backend=graphs.backend, fullgraph=not breaks, **options)
    step = run_step(compiled, inputs, of=of)
    if not breaks:
        assert not counters["graph_break"]
        assert len(graphs.dynamo) == 1
    return Step(step.outputs, step.gradients, graphs)


def run_inductor(call: Callable[..., Any], inputs: Sequence[Any], *, of: Sequence[Tensor] = (), **options: Any) -> Step:
    """The same step, compiled by Inductor."""
    torch._dynamo.reset()
    counters.clear()
    step = run_step(torch.compile(call, fullgraph=True, **options), inputs, of=of)
    assert not counters["graph_break"]
    return step


def assert_same(found: Step, expected: Step, *, exact: bool = True) -> None:
    """Outputs and gradients: bit for bit, or nearly."""
    pairs = [*zip(found.outputs, expected.outputs, strict=True), *zip(found.gradients, expected.gradients, strict=True)]
    assert any(gradient is not None for gradient in expected.gradients)
    for mine, theirs in pairs:
        if mine is None or theirs is None:
            assert mine is theirs
        elif exact:
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def parameters_of(*modules: nn.Module) -> list[Tensor]:
    return [parameter for module in modules for parameter in module.parameters()]
