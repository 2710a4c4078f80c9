"""Policies: what a region keeps between forward and backward, and what it computes again.

A policy is a function from a `recollect.Site` to a `recollect.Decision`. Any function will do; those below can be
combined, compared and printed, and each has nothing to say of sites that it does not match.

By operator:
    - `save_matmuls` saves what matrix products make.
    - `save_attention` saves what attention kernels make.
    - `save_ops` saves what the operators that you name make.
    - `save_every` saves every n-th call of an operator.

By place:
    - `save_names` saves blocks and values that you gave a name.
    - `save_modules` saves what modules give, by path or class.

By number:
    - `save_larger_than` saves values of more than so many bytes.
    - `save_if` saves where a question is answered by yes; `flops`, `nbytes` and `flops_per_byte` are there to ask with.

By kind:
    - `save_random` saves what is drawn at random.
    - `save_routing` saves choices (topk, sort, argmax) and what is counted out of them.
    - `save_collectives` saves what comes from other processes.

All or none:
    - `save_all` saves everything.
    - `save_nothing` saves nothing.

Combined:
    - `first_match` asks one policy after the other.
    - `otherwise` answers for every site, and stands last.
    - `per_region` picks a policy by the region's name.
    - `strictly` keeps nothing besides what its policy says.
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
