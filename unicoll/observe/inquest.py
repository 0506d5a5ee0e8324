"""What went wrong in a collective, in words: asks the other ranks and writes the errors.

Everything here runs after something failed, or after a long wait; it asks through the control plane.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import NoneType
from typing import TYPE_CHECKING, Any

from ..errors import (
    CollectiveMismatchError,
    DistError,
    GroupAbortedError,
    OperationTimeoutError,
    RankLostError,
)

if TYPE_CHECKING:
    from ..backend import Context
    from ..call import Call

__all__ = ["aborted", "failed", "lost", "mismatch", "report", "timed_out", "where", "while_waiting"]

_SHOWN = 64
"""Ranks that an error lists at most."""
_UNKNOWN_S = 0.3
"""For how long a rank is asked again that does not have the group: it may be about to make it."""
_NOT_THE_USERS = {"unicoll", "gloo_fallback", "mpi_comm", "nccl_comm", "torch", *sys.stdlib_module_names}

Report = dict[str, Any]


def lost(context: Context, call: Call, peer: int, why: str) -> RankLostError:
    """The error of a member that is gone."""
    rank, control = context.ranks[peer], context.job.control
    if control is not None and rank in control.died:  # others have said themselves how they ended
        why += context.job.cause_of_death(rank)
    seq = f" #{call.seq}" if call.seq else ""
    error = RankLostError(
        f"{call.describe()}{seq} on group {context.name!r}: {why}",
        group=context.name,
        rank=rank,
        op=call.op.name,
        seq=call.seq or None,
    )
    if control is not None and rank < len(control.peers):
        error.host, error.pid = control.peers[rank]
    return error


def failed(context: Context, call: Call, cause: BaseException) -> GroupAbortedError:
    """What the other ranks are told when this one fails within a call by itself."""
    return GroupAbortedError(
        f"{context.who(context.rank)} failed in {call.describe()} #{call.seq} on group {context.name!r}:"
        f" {type(cause).__name__}: {cause}",
        group=context.name,
        rank=context.ranks[context.rank],
        op=call.op.name,
        seq=call.seq,
    )


def aborted(context: Context, reason: Exception) -> DistError:
    """Why a group was aborted, as one of our errors."""
    return reason if isinstance(reason, DistError) else GroupAbortedError(str(reason), group=context.name)


def mismatch(context: Context, call: Call, peer: int, seq: int, why: str = "") -> CollectiveMismatchError:
    """The error of ranks whose calls differ, ``why`` says in what; member ``peer`` was seen to be at ``seq``."""
    why = why or f"the ranks of group {context.name!r} are in different collectives"
    reports = _ask(context)
    lines = []
    for member, rank in enumerate(context.ranks[:_SHOWN]):
        if member == context.rank:
            doing = f"{call.describe()} #{call.seq}{_at(call.site or where())}"
        else:
            doing = _doing(context, rank, reports.get(rank), seq if member == peer else None)
        lines.append(f"rank {rank}: {doing}")
    return CollectiveMismatchError(
        f"{why}:\n  " + "\n  ".join(lines),
        group=context.name,
        op=call.op.name,
        seq=call.seq,
    )


def timed_out(context: Context, call: Call) -> OperationTimeoutError:
    """The error of a deadline that has passed."""
    reports = _ask(context)
    arrived, absent = _roll_call(context, call, reports)
    names = f"rank{'s' if len(arrived) > 1 else ''} {', '.join(map(str, arrived[:_SHOWN]))}"
    error = OperationTimeoutError(
        f"{call.describe()} #{call.seq} on group {context.name!r} timed out after {call.timeout:g} s;"
        f" arrived: {names}; missing: {_list(list(absent.values()))}{_differing(call, reports)}",
        group=context.name,
        op=call.op.name,
        seq=call.seq,
    )
    error.missing = list(absent)
    return error


def while_waiting(context: Context, call: Call, seconds: float) -> None:
    """Warn that a call has waited so long, and for whom."""
    _, absent = _roll_call(context, call, _ask(context))
    logging.getLogger("unicoll").warning(
        "%s #%d on group %r has waited %.0f s; missing: %s",
        call.describe(), call.seq, context.name, seconds, _list(list(absent.values())),
    )  # fmt: skip


def report(call: Call | None, last: Call | None) -> Report:
    """What this rank is doing in the group, for the others' errors (called on the control thread)."""
    latest = call or last
    return {
        "seq": latest.seq if latest is not None else 0,
        "call": f"{call.describe()} #{call.seq}" if call is not None else None,
        "last": f"{last.describe()} #{last.seq}" if last is not None and call is None else None,
        "where": call.site if call is not None and call.site else where(),
    }


def where() -> str:
    """``file:line`` of the user's code that the main thread is in (called from any thread)."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _differing(call: Call, reports: dict[int, Report]) -> str:
    """Which ranks are in another call of the same number, where the backend itself does not notice."""
    mine = f"{call.describe()} #{call.seq}"
    others = [
        f"rank {rank} is in {told['call']}{_at(told['where'])}"
        for rank, told in sorted(reports.items())
        if told.get("seq") == call.seq and told.get("call") not in (None, mine)
    ]
    return f"; the calls differ: {'; '.join(others[:_SHOWN])}" if others else ""


def _roll_call(context: Context, call: Call, reports: dict[int, Report]) -> tuple[list[int], dict[int, str]]:
    """Global ranks that are in this call or past it, and the others with what they are doing, in words."""
    arrived: list[int] = []
    absent: dict[int, str] = {}
    for member, rank in enumerate(context.ranks):
        told = reports.get(rank)
        if member == context.rank or (told is not None and told.get("seq", 0) >= call.seq):
            arrived.append(rank)
        else:
            absent[rank] = f"{context.who(member)}: {_doing(context, rank, told, None)}"
    return arrived, absent


def _list(missing: list[str]) -> str:
    more = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return "; ".join(missing[:_SHOWN]) + more if missing else "none (all are waiting)"


def _ask(context: Context) -> dict[int, Report]:
    control = context.job.control
    if control is None:
        return {}
    others = set(context.ranks) - {context.job.rank}
    reports = _well_formed(control.ask(context.name, others), others)
    deadline = time.monotonic() + _UNKNOWN_S
    while unknown := {rank for rank, told in reports.items() if told.get("unknown")}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
        reports |= _well_formed(control.ask(context.name, unknown), unknown)
    return reports


def _well_formed(answers: dict[Any, Any], asked: set[int]) -> dict[int, Report]:
    """The answers that are reports (see :func:`report`) of ranks that were asked."""
    kinds: dict[str, Any] = {"seq": int, "call": (str, NoneType), "last": (str, NoneType), "where": str}
    return {
        rank: told
        for rank, told in answers.items()
        if rank in asked
        and isinstance(told, dict)
        and (told.get("unknown") or all(n in told and isinstance(told[n], kind) for n, kind in kinds.items()))
    }


def _doing(context: Context, rank: int, told: Report | None, seq: int | None) -> str:
    control = context.job.control
    if control is not None and rank in control.departed:
        return control.departed[rank]
    if told is None:
        place = f"; is at #{seq}" if seq else ""
        return f"does not answer (stopped, holding the interpreter, or cut off){place}"
    if told.get("unknown"):
        return "does not have this group (any more, or yet)"
    before = f", last was {told['last']}" if told.get("last") else ""
    doing = told["call"] or "in no collective of this group, now"
    return f"{doing}{_at(told['where'])}{before}"


def _at(place: str) -> str:
    return f" at {place}" if place else ""
