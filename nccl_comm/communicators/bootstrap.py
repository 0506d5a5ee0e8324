"""Exchange of NCCL's unique id through the job's store (TCP, a file, or MPI).

Every member publishes its device; rank 0 checks that the devices differ, makes the id and publishes it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from nccl_comm.library import api
from nccl_comm.library.api import Nccl
from nccl_comm.library.errors import error_for
from unicoll.arrays.cuda import Cuda
from unicoll.backend import Context
from unicoll.errors import (
    DistArgumentError,
    DistBackendError,
    DistError,
    OperationTimeoutError,
    RankLostError,
    StoreTimeoutError,
)
from unicoll.net import logs, settings

__all__ = [
    "RANKS_PER_ROOT",
    "SHARING",
    "announce",
    "await_announcement",
    "exchange_ids",
    "member_facts",
    "roots",
]

SHARING = "UNICOLL_NCCL_SHARE_DEVICE"
"""With the value 1 several ranks may use one device (for tests; NCCL has a variable of its own for that)."""
RANKS_PER_ROOT = "UNICOLL_NCCL_RANKS_PER_ROOT"
"""Ranks per id if NCCL takes several ids; its documentation and torch recommend 128."""
MakeId = Callable[[], tuple[int, bytes]]
_CHECK_PERIOD_S = 1.0
_WARNING_S = 20.0
"""How long a rank waits for the others before it logs a warning."""


def exchange_ids(
    context: Context, device: int, nccl: Nccl, cuda: Cuda, deadline: float, make_id: MakeId | None = None
) -> list[bytes]:
    """NCCL's unique ids of a group; every member calls this, with its device.

    If NCCL takes several ids, there is one for every ``UNICOLL_NCCL_RANKS_PER_ROOT`` ranks: these ranks connect first
    to the rank that made the id, which would otherwise have to serve all ranks. With ``make_id``, rank 0 calls that in
    place of ncclGetUniqueId, and there is one id.

    Raises:
        DistArgumentError: two members are on one device.
        OperationTimeoutError: members were missing at the ``deadline``; the message names them.
        RankLostError: a member died.
        DistBackendError: a rank could not make an id.
    """
    prefix = f"nccl/{context.name}"
    store = context.job.store
    facts = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": device,
        "uuid": cuda.facts(device).uuid,
    }
    if os.environ.get("NCCL_HOSTID"):
        facts["hostid"] = os.environ["NCCL_HOSTID"]
    store.set(f"{prefix}/{context.rank}", json.dumps(facts))
    if context.rank == 0:
        answer = _choose_roots(context, prefix, nccl, deadline, make_id)
        store.set(f"{prefix}/id", json.dumps(answer))
    else:
        _await(context, [f"{prefix}/id"], prefix, deadline)
        answer = json.loads(store.get(f"{prefix}/id"))
    first = _id_of(context, answer)
    owners = roots(context.size, answer["roots"])
    if len(owners) == 1:
        return [first]
    keys = {f"{prefix}/id/{i}": owner for i, owner in enumerate(owners) if i}
    for key, owner in keys.items():
        if owner == context.rank:
            store.set(key, json.dumps(_new_id(context, nccl)))
    _await(context, list(keys), prefix, deadline, keys)
    return [first, *(_id_of(context, json.loads(text)) for text in store.multi_get(list(keys)))]


def announce(context: Context, decision: str) -> None:
    """Publish a decision of rank 0 for the new ranks of a group."""
    context.job.store.set(f"nccl/{context.name}/announced", json.dumps(decision))


def await_announcement(context: Context, deadline: float) -> str:
    """Wait for the decision that rank 0 publishes.

    Raises:
        OperationTimeoutError, RankLostError: as :func:`exchange_ids`.
    """
    key = f"nccl/{context.name}/announced"
    _await(context, [key], "", deadline, {key: 0})
    decision: str = json.loads(context.job.store.get(key))
    return decision


def roots(size: int, count: int) -> list[int]:
    """The ranks that make the ids: the first ranks of ``count`` blocks, divided as NCCL does."""
    share, rest = divmod(size, count)
    return [i * share + min(i, rest) for i in range(count)]


def _id_of(context: Context, answer: dict[str, Any]) -> bytes:
    """The id that a rank has published; raise the error if it published one."""
    if "id" in answer:
        return bytes.fromhex(answer["id"])
    kind = {"argument": DistArgumentError, "timeout": OperationTimeoutError}.get(
        answer["kind"], DistBackendError
    )
    raise kind(answer["error"], group=context.name)


def member_facts(context: Context, timeout: float) -> list[dict[str, Any]]:
    """What the members of a group have published with :func:`exchange_ids`, in group order.

    Raises:
        DistError: the store does not answer within ``timeout`` seconds.
    """
    keys = [f"nccl/{context.name}/{rank}" for rank in range(context.size)]
    context.job.store.wait(keys, timeout)
    return [json.loads(text) for text in context.job.store.multi_get(keys)]


def _choose_roots(
    context: Context, prefix: str, nccl: Nccl, deadline: float, make_id: MakeId | None
) -> dict[str, Any]:
    """Rank 0's answer to all members: the first id and the number of ids, or an error, which all members raise."""
    keys = [f"{prefix}/{rank}" for rank in range(context.size)]
    try:
        _await(context, keys, prefix, deadline)
        facts = [json.loads(text) for text in context.job.store.multi_get(keys)]
        if not settings.flag(SHARING):
            _refuse_sharing(context, facts)
    except DistArgumentError as e:
        return {"kind": "argument", "error": str(e)}
    except OperationTimeoutError as e:
        return {"kind": "timeout", "error": str(e)}
    except RankLostError:
        raise  # the control plane notifies the other members
    except DistError as e:
        return {"kind": "backend", "error": f"{context.who(0)} could not start NCCL: {e}"}
    several = make_id is None and nccl.has("ncclCommInitRankScalable")
    share = settings.number(RANKS_PER_ROOT) if several else context.size
    return {**_new_id(context, nccl, make_id), "roots": -(-context.size // share)}


def _new_id(context: Context, nccl: Nccl, make_id: MakeId | None = None) -> dict[str, Any]:
    """A new id, or the reason why there is none, to be published."""
    code, unique_id = make_id() if make_id is not None else nccl.unique_id()
    if code:
        what = "ncclGetUniqueId" if make_id is None else "ncclCommGetUniqueId"
        error = error_for(code, nccl, 0, what, context.name, None, None)
        return {"kind": "backend", "error": f"{context.who(context.rank)} could not start NCCL: {error}"}
    assert len(unique_id) == api.UNIQUE_ID_BYTES
    return {"id": unique_id.hex()}


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


def _await(
    context: Context, keys: list[str], prefix: str, deadline: float, owners: Mapping[str, int] | None = None
) -> None:
    """Wait for keys of the store; check at every period whether all members are alive.

    ``owners`` gives the member that sets each key; without it every member is expected.
    """
    if owners is None:
        owners = {f"{prefix}/{member}": member for member in range(context.size)}
    store, control = context.job.store, context.job.control
    warn_at = time.monotonic() + _WARNING_S
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait(keys, max(0.001, min(_CHECK_PERIOD_S, left)))
            return
        except StoreTimeoutError:
            pass
        if time.monotonic() >= warn_at:
            warn_at = deadline + _CHECK_PERIOD_S  # once
            logs.logger("nccl").warning(
                "group %r waits for all its members to start NCCL; missing: %s. A group without a device starts NCCL at"
                " its first operation, sends and receives included; with device_id= of init_process_group or new_group"
                " it starts when the group is made",
                context.name,
                _missing(context, owners),
            )
        if control is not None:
            if (failure := control.group_failure(context.name)) is not None:
                raise failure
            for rank in context.ranks:
                if rank in control.departed:
                    reason = f"group {context.name!r} was starting NCCL: {control.departed[rank]}"
                    raise RankLostError(reason, group=context.name, rank=rank)
        if left <= _CHECK_PERIOD_S:
            raise _timed_out(context, owners)


def _timed_out(context: Context, owners: Mapping[str, int]) -> OperationTimeoutError:
    return OperationTimeoutError(
        f"starting NCCL for group {context.name!r} timed out; missing: {_missing(context, owners)}",
        group=context.name,
    )


def _missing(context: Context, owners: Mapping[str, int]) -> str:
    store = context.job.store
    missing = [member for key, member in owners.items() if not store.check([key])]
    return ", ".join(context.who(m) for m in missing[:16]) or context.who(0)
