"""A region's arguments, as recomputation will need them."""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from recollect._core.errors import ChangedInputError
from recollect._core.torch_private.engine import LED_TO, set_grad_enabled
from recollect._core.torch_private.forward_ad import enter_level, has_level, make_dual, tangent_of
from recollect._recompute.handles import find_slot, frame_of

if TYPE_CHECKING:
    from recollect._core.pytree import Arguments
    from recollect._recompute.joins import Joins


class Inputs:
    """The arguments of one call, cut off from the graph.

    Cut off, so that no gradient and no hook of the recomputation reaches the original graph, and so that an input
    written in place later, whose history then leads back to this region, is not held by its own history.

    Inside saved-tensor hooks (an enclosing region, `save_on_cpu`) each tensor is given to those hooks, exactly as
    autograd would give them a saved tensor, and only the answer is held.

    Attributes:
        aliases: what stands for the tensors with gradient; None if `empty` cannot let go of them.
        are_led_to: whether recomputed values that the frame holds lead to them, through the graph they are in.
    """

    __slots__ = (
        "_arguments",
        "_changed",
        "_constants",
        "_given",
        "_held",
        "_joined",
        "_originals",
        "_own_leaves",
        "_requires_grad",
        "_tangents",
        "_tensors",
        "_unpack",
        "_versions",
        "aliases",
        "are_led_to",
    )

    def __init__(
        self,
        arguments: Arguments,
        hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None,
        joins: Joins | None = None,
    ) -> None:
        self._arguments = arguments
        held = self._held = list(arguments.leaves)
        self._tensors = arguments.tensors
        try:
            self._versions = [held[index]._version for index in self._tensors]  # noqa: SLF001
        except RuntimeError:  # an inference tensor has no version and cannot be saved: it passes like any other value
            self._tensors = [index for index in arguments.tensors if not held[index].is_inference()]
            self._versions = [held[index]._version for index in self._tensors]  # noqa: SLF001
        self._requires_grad: list[bool] = []
        self._unpack: Callable[[Any], Tensor] | None = None
        self._originals: list[Tensor] | None = None
        self._changed: int | None = None
        # Tensors without gradient come back as the very same objects, if they are still alive.
        self._constants: list[tuple[int, ref[Tensor]]] = []
        self._own_leaves: list[int] = []  # those that are held as they are
        self._given: list[ref[Tensor]] = []  # those with a history of their own
        self._joined: list[int] = []  # those that another region makes again
        self.aliases: list[Tensor] | None = None
        self.are_led_to = False
        # What forward-mode differentiation has attached, by place: an alias loses it.
        self._tangents = self._find_tangents() if has_level() else None
        if hooks is not None and self._tensors:
            self._pack(*hooks)
            return
        if joins is not None:
            self._forget_joined(joins)
        self._cut()

    def _pack(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Give the tensors to enclosing hooks."""
        self._unpack, held = unpack, self._held
        frame = frame_of(pack)
        if frame is not None:
            frame.encloses = True
        originals = self._originals = [held[index] for index in self._tensors]
        self._requires_grad = [tensor.requires_grad for tensor in originals]
        set_grad_enabled(False)
        try:
            for index, tensor in zip(self._tensors, originals, strict=True):
                # Whoever holds the tensor itself would hold its history, which leads back here if the function
                # writes into it.
                is_leaf = tensor.requires_grad and tensor.is_leaf
                packed = pack(tensor if frame is not None or is_leaf else tensor.detach())
                held[index] = tensor.detach() if packed is tensor and not is_leaf else packed
        finally:
            set_grad_enabled(True)

    def _cut(self) -> None:
        """Hold aliases without history."""
        held, cut, with_gradient = self._held, dict[int, Tensor](), list[Tensor]()
        are_plain = not self._joined
        for index in self._tensors:
            tensor = held[index]
            requires_grad = tensor.requires_grad
            if requires_grad and tensor.is_leaf:
                self._own_leaves.append(index)
                continue
            key = id(tensor)
            alias = cut.get(key)
            if alias is None:
                alias = cut[key] = tensor.detach()
                if requires_grad:
                    alias.requires_grad_()
                    with_gradient.append(alias)
                    are_plain = are_plain and type(alias) is Tensor
                    self._given.append(ref(tensor))
            if not requires_grad:
                self._constants.append((index, ref(tensor)))
            held[index] = alias
        if are_plain:
            self.aliases = with_gradient

    def _find_tangents(self) -> dict[int, Tensor]:
        found = {index: tangent_of(self._held[index]) for index in self._tensors}
        return {
            index: tangent.detach().requires_grad_(tangent.requires_grad)
            for index, tangent in found.items()
            if tangent is not None
        }

    def _forget_joined(self, joins: Joins) -> None:
        """Hold what stands for a tensor, where the region that gave it makes it again."""
        held = self._held
        for index in self._tensors:
            joined = joins.take(held[index])
            if joined is not None:
                self._given.append(ref(held[index]))
                held[index] = joined
                self._joined.append(index)
        if self._joined:
            others = [place for place, index in enumerate(self._tensors) if index not in self._joined]
            self._tensors = [self._tensors[place] for place in others]
            self._versions = [self._versions[place] for place in others]

    @property
    def are_packed(self) -> bool:
        """Whether somebody else holds or makes the tensors, so that they come back as other objects."""
        return self._unpack is not None or bool(self._joined)

    def empty(self) -> None:
        """Let go of the tensors, though the graph of a recomputation leads to them: of those that nobody else holds.

        A value that is one of them is somebody else, and so is whoever has put one away.
        """
        aliases, self._held, self.aliases = self.aliases or [], [], []
        while aliases:
            alias = aliases.pop()
            if getrefcount(alias) == LED_TO and alias._use_count() == 2:  # type: ignore[attr-defined] # noqa: SLF001, PLR2004
                alias.data = alias.new_empty(0)

    def held_tensors(self) -> list[tuple[str, Any]]:
        """Each tensor argument, as its caller wrote it, with the tensor, the enclosing region's slot, or what else."""
        found = []
        for index in self._arguments.tensors:
            value = self._held[index]
            packed, unpack = value.packed if index in self._joined else (value, self._unpack)
            found.append((self._arguments.describe(index), find_slot(packed, unpack) or value))
        return found

    def has_given(self, tensor: Tensor) -> bool:
        """Until `settle`: whether this is one of the arguments."""
        if self._originals is not None:
            return any(tensor is original for original in self._originals)
        return any(tensor is given() for given in self._given)

    def settle(self) -> None:
        """At exit: see whether the function wrote into tensors that enclosing hooks now hold, and let those go."""
        if self._originals is not None:
            self._note_changes()
            self._originals = None

    def _note_changes(self) -> None:
        for index, tensor, version in zip(self._tensors, self._originals or (), self._versions, strict=False):
            if tensor._version != version:  # noqa: SLF001
                self._changed = index

    def materialise(self, region: str) -> list[Any]:
        """Leaves to call the function with again.

        Raises:
            ChangedInputError: a tensor was changed in place since the region was entered.
        """
        if self._unpack is not None:
            return self._unpack_all(region, self._unpack)
        held = self._held
        for index, version in zip(self._tensors, self._versions, strict=True):
            if held[index]._version != version:  # noqa: SLF001
                raise ChangedInputError(self._describe_change(region, index))
        if not self._constants and not self._joined and not self._own_leaves:
            return held
        leaves = list(held)
        for index in self._own_leaves:
            if not held[index].requires_grad:  # somebody has set it since
                leaves[index] = held[index].detach().requires_grad_()
        for index in self._joined:
            leaves[index] = held[index].get().detach().requires_grad_()
        for index, original in self._constants:
            tensor = original()
            if tensor is not None and not tensor.requires_grad:
                leaves[index] = tensor
        return leaves

    def _unpack_all(self, region: str, unpack: Callable[[Any], Tensor]) -> list[Any]:
        """The same where enclosing hooks hold the tensors."""
        self._note_changes()
        if self._changed is not None:
            raise ChangedInputError(self._describe_change(region, self._changed))
        leaves = list(self._held)
        for index, requires_grad in zip(self._tensors, self._requires_grad, strict=True):
            tensor = unpack(leaves[index])
            if requires_grad and not (tensor.is_leaf and tensor.requires_grad):
                tensor = tensor.detach().requires_grad_()
            elif tensor.requires_grad and not requires_grad:
                tensor = tensor.detach()
            leaves[index] = tensor
        return leaves

    def _describe_change(self, region: str, index: int) -> str:
        return (
            f"region '{region}': {self._arguments.describe(index)} was changed in place after the region was "
            "entered.\n"
            "Recomputation would read the new value. Either the function writes into its own input, or something did "
            "between forward and backward.\n"
            "Use the out-of-place form of that operation, or pass a clone."
        )

    def call(self, fn: Callable[..., Any], leaves: list[Any]) -> Any:
        """Call the function with these leaves."""
        if self._tangents:
            return self._call_dual(fn, leaves, self._tangents)
        if self._arguments.are_positional:
            return fn(*leaves)
        args, kwargs = self._arguments.rebuild(leaves)
        return fn(*args, **kwargs)

    def _call_dual(self, fn: Callable[..., Any], leaves: list[Any], tangents: dict[int, Tensor]) -> Any:
        """The same, with what forward-mode differentiation had attached."""
        with enter_level():
            duals = [make_dual(leaf, tangents[at]) if at in tangents else leaf for at, leaf in enumerate(leaves)]
            args, kwargs = self._arguments.rebuild(duals)
            return fn(*args, **kwargs)
