"""Decisions that rank 0 makes for all members of a group, through the job's store (TCP, a file, or
MPI)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from unicoll.backend import Context
from unicoll.errors import (
    DistArgumentError,
    DistBackendError,
    DistError,
    OperationTimeoutError,
    RankLostError,
    StoreTimeoutError,
)
from unicoll.net.objects.received_json import from_store
from unicoll.process import logs

if TYPE_CHECKING:
    from unicoll.net.stores import Store

_KINDS: dict[str, type[DistError]] = {
    "argument": DistArgumentError,
    "timeout": OperationTimeoutError,
}
"""Errors that keep their class on the other ranks; the rest become DistBackendError."""
_CHECK_PERIOD_S = 1.0
WARNING_S = 20.0
"""How long a rank waits for the others, or for the library to connect to them, before it logs a
warning."""


class Purpose(NamedTuple):
    """What the members agree on, for messages: "starting NCCL", "start NCCL", a hint for a warning
    of a long wait."""

    doing: str
    to_do: str
    hint: str = ""


def gather_and_decide(
    context: Context,
    prefix: str,
    facts: dict[str, Any],
    purpose: Purpose,
    deadline: float,
    choose: Callable[[list[dict[str, Any]]], Any],
) -> Any:
    """Publish this member's facts; rank 0's answer to the facts of all members, which call this, is
    returned.

    Args:
        prefix: of the store's keys; unused before.
        facts: of this member, for JSON.
        choose: gives the answer from the facts of all members, in group order; called on rank 0.

    Raises:
        DistError: ``choose`` has raised it on rank 0; it is raised on all members.
        OperationTimeoutError: members were missing at the ``deadline``; the message names them.
        RankLostError: a member died.
    """
    store = context.job.store
    keys, answer = [f"{prefix}/{member}" for member in range(context.size)], f"{prefix}/answer"
    members = {key: member for member, key in enumerate(keys)}
    store.set(keys[context.rank], json.dumps(facts))
    if context.rank:
        # The answer alone is awaited, but the members whose facts are missing are what delays it,
        # so they are the ones that errors name.
        await_keys(context, [answer], purpose, deadline, members)
        return result_or_raise(context, from_store(answer, store.get(answer), {}))

    def chosen() -> Any:
        await_keys(context, keys, purpose, deadline, members)
        return choose(stored_values(store, keys))

    # An error of rank 0 is published as well: the other members wait for an answer and would
    # otherwise wait until their deadlines.
    outcome = outcome_to_publish(context, chosen, purpose)
    store.set(answer, json.dumps(outcome))
    return result_or_raise(context, outcome)


def outcome_to_publish(
    context: Context, function: Callable[[], Any], purpose: Purpose
) -> dict[str, Any]:
    """The result of a function or its error, to be published; the control plane notifies of a lost
    rank."""
    try:
        return {"value": function()}
    except RankLostError:
        raise
    except DistError as e:
        for kind, error in _KINDS.items():
            if isinstance(e, error):
                return {"kind": kind, "error": str(e)}
        return {"kind": "", "error": f"{context.who(context.rank)} could not {purpose.to_do}: {e}"}


def result_or_raise(context: Context, outcome: dict[str, Any]) -> Any:
    """The result that a rank has published; raise the error if it published one."""
    if "value" in outcome:
        return outcome["value"]
    kind, error = str(outcome.get("kind")), str(outcome.get("error"))
    raise _KINDS.get(kind, DistBackendError)(error, group=context.name)


def stored_values(store: Store, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON objects that members have stored under keys; DistStoreError if one is another
    program's."""
    return [
        from_store(key, text, {})
        for key, text in zip(keys, store.multi_get(list(keys)), strict=True)
    ]


def await_keys(
    context: Context, keys: list[str], purpose: Purpose, deadline: float, owners: Mapping[str, int]
) -> None:
    """Wait for keys of the store; check at every period whether all members are alive.

    ``owners`` gives the keys that may be missing, and the member that sets each.
    """
    store, control = context.job.store, context.job.control
    warn_at = time.monotonic() + WARNING_S
    while True:
        left = deadline - time.monotonic()
        try:
            # The wait has short periods: the store does not know that a member has died, the
            # control plane does.
            store.wait(keys, max(0.001, min(_CHECK_PERIOD_S, left)))
            return
        except StoreTimeoutError:
            pass
        if time.monotonic() >= warn_at:
            # This is later than the deadline, so that the warning is logged once.
            warn_at = deadline + _CHECK_PERIOD_S
            logs.logger(context.backend).warning(
                "group %r waits for all its members to %s; missing: %s%s",
                context.name,
                purpose.to_do,
                _missing(context, owners),
                purpose.hint,
            )
        if control is not None:
            # The failure of the group comes first: all members raise the same one, while they may
            # learn of deaths in different orders.
            if (failure := control.group_failure(context.name)) is not None:
                raise failure
            for rank in context.ranks:
                if rank in control.departed:
                    reason = f"group {context.name!r} was {purpose.doing}: {control.departed[rank]}"
                    raise RankLostError(reason, group=context.name, rank=rank)
        # The wait above has lasted until the deadline then. It is checked last, because the control
        # plane's reason says more than a timeout.
        if left <= _CHECK_PERIOD_S:
            raise OperationTimeoutError(
                f"{purpose.doing} for group {context.name!r} timed out; missing:"
                f" {_missing(context, owners)}",
                group=context.name,
            )


def _missing(context: Context, owners: Mapping[str, int]) -> str:
    store = context.job.store
    missing = [member for key, member in owners.items() if not store.check([key])]
    # If no facts are missing, the answer of rank 0 is.
    return ", ".join(context.who(m) for m in missing[:16]) or context.who(0)
