"""Policies: what a region keeps between forward and backward, and what it computes again.

A policy is a function from a `recollect.Site` to a `recollect.Decision`. Any function works; you can
combine, compare and print the ones below, and each leaves sites that it does not match to others.

By operator:
    - `save_matmuls` saves the results of matrix products.
    - `save_attention` saves the results of attention kernels.
    - `save_ops` saves the results of the operators that you name.
    - `save_every` saves every n-th call of an operator.

By place:
    - `save_names` saves blocks and values that you gave a name.
    - `save_modules` saves the results of modules, by path or class.

By number:
    - `save_larger_than` saves values larger than a number of bytes.
    - `save_if` saves values for which a comparison holds: of `flops`, `nbytes` or `flops_per_byte` with a bound.

By kind:
    - `save_random` saves random values, such as dropout masks.
    - `save_routing` saves choices (topk, sort, argmax) and the counts made from them.
    - `save_collectives` saves values that come from other processes.

All or none:
    - `save_all` saves everything.
    - `save_nothing` saves nothing.

Combined:
    - `first_match` asks one policy after another.
    - `otherwise` decides for every site, and comes last.
    - `per_region` picks a policy by the region's name.
    - `strictly` keeps only what its policy says.
"""

from recollect._policy.combine import first_match, otherwise, per_region, strictly
from recollect._policy.places import save_modules, save_names
from recollect._policy.predicates import flops, flops_per_byte, nbytes
from recollect._policy.rules import (
    save_all,
    save_attention,
    save_collectives,
    save_every,
    save_if,
    save_larger_than,
    save_matmuls,
    save_nothing,
    save_ops,
    save_random,
    save_routing,
)

__all__ = [
    "first_match",
    "flops",
    "flops_per_byte",
    "nbytes",
    "otherwise",
    "per_region",
    "save_all",
    "save_attention",
    "save_collectives",
    "save_every",
    "save_if",
    "save_larger_than",
    "save_matmuls",
    "save_modules",
    "save_names",
    "save_nothing",
    "save_ops",
    "save_random",
    "save_routing",
    "strictly",
]
