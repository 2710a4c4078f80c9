"""What autograd's engine says about the node that runs on this thread.

Would be replaced by: a public way to ask the running node which of its gradients this pass makes.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from typing import Any

import torch


def node_runs_in_part() -> bool:
    """Whether the running node makes only some of its gradients in this pass, so that a later one will run it again.

    So it is where a backward pass is split: the node of a matrix product makes its input's gradient first and its
    weight's later, and reads all that it saved both times. Costs about 1 µs per gradient; False outside of a node.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return False
    return any(following is not None and not _is_reached(following) for following, _ in node.next_functions)


def _is_reached(node: Any) -> bool:
    try:
        reached: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient is asked for by `torch.autograd.grad`: caught, not executed
        return True
    return reached
