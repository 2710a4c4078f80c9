"""Whether torch.jit.trace is recording what runs.

Would be replaced by: `torch.jit.is_tracing`, which asks Python first and takes 0.2 µs more for each region.
Run on: torch 2.11, 2.13.
"""

from torch._C import _is_tracing as is_tracing

__all__ = ["is_tracing"]
