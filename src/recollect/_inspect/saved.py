"""Which tensors the graph behind a loss holds for backward: read off the graph itself, at any time."""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from recollect._core.torch_private.graph import NodeValue, is_parameter, leaf_of, read_node, walk
from recollect._core.torch_private.pytree import tree_leaves
from recollect._core.units import count_noun, format_bytes
from recollect._inspect.packed import Packed, Part
from recollect._profile.storages import storages_of

_MOST_HOLDERS = 3


class Fate(Enum):
    """What becomes of a saved tensor between forward and backward."""

    KEPT = "autograd holds it as it is"
    REGION = "a region holds it: one of its inputs, or a value it keeps or has recomputed"
    PACKED = "other saved-tensor hooks hold it, or what they made of it"
    PARAMETER = "a parameter, or another leaf that requires grad: alive without the graph"
    FORGOTTEN = "a region has let it go and will recompute it"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEntry:
    """One saved tensor, or, where it is made of several storages, one of these. Holds no tensor."""

    holder: str
    """The node, or the region, that holds it."""
    attribute: str
    """What the holder calls it."""
    kind: Fate
    owner: str = ""
    """The region that holds or has forgotten it, or the hooks that packed it."""
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    tensor_bytes: int = 0
    """Bytes of its elements."""
    storage: int | None = None
    """Equal numbers are one storage; None if there is none here: it is forgotten, or packed into no tensor."""
    storage_bytes: int = 0
    """Bytes it keeps alive."""

    def __str__(self) -> str:
        """Who holds it."""
        if self.holder == f"region '{self.owner}'":
            return f"{self.holder} ({self.attribute})"
        by = {Fate.REGION: f" (region '{self.owner}')", Fate.PACKED: f" (packed by {self.owner})"}
        return f"{self.holder}.{self.attribute}{by.get(self.kind, '') if self.owner else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedReport:
    """What the graph behind a loss holds for backward."""

    entries: tuple[SavedEntry, ...]
    freed_nodes: int
    """Nodes whose saved tensors a backward pass has released."""
    opaque_nodes: tuple[str, ...]
    """Names of nodes that may hold tensors which torch does not show."""

    @property
    def held(self) -> list[list[SavedEntry]]:
        """Entries of each storage that the graph holds, parameters left out; largest storage first."""
        return _by_storage(entry for entry in self.entries if entry.kind is not Fate.PARAMETER)

    @property
    def parameters(self) -> list[list[SavedEntry]]:
        """Entries of each parameter's storage among the saved tensors; largest first."""
        return _by_storage(entry for entry in self.entries if entry.kind is Fate.PARAMETER)

    @property
    def forgotten(self) -> list[SavedEntry]:
        """Tensors that regions will recompute."""
        return [entry for entry in self.entries if entry.kind is Fate.FORGOTTEN]

    @property
    def packed_away(self) -> list[SavedEntry]:
        """What hooks of others packed into something that holds no tensor."""
        return [entry for entry in self.entries if entry.kind is Fate.PACKED and entry.storage is None]

    @property
    def held_bytes(self) -> int:
        """Bytes that the graph keeps alive: each storage once, parameters left out."""
        return sum(entries[0].storage_bytes for entries in self.held)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters among the saved tensors: each storage once."""
        return sum(entries[0].storage_bytes for entries in self.parameters)


def _by_storage(entries: Iterable[SavedEntry]) -> list[list[SavedEntry]]:
    groups: defaultdict[int, list[SavedEntry]] = defaultdict(list)
    for entry in entries:
        if entry.storage is not None:
            groups[entry.storage].append(entry)
    return sorted(groups.values(), key=lambda group: -group[0].storage_bytes)


def print_saved(loss: Any, *, top: int = 20) -> None:
    """Print which tensors the autograd graph behind a loss holds for backward.

    Call it at any time between forward and backward, without preparation. It reads the graph as it is: no tensor is
    unpacked, copied or recomputed. Tensors that share a storage are one line and count once. Parameters and other
    leaves that require grad are summed separately: they live with or without the graph. For the dropped tensors of a
    region, parameters among them, it prints their number and what they would add up to.

    Not seen: random states and buffer copies of regions, what their functions close over, and what C++ keeps in nodes
    that Python cannot look into, which are named.

    Args:
        loss: a tensor, or any container of tensors, such as a model's output.
        top: how many storages to list, largest first; the sums are over all.

    Raises:
        ValueError: there is no graph behind `loss`, or `top` is negative.
        TypeError: `loss` holds no tensor.

    >>> import torch, recollect
    >>> x = torch.ones(256, requires_grad=True)
    >>> y = recollect.checkpoint(lambda x: x.sin().cos(), name="f")(x.sigmoid())
    >>> recollect.print_saved(y.exp().sum())
       bytes  tensor        held by
    1.00 KiB  float32[256]  ExpBackward0.result
    1.00 KiB  float32[256]  region 'f' (argument 0), SigmoidBackward0.result
    held by the graph: 2.00 KiB in 2 storages
    forgotten, to be recomputed: 2 tensors (2.00 KiB) of region 'f'
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 0:
        message = f"top={top!r}: expected a whole number of at least 0"
        raise ValueError(message)
    sys.stdout.write(format_saved(describe_saved(loss), top=top))


def describe_saved(loss: Any) -> SavedReport:
    """The data behind `print_saved`."""
    tensors = [leaf for leaf in tree_leaves(loss) if isinstance(leaf, Tensor)]
    roots = [node for tensor in tensors if (node := tensor.grad_fn) is not None]
    if not tensors:
        message = f"loss holds no tensor: expected a tensor or a container of tensors, not {type(loss).__name__}"
        raise TypeError(message)
    if not roots:
        raise ValueError(_explain_no_graph(tensors))
    survey = _Survey()
    freed = 0
    opaque = []
    for node in walk(roots):
        leaf = leaf_of(node)
        if leaf is not None:
            survey.add_parameter(leaf)
        contents = read_node(node)
        freed += contents.is_freed
        if contents.is_opaque:
            opaque.append(contents.name)
        for held in contents.held:
            survey.add_saved(contents.name, held)
    return SavedReport(entries=survey.conclude(), freed_nodes=freed, opaque_nodes=tuple(opaque))


def _explain_no_graph(tensors: list[Tensor]) -> str:
    if any(tensor.requires_grad for tensor in tensors):
        return "loss has no graph behind it: it is a leaf, not a result. Pass what is computed from it."
    return (
        "loss does not require grad: it was computed under torch.no_grad(), was detached, or nothing that it "
        "was computed from requires grad.\n"
        "There is no graph behind it, and nothing is held for backward."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """A tensor and how it was come by. Keeps the tensor, and so the identity of its storage, while surveying."""

    tensor: Tensor
    holder: str
    attribute: str
    kind: Fate
    owner: str


class _Survey:
    """Collects what nodes and frames hold; which of it are parameters is known only when every node was seen."""

    def __init__(self) -> None:
        self._findings: list[_Finding] = []
        self._elsewhere: list[SavedEntry] = []
        self._parameters: list[Tensor] = []
        self._packed = Packed()

    def add_parameter(self, leaf: Tensor) -> None:
        self._parameters.append(leaf)

    def add_saved(self, node: str, held: NodeValue) -> None:
        """A node holds this."""
        hook = held.unpack_hook
        is_ours = hook is None or (getattr(hook, "__module__", None) or "").startswith("recollect.")
        owner = "" if is_ours else getattr(hook, "__qualname__", type(hook).__qualname__).partition(".")[0]
        kind = Fate.KEPT if is_ours else Fate.PACKED
        for part in self._packed.parts(held):
            holder, attribute = (f"region '{part.holder}'", part.what) if part.holder else (node, held.attribute)
            self._add(part, holder, attribute, Fate.REGION if part.region else kind, part.region or owner)

    def _add(self, part: Part, holder: str, attribute: str, kind: Fate, owner: str) -> None:
        if part.tensor is not None:
            kind = kind if part.is_whole else Fate.PACKED
            found = _Finding(tensor=part.tensor, holder=holder, attribute=attribute, kind=kind, owner=owner)
            self._findings.append(found)
            return
        shape, dtype = part.shape, part.dtype
        self._elsewhere.append(
            SavedEntry(
                holder=holder,
                attribute=attribute,
                kind=Fate.FORGOTTEN if part.is_forgotten else Fate.PACKED,
                owner=owner,
                shape=shape,
                dtype=dtype,
                device=part.device,
                tensor_bytes=0 if shape is None or dtype is None else math.prod(shape) * dtype.itemsize,
            )
        )

    def conclude(self) -> tuple[SavedEntry, ...]:
        """The entries, each storage numbered."""
        self._parameters.extend(found.tensor for found in self._findings if is_parameter(found.tensor))
        parameters = {id(storage) for tensor in self._parameters for storage, _ in storages_of(tensor)}
        numbers: dict[int, int] = {}
        entries = []
        for found in self._findings:
            for storage, device in storages_of(found.tensor):
                entries.append(
                    SavedEntry(
                        holder=found.holder,
                        attribute=found.attribute,
                        kind=Fate.PARAMETER if id(storage) in parameters else found.kind,
                        owner=found.owner,
                        shape=_shape_of(found.tensor),
                        dtype=found.tensor.dtype,
                        device=device,
                        tensor_bytes=_bytes_of(found.tensor, storage.nbytes()),
                        storage=numbers.setdefault(id(storage), len(numbers)),
                        storage_bytes=storage.nbytes(),
                    )
                )
        return (*entries, *self._elsewhere)


def _shape_of(tensor: Tensor) -> tuple[int, ...] | None:
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # a nested tensor of the old kind has none
        return None


def _bytes_of(tensor: Tensor, storage_bytes: int) -> int:
    """Bytes of the elements; where they lie in several storages, those of the storage at hand."""
    is_plain = tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")
    return tensor.numel() * tensor.element_size() if is_plain else storage_bytes


def format_saved(report: SavedReport, *, top: int) -> str:
    """Write a report as text: a table of the largest storages, then the sums."""
    held = report.held
    lines = _format_table(held[:top])
    if lines and len(held) > top:
        rest = sum(entries[0].storage_bytes for entries in held[top:])
        lines.append(f"and {count_noun(len(held) - top, 'smaller storage')} of {format_bytes(rest)} together")
    lines.append(_format_held(report))
    lines.extend(_format_others(report))
    return "\n".join(lines) + "\n"


def _format_table(groups: list[list[SavedEntry]]) -> list[str]:
    if not groups:
        return []
    rows = [("bytes", "tensor", "held by")]
    for entries in groups:
        shown = max(entries, key=lambda entry: entry.tensor_bytes)
        holders = list(dict.fromkeys(map(str, entries)))
        more = [f"{len(holders) - _MOST_HOLDERS} more"] if len(holders) > _MOST_HOLDERS else []
        held_by = ", ".join(holders[:_MOST_HOLDERS] + more)
        rows.append((format_bytes(shown.storage_bytes), _format_tensor(shown), held_by))
    sizes, tensors, _ = zip(*rows, strict=True)
    width, breadth = max(map(len, sizes)), max(map(len, tensors))
    return [f"{size:>{width}}  {tensor:{breadth}}  {held_by}" for size, tensor, held_by in rows]


def _format_tensor(entry: SavedEntry) -> str:
    shape = "[nested]" if entry.shape is None else str(list(entry.shape))
    part = " (part of its storage)" if entry.tensor_bytes < entry.storage_bytes else ""
    return f"{str(entry.dtype).removeprefix('torch.')}{shape}{part}"


def _format_held(report: SavedReport) -> str:
    parameters = report.parameter_bytes
    apart = f" ({format_bytes(parameters)} more are parameters)" if parameters else ""
    held = report.held
    if not held:
        return f"held by the graph: nothing{apart}"
    by_device: Counter[torch.device | None] = Counter()
    for entries in held:
        by_device[entries[0].device] += entries[0].storage_bytes
    devices = ", ".join(f"{format_bytes(size)} on {device}" for device, size in by_device.most_common())
    where = f": {devices}" if len(by_device) > 1 else ""
    return f"held by the graph: {format_bytes(report.held_bytes)} in {count_noun(len(held), 'storage')}{where}{apart}"


def _format_others(report: SavedReport) -> list[str]:
    lines = []
    if report.forgotten:
        regions = Counter(entry.owner for entry in report.forgotten)
        names = ", ".join(f"'{name}' ({count})" for name, count in regions.most_common())
        whose = f"regions {names}" if len(regions) > 1 else f"region '{report.forgotten[0].owner}'"
        size = format_bytes(sum(entry.tensor_bytes for entry in report.forgotten))
        tensors = count_noun(len(report.forgotten), "tensor")
        lines.append(f"forgotten, to be recomputed: {tensors} ({size}) of {whose}")
    if report.packed_away:
        hooks = _format_counts(entry.owner for entry in report.packed_away)
        lines.append(f"other hooks packed these into something that is not a tensor, size unknown: {hooks}")
    if report.opaque_nodes:
        nodes = _format_counts(report.opaque_nodes)
        lines.append(f"cannot be inspected with torch {torch.__version__}, may hold more: {nodes}")
    if report.freed_nodes:
        lines.append(f"freed by a backward pass: what {count_noun(report.freed_nodes, 'node')} had saved")
    return lines


def _format_counts(names: Iterable[str]) -> str:
    return ", ".join(f"{name or 'a hook'} ({count})" for name, count in Counter(names).most_common())
