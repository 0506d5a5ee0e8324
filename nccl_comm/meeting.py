"""How the members of a group find each other: rank 0 looks at everybody's device and hands out NCCL's unique id.

It goes through the job's store, whatever that is: TCP, a file, or MPI.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from unicoll import settings
from unicoll.backend import Context
from unicoll.errors import (
    DistArgumentError,
    DistBackendError,
    DistError,
    OperationTimeoutError,
    RankLostError,
    StoreTimeoutError,
)
from unicoll.streams import Cuda

from . import api
from .api import Nccl
from .errors import error_for

__all__ = ["RANKS_PER_ROOT", "SHARING", "announce", "announced", "facts_of", "meet", "roots"]

SHARING = "UNICOLL_NCCL_SHARE_DEVICE"
"""With the value 1 several ranks may use one device (for tests: NCCL itself has to be told, too)."""
RANKS_PER_ROOT = "UNICOLL_NCCL_RANKS_PER_ROOT"
"""How many ranks share an id where NCCL takes several; its own documentation and torch recommend 128."""
MakeId = Callable[[], tuple[int, bytes]]
_SLICE_S = 1.0
_SILENCE_S = 20.0
"""After how long those who wait for others to start NCCL are told so."""


def meet(
    context: Context, device: int, nccl: Nccl, cuda: Cuda, deadline: float, make: MakeId | None = None
) -> list[bytes]:
    """NCCL's unique ids of a group; every member calls this, with its device.

    There is one for every ``UNICOLL_NCCL_RANKS_PER_ROOT`` ranks, where NCCL takes several: the rank that has made an id
    is the one that its share of the ranks connect to first, of which one alone would have too many.
    ``make`` makes the only one on rank 0 in place of ncclGetUniqueId.

    Raises:
        DistArgumentError: two members are on one device.
        OperationTimeoutError: not all members came before ``deadline``; names the missing.
        RankLostError: a member died meanwhile.
        DistBackendError: a rank could not make an id.
    """
    prefix = f"nccl/{context.name}"
    store = context.job.store
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "device": device, "uuid": cuda.facts(device).uuid}
    if os.environ.get("NCCL_HOSTID"):
        mine["hostid"] = os.environ["NCCL_HOSTID"]
    store.set(f"{prefix}/{context.rank}", json.dumps(mine))
    if context.rank == 0:
        answer = _preside(context, prefix, nccl, deadline, make)
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
            store.set(key, json.dumps(_made_id(context, nccl)))
    _await(context, list(keys), prefix, deadline, keys)
    return [first, *(_id_of(context, json.loads(text)) for text in store.multi_get(list(keys)))]


def announce(context: Context, what: str) -> None:
    """Rank 0 tells something to those who are to come to a group."""
    context.job.store.set(f"nccl/{context.name}/announced", json.dumps(what))


def announced(context: Context, deadline: float) -> str:
    """What rank 0 has told, once it has.

    Raises:
        OperationTimeoutError, RankLostError: as :func:`meet`.
    """
    key = f"nccl/{context.name}/announced"
    _await(context, [key], "", deadline, {key: 0})
    said: str = json.loads(context.job.store.get(key))
    return said


def roots(size: int, count: int) -> list[int]:
    """The ranks that make the ids, each the first of its share of the ranks, as NCCL cuts them."""
    each, more = divmod(size, count)
    return [i * each + min(i, more) for i in range(count)]


def _id_of(context: Context, answer: dict[str, Any]) -> bytes:
    """The id that a rank has published, or the error in place of it."""
    if "id" in answer:
        return bytes.fromhex(answer["id"])
    kind = {"argument": DistArgumentError, "timeout": OperationTimeoutError}.get(answer["kind"], DistBackendError)
    raise kind(answer["error"], group=context.name)


def facts_of(context: Context, patience: float) -> list[dict[str, Any]]:
    """What the members of a group said of themselves where they met, in group order.

    Raises:
        DistError: the store does not answer in ``patience`` seconds, or not any more.
    """
    keys = [f"nccl/{context.name}/{rank}" for rank in range(context.size)]
    context.job.store.wait(keys, patience)
    return [json.loads(text) for text in context.job.store.multi_get(keys)]


def _preside(
    context: Context, prefix: str, nccl: Nccl, deadline: float, make: MakeId | None
) -> dict[str, Any]:
    """Rank 0's part: whatever goes wrong here is everybody's answer, so that nobody is left waiting."""
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
        raise  # everybody learns of it from the control plane
    except DistError as e:
        return {"kind": "backend", "error": f"{context.who(0)} could not start NCCL: {e}"}
    several = make is None and nccl.has("ncclCommInitRankScalable")
    share = settings.number(RANKS_PER_ROOT) if several else context.size
    return {**_made_id(context, nccl, make), "roots": -(-context.size // share)}


def _made_id(context: Context, nccl: Nccl, make: MakeId | None = None) -> dict[str, Any]:
    """A new id of this rank's, or why there is none, for all to know."""
    code, unique_id = make() if make is not None else nccl.unique_id()
    if code:
        what = "ncclGetUniqueId" if make is None else "ncclCommGetUniqueId"
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
    """Wait for keys, in slices: between them, look whether everybody is alive.

    ``owners`` are the members who set them, where it is not for all members to come.
    """
    if owners is None:
        owners = {f"{prefix}/{member}": member for member in range(context.size)}
    store, control = context.job.store, context.job.control
    silent_until = time.monotonic() + _SILENCE_S
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait(keys, max(0.001, min(_SLICE_S, left)))
            return
        except StoreTimeoutError:
            pass
        if time.monotonic() >= silent_until:
            silent_until = deadline + _SLICE_S
            logging.getLogger("unicoll").warning(
                "group %r waits to start NCCL, which takes all its members; have not come: %s. A group without a device"
                " starts it at its first operation, messages included: give device_id= to init_process_group or"
                " new_group, and it starts when it is made", context.name, _missing(context, owners),
            )  # fmt: skip
        if control is not None:
            for rank in context.ranks:
                if rank in control.departed:
                    why = f"group {context.name!r} was to start NCCL: {control.departed[rank]}"
                    raise RankLostError(why, group=context.name, rank=rank)
        if left <= _SLICE_S:
            raise _too_late(context, owners)


def _too_late(context: Context, owners: Mapping[str, int]) -> OperationTimeoutError:
    return OperationTimeoutError(
        f"starting NCCL for group {context.name!r} was not done in time; have not come: {_missing(context, owners)}",
        group=context.name,
    )


def _missing(context: Context, owners: Mapping[str, int]) -> str:
    store = context.job.store
    missing = [member for key, member in owners.items() if not store.check([key])]
    return ", ".join(context.who(m) for m in missing[:16]) or context.who(0)
