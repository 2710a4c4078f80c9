"""What autograd's engine says about the backward pass that runs on this thread.

Would be replaced by: public functions for the running graph task (its id, whether it keeps the graph, which group
of backward calls it belongs to, whether a node asks, what to call when it is done).
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Id of the running backward pass, -1 outside of one. Costs 60 ns."""

pass_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running pass was started with retain_graph or create_graph. True outside of a pass."""

ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__
"""The Python function under which the engine runs on the thread that called backward; on its own threads none is."""


def engine_calls(depth: int) -> bool:
    """Whether the engine itself called the function that many Python frames above the caller's, no code of a hook."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth):
        frame = None if frame is None else frame.f_back
    return frame is None or frame.f_code is ENGINE_CODE


top_hooks: Callable[[bool], tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None] = (
    torch._C._autograd._top_saved_tensors_default_hooks
)
"""The saved-tensor hooks in force here; the argument says to answer while tracing too. Costs 70 ns."""

push_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks
)
"""Put hooks in force. With `pop_hooks` 200 ns against 660 ns of the public context manager."""

pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

get_group: Callable[[], Any] = torch._C._get_graph_exec_group
"""The group of backward calls around the running pass, carried to the engine's threads; None outside of one."""

set_group: Callable[[Any], None] = torch._C._set_graph_exec_group


def when_pass_ends(callback: Callable[[], None]) -> None:
    """Call back when the running pass is done; a pass that fails does not call."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


Around = Callable[[tuple[Any, ...], bool], AbstractContextManager[Any]]
"""Makes what is around a backward pass.

It is given what the pass starts from (tensors, or edges of the graph), and whether the pass is the last one of that
graph: it adds to ``.grad``, or frees the graph.
"""


@contextmanager
def around_passes(around: Around) -> Generator[None]:
    """Run all backward passes of the process inside of what this makes, on the thread that asks for them.

    Around torch's Python function and not the engine: who asks for a saved tensor is told by the engine's caller.
    """
    run: Any = torch.autograd.graph._engine_run_backward

    def run_inside(roots: Any, gradients: Any, keeps_graph: bool, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001
        with around(tuple(roots), kwargs.get("accumulate_grad", False) or not keeps_graph):
            return run(roots, gradients, keeps_graph, *args, **kwargs)

    places: list[Any] = [torch.autograd, torch.autograd.graph]  # the first has imported it from the second
    for place in places:
        place._engine_run_backward = run_inside
    try:
        yield
    finally:
        for place in places:
            place._engine_run_backward = run


_RAN = "recollect: backward ran here"
_MOST_MARKED = 4096  # nodes: what a loss is made of stands near the root


@contextmanager
def marking_passes() -> Generator[None]:
    """Meanwhile, note at nodes that the last backward pass of their graph has started from them, or above."""
    with around_passes(_mark):
        yield


def _mark(roots: tuple[Any, ...], is_last: bool) -> AbstractContextManager[None]:  # noqa: FBT001
    starts = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots] if is_last else []
    nodes: list[Any] = [node for node in starts if node is not None]
    seen = set(nodes)
    for node in nodes:  # grows
        node.metadata[_RAN] = True
        following = {below for below, _ in node.next_functions if below is not None} - seen
        if len(seen) < _MOST_MARKED:
            seen |= following
            nodes += following
    return nullcontext()


def has_run(node: Any) -> bool:
    """Whether a pass that was marked has come by this node."""
    return _RAN in node.metadata


next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next autograd node of this thread gets; nodes are numbered in the order they are made."""


def sequence_of(node: Any) -> int:
    """The number an autograd node got when it was made. Costs 90 ns."""
    number: int = node._sequence_nr()
    return number


pass_is_whole: Callable[[], bool] = torch.autograd.Variable._execution_engine.is_checkpoint_valid
"""False if the running pass was asked for certain inputs only (`torch.autograd.grad`, ``inputs=``)."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node that the engine runs on this thread; None outside of one."""


def _count_led_to() -> int:
    with torch.inference_mode(mode=False), torch.enable_grad():
        tensor = torch.zeros(1, requires_grad=True)
        result = tensor.exp()
    count = sys.getrefcount(tensor)
    del result
    return count


LED_TO = _count_led_to()
"""What `getrefcount` counts of a tensor that one variable holds, and the graph of what was computed from it.

Where C++ holds a tensor, some versions of torch hold its Python object, too.
"""
