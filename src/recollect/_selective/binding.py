"""Binds the tensors of one forward to their numbers in a program, and checks that they are used the same way.

A tensor is known by a weak reference, by its version, and, if others are views of it, by where its memory begins. One
that is used differently than when the program was learned breaks the program.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from recollect._core.operators import storages_in
from recollect._core.pytree import Arguments
from recollect._selective.program import (
    NOWHERE,
    Bound,
    Call,
    Program,
    Unfixed,
    View,
    fixed,
    flags_of,
    hold,
    template_of,
)
from recollect._selective.recording import results_of
from recollect._selective.tensor_classes import TensorClasses

OTHER_CALLS = "it calls torch differently than in its first call"
OTHER_WAYS = "its tensors are used differently than in its first call"


class Binding:
    """What is bound in one forward. The base of what follows a program, so that hooks reach all of it in one step.

    Args:
        program: what is followed.
        classes: which tensors are plain.

    Attributes:
        program: as given.
        bound: what replay will need.
        why_broken: what is not as in the program; None so far.
    """

    def __init__(self, program: Program, classes: TensorClasses) -> None:
        super().__init__()
        self._plain, self._start = classes.plain, classes.start
        self.program = program
        self.bound = Bound(len(program.makers), len(program.calls))
        self.why_broken: str | None = None
        self._refs: list[Any] = [None] * len(program.makers)
        self._starts: dict[int, int] = {}  # where in memory those are that others are views of

    def begin(self, arguments: Arguments) -> None:
        """Bind the region's arguments."""
        leaves = arguments.leaves
        for number, index in self.program.inputs.items():
            tensor: Any = leaves[index] if index < len(leaves) else None  # a list may be shorter than it was
            if type(tensor) not in self._plain or tensor.is_inference():
                self.why_broken = OTHER_WAYS
                return
            self._refs[number] = ref(tensor)
            self.bound.versions[number] = tensor._version  # noqa: SLF001
            if number in self.program.bases:
                self._starts[number] = self._start(tensor)

    def _rest(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """The arguments that are not tensors."""
        try:
            others = [fixed(args[place]) for place in call.others]
            named = kwargs.items() if kwargs else ()
            return others, {name: fixed(value) for name, value in named if name not in call.names}
        except Unfixed:  # a tensor where there was none, or something that may change
            self.why_broken = OTHER_WAYS
            return None

    def _check_grad(self, call: Call, tensors: list[Tensor]) -> None:
        if call.needs_grad != tuple(tensor.requires_grad for tensor in tensors):
            self.why_broken = OTHER_WAYS

    def _bind_general(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """The same for calls with tensors in lists."""
        if not call.is_general:
            self.why_broken = OTHER_CALLS
            return
        met: list[Tensor] = []
        numbers = iter(call.links)

        def name(tensor: Tensor) -> int:
            met.append(tensor)
            return next(numbers, NOWHERE)

        try:
            self.bound.arguments[index] = (
                [template_of(value, name) for value in args],
                {key: template_of(value, name) for key, value in (kwargs or {}).items()},
            )
        except Unfixed:
            self.why_broken = OTHER_WAYS
            return
        if len(met) != len(call.links):
            self.why_broken = OTHER_WAYS
            return
        for number, value in zip(call.links, met, strict=True):
            if number == NOWHERE:
                continue
            known = self._refs[number]
            if known is None:
                self._bind_outside(number, value)
            elif known() is not value or value._version != self.bound.versions[number]:  # noqa: SLF001
                self.why_broken = OTHER_WAYS
        if call.needs_grad is not None:
            self._check_grad(call, met)

    def _bind_outside(self, number: int, tensor: Any) -> None:
        """A parameter, something the function closes over, the result of a kept block: seen for the first time."""
        if type(tensor) not in self._plain or self.program.makers[number] >= 0 or tensor.is_inference():
            self.why_broken = OTHER_WAYS
            return
        self._refs[number] = ref(tensor)
        self.bound.held[number] = hold(tensor)
        self.bound.versions[number] = tensor._version  # noqa: SLF001
        if number in self.program.bases:
            self._starts[number] = self._start(tensor)

    def _check_memory(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """What is overwritten later must be memory of its own; statistics that were only updated must be so again."""
        is_read = bool(call.scratch) and flags_of(args, kwargs) != call.flags
        made = storages_in(results_of(result)) if call.is_overwritten and not call.bump else []
        given = storages_in(args, kwargs) if made else []
        if is_read or any(one is other for one in made for other in given):
            self.why_broken = OTHER_WAYS

    def _check_identity(self, index: int, call: Call, result: Any) -> None:
        """A result that was one of the arguments (of `contiguous`, `to`, a dropout of nothing) must be so again."""
        for number, tensor in zip(call.outs, results_of(result) or (), strict=True):
            if number < 0 or self.program.makers[number] == index:
                continue
            known = self._refs[number]
            if known is None and self.program.makers[number] == NOWHERE:  # a parameter, seen here for the first time
                self._bind_outside(number, tensor)
            elif known is None or known() is not tensor:
                self.why_broken = OTHER_WAYS

    def _bind_views(self, call: Call, result: Any) -> None:
        """Results that are views must be the same views of the same tensors."""
        assert call.views is not None
        refs = self._refs
        for place, tensor in enumerate((result,) if call.is_single else results_of(result) or ()):
            number = call.outs[place]
            if number < 0:
                continue
            refs[number] = ref(tensor)
            self.bound.versions[number] = tensor._version  # noqa: SLF001
            view = call.views.get(place)
            if view is not None and not self._is_view(tensor, view):
                self.why_broken = OTHER_WAYS

    def _is_view(self, tensor: Tensor, view: View) -> bool:
        start = self._starts.get(view.number)
        return (
            start is not None
            and (self._start(tensor) - start == view.delta or not tensor.numel())  # torch says 0 for what is empty
            and tensor.stride() == view.stride
            and tensor.shape == view.shape
        )

    def _bind_results(self, call: Call, result: Any) -> None:
        bound = self.bound
        for place, (number, tensor) in enumerate(zip(call.outs, results_of(result) or (), strict=True)):
            if number >= 0:
                self._refs[number] = ref(tensor)
                bound.versions[number] = tensor._version  # noqa: SLF001
                if place in call.kept:
                    bound.held[number] = tensor.detach()
                if number in self.program.bases:
                    self._starts[number] = self._start(tensor)
