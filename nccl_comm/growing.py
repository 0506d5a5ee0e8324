"""A communicator with more ranks, made of one that there is: what its members do, and those who come.

The members decide by what is equal on all of them: whether they have connected, and whether NCCL can grow (2.29). The
new ranks cannot know; rank 0 tells them through the store.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from unicoll.backend import Call, Context
from unicoll.errors import DistArgumentError
from unicoll.streams import Cuda

from .api import Config, Nccl
from .communicator import Communicator
from .devices import bound_device
from .meeting import announce, announced, meet

__all__ = ["ANEW", "GROW", "LATER", "device_to_bring", "grown", "how_to_come", "how_to_grow"]

GROW, ANEW, LATER = "grow", "anew", "later"
"""NCCL grows the communicator; all connect anew, since it cannot; all connect at the first operation."""


def how_to_grow(context: Context, above: Communicator | None) -> str:
    """What the members of a group do, of which ``above`` is the communicator, to make a larger one."""
    if above is None:
        way = LATER
    else:
        way = GROW if above.nccl.has("ncclCommGrow") else ANEW
    if context.rank == 0:
        announce(context, way)
    return way


def how_to_come(context: Context, deadline: float) -> str:
    """What a new rank does to be one of the larger group."""
    return announced(context, deadline)


def device_to_bring(context: Context, cuda: Cuda) -> int:
    """The device of a new rank, which connects before it has an array."""
    bound = bound_device(context, cuda, context.asked)
    device = cuda.current_device() if bound is None else bound
    if device < 0:
        raise DistArgumentError("grow_group: this rank's device is not known: give device_id=, or choose one first")
    return device


def grown(
    context: Context, nccl: Nccl, cuda: Cuda, device: int, config: Config, deadline: float,
    look: Callable[[Call | None], None], above: Communicator | None,
) -> Communicator:  # fmt: skip
    """The larger communicator; ``above`` is the smaller one, which has no work, or None on a new rank."""
    make = partial(nccl.comm_unique_id, above.handle) if above is not None else None
    (unique_id,) = meet(context, device, nccl, cuda, deadline, make)
    comm, rank = (above.handle, -1) if above is not None else (0, context.rank)
    given = unique_id if above is None or context.rank == 0 else None
    return Communicator(
        context, nccl, cuda, device, lambda: nccl.comm_grow(comm, context.size, given, rank, config), "ncclCommGrow",
        deadline, look,
    )  # fmt: skip
