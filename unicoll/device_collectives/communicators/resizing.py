"""Agreement on how the members of a group make a larger or smaller one.

A group grows by what is equal on all of its members: whether they have connected, and whether the
library can grow a communicator (NCCL from 2.29). The new ranks cannot know; rank 0 announces the
decision through the store. After a failure the members may differ, so those that remain exchange
what each can do before they shrink the group.
"""

from __future__ import annotations

import json

from unicoll.backend import Context
from unicoll.device_collectives.communicators.agreement import (
    Purpose,
    await_keys,
    gather_and_decide,
)
from unicoll.device_collectives.communicators.communicator import Communicator
from unicoll.device_collectives.communicators.devices import bound_device
from unicoll.device_collectives.communicators.unique_id import starting
from unicoll.device_collectives.interface import SUCCESS, CollectiveLibrary
from unicoll.devices.device_runtime import DeviceRuntime
from unicoll.errors import DistArgumentError
from unicoll.net.objects.received_json import from_store

RESIZE, RECONNECT, LAZY = "resize", "reconnect", "lazy"
"""The library grows or shrinks the communicator; all ranks make a new one, since it cannot; all do
so at the first operation."""
_SHRINKING = Purpose("shrinking", "shrink the group")


def decide_growth(context: Context, parent: Communicator | None) -> str:
    """How the members of a group with communicator ``parent`` make the larger one; rank 0 announces
    it."""
    if parent is None:
        decision = LAZY
    else:
        decision = RESIZE if parent.library.has("comm_grow") else RECONNECT
    if context.rank == 0:
        context.job.store.set(_key(context), json.dumps(decision))
    return decision


def await_growth(context: Context, library: CollectiveLibrary, deadline: float) -> str:
    """The members' decision, on a new rank.

    Raises:
        OperationTimeoutError, RankLostError: as :func:`.agreement.gather_and_decide`.
    """
    key = _key(context)
    await_keys(context, [key], starting(library), deadline, {key: 0})
    decision: str = from_store(key, context.job.store.get(key), str)
    return decision


def decide_shrink(context: Context, parent: Communicator | None, deadline: float) -> str:
    """How the remaining members make group ``context``; ``parent`` is this rank's communicator, or
    None.

    NCCL does not shrink a communicator that has an error, and the error may be on some of its ranks
    only.

    Raises:
        OperationTimeoutError, RankLostError: as :func:`.agreement.gather_and_decide`.
    """
    if parent is None:
        own = LAZY
    else:
        own = (
            RESIZE if parent.library.has("comm_shrink") and parent.state() == SUCCESS else RECONNECT
        )
    prefix = f"{context.backend}/{context.name}/shrink"
    decision: str = gather_and_decide(context, prefix, {"can": own}, _SHRINKING, deadline, _weakest)
    return decision


def _weakest(facts: list[dict[str, str]]) -> str:
    offers = {fact["can"] for fact in facts}
    # A member without a communicator can take part in neither of the others, and one that cannot
    # shrink its communicator can still make a new one.
    return next(way for way in (LAZY, RECONNECT, RESIZE) if way in offers)


def _key(context: Context) -> str:
    return f"{context.backend}/{context.name}/announced"


def device_of_new_rank(context: Context, runtime: DeviceRuntime) -> int:
    """The device of a new rank, which connects before it has an array."""
    bound = bound_device(context, runtime, context.explicit)
    device = runtime.current_device() if bound is None else bound
    if device < 0:
        raise DistArgumentError(
            "grow_group: this rank's device is not known: give device_id=, or choose one first"
        )
    return device
