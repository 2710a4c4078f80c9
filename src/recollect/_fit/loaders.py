"""What batches a DataLoader gives: their sizes, and the largest. Random numbers that loading draws are put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from recollect._core.reachable import find_reachable
from recollect._core.torch_private.pytree import tree_leaves
from recollect._inspect.surroundings import list_generators
from recollect._recompute.rng import put_back

_MOST_BATCHES = 64
_SAME = 8  # batches of one size, after which no other is expected


def find_largest(loader: DataLoader[Any]) -> Any:
    """The batch with the most elements among the first 64; of equal ones the first. Only that one is held.

    Raises:
        ValueError: there is no batch.
    """
    largest, most, sizes = None, -1, set[int]()
    with _generators_kept(loader):
        for number, batch in enumerate(loader):
            size = count_elements(batch)
            sizes.add(size)
            if size > most:
                largest, most = batch, size
            if number + 1 >= (_SAME if len(sizes) == 1 else _MOST_BATCHES):
                break
    if most < 0:
        message = "the DataLoader yields no batch"
        raise ValueError(message)
    return largest


def list_batches(batch: Any) -> list[Any]:
    """The batches that there are, the largest last: several in a list of tuples or of dicts, else one.

    >>> list_batches([{"x": 1}, {"x": 2}]), list_batches([1, 2])
    ([{'x': 1}, {'x': 2}], [[1, 2]])
    """
    if isinstance(batch, DataLoader):
        return [find_largest(batch)]
    for kind in (Mapping, tuple, list):
        if isinstance(batch, list) and batch and all(isinstance(one, kind) for one in batch):
            return sorted(batch, key=count_elements)
    return [batch]


def count_elements(batch: Any) -> int:
    """How many numbers the tensors of a batch have."""
    if isinstance(batch, Tensor):
        return batch.numel()
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


@contextmanager
def _generators_kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Let all generators be as before: those of the process, and those that the loader and its samplers have."""
    states = [(source, source.read()) for source in list_generators()]
    held = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    own = find_reachable(torch.Generator, lambda: None, [vars(one) for one in held if hasattr(one, "__dict__")])
    kept = [(generator, generator.get_state()) for generator in own]
    try:
        yield
    finally:
        put_back(states)
        for generator, state in kept:
            generator.set_state(state)
