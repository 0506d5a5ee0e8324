"""Exchange of a library's unique id through the job's store.

Every member publishes its device; rank 0 checks that the devices differ, makes the id and publishes
it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from unicoll.backend import Context
from unicoll.device_collectives.communicators.agreement import (
    Purpose,
    await_keys,
    gather_and_decide,
    outcome_to_publish,
    result_or_raise,
    stored_values,
)
from unicoll.device_collectives.errors import error_for
from unicoll.device_collectives.interface import CollectiveLibrary
from unicoll.devices.device_runtime import DeviceRuntime
from unicoll.errors import DistArgumentError

MakeId = Callable[[], tuple[int, bytes]]
Capability = tuple[int, int]


def starting(library: CollectiveLibrary) -> Purpose:
    """What the members agree on when they exchange ids."""
    name = library.name
    return Purpose(
        f"starting {name}",
        f"start {name}",
        f". A group without a device starts {name} at its first operation, sends and receives"
        " included; with device_id= of init_process_group or new_group it starts when the group is"
        " made",
    )


class Origin(NamedTuple):
    """Where the members of a communicator have exchanged their facts: in its group, or in the one
    it was split from.

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
    library: CollectiveLibrary,
    runtime: DeviceRuntime,
    deadline: float,
    make_id: MakeId | None = None,
) -> tuple[list[bytes], Origin]:
    """The unique ids of a group; every member calls this, with its device, and with the number of
    its calls before.

    If the library takes several ids, there is one for every :meth:`.ranks_per_id` ranks: these
    ranks connect first to the rank that made the id, which would otherwise have to serve all ranks.
    With ``make_id``, rank 0 calls that in place of ``unique_id``, and there is one id.

    Raises:
        DistArgumentError: two members are on one device.
        OperationTimeoutError: members were missing at the ``deadline``; the message names them.
        RankLostError: a member died.
        DistBackendError: a rank could not make an id.
    """
    prefix = f"{context.backend}/{context.name}/{attempt}"
    purpose = starting(library)
    store = context.job.store
    own = runtime.facts(device)
    facts = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": device,
        "uuid": own.uuid,
        "capability": own.capability,
    }
    if hostid := library.host_id():
        facts["hostid"] = hostid
    answer = gather_and_decide(
        context,
        prefix,
        facts,
        purpose,
        deadline,
        partial(_choose_roots, context, library, runtime, make_id),
    )
    owners = roots(context.size, answer["roots"])
    # The first id is in the answer of rank 0; the other owners publish theirs now that they know of
    # the number of ids.
    keys = {f"{prefix}/id/{i}": owner for i, owner in enumerate(owners) if i}
    for key, owner in keys.items():
        if owner == context.rank:
            store.set(
                key,
                json.dumps(
                    outcome_to_publish(context, partial(_new_id, context, library), purpose)
                ),
            )
    made = [answer["id"]]
    if keys:
        # An owner that could not make an id has published its error, which all members raise.
        await_keys(context, list(keys), purpose, deadline, keys)
        made += (result_or_raise(context, outcome) for outcome in stored_values(store, list(keys)))
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
    found = stored_values(context.job.store, keys)
    return dict(zip(context.ranks, found, strict=True))


def _choose_roots(
    context: Context,
    library: CollectiveLibrary,
    runtime: DeviceRuntime,
    make_id: MakeId | None,
    facts: list[dict[str, Any]],
) -> dict[str, Any]:
    """Rank 0's answer to all members: the first id, the number of ids, and the members' compute
    capabilities."""
    # Settings of the environment count on rank 0 only: ranks that differ in them would disagree.
    if not library.may_share_device():
        _refuse_sharing(context, runtime.device_type, facts)
    share = (library.ranks_per_id() if make_id is None else 0) or context.size
    return {
        "id": _new_id(context, library, make_id),
        "roots": -(-context.size // share),
        "capabilities": [fact["capability"] for fact in facts],
    }


def _new_id(context: Context, library: CollectiveLibrary, make_id: MakeId | None = None) -> str:
    """A new id in hexadecimal digits."""
    code, unique_id = make_id() if make_id is not None else library.unique_id()
    if code:
        what = library.symbol("unique_id" if make_id is None else "comm_unique_id")
        raise error_for(code, library, 0, what, context.name, None, None)
    return unique_id.hex()


def _refuse_sharing(context: Context, kind: str, facts: list[dict[str, Any]]) -> None:
    owners: dict[tuple[str, str], int] = {}
    for member, fact in enumerate(facts):
        # The host is a part of the key, because the names of SYCL's devices are unique on one host
        # only.
        other = owners.setdefault((fact["host"], fact["uuid"]), member)
        if other != member:
            raise DistArgumentError(
                f"group {context.name!r}: {_described(context, other, facts[other], kind)} and"
                f" {_described(context, member, fact, kind)} are on the same device {fact['uuid']}"
                f" of host {fact['host']}: give each rank a device of its own (device_id=, the"
                " current device, or LOCAL_RANK)",
                group=context.name,
            )


def _described(context: Context, member: int, fact: dict[str, Any], kind: str) -> str:
    return f"rank {context.ranks[member]} (pid {fact['pid']}, {kind}:{fact['device']})"
