"""Selective checkpointing with torch's names: a policy says of each operator whether its result is kept.

The policy is asked in forward only, once for each operator, after it ran. Whatever it says, some run again, to the same
values and at no cost in memory: views, operators that write in place (unless they draw random numbers), memory that is
not filled yet. Backward can be run as often as the graph allows, with ``debug=True`` too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch.utils.checkpoint import CheckpointPolicy  # torch's own, so that its users' policies mean the same here

from recollect._core.errors import ChangedInputError, CheckpointError, MismatchError
from recollect._core.operators import Operator, operator_of
from recollect._core.places import Place, Places
from recollect._core.torch_private.engine import top_hooks
from recollect._core.torch_private.ops import op_name, packet_name
from recollect._core.torch_private.schemas import HigherOrderOperator, OpOverload
from recollect._offload.offload import Offload, offload_everything
from recollect._policy.base import CallPolicy
from recollect._selective.keeping_mode import KeepingMode
from recollect._selective.kept_call import KeptCall
from recollect._selective.kept_calls import Counter, KeptCalls
from recollect._selective.served_way import SERVED, marking
from recollect._selective.serving_mode import ServingMode

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame
    from recollect._recompute.way import Pack

_aten, _profiler = torch.ops.aten, torch.ops.profiler

SAC_IGNORED_OPS: set[Any] = {
    _aten.detach.default,
    _aten.lift_fresh.default,
    torch.ops.prim.device.default,
    _aten.is_contiguous.default,
    _aten.is_contiguous.memory_format,
    _aten.is_strides_like_format.default,
    _aten.is_non_overlapping_and_dense.default,
    _aten.size.default,
    _aten.sym_size.default,
    _aten.stride.default,
    _aten.sym_stride.default,
    _aten.storage_offset.default,
    _aten.sym_storage_offset.default,
    _aten.numel.default,
    _aten.sym_numel.default,
    _aten.dim.default,
    _profiler._record_function_enter.default,  # noqa: SLF001
    _profiler._record_function_enter_new.default,  # noqa: SLF001
    _profiler._record_function_exit.default,  # noqa: SLF001
    _profiler._record_function_exit._RecordFunction,  # noqa: SLF001
}
"""Operators that no policy is asked about: they run at other times in recomputation than in forward. Yours to add to,
while no graph is alive that was made before."""

Policy = Callable[..., Any]


class SelectiveCheckpointContext:
    """What a policy gets in addition to the operator and its arguments.

    Attributes:
        is_recompute: False: the policy is asked in forward only.
        op_output: the operator's result.
    """

    def __init__(self, *, is_recompute: bool, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output


class _Answer:
    """What becomes of a result."""

    __slots__ = ("is_kept", "is_offloaded", "is_written", "place")

    def __init__(self, *, is_kept: bool, is_offloaded: bool = False) -> None:
        self.is_kept, self.is_offloaded, self.is_written = is_kept, is_offloaded, False
        self.place: Place | None = None  # looked for when an error needs it: recomputation comes by the same place


_KEEP, _RECOMPUTE = _Answer(is_kept=True), _Answer(is_kept=False)
_OFFLOAD = _Answer(is_kept=True, is_offloaded=True)
_MEANINGS = {
    CheckpointPolicy.MUST_SAVE: _KEEP,
    CheckpointPolicy.PREFER_SAVE: _KEEP,
    CheckpointPolicy.MUST_RECOMPUTE: _RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: _RECOMPUTE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: _OFFLOAD,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: _OFFLOAD,
}


class _Asker:
    """Asks the policy. Not the mode itself, which would then hold itself alive."""

    __slots__ = ("_policy",)

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def ask(self, func: Any, operator: Operator, call: int, args: Any, kwargs: Any, result: Any) -> _Answer:
        """What becomes of one result."""
        del call
        answer = self._policy(SelectiveCheckpointContext(is_recompute=False, op_output=result), func, *args, **kwargs)
        if isinstance(answer, bool):
            meaning = _KEEP if answer else _RECOMPUTE
        elif not isinstance(answer, CheckpointPolicy):
            message = f"the policy answered {answer!r} for {operator.name}; expected a CheckpointPolicy or a bool"
            raise TypeError(message)
        else:
            meaning = _MEANINGS[answer]
        return meaning


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Policy | list[Any],
    allow_cache_entry_mutation: bool = False,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make the two contexts of one region under a policy; pass a partial of it to `checkpoint` as ``context_fn``.

    Args:
        policy_fn_or_list: the operators whose results are kept, as overloads; or a function of a
            `SelectiveCheckpointContext`, the operator and its arguments that returns a `CheckpointPolicy` or a bool.
        allow_cache_entry_mutation: whether the function may write into a kept value. If so, the value is copied before
            the write, so that recomputation sees what forward computed. If not, recomputation raises an error.

    Raises:
        ValueError: something in the list is not an overload.
        TypeError: it is neither a list nor a function.

    >>> import functools, torch
    >>> from recollect.compat import checkpoint, create_selective_checkpoint_contexts
    >>> keep_products = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    >>> x = torch.randn(4, 4, requires_grad=True)
    >>> y = checkpoint(lambda x: (x @ x).sin().exp(), x, use_reentrant=False, context_fn=keep_products)
    >>> y.sum().backward()  # runs sin and exp again, but no product
    >>> create_selective_checkpoint_contexts([torch.ops.aten.mm])
    Traceback (most recent call last):
    ...
    ValueError: aten.mm stands for several operators; write the one you mean: torch.ops.aten.mm.default, ...
    """
    if isinstance(policy_fn_or_list, list):
        policy = _policy_of(policy_fn_or_list)
    elif callable(policy_fn_or_list):
        policy = policy_fn_or_list
    else:
        message = f"expected a list of operators or a policy function, not {policy_fn_or_list!r}"
        raise TypeError(message)
    kept_calls = _KeptCalls(may_write=bool(allow_cache_entry_mutation))
    return _Forward(kept_calls, policy), _Again(kept_calls)


def _policy_of(ops: list[Any]) -> Policy:
    for op in ops:
        if isinstance(op, (OpOverload, HigherOrderOperator)):
            continue
        packet = packet_name(op)
        if packet is not None:
            overloads = [f"torch.ops.{packet}.{name}" for name in op.overloads()]
            message = f"{packet} stands for several operators; write the one you mean: {', '.join(overloads)}"
        elif (name := op_name(op)) is not None:
            message = f"{op!r} wraps an operator; write the operator itself: torch.ops.{name}"
        else:
            message = f"{op!r} is not an operator; write an overload such as torch.ops.aten.mm.default"
        raise ValueError(message)
    kept = frozenset(ops)

    def keep_listed(_: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any) -> bool:
        return op in kept

    return keep_listed


class _KeptCalls(KeptCalls):
    """What forward tells recomputation: what was kept, how often each operator ran, who wrote into a kept value."""

    __slots__ = ("is_complete", "may_write", "ran", "writers")

    def __init__(self, *, may_write: bool) -> None:
        super().__init__("selective checkpoint")
        self.may_write = may_write
        self.is_complete = False
        self.ran = Counter()
        self.writers: dict[KeptCall, str] = {}

    def offloader(self) -> Offload:
        """To the host, whatever the size: what is there already is copied, as torch does."""
        return offload_everything()

    def refuse(self, kept: KeptCall) -> None:
        """Raise, because a kept value was written into; where that is allowed the call is run again.

        Raises:
            ChangedInputError: it is not allowed.
        """
        if self.may_write:
            return
        message = (
            f"region '{self.region}': the result of {kept.label}{Places().find(2)}, which the policy keeps, was "
            f"changed in place by {self.writers.get(kept, 'something after the region')}.\n"
            "Recomputation would read the changed value. Use the out-of-place form of that operation, or pass "
            "allow_cache_entry_mutation=True: the value is then copied before it is written into."
        )
        raise ChangedInputError(message)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _InGraph(CallPolicy):
    """A torch-style policy for the nodes of a graph."""

    fn: Policy

    def __repr__(self) -> str:
        return "a torch-style policy"

    def judge_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Ask, unless it is an operator that no policy is asked about."""
        if func in SAC_IGNORED_OPS:
            return None
        answer = self.fn(SelectiveCheckpointContext(is_recompute=False, op_output=result), func, *args, **kwargs)
        if isinstance(answer, bool):
            return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        return answer


class _Forward(KeepingMode):
    """Around forward: asks the policy, and keeps."""

    _kept_calls: _KeptCalls
    policy_in_graph: CallPolicy

    def __init__(self, kept_calls: _KeptCalls, policy: Policy) -> None:
        super().__init__(kept_calls, _Asker(policy).ask)
        self.policy_in_graph = _InGraph(policy)
        self._counter = kept_calls.ran
        self._was_entered = False
        # Read before the region's own hooks are in force: what is kept is a saved tensor of whoever is around.
        self._around = top_hooks(True)

    def __enter__(self) -> Self:
        if self._was_entered:
            message = (
                "the contexts of create_selective_checkpoint_contexts work for one call of a region, but these have "
                "been used already.\n"
                "Give `checkpoint` a function that makes new ones: "
                "context_fn=functools.partial(create_selective_checkpoint_contexts, policy)."
            )
            raise CheckpointError(message)
        self._was_entered = True
        return super().__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        self._kept_calls.is_complete = True
        if exc is None:
            self._kept_calls.settle(self._around)

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and keep its result if the policy says so."""
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        return super().meet(func, args, kwargs)

    def _meet_write(self, kept: KeptCall, operator: Operator) -> None:
        if self._kept_calls.may_write:
            super()._meet_write(kept, operator)
        else:
            kept.must_rerun = True  # in inference mode the version would not tell
            self._kept_calls.writers.setdefault(kept, f"{operator.name}{Places().find(2)}")


class _Again(ServingMode):
    """Around each recomputation: gives what was kept."""

    _kept_calls: _KeptCalls

    def __init__(self, kept_calls: _KeptCalls) -> None:
        super().__init__(kept_calls, refuse=kept_calls.refuse)

    def take_over(self, frame: Frame) -> Pack:
        """A region begins under these contexts: what was kept is given by its way, which needs to be told the order."""
        frame.way = SERVED
        return marking(frame.pack(), self._kept_calls.tally)

    def __enter__(self) -> Self:
        """A recomputation starts: count from the beginning, as far as forward came."""
        entered = super().__enter__()
        if self._kept_calls.is_complete:  # not in a backward inside the function
            self._counter = _Limited(self._kept_calls)
        return entered

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give what was kept of this call, or run it."""
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        return super().meet(func, args, kwargs)


class _Limited(Counter):
    """Numbers the calls of a recomputation, and refuses those that forward did not make."""

    __slots__ = ("_kept_calls",)

    def __init__(self, kept_calls: _KeptCalls) -> None:
        super().__init__()
        self._kept_calls = kept_calls

    def next(self, what: Any) -> int:
        number = super().next(what)
        if number >= self._kept_calls.ran.count(what):
            self._refuse(what, number)
        return number

    def _refuse(self, what: Any, number: int) -> NoReturn:
        func, _is_tracked = what
        message = (
            f"region '{self._kept_calls.region}': recomputation calls {operator_of(func).name}{Places().find(3)}, more "
            f"than the {number} times that forward did.\n"
            "The function took a different path than in forward: it read something that changed in between.\n"
            "To see both operator logs side by side, wrap the step in `recollect.explain_mismatch()`."
        )
        raise MismatchError(message)
