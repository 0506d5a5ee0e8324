"""all_reduce of sparse COO tensors, as torch's Gloo does it: gathered, and added up where indices are the same."""

from __future__ import annotations

from typing import Any

import torch

from unicoll.errors import DistTypeError
from unicoll.group import ProcessGroup
from unicoll.types import ReduceOp, Reduction

__all__ = ["sparse_all_reduce"]


def sparse_all_reduce(group: ProcessGroup, tensor: Any, op: Reduction, timeout: Any) -> None:
    """The sum over all members, in place; each may have another number of elements.

    Args:
        tensor: sparse COO, the same shape and dtype on all members.

    Raises:
        DistTypeError: the reduction is not SUM, or the layout is not COO.
    """
    if tensor.layout is not torch.sparse_coo:
        raise DistTypeError(f"all_reduce: tensors of layout {tensor.layout} cannot be reduced")
    if op.code != ReduceOp.SUM.code:
        raise DistTypeError(f"all_reduce: sparse tensors can be added (ReduceOp.SUM) only, not {op}")
    mine = tensor.detach().coalesce()
    counts = torch.zeros(group.size(), dtype=torch.int64, device=tensor.device)
    counts[group.rank()] = mine._nnz()
    group.all_reduce(counts, timeout=timeout)
    indices = _gather(group, mine.indices().T.contiguous(), counts, timeout)
    summands = _gather(group, mine.values().contiguous(), counts, timeout)
    total = torch.sparse_coo_tensor(indices.T, summands, tensor.shape, check_invariants=False)
    with torch.no_grad():  # a detached sparse tensor would take the result for itself alone
        tensor.copy_(total.coalesce())


def _gather(group: ProcessGroup, rows: Any, counts: Any, timeout: Any) -> Any:
    """The rows of all members, one after another; they may have different numbers of them."""
    pieces = [rows.new_empty((int(n), *rows.shape[1:])) for n in counts]
    group.all_gather(pieces, rows, timeout=timeout)
    return torch.cat(pieces)
