"""all_reduce of sparse COO tensors, as in torch's Gloo: gather all elements and add those with
equal indices."""

from __future__ import annotations

from typing import Any

import torch

from unicoll.arrays.types import ReduceOp, Reduction
from unicoll.backend.operation_errors import only_different
from unicoll.errors import CollectiveMismatchError, DistTypeError
from unicoll.group.process_group import ProcessGroup


def sparse_all_reduce(group: ProcessGroup, tensor: Any, op: Reduction, timeout: Any) -> None:
    """Sum a tensor over all ranks, in place; the number of elements may differ between ranks.

    ``timeout`` is of each collective. Raises DistTypeError if the reduction is not SUM or the
    layout is not COO, and CollectiveMismatchError on all ranks if the shapes differ.
    """
    if tensor.layout is not torch.sparse_coo:
        raise DistTypeError(f"all_reduce: tensors of layout {tensor.layout} cannot be reduced")
    if op.code != ReduceOp.SUM.code:
        raise DistTypeError(f"all_reduce: sparse tensors support ReduceOp.SUM only, not {op}")
    own = tensor.detach().coalesce()
    sizes = torch.zeros(group.size(), 1 + tensor.dim(), dtype=torch.int64, device=tensor.device)
    sizes[group.rank()] = torch.tensor([own._nnz(), *tensor.shape])
    group.all_reduce(sizes, timeout=timeout)
    counts, *shapes = sizes.T.tolist()
    if any(len(set(lengths)) > 1 for lengths in shapes):
        each = {rank: str(shape) for rank, *shape in zip(group.ranks, *shapes, strict=True)}
        lines = "".join(f"\n  rank {rank}: {shape}" for rank, shape in each.items())
        raise CollectiveMismatchError(
            f"all_reduce: the shapes of the sparse tensors differ:{lines}",
            group=group.name,
            rank=only_different(each),
            op="all_reduce",
        )
    indices = _gather(group, own.indices().T.contiguous(), counts, timeout)
    summands = _gather(group, own.values().contiguous(), counts, timeout)
    total = torch.sparse_coo_tensor(indices.T, summands, tensor.shape, check_invariants=False)
    # A copy_ to a detached sparse tensor would not change the original.
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _gather(group: ProcessGroup, rows: Any, counts: list[int], timeout: Any) -> Any:
    """The rows of all ranks, concatenated; ``counts`` has the number per rank."""
    parts = [rows.new_empty((n, *rows.shape[1:])) for n in counts]
    group.all_gather(parts, rows, timeout=timeout)
    return torch.cat(parts)
