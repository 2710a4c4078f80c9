"""What a profiled step may change, kept aside before it does and put back after: memory, gradients, optimizers.

Memory is copied to the host just before the first operator that writes into it, so that a step that changes nothing
copies nothing, and the device holds no second copy. Parameters and buffers are also known by the memory they have: a
step that gives them other memory (``p.data = ...``) gets the old one back; see `exchanged`. What a first forward sets
up (hooks, parts, buffers that were not there) stays set up, once; see `attributes` for the flags by which models know.
Not seen: writes past the operators (through ``numpy`` or raw pointers), and Python objects other than these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from weakref import ref

import torch
from torch import Tensor, nn

from recollect._core.torch_private.pytree import tree_leaves
from recollect._profile.attributes import PARTS_AND_HOOKS, Attributes
from recollect._profile.contents import Contents
from recollect._profile.exchanged import TensorMemories
from recollect._profile.storages import Found, storages_of

_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_SMALL = 2**20
_DEEPEST = 6  # states of optimizers are dicts of dicts, some with lists in them


class Snapshot:
    """Keeps aside what is about to change; `restore` puts it back."""

    def __init__(self) -> None:
        self._contents = Contents()
        self._written: dict[int, tuple[ref[torch.UntypedStorage], torch.UntypedStorage]] = {}
        self._initialised: dict[int, ref[torch.UntypedStorage]] = {}
        self._gradients: dict[int, _Gradient] = {}
        self._attributes = Attributes()
        self.memories = TensorMemories()
        self._modes: list[tuple[nn.Module, bool]] = []
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    def note_module(self, module: nn.Module) -> None:
        """Keep which tensors and parts a module has, the gradients and flags."""
        for part in module.modules():
            for name in _TABLES:
                self._contents.note_lost(vars(part).get(name))
            self._attributes.note(part)
            self._modes.append((part, part.training))
        for tensor in (*module.parameters(), *module.buffers()):
            self.memories.add(tensor)
        for parameter in module.parameters():
            self.note_leaf(parameter)
        # On a device small ones are copied now: in the midst of the step each copy would wait for all that is queued.
        for tensor in module.buffers():
            self.before_write(
                (storage, device)
                for storage, device in storages_of(tensor)
                if device.type not in ("cpu", "meta") and storage.nbytes() <= _SMALL
            )

    def note_set_up(self, module: nn.Module) -> None:
        """The step has run once: parts and hooks that it has set, or taken away, stay so, whatever it does again."""
        self._attributes.settle(self._has_initialised)
        for part in module.modules():
            for name in PARTS_AND_HOOKS:
                self._contents.note(vars(part).get(name))

    def note_leaf(self, leaf: Tensor) -> None:
        """Keep the gradient that a tensor has now; the first time counts. The tensor itself is not held."""
        known = self._gradients.get(id(leaf))
        if known is None or known.leaf() is not leaf:
            self._gradients[id(leaf)] = _Gradient(leaf)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep an optimizer's state and settings; the first time counts."""
        self._contents.note(vars(optimizer))
        self._contents.note(optimizer.state, depth=_DEEPEST)
        self._contents.note(optimizer.param_groups, depth=_DEEPEST)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.note_leaf(parameter)

    def note_object(self, thing: object) -> None:
        """Keep the attributes of a scheduler, a loss scaler or the like, and what its lists and dicts have."""
        self._contents.note(vars(thing), depth=_DEEPEST)

    def note_generator(self, generator: torch.Generator) -> None:
        """Keep the state of a generator that is about to be drawn from; the first time counts."""
        if id(generator) not in self._generators:
            self._generators[id(generator)] = (generator, generator.get_state())

    def before_write(self, found: Iterable[Found], *, is_before_backward: bool = False) -> None:
        """These storages are about to be written into; the first time counts.

        They are not held: a region that runs again writes into copies of buffers, which would stay until the end.
        """
        for storage, device in found:
            if is_before_backward:
                self._initialised[id(storage)] = ref(storage)
            if not self._has_copy(storage):
                copy = storage.clone() if device.type == "cpu" else storage.cpu()
                self._written[id(storage)] = (ref(storage), copy)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to write into its parameters and its state; the first time counts."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for tensor in (*parameters, *tensors_of_optimizer(optimizer)):
            self.before_write(storages_of(tensor))

    def _has_copy(self, storage: torch.UntypedStorage) -> bool:
        known = self._written.get(id(storage))
        return known is not None and known[0]() is storage

    def _has_initialised(self, part: nn.Module) -> bool:
        """Whether forward has written into a module's own parameters or buffers: before backward, nobody else does."""
        own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        storages = (storage for tensor in own for storage, _ in storages_of(tensor))
        found = ((self._initialised.get(id(storage)), storage) for storage in storages)
        return any(known is not None and known() is storage for known, storage in found)

    def clear_gradients(self) -> None:
        """Let the known leaves have no gradient, as after ``zero_grad``; `restore` gives theirs back."""
        for gradient in self._gradients.values():
            leaf = gradient.leaf()
            if leaf is not None:
                leaf.grad = None

    def gradients(self) -> Iterator[Tensor]:
        """The gradients that the known leaves had at first."""
        for known in self._gradients.values():
            if known.gradient is not None:
                yield known.gradient

    def count_missed(self) -> int:
        """How many parameters and buffers were written into past the operators that were seen: they stay so."""
        return sum(
            memory.was_written and not any(self._has_copy(storage) for storage, _ in storages_of(memory.tensor))
            for memory in self.memories
        )

    def restore(self) -> None:
        """Put everything back."""
        self._attributes.settle(self._has_initialised)  # it may have failed before it was said to have run
        for weak, copy in self._written.values():
            storage = weak()
            if storage is None:
                continue
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._contents.restore()
        self._attributes.restore()
        for memory in self.memories:
            memory.restore()
        for module, training in self._modes:
            module.training = training
        for gradient in self._gradients.values():
            gradient.restore()
        for generator, state in self._generators.values():
            generator.set_state(state)


class _Gradient:
    """The gradient that a leaf had. One that is not strided has its memory exchanged when it is added to."""

    __slots__ = ("_copy", "gradient", "leaf")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = ref(leaf)
        self.gradient = leaf.grad
        self._copy: Tensor | None = None
        if self.gradient is not None and self.gradient.layout is not torch.strided:
            self._copy = self.gradient.detach().clone()

    def restore(self) -> None:
        leaf = self.leaf()
        if self._copy is not None and self.gradient is not None:
            with torch.no_grad():
                self.gradient.copy_(self._copy)
        if leaf is not None and leaf.grad is not self.gradient:
            leaf.grad = self.gradient


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer after those that it has do its work; without itself where it has no parameters of its own.

    Such a one, as Accelerate and Lightning put around the user's, passes calls on and decides only whether to.
    """
    attributes = vars(optimizer)
    inside = [value for value in attributes.values() if isinstance(value, torch.optim.Optimizer)]
    found = [one for inner in inside for one in optimizers_in(inner)]
    return found if found and "param_groups" not in attributes else [*found, optimizer]


def tensors_of_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]


def name_states(optimizer: torch.optim.Optimizer, paths: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    """The same, each with a name: ``"embed.weight.exp_avg"``, given the paths of parameters by their ids."""
    for key, values in optimizer.state.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield f"{paths.get(id(key), '')}.{name}".strip("."), leaf
