"""The dense tensors that make up a sparse one, whatever its layout.

Private names: `Tensor._indices`, `Tensor._values`, the parts of an uncoalesced COO tensor.
Replaced by: `Tensor.indices` and `Tensor.values`, were they to accept uncoalesced tensors.
Run on: torch 2.11 (CUDA), 2.13 (CPU).
"""

import torch
from torch import Tensor

__all__ = ["sparse_parts"]

_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The index and value tensors of `tensor`, as aliases; empty if it is not sparse."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _BY_ROW:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _BY_COLUMN:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
