"""Exchange of NCCL's unique id through the job's store.

Every member publishes its device; rank 0 checks that the devices differ, makes the id and publishes it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from nccl_comm.communicators.agreement import (
    Purpose,
    await_keys,
    gather_and_decide,
    outcome_to_publish,
    result_or_raise,
)
from nccl_comm.library import interface
from nccl_comm.library.errors import error_for
from nccl_comm.library.interface import Nccl
from unicoll.arrays.cuda import Cuda
from unicoll.backend import Context
from unicoll.errors import DistArgumentError
from unicoll.net import environment

SHARING = "UNICOLL_NCCL_SHARE_DEVICE"
"""With the value 1 several ranks may use one device (for tests; NCCL has a variable of its own for that)."""
RANKS_PER_ROOT = "UNICOLL_NCCL_RANKS_PER_ROOT"
"""Ranks per id if NCCL takes several ids; its documentation and torch recommend 128."""
MakeId = Callable[[], tuple[int, bytes]]
Capability = tuple[int, int]
STARTING = Purpose(
    "starting NCCL",
    "start NCCL",
    ". A group without a device starts NCCL at its first operation, sends and receives included; with device_id= of"
    " init_process_group or new_group it starts when the group is made",
)


class Origin(NamedTuple):
    """Where the members of a communicator have exchanged their facts: in its group, or in the one it was split from.

    Attributes:
        context: the group.
        prefix: of the store's keys.
        capabilities: compute capability of each member's device, by rank in the world.
    """

    context: Context
    prefix: str
    capabilities: dict[int, Capability]


def exchange_ids(
    context: Context,
    attempt: int,
    device: int,
    nccl: Nccl,
    cuda: Cuda,
    deadline: float,
    make_id: MakeId | None = None,
) -> tuple[list[bytes], Origin]:
    """NCCL's unique ids of a group; every member calls this, with its device, and with the number of its calls before.

    If NCCL takes several ids, there is one for every ``UNICOLL_NCCL_RANKS_PER_ROOT`` ranks: these ranks connect first
    to the rank that made the id, which would otherwise have to serve all ranks. With ``make_id``, rank 0 calls that in
    place of ncclGetUniqueId, and there is one id.

    Raises:
        DistArgumentError: two members are on one device.
        OperationTimeoutError: members were missing at the ``deadline``; the message names them.
        RankLostError: a member died.
        DistBackendError: a rank could not make an id.
    """
    prefix = f"nccl/{context.name}/{attempt}"
    store = context.job.store
    own = cuda.facts(device)
    facts = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": device,
        "uuid": own.uuid,
        "capability": own.capability,
    }
    if os.environ.get("NCCL_HOSTID"):
        facts["hostid"] = os.environ["NCCL_HOSTID"]
    answer = gather_and_decide(
        context, prefix, facts, STARTING, deadline, partial(_choose_roots, context, nccl, make_id)
    )
    owners = roots(context.size, answer["roots"])
    keys = {f"{prefix}/id/{i}": owner for i, owner in enumerate(owners) if i}
    for key, owner in keys.items():
        if owner == context.rank:
            store.set(key, json.dumps(outcome_to_publish(context, partial(_new_id, context, nccl), STARTING)))
    made = [answer["id"]]
    if keys:
        await_keys(context, list(keys), STARTING, deadline, keys)
        made += (result_or_raise(context, json.loads(text)) for text in store.multi_get(list(keys)))
    found = zip(context.ranks, answer["capabilities"], strict=True)
    capabilities = {rank: (major, minor) for rank, (major, minor) in found}
    return [bytes.fromhex(one) for one in made], Origin(context, prefix, capabilities)


def roots(size: int, count: int) -> list[int]:
    """The ranks that make the ids: the first ranks of ``count`` blocks, divided as NCCL does."""
    share, rest = divmod(size, count)
    return [i * share + min(i, rest) for i in range(count)]


def member_facts(origin: Origin, timeout: float) -> dict[int, dict[str, Any]]:
    """What the members of a group have published with :func:`exchange_ids`, by rank in the world.

    Raises:
        DistError: the store does not answer within ``timeout`` seconds.
    """
    context = origin.context
    keys = [f"{origin.prefix}/{member}" for member in range(context.size)]
    context.job.store.wait(keys, timeout)
    found = [json.loads(text) for text in context.job.store.multi_get(keys)]
    return dict(zip(context.ranks, found, strict=True))


def _choose_roots(
    context: Context, nccl: Nccl, make_id: MakeId | None, facts: list[dict[str, Any]]
) -> dict[str, Any]:
    """Rank 0's answer to all members: the first id, the number of ids, and the members' compute capabilities."""
    if not environment.flag(SHARING):
        _refuse_sharing(context, facts)
    several = make_id is None and nccl.has("ncclCommInitRankScalable")
    share = environment.number(RANKS_PER_ROOT) if several else context.size
    return {
        "id": _new_id(context, nccl, make_id),
        "roots": -(-context.size // share),
        "capabilities": [fact["capability"] for fact in facts],
    }


def _new_id(context: Context, nccl: Nccl, make_id: MakeId | None = None) -> str:
    """A new id in hexadecimal digits."""
    code, unique_id = make_id() if make_id is not None else nccl.unique_id()
    if code:
        what = "ncclGetUniqueId" if make_id is None else "ncclCommGetUniqueId"
        raise error_for(code, nccl, 0, what, context.name, None, None)
    assert len(unique_id) == interface.UNIQUE_ID_BYTES
    return unique_id.hex()


def _refuse_sharing(context: Context, facts: list[dict[str, Any]]) -> None:
    owners: dict[tuple[str, str], int] = {}
    for member, fact in enumerate(facts):
        other = owners.setdefault((fact["host"], fact["uuid"]), member)
        if other != member:
            raise DistArgumentError(
                f"group {context.name!r}: rank {context.ranks[other]} (pid {facts[other]['pid']}, cuda:"
                f"{facts[other]['device']}) and rank {context.ranks[member]} (pid {fact['pid']}, cuda:{fact['device']})"
                f" are on the same device {fact['uuid']} of host {fact['host']}: give each rank a device of its own"
                " (device_id=, the current device, or LOCAL_RANK)",
                group=context.name,
            )
