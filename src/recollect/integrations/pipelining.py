"""One recomputation per micro-batch where a schedule of `torch.distributed.pipelining` splits backward.

A zero-bubble schedule splits a micro-batch's backward into two halves: first the gradients of a stage's inputs, then,
with other micro-batches in between, those of its weights, with one call of autograd for each group of weights. A region
is correct under all of that, but would recompute for the first half and for every call of the second.

Stages that torch traces (`torch.distributed.pipelining.pipeline`) hold operators and no regions: call `recollect.apply`
on their ``submod``, after they are built.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar
from weakref import finalize, ref

from recollect._core.torch_private.pipelining import stages_of
from recollect._recompute.group import Sharing, current_sharing

__all__ = ["SharedRecomputation", "share_recomputation"]


def share_recomputation(stage_or_schedule: Any) -> SharedRecomputation:
    """Let the two halves of a split backward share one recomputation of each region.

    Call it once, when the stages are built. A value that the second half needs lives until then; all others are freed
    as they are used. A schedule or micro-batch that does not split its backward is unaffected, and so is a stage with
    its own `dw_builder`. Inside your own `GraphExecGroup`, that group decides.

    If the second half never comes, its values are freed when the step fails, when the next one begins, with the stage,
    or at ``remove``. Pass the schedule rather than a stage, and it notices failures anywhere in the step.

    Args:
        stage_or_schedule: a pipeline stage (of either frontend), or a schedule for all of its stages on this rank.

    Returns:
        A handle whose ``remove`` ends it.

    Raises:
        TypeError: the argument is neither a stage nor a schedule.
        ValueError: a stage already shares its recomputation.

    >>> import torch, recollect
    >>> from torch import distributed, nn
    >>> from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
    >>> from recollect.integrations.pipelining import share_recomputation
    >>> runs = 0
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ...     def forward(self, x):
    ...         return recollect.checkpoint(self.run)(x)
    ...     def run(self, x):
    ...         global runs
    ...         runs += recollect.is_recomputing()
    ...         return self.body(x)
    >>> distributed.init_process_group("fake", store=distributed.HashStore(), rank=0, world_size=1)
    >>> x, y = torch.zeros(2, 8), torch.zeros(2, 8, requires_grad=True)
    >>> stages = [
    ...     PipelineStage(Block(), 0, 2, torch.device("cpu"), input_args=x, output_args=y),
    ...     PipelineStage(Block(), 1, 2, torch.device("cpu"), input_args=y, output_args=y),
    ... ]
    >>> schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=4, loss_fn=nn.MSELoss())
    >>> handle = share_recomputation(schedule)
    >>> _ = schedule.step(torch.randn(8, 8), target=torch.randn(8, 8))
    >>> runs  # one per stage and micro-batch
    8
    >>> handle.remove()
    >>> distributed.destroy_process_group()
    """
    if _is_stage(stage_or_schedule):
        return SharedRecomputation([stage_or_schedule], None)
    stages = stages_of(stage_or_schedule)
    if not (stages and all(map(_is_stage, stages))):
        message = (
            "share_recomputation expects a pipeline stage or schedule of torch.distributed.pipelining, not "
            f"{type(stage_or_schedule).__name__}"
        )
        raise TypeError(message)
    return SharedRecomputation(stages, stage_or_schedule)


class SharedRecomputation:
    """The handle of `share_recomputation`. It holds the stages only weakly."""

    def __init__(self, stages: list[Any], schedule: Any) -> None:
        shared = [str(stage.stage_index) for stage in stages if _is_shared(stage)]
        if shared:
            message = (
                f"pipeline stage {', '.join(shared)}: its two halves of backward already share their recomputation.\n"
                "Call share_recomputation once for a stage, or call remove() on the first handle before."
            )
            raise ValueError(message)
        splits = [_SplitBackward(stage) for stage in stages]
        self._before: list[_Before] = [*splits]
        if schedule is not None:
            self._before.append(_Step(schedule, splits))

    def remove(self) -> None:
        """Restore the methods of the stages and the schedule, and free values that wait for a second half."""
        before, self._before = self._before, []
        for each in before:
            each.remove()


class _Before:
    """Stands before some methods of an object, under their names. The object holds it and is not held by it."""

    methods: ClassVar[tuple[str, ...]]

    def __init__(self, owner: Any) -> None:
        own = vars(owner)
        self._owner = ref(owner)
        self._earlier = {name: own[name] for name in self.methods if name in own}
        self.is_removed = False
        for name in self.methods:
            own[name] = getattr(self, name)

    def _pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method that this stands before."""
        if name in self._earlier:
            return self._earlier[name](*args, **kwargs)
        owner = self._owner()
        assert owner is not None, "only its owner calls it"
        return getattr(type(owner), name)(owner, *args, **kwargs)

    def remove(self) -> None:
        """Put the methods back; where somebody else stands before this one by now, only pass on from here."""
        self.is_removed = True
        owner = self._owner()
        if owner is None:
            return
        own = vars(owner)
        for name in self.methods:
            if getattr(own.get(name), "__self__", None) is not self:
                continue
            if name in self._earlier:
                own[name] = self._earlier[name]
            else:
                del own[name]


class _SplitBackward(_Before):
    """The two halves of one stage's backward, with what each micro-batch shares between them."""

    methods = ("backward_one_chunk", "backward_weight_one_chunk", "clear_runtime_states")

    def __init__(self, stage: Any) -> None:
        super().__init__(stage)
        self._waiting: dict[int, Sharing] = {}
        # The graph between the halves may be held by a cycle of others; what was recomputed must not wait for that.
        self._finalizer = finalize(stage, _close_all, self._waiting)
        self._finalizer.atexit = False

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The whole backward of a micro-batch, or its first half."""
        arguments = (bwd_chunk_id, loss, full_backward, *args)
        sharing = None
        if not full_backward and self._may_share():
            _close_all(self._waiting, bwd_chunk_id)
            sharing = self._waiting[bwd_chunk_id] = Sharing()
        return self._run(sharing, "backward_one_chunk", *arguments, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The second half."""
        sharing = self._waiting.get(bwd_chunk_id) if current_sharing() is None else None
        try:
            return self._run(sharing, "backward_weight_one_chunk", bwd_chunk_id, *args, **kwargs)
        finally:
            _close_all(self._waiting, bwd_chunk_id)

    def clear_runtime_states(self) -> Any:
        """A step begins: what waits from an earlier one goes."""
        self.close()
        return self._pass_on("clear_runtime_states")

    def _may_share(self) -> bool:
        """Whether autograd runs in both halves. The first stage runs all of its backward in the second one."""
        stage = self._owner()
        assert stage is not None
        has_halves = not stage.is_first and getattr(stage, "dw_builder", None) is None
        return has_halves and not self.is_removed and current_sharing() is None

    def _run(self, sharing: Sharing | None, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            with nullcontext() if sharing is None else sharing.resume():
                return self._pass_on(name, *args, **kwargs)
        except BaseException:  # the step has failed
            self.close()
            raise

    def close(self) -> None:
        """No second half will come: what waits for one goes."""
        _close_all(self._waiting)

    def remove(self) -> None:
        """Put the methods back, and let go of what waits."""
        super().remove()
        self._finalizer.detach()
        self.close()


class _Step(_Before):
    """A schedule's step; when it fails, nothing waits any longer."""

    methods = ("step",)

    def __init__(self, schedule: Any, splits: list[_SplitBackward]) -> None:
        super().__init__(schedule)
        self._splits = splits

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step."""
        try:
            return self._pass_on("step", *args, **kwargs)
        except BaseException:
            for split in self._splits:
                split.close()
            raise


def _close_all(waiting: dict[int, Sharing], *only: int) -> None:
    """Let go of what waits: of these micro-batches, or of all."""
    for micro_batch in only or list(waiting):
        sharing = waiting.pop(micro_batch, None)
        if sharing is not None:
            sharing.close()


def _is_stage(what: Any) -> bool:
    return all(callable(getattr(what, name, None)) for name in _SplitBackward.methods)


def _is_shared(stage: Any) -> bool:
    return isinstance(getattr(vars(stage).get("backward_one_chunk"), "__self__", None), _SplitBackward)
