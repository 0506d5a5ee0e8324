"""Agreement on how a group grows, between its members and the new ranks.

The members decide by what is equal on all of them: whether they have connected, and whether NCCL can grow a
communicator (from 2.29). The new ranks cannot know; rank 0 announces the decision through the store.
"""

from __future__ import annotations

import json

from nccl_comm.communicators.agreement import await_keys
from nccl_comm.communicators.communicator import Communicator
from nccl_comm.communicators.devices import bound_device
from nccl_comm.communicators.unique_id import STARTING
from unicoll.arrays.cuda import Cuda
from unicoll.backend import Context
from unicoll.errors import DistArgumentError

GROW, RECONNECT, LAZY = "grow", "reconnect", "lazy"
"""NCCL grows the communicator; all ranks make a new one, since NCCL cannot; all do so at the first operation."""


def decide_growth(context: Context, parent: Communicator | None) -> str:
    """How the members of a group with communicator ``parent`` make the larger one; rank 0 announces it."""
    if parent is None:
        decision = LAZY
    else:
        decision = GROW if parent.nccl.has("ncclCommGrow") else RECONNECT
    if context.rank == 0:
        context.job.store.set(_key(context), json.dumps(decision))
    return decision


def await_growth(context: Context, deadline: float) -> str:
    """The members' decision, on a new rank.

    Raises:
        OperationTimeoutError, RankLostError: as :func:`~nccl_comm.communicators.agreement.gather_and_decide`.
    """
    key = _key(context)
    await_keys(context, [key], STARTING, deadline, {key: 0})
    decision: str = json.loads(context.job.store.get(key))
    return decision


def _key(context: Context) -> str:
    return f"nccl/{context.name}/announced"


def device_of_new_rank(context: Context, cuda: Cuda) -> int:
    """The device of a new rank, which connects before it has an array."""
    bound = bound_device(context, cuda, context.explicit)
    device = cuda.current_device() if bound is None else bound
    if device < 0:
        raise DistArgumentError(
            "grow_group: this rank's device is not known: give device_id=, or choose one first"
        )
    return device
