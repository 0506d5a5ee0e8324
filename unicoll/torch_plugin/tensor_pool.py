"""Tensors in symmetric memory on the CPU, for torch's ``allocate_tensor``, which FSDP2 calls before
each collective."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from unicoll.arrays.types import ReduceOp
from unicoll.errors import BackendUnavailableError
from unicoll.group.process_group import ProcessGroup

_SMALL = 1 << 16
"""Bytes up to which symmetric memory is of no use."""
_MOST = 62
"""Blocks of one size; further tensors are in ordinary memory."""
_REDUCTION = ReduceOp.BAND


class _Block:
    """Memory for one tensor at a time."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._lent: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        return self._lent is None or self._lent() is None

    def lend(self) -> Any:
        """A tensor of bytes; it and its views keep an array alive, which :attr:`free` looks for."""
        view = self._memory[:]
        self._lent = weakref.ref(view)
        return torch.from_numpy(view)


class TensorPool:
    """Symmetric memory of one group that is used again when its tensors are gone; it grows until
    the group ends.

    The members of the group allocate the same sizes in the same order.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        # The keys are sizes in bytes.
        self._blocks: dict[int, list[_Block]] = {}
        self._available = True

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor; all members call this."""
        nbytes = count * dtype.itemsize
        if nbytes <= _SMALL or not self._available:
            return torch.empty(count, dtype=dtype)
        blocks = self._blocks.setdefault(nbytes, [])
        # Each block has a bit. Garbage collection may have freed other blocks on other ranks, so
        # the ranks agree on those that are free on all. One int64 has bits for _MOST blocks.
        free = np.array([sum(1 << i for i, block in enumerate(blocks) if block.free)])
        # The members have made the same blocks, so all of them make this call or none does.
        if blocks:
            self._group.all_reduce(free, op=_REDUCTION)
        common = int(free[0])
        # A block is one allocation of all members, so all of them take the same one: the lowest.
        if common:
            return blocks[(common & -common).bit_length() - 1].lend().view(dtype)
        if len(blocks) == _MOST:
            return torch.empty(count, dtype=dtype)
        try:
            blocks.append(_Block(self._group.symmetric_empty(nbytes, "uint8", device="cpu")))
        except BackendUnavailableError:
            # All members get this error, so all of them use ordinary memory from now on.
            self._available = False
            return torch.empty(count, dtype=dtype)
        return blocks[-1].lend().view(dtype)
