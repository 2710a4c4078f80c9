"""What a dry step is told where it asks for values that nobody has, if the answer changes its memory little.

| asked for | answer |
|---|---|
| a float (``.item()``) | 1.0: floats scale and are logged |
| a single random number (``torch.rand``) | 0.5: a layer or adapter that is seldom dropped is not |
| an index, out of ``nonzero``, ``topk`` and the like | 0, unless all places are taken as true: then each in turn |
| whether all are (``all``) | True: checks of arguments pass |
| whether any is (``any``) of a one-hot mask, or of choices that equal a number | True: each expert has tokens |
| another bool (``if`` on a tensor, ``any``, ``torch.equal``) | False: nothing unusual is found, no layer is dropped |
| which values are NaN or infinite, a ``GradScaler``'s gradients included | none |
| where a mask is true (``nonzero``, ``where``, a mask as index) | everywhere |
| the same of a one-hot mask, or of choices (``topk``) that equal a number | as often as on average |
| how often a mask is true (its ``sum``) | likewise |
| ``unique`` | all are different |
| ``bincount`` with ``minlength`` | that many counts |
| the longest target of ``ctc_loss`` | as long as targets are on average; where they are padded, the padded length |

Numbers that are sizes (an int) and all other values are refused by name, see `step`. Each answer is noted with its
line. Where all values are known (`known.py`), the answer is the true one, and there is nothing to note.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recollect._core.operators import operator_of, tensors_in
from recollect._core.places import Places
from recollect._core.torch_private.dispatch import DispatchMode, without_dispatch_modes
from recollect._core.torch_private.fake import DATA_ERRORS, is_fake
from recollect._core.torch_private.sparse import sparse_parts
from recollect._profile.dry.known import MOST_KNOWN, KnownValues, note_known
from recollect._profile.dry.recurrent import run_on_cpu

Note = Callable[[str], object]
_MASKS = (torch.bool, torch.uint8)
_PASSING_ON = ("aten.index.Tensor", "aten.index_select.default", "aten.clone.default", "aten._to_copy.default")
"""Operators whose result is true as often as their first argument."""
_CHOOSING = frozenset({"aten.argmax.default", "aten.argmin.default", "aten.topk.default", "aten.multinomial.default"})
"""Operators that give indices."""
_UNUSUAL = frozenset({"aten.isnan.default", "aten.isinf.default", "aten.isposinf.default", "aten.isneginf.default"})
_UNSCALING = "aten._amp_foreach_non_finite_check_and_unscale_.default"
"""Notes in a tensor of zeros whether a gradient is NaN or infinite."""
_WITH_DIM = {"aten.topk.default": 2, "aten.argmax.default": 1, "aten.argmin.default": 1}
"""Where these take the dimension that they choose in."""
_CHECKS = ("aten.all.", "aten._is_all_true.")
_MATRIX = 2


class Answers(DispatchMode):
    """Answers in place of operators that need values.

    Args:
        note: is told each answer in a sentence.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note
        self._places = Places()
        self._known = KnownValues()
        self._densities: WeakKeyDictionary[torch.UntypedStorage, float] = WeakKeyDictionary()
        self._ranges: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._indices: WeakKeyDictionary[torch.UntypedStorage, None] = WeakKeyDictionary()
        self._choices: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._counts: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._checks: WeakKeyDictionary[torch.UntypedStorage, str] = WeakKeyDictionary()
        self._answers: dict[str, Callable[..., Any]] = {
            "aten._local_scalar_dense.default": self._read,
            "aten.equal.default": self._compare,
            "aten.nonzero.default": self._find,
            "aten.masked_select.default": self._select,
            "aten.bincount.default": self._count,
            "aten._unique2.default": self._distinguish,
            "aten._ctc_loss.Tensor": self._align,
            "aten._ctc_loss.default": self._align,
            "aten._embedding_bag_backward.default": _spread_over_bags,
            "aten.clone.default": _copy_sparse,
            "aten.view.default": _view,
            "aten.native_batch_norm.default": _normalise,
            "aten.native_batch_norm_backward.default": _normalise_backward,
            "aten._grouped_mm.default": _multiply_groups,
            "aten.mkldnn_rnn_layer.default": run_on_cpu,
        }

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, or answer for it."""
        name = str(func)
        if name == _UNSCALING:  # or no optimizer would step
            self._say("a test for NaN or infinity", "no")
            return func(*args, **kwargs)
        real = self._known.compute(func, operator_of(func), args, kwargs)
        if real is not NotImplemented:
            return self._know(func, args, kwargs, real)
        answer = self._answers.get(name)
        if answer is not None and isinstance(args[0], Tensor) and is_fake(args[0]):
            found = answer(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if name.startswith("aten.index.Tensor") and any(_is_mask(index) for index in args[1]):
            args = (args[0], self._index_by_numbers(args[1]), *args[2:])
        result = func(*args, **kwargs)
        self._known.note_made(func, args, kwargs, result)
        if name in _UNUSUAL or _asks_if_usual(name, args):
            self._say("a test for NaN or infinity", "no")
            with without_dispatch_modes():
                note_known(result, torch.full(result.shape, name not in _UNUSUAL))
        if name == "aten.rand.default" and result.numel() == 1:
            self._say("a random number", "0.5")
            with without_dispatch_modes():
                note_known(result, torch.full(result.shape, 0.5, dtype=result.dtype))
        self._remember(name, args, result)
        return result

    def _remember(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """What a result is, for when it is read: a check, a count, an index, a mask that is seldom true, a range."""
        if any(isinstance(one, Tensor) and one.layout is not torch.strided for one in (*args[:1], result)):
            return  # sparse gradients: nothing of these, and no memory of their own
        if name.startswith(_CHECKS):
            self._checks[result.untyped_storage()] = "a check with all()"
        elif name.startswith("aten.any.") and args[0].untyped_storage() in self._densities:
            self._checks[result.untyped_storage()] = "a check with any()"  # each expert has tokens
            among = args[0].numel() / max(result.numel(), 1)  # a token's choices, of which one may be this expert
            self._densities[result.untyped_storage()] = min(self._density(args[0]) * among, 1.0)
        elif name.startswith("aten.sum.") and is_fake(args[0]):
            if _is_mask(args[0]) or args[0].untyped_storage() in self._densities:
                each = args[0].numel() / max(result.numel(), 1)
                self._counts[result.untyped_storage()] = math.ceil(each * self._density(args[0]))
        elif name in _CHOOSING:
            chosen = (result if isinstance(result, Tensor) else result[-1]).untyped_storage()
            self._indices[chosen] = None
            self._choices[chosen] = _count_choices(name, args)
        elif name == "aten.eq.Scalar" and (count := self._choices.get(args[0].untyped_storage())):
            self._densities[result.untyped_storage()] = 1 / count  # the tokens of one expert
        elif name in _PASSING_ON or name == "aten.eq.Tensor" or name.startswith("aten.scatter"):
            self._pass_on(name, args, result)
        elif name.startswith("aten.arange"):
            self._ranges[result.untyped_storage()] = result.numel()

    def _know(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], real: Any) -> Any:
        """The result of an operator whose values are known."""
        parts = list(real) if isinstance(real, (tuple, list)) else [real]
        if not all(isinstance(part, Tensor) for part in parts):
            return real
        try:
            result = func(*args, **kwargs)
            made = result if isinstance(result, (tuple, list)) else [result]
        except DATA_ERRORS:  # its size is known, too
            made = [torch.empty_like(part, device=tensors_in(args)[0].device) for part in parts]
            result = tuple(made) if isinstance(real, tuple) else made if isinstance(real, list) else made[0]
        for fake, part in zip(made, parts, strict=True):
            note_known(fake, part)
        return result

    def _say(self, what: str, answer: str) -> None:
        _, line = self._places.locate(3)
        self._note(f"{what}{f' at {line}' if line else ''} has no value in a dry profile: taken as {answer}")

    # Numbers

    def _read(self, tensor: Tensor) -> Any:
        if tensor.dtype is torch.bool:
            check = self._checks.get(tensor.untyped_storage())
            self._say(check or "a condition", str(check is not None))
            return check is not None
        if tensor.is_floating_point():
            self._say("a number", "1.0")
            return 1.0
        if tensor.untyped_storage() in self._indices:
            self._say("an index", "0")
            return 0
        if (count := self._counts.get(tensor.untyped_storage())) is not None:
            self._say("the count of a mask", str(count))
            return count
        return NotImplemented

    def _compare(self, one: Tensor, other: Tensor) -> Any:
        if one.shape == other.shape:
            self._say("a comparison of two tensors", "False")
        return False

    # Places

    def _density(self, mask: Tensor) -> float:
        """Which part of a mask is true."""
        return self._densities.get(mask.untyped_storage(), 1.0)

    def _pass_on(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Know how often results are true: those of one-hot masks, and what is taken out of them."""
        if name.startswith("aten.scatter"):
            into, dim, index, value = args[:4]
            if not isinstance(value, Tensor) and value == 1 and index.dim():
                self._densities[result.untyped_storage()] = index.shape[dim] / max(into.shape[dim], 1)
        elif name == "aten.eq.Tensor":  # numbers against a range of all there can be: one-hot, as torch composes it
            count = self._ranges.get(args[1].untyped_storage(), 0)
            if count and args[0].dim() and args[0].shape[-1] == 1 and result.shape[-1] == count:
                self._densities[result.untyped_storage()] = 1 / count
        else:
            if (choices := self._choices.get(args[0].untyped_storage())) is not None:
                self._choices[result.untyped_storage()] = choices
            density = self._density(args[0])
            if density < 1:
                self._densities[result.untyped_storage()] = density

    def _how_many(self, mask: Tensor) -> int:
        """How many are true."""
        known = self._known.count_true(mask)
        if known is not None:
            return known
        density = self._density(mask)
        answer = "true everywhere" if density == 1 else f"true in {density:.1%}, as often as on average"
        self._say("a mask", answer)
        return math.ceil(mask.numel() * density)

    def _find(self, mask: Tensor) -> Tensor:
        count = self._how_many(mask)
        found = torch.empty(count, mask.dim(), dtype=torch.long)
        self._indices[found.untyped_storage()] = None
        if count == mask.numel() <= MOST_KNOWN:  # each index, once: a loop over experts meets all of them
            with without_dispatch_modes():
                note_known(found, torch.ones(mask.shape, dtype=torch.bool).nonzero())
        return found

    def _select(self, tensor: Tensor, mask: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        count = math.ceil(math.prod(shape) * self._how_many(mask) / max(mask.numel(), 1))
        return torch.empty(count, dtype=tensor.dtype)

    def _index_by_numbers(self, indices: Any) -> list[Any]:
        """Masks among indices as the numbers of what they choose."""
        found: list[Any] = []
        for index in indices:
            if not _is_mask(index):
                found.append(index)
                continue
            count = self._how_many(index)
            found += [torch.empty(count, dtype=torch.long) for _ in range(index.dim())]
        return found

    # Others

    def _count(self, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
        if not minlength:
            return NotImplemented
        self._say("the input of bincount", f"numbers below its minlength, {minlength}")
        return torch.empty(minlength, dtype=torch.long if weights is None else torch.float64)

    def _distinguish(self, tensor: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
        del options
        self._say("the input of unique", "all different")
        count = tensor.numel()
        inverse = torch.empty(tensor.shape, dtype=torch.long)
        return torch.empty(count, dtype=tensor.dtype), inverse, torch.empty(count, dtype=torch.long)

    def _align(
        self, log_probs: Tensor, targets: Tensor, lengths: Any, target_lengths: Any, *options: Any
    ) -> tuple[Tensor, Tensor]:
        """The losses of a CTC, and what it keeps: for each step and example, a number for each place in a target."""
        del lengths, options
        examples = log_probs.shape[1]
        if isinstance(target_lengths, Tensor):
            longest = self._known.largest(target_lengths)
            if longest is None:
                is_padded = targets.dim() == _MATRIX
                longest = targets.shape[1] if is_padded else math.ceil(targets.numel() / max(examples, 1))
                self._say("the length of ctc_loss's longest target", str(longest))
        else:
            longest = max(target_lengths, default=0)
        kept = log_probs.new_empty(examples, log_probs.shape[0], 2 * longest + 1)
        return log_probs.new_empty(examples), kept


def _count_choices(name: str, args: tuple[Any, ...]) -> int:
    """Among how many an operator chooses."""
    at = _WITH_DIM.get(name, len(args))
    dim = args[at] if at < len(args) else -1 if name in ("aten.topk.default", "aten.multinomial.default") else None
    return int(args[0].numel() if dim is None or not args[0].dim() else args[0].shape[dim])


def _asks_if_usual(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a comparison is one that holds for all but NaN and infinity: torch.isfinite is composed of them."""
    if name == "aten.eq.Tensor":
        return args[0] is args[1] and bool(args[0].is_floating_point())
    return name == "aten.ne.Scalar" and args[1] == math.inf


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in _MASKS and is_fake(index)


def _spread_over_bags(grad: Tensor, indices: Tensor, *options: Any) -> Any:
    """The sparse gradient of an EmbeddingBag, a row for each index: torch's own form for fake tensors has no rows."""
    count, is_sparse = options[4], options[7]
    if not is_sparse:
        return NotImplemented
    rows = grad.new_empty(indices.numel(), grad.shape[-1])
    return torch.sparse_coo_tensor(indices.reshape(1, -1), rows, (count, grad.shape[-1]), check_invariants=False)


def _copy_sparse(tensor: Tensor, **options: Any) -> Any:
    """A copy of a sparse gradient: torch's own form for fake tensors has no rows."""
    del options
    if tensor.layout is not torch.sparse_coo:
        return NotImplemented
    indices, rows = (part.clone() for part in sparse_parts(tensor))
    return torch.sparse_coo_tensor(indices, rows, tensor.shape, check_invariants=False)


def _view(tensor: Tensor, shape: list[int]) -> Any:
    """A view with the strides that its kernel gives: torch's own form for fake tensors has others where a size is 1.

    They decide whether images are laid out with channels last, and that, whether a gradient is copied.
    """
    if 1 not in tensor.shape:
        return NotImplemented
    with without_dispatch_modes():
        strides = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(shape).stride()
    found = torch.ops.aten.view.default(tensor, shape)
    return found if found.stride() == strides else tensor.as_strided(found.shape, strides, tensor.storage_offset())


def _normalise(x: Tensor, *options: Any) -> Any:
    return _lay_out(torch.ops.aten.native_batch_norm.default(x, *options))


def _normalise_backward(grad: Tensor, *options: Any) -> Any:
    return _lay_out(torch.ops.aten.native_batch_norm_backward.default(grad, *options))


def _lay_out(results: Any) -> Any:
    """What a batch norm gives: its kernel does not keep the strides of a transposed input, torch's fake form does."""
    first = results[0]
    if first is None or first.is_contiguous() or first.is_contiguous(memory_format=_layout_of(first)):
        return results
    return torch.empty(first.shape, dtype=first.dtype), *results[1:]


def _layout_of(tensor: Tensor) -> torch.memory_format:
    """How its channels may come last."""
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)


def _multiply_groups(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """A grouped product of any dtype: torch's own form for fake tensors knows bfloat16 alone."""
    if one.dtype is torch.bfloat16 or one.shape[-1] != other.shape[-2]:
        return NotImplemented
    rows, columns = one.shape[-2], other.shape[-1]
    if one.dim() == other.dim() == _MATRIX:
        groups = 0 if offs is None else offs.shape[0]
        shape: tuple[int, ...] = (groups, rows, columns)
    elif one.dim() == other.dim():
        shape = (one.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    return torch.empty(shape, dtype=out_dtype or one.dtype)
