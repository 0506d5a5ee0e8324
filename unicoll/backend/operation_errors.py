"""Errors of failed operations, with the state of the other ranks.

The state comes from reports that the control plane collects. All functions run after a failure or a
long wait.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType, NoneType
from typing import TYPE_CHECKING, Any

from unicoll.arrays.types import ALL_DTYPES
from unicoll.calls.flight_recorder import site_of
from unicoll.calls.thread_activity import Activity, entries
from unicoll.errors import (
    AuthenticationError,
    CollectiveMismatchError,
    DistError,
    DistNetworkError,
    GroupAbortedError,
    MessageMismatchError,
    OperationTimeoutError,
    RankLostError,
)
from unicoll.net.wire.interfaces import check_loopback
from unicoll.process import logs
from unicoll.process.excepthook import PACKAGES
from unicoll.process.thread_frames import ThreadFrames, outwards

if TYPE_CHECKING:
    from unicoll.backend.contract import Context
    from unicoll.calls.call import Call, EndedCall
    from unicoll.net.wire.records import TamperedError

_SHOWN = 64
"""Maximum number of ranks that an error lists."""
_UNKNOWN_S = 0.3
"""How long the request to a rank that does not have the group is repeated: it may be creating the
group."""
_BEHIND_S = 1.0
"""How long the request to a rank that is in an earlier call is repeated: it may be about to leave
that call."""
LIBRARY_PACKAGES = {*PACKAGES, "torch", "ray", "typing_extensions", *sys.stdlib_module_names}

_TYPES = {dtype.code: dtype.name for dtype in ALL_DTYPES}

Report = dict[str, Any]


def rank_lost_error(context: Context, call: Call, peer: int, why: str) -> RankLostError:
    """The error of an operation whose peer has died or left, for the reason ``why``."""
    rank, control = context.ranks[peer], context.job.control
    # For a rank that left, ``why`` has the reason.
    if control is not None and rank in control.died:
        why += context.job.cause_of_death(rank)
    error = RankLostError(
        f"{call.describe_with_number()} on group {context.name!r}: {why}",
        group=context.name,
        rank=rank,
        op=call.op.name,
        seq=call.seq or None,
    )
    if control is not None and rank < len(control.peers):
        error.host, error.pid = control.peers[rank][:2]
    return error


def tampered_error(
    context: Context, rank: int, error: TamperedError, call: Call | None = None
) -> AuthenticationError:
    """The error of altered data from global rank ``rank``, which ``call`` needs, or no call in
    particular."""
    before = f"{call.describe()}: " if call is not None else ""
    return AuthenticationError(
        f"{before}{context.who(context.ranks.index(rank))}: {error.strerror}",
        group=context.name,
        rank=rank,
        op=call.op.name if call is not None else None,
    )


def call_failed_error(context: Context, call: Call, cause: BaseException) -> GroupAbortedError:
    """The error that the other ranks raise after this rank has raised ``cause`` in a call."""
    return GroupAbortedError(
        f"{context.who(context.rank)} failed in {call.describe_with_number()} on group"
        f" {context.name!r}: {_described(cause)}",
        group=context.name,
        rank=context.ranks[context.rank],
        op=call.op.name,
        seq=call.seq,
    )


def member_failed_error(context: Context, what: str, cause: BaseException) -> DistError:
    """The error that the other ranks raise after ``what``, which all members do together, has
    failed on this one."""
    return GroupAbortedError(
        f"{context.who(context.rank)} failed while {what} group {context.name!r}:"
        f" {_described(cause)}",
        group=context.name,
        rank=context.ranks[context.rank],
    )


def thread_failed(context: Context, cause: BaseException) -> DistError:
    """The error that all ranks of a group raise after the calling thread, which runs its
    operations, has failed."""
    who, thread = context.who(context.rank), threading.current_thread().name
    error: DistError = GroupAbortedError(
        f"{who}: the thread {thread!r} of group {context.name!r} failed: {_described(cause)}",
        group=context.name,
        rank=context.ranks[context.rank],
    )
    error.__cause__ = cause
    return announce(context, error)


def announce(context: Context, error: DistError) -> DistError:
    """Announce that a group failed; returns the error that all its ranks raise."""
    control = context.job.control
    return (
        error if control is None else control.announce_failure(context.name, context.ranks, error)
    )


def group_aborted_error(context: Context, reason: Exception) -> DistError:
    """The reason for which a group was aborted, as a DistError."""
    return (
        reason
        if isinstance(reason, DistError)
        else GroupAbortedError(str(reason), group=context.name)
    )


def mismatch_error(
    context: Context, call: Call, peer: int, seq: int, why: str = ""
) -> CollectiveMismatchError:
    """The error of ranks whose calls differ, for the reason ``why``; member ``peer`` is in its call
    ``seq``."""
    reports = _request_reports(context, reached=call.seq)
    lines = []
    for member, rank in enumerate(context.ranks[:_SHOWN]):
        if member == context.rank:
            doing = f"{call.describe_with_number()}{_at(_site(call))}"
        else:
            doing = _describe_state(
                context, rank, reports.get(rank), seq if member == peer else None
            )
        lines.append(f"rank {rank}: {doing}")
    calls = {rank: answer["call"] for rank, answer in reports.items() if answer.get("call")}
    calls[context.job.rank] = call.describe_with_number()
    differ = why or f"the ranks of group {context.name!r} are in different collectives"
    return CollectiveMismatchError(
        f"{differ}:\n  " + "\n  ".join(lines),
        group=context.name,
        # The call of a root lists all ranks' sizes.
        rank=None if why else only_different(calls),
        op=call.op.name,
        seq=call.seq,
    )


def only_different(calls: Mapping[int, str]) -> int | None:
    """The rank whose call differs from that of all others, two or more; None if there is no such
    rank."""
    counts = Counter(calls.values())
    odd = [rank for rank, call in calls.items() if counts[call] == 1]
    return odd[0] if len(odd) == 1 and len(counts) == 2 else None


def timeout_error(
    context: Context, call: Call, links: Callable[[], str] = lambda: ""
) -> OperationTimeoutError:
    """The error of a collective whose deadline has passed; ``links`` as in :func:`report`."""
    reports = _request_reports(context)
    arrived, absent = _arrived_and_absent(context, call, reports)
    names = f"{_plural(arrived)} {', '.join(map(str, arrived[:_SHOWN]))}"
    error = OperationTimeoutError(
        f"{call.describe_with_number()} on group {context.name!r} timed out after"
        f" {call.timeout:g} s;"
        f" arrived: {names}; missing: {_list(list(absent.values()))}{_differing(call, reports)}"
        f"{_without_answer(context, reports, links())}",
        group=context.name,
        op=call.op.name,
        seq=call.seq,
    )
    error.missing = list(absent)
    return error


def message_timeout_error(
    context: Context, call: Call, peer: int, state: str = "", others: str = ""
) -> OperationTimeoutError:
    """The error of a send or receive whose deadline has passed.

    Args:
        context, call: of the group, and the send or receive.
        peer: the other member; -1 for a receive from any that has no message.
        state: how far the message was transferred; "" if no part of it was.
        others: messages that have come and that a receive does not match; "" if none.
    """
    who = context.who(peer) if peer >= 0 else "any rank"
    if state:
        reason = f"{who}: {state}"
    elif not call.inputs:
        reason = f"no message for it has come from {who}{others}"
    else:
        reason = f"{who} has not received the message"
    return OperationTimeoutError(
        f"{call.describe()} on group {context.name!r} timed out after {call.timeout:g} s: {reason}",
        group=context.name,
        op=call.op.name,
    )


def message_mismatch_error(
    context: Context, call: Call, size: int, code: int
) -> MessageMismatchError:
    """The error of a receive whose array has another size or element type than its message.

    Args:
        call: the receive; ``call.source`` is the sender's rank in the group.
        size: bytes of the message.
        code: of its element type, :attr:`unicoll.arrays.types.DType.code`.
    """
    buffer = call.outputs[0]
    sent = f"{size} bytes of {_TYPES.get(code, '?')}"
    return MessageMismatchError(
        f"{call.describe()}: {context.who(call.source)} sent {sent}, the array holds"
        f" {buffer.nbytes} bytes of {buffer.dtype}",
        group=context.name,
        rank=context.ranks[call.source],
        op=call.op.name,
    )


def check_message(context: Context, call: Call, size: int, code: int) -> None:
    """Raise :func:`message_mismatch_error` if a message does not fit the array of its receive."""
    if not call.accepts(code, size):
        raise message_mismatch_error(context, call, size, code)


def first_dead_member(context: Context) -> int | None:
    """The global rank of the first member that has died, or None. Ranks that left the job do not
    count."""
    control = context.job.control
    if control is None or not control.departed:
        return None
    departed = [
        *control.departed
        # In the order in which they ended: the first one may be why the others did.
    ]
    return next((r for r in departed if r in context.ranks and r not in control.left), None)


def first_member_that_left(context: Context) -> int | None:
    """The global rank of a member that has left the job without an exception, or None."""
    control = context.job.control
    return (
        next((r for r in context.ranks if r in control.left), None) if control is not None else None
    )


def log_stall(context: Context, call: Call, seconds: float, links: str, others: str = "") -> None:
    """Log a warning that a call has waited for some seconds, with what the ranks do that it waits
    for.

    ``links`` as in :func:`report`, ``others`` as for :func:`message_timeout_error`.
    """
    what = f"{call.describe_with_number()} on group {context.name!r}{_at(call.site)}"
    text = f"{what} has waited {seconds:.0f} s"
    if call.op.message:
        peers = (
            [call.peer] if call.peer >= 0 else [m for m in range(context.size) if m != context.rank]
        )
        reports = _request_reports(context, {context.ranks[peer] for peer in peers})
        doing = [
            _describe_state(context, context.ranks[m], reports.get(context.ranks[m]), None)
            for m in peers
        ]
        text += f"; {_list([f'{context.who(m)}: {what}' for m, what in zip(peers, doing, strict=True)])}{others}"
    else:
        reports = _request_reports(context)
        arrived, absent = _arrived_and_absent(context, call, reports)
        control = context.job.control
        if call.presumed and (control is None or control.left.issuperset(absent)):
            return
        more = ", ..." if len(arrived) > _SHOWN else ""
        text += f"; arrived: {_plural(arrived)} {', '.join(map(str, arrived[:_SHOWN]))}{more}"
        text += f"; missing: {_list(list(absent.values()))}{_differing(call, reports)}"
        text += _without_answer(context, reports, links)
    logs.logger("backend").warning("%s", text)


def report(call: Call | None, last: EndedCall | None, links: str = "") -> Report:
    """The state of this rank in the group, for errors on other ranks; called on the control thread.

    Args:
        links: this rank's connections that are not acknowledged, and addresses that do not answer.
    """
    seq, ended = last or (0, None)
    return {
        "seq": seq if call is None else call.seq,
        "call": call.describe_with_number() if call is not None else None,
        "last": f"{ended.describe()} #{seq}" if ended is not None and call is None else None,
        "where": where() if call is None else _site(call),
        "links": links,
    }


def _site(call: Call) -> str:
    """``file:line`` of the user's code that made a call, in whichever thread; called from any
    thread."""
    if not call.site:
        made = getattr(call, "of", call)
        for entry in [*entries]:
            if entry[1] is made:
                activity = Activity(*entry)
                with ThreadFrames() as frames:
                    try:
                        return line_of_user(activity.frame or frames.get(activity.thread))
                    finally:
                        # Frames keep arrays alive.
                        frames.clear()
    return call.site or where()


def where() -> str:
    """``file:line`` of the user's code that the main thread runs; called from any thread."""
    with ThreadFrames() as frames:
        try:
            return line_of_user(frames.get(threading.main_thread().ident or 0))
        finally:
            # Frames keep arrays alive.
            frames.clear()


def line_of_user(innermost: FrameType | None) -> str:
    """``file:line`` of the innermost frame of the user's code, "" if there is none."""
    for frame in outwards(innermost):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARY_PACKAGES:
            return site_of(frame)
    return ""


def _described(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {cause}".removesuffix(": ")


def _plural(ranks: list[int]) -> str:
    return "ranks" if len(ranks) > 1 else "rank"


def _differing(call: Call, reports: dict[int, Report]) -> str:
    """The ranks whose call has this number and differs, for backends that do not compare calls."""
    mine = call.describe_with_number()
    others = [
        f"rank {rank} is in {answer['call']}{_at(answer['where'])}"
        for rank, answer in sorted(reports.items())
        if answer.get("seq") == call.seq and answer.get("call") not in (None, mine)
    ]
    return f"; the calls differ: {'; '.join(others[:_SHOWN])}" if others else ""


def _without_answer(context: Context, reports: dict[int, Report], own: str) -> str:
    """The connections and addresses of all ranks on which nothing is acknowledged or answered."""
    found = {rank: answer["links"] for rank, answer in reports.items() if not answer.get("unknown")}
    found[context.job.rank] = own
    lines = [f"rank {rank}: {links}" for rank, links in sorted(found.items()) if links]
    return f"; connections without an answer: {'; '.join(lines[:_SHOWN])}" if lines else ""


def _arrived_and_absent(
    context: Context, call: Call, reports: dict[int, Report]
) -> tuple[list[int], dict[int, str]]:
    """Global ranks that have reached this call, and a description of the state of each other
    rank."""
    arrived: list[int] = []
    absent: dict[int, str] = {}
    for member, rank in enumerate(context.ranks):
        answer = reports.get(rank)
        if member == context.rank or (answer is not None and answer.get("seq", 0) >= call.seq):
            arrived.append(rank)
        else:
            absent[rank] = f"{context.who(member)}: {_describe_state(context, rank, answer, None)}"
    return arrived, absent


def _list(missing: list[str]) -> str:
    more = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return "; ".join(missing[:_SHOWN]) + more if missing else "none (all are waiting)"


def _request_reports(
    context: Context, ranks: set[int] | None = None, reached: int = 0
) -> dict[int, Report]:
    """The reports of all other ranks, or of ``ranks``; requests to those before call ``reached``
    are repeated."""
    control = context.job.control
    if control is None:
        return {}
    others = set(context.ranks) - {context.job.rank} if ranks is None else ranks
    reports = _valid_reports(control.request_reports(context.name, context.backend, others), others)
    started = time.monotonic()
    while True:
        age = time.monotonic() - started
        again = {
            rank
            for rank, answer in reports.items()
            if (
                age < _UNKNOWN_S
                if answer.get("unknown")
                else answer["seq"] < reached and age < _BEHIND_S
            )
        }
        if not again:
            return reports
        time.sleep(0.02)
        reports |= _valid_reports(
            control.request_reports(context.name, context.backend, again), again
        )


def _valid_reports(answers: dict[Any, Any], ranks: set[int]) -> dict[int, Report]:
    """The answers that are valid reports (see :func:`report`) of these ranks."""
    text_or_none = (str, NoneType)
    kinds: dict[str, Any] = {
        "seq": int,
        "call": text_or_none,
        "last": text_or_none,
        "where": str,
        "links": str,
    }
    return {
        rank: answer
        for rank, answer in answers.items()
        if rank in ranks
        and isinstance(answer, dict)
        and (
            answer.get("unknown")
            or all(n in answer and isinstance(answer[n], kind) for n, kind in kinds.items())
        )
    }


def _describe_state(context: Context, rank: int, answer: Report | None, seq: int | None) -> str:
    control = context.job.control
    if control is not None and rank in control.departed:
        return control.departed[rank]
    if answer is None:
        place = f"; is at #{seq}" if seq else ""
        return f"sends no report ({_why_no_report()}){place}"
    if answer.get("unknown"):
        return "has not created this group yet, or has destroyed it"
    before = f", last was {answer['last']}" if answer.get("last") else ""
    place = _at(answer["where"])
    if answer["call"]:
        return f"{answer['call']}{place}{before}"
    return f"not in a collective of this group{place and '; is'}{place}{before}"


def _why_no_report() -> str:
    try:
        # This is the address of this host over which its processes connect.
        check_loopback()
    except DistNetworkError as error:
        return str(error)
    return "the process is stopped, a thread holds the GIL, or the network is down"


def _at(place: str) -> str:
    return f" at {place}" if place else ""
