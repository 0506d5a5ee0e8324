"""Ways to average a bucket of gradients, for ``DistributedDataParallel.register_comm_hook(state, hook)``.

The state of these hooks is the process group; None means the default group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unicoll.parallel.common import member_group
from unicoll.types import ReduceOp

if TYPE_CHECKING:
    from unicoll.futures import Future

__all__ = ["GradBucket", "allreduce_hook", "bf16_compress_hook", "fp16_compress_hook", "views_of"]


def views_of(flat: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a flat tensor, one after another, with the parameters' shapes and orders of dimensions."""
    views, start = [], 0
    for parameter in parameters:
        dense = torch.empty_like(parameter, device="meta")  # channels_last stays channels_last
        views.append(flat.as_strided(dense.shape, dense.stride(), flat.storage_offset() + start))
        start += dense.numel()
    return views


class GradBucket:
    """The gradients that travel together, as a comm hook sees them; methods as torch's ``GradBucket``."""

    def __init__(self, index: int, buffer: torch.Tensor, parameters: list[torch.Tensor], last: bool) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = parameters
        self._last = last

    def index(self) -> int:
        """Its number in the order in which buckets are launched, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The flat tensor of all its gradients, of this rank, undivided."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another flat tensor in the buffer's place, of as many elements."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, shaped as the parameters."""
        return views_of(self._buffer, self._parameters)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients it holds, in the buffer's order."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no bucket is launched after it in this step."""
        return self._last


def allreduce_hook(group: Any, bucket: GradBucket) -> Future[Any]:
    """Average the gradients as they are: what happens without a hook.

    Raises:
        DistArgumentError: this process is not in the group.
        NotInitializedError: no group is given, and there is no default group.
    """
    work = member_group(group).all_reduce(bucket.buffer(), op=ReduceOp.AVG, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def fp16_compress_hook(group: Any, bucket: GradBucket) -> Future[Any]:
    """Divide by the number of ranks, add up in float16, and widen again: half the bytes of float32.

    Raises:
        as :func:`allreduce_hook`.
    """
    return _compressed(member_group(group), bucket, torch.float16)


def bf16_compress_hook(group: Any, bucket: GradBucket) -> Future[Any]:
    """As :func:`fp16_compress_hook` in bfloat16, which has float32's range.

    Raises:
        as :func:`allreduce_hook`.
    """
    return _compressed(member_group(group), bucket, torch.bfloat16)


def _compressed(group: Any, bucket: GradBucket, dtype: Any) -> Future[Any]:
    buffer = bucket.buffer()
    work = group.all_reduce(buffer.to(dtype).div_(group.size()), async_op=True)
    future: Future[Any] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return future
