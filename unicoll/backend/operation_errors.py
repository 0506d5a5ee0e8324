"""Errors of failed operations: what is learned of the other ranks, and then the error.

The errors of timeouts and of calls that differ have the state of the other ranks, which reply to a
request of the control plane, and that of a lost rank has the launcher's note on its end. So these
functions wait, for a second at most; they run after a failure or a long wait. The texts are in
:mod:`unicoll.backend.error_texts`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from unicoll.arrays.types import ALL_DTYPES
from unicoll.backend.error_texts import (
    Learned,
    Report,
    arrived_and_absent,
    at,
    cause_text,
    list_text,
    mismatch_text,
    progress_text,
    state_text,
)
from unicoll.calls.call_site import line_of_main_thread, site_of_call
from unicoll.errors import (
    AuthenticationError,
    CollectiveMismatchError,
    DistError,
    GroupAbortedError,
    MessageMismatchError,
    OperationTimeoutError,
    RankLostError,
)
from unicoll.net.control.reports import why_no_reply
from unicoll.process import logs

if TYPE_CHECKING:
    from unicoll.backend.contract import Context
    from unicoll.calls.call import Call, EndedCall
    from unicoll.net.wire.records import TamperedError

_TYPES = {dtype.code: dtype.name for dtype in ALL_DTYPES}


def learn(
    context: Context, ranks: set[int] | None = None, reached: int = 0, links: str = ""
) -> Learned:
    """Ask the other ranks for their state.

    Args:
        ranks: global ranks; None: all other members.
        reached: requests to ranks that are before this call are repeated: they may be about to
            leave the call before.
        links: of this rank, see :class:`Learned`.
    """
    control = context.job.control
    if control is None:
        return Learned({}, links=links)
    others = set(context.ranks) - {context.job.rank} if ranks is None else ranks
    reports = control.collect_reports(context.name, context.backend, others, reached)
    # Of a rank that has ended the text says how.
    silence = why_no_reply() if others.difference(reports, control.departed) else ""
    return Learned(reports, silence, links)


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
        f" {context.name!r}: {cause_text(cause)}",
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
        f" {cause_text(cause)}",
        group=context.name,
        rank=context.ranks[context.rank],
    )


def thread_failed(context: Context, cause: BaseException) -> DistError:
    """The error that all ranks of a group raise after the calling thread, which runs its
    operations, has failed."""
    who, thread = context.who(context.rank), threading.current_thread().name
    error: DistError = GroupAbortedError(
        f"{who}: the thread {thread!r} of group {context.name!r} failed: {cause_text(cause)}",
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
    learned = learn(context, reached=call.seq)
    lines = mismatch_text(context, call, (peer, seq), site_of_call(call), learned)
    calls = {rank: answer["call"] for rank, answer in learned.reports.items() if answer.get("call")}
    calls[context.job.rank] = call.describe_with_number()
    differ = why or f"the ranks of group {context.name!r} are in different collectives"
    return CollectiveMismatchError(
        f"{differ}:\n  {lines}",
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
    context: Context,
    call: Call,
    links: Callable[[], str] = lambda: "",
    device: Report | None = None,
    diagnosis: Callable[[], str] = lambda: "",
) -> OperationTimeoutError:
    """The error of a collective whose deadline has passed, or of another operation on a device.

    Args:
        links: as in :func:`report`.
        device: as in :class:`Learned`.
        diagnosis: what a library says of the ranks.
    """
    absent: dict[int, str] = {}
    if call.op.collective:
        learned = learn(context)._replace(links=links(), device=device or {})
        arrived, absent = arrived_and_absent(context, call, learned)
        doing = progress_text(call, arrived, absent, learned, context.job.rank)
    else:
        doing = f"; {_peers_text(context, call)}"
    said = f"\n{found}" if (found := diagnosis()) else ""
    error = OperationTimeoutError(
        f"{call.describe_with_number()} on group {context.name!r} timed out after"
        f" {call.timeout:g} s{doing}{said}",
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


def log_stall(
    context: Context,
    call: Call,
    seconds: float,
    links: str,
    others: str = "",
    device: Report | None = None,
) -> None:
    """Log a warning that a call has waited for some seconds, with what the ranks do that it waits
    for.

    ``links`` as in :func:`report`, ``others`` as for :func:`message_timeout_error`, ``device`` as
    in :class:`Learned`.
    """
    what = f"{call.describe_with_number()} on group {context.name!r}{at(call.site)}"
    text = f"{what} has waited {seconds:.0f} s"
    if not call.op.collective:
        text += f"; {_peers_text(context, call)}{others}"
    else:
        learned = learn(context, links=links)._replace(device=device or {})
        arrived, absent = arrived_and_absent(context, call, learned)
        control = context.job.control
        if call.presumed and (control is None or control.left.issuperset(absent)):
            return
        text += progress_text(call, arrived, absent, learned, context.job.rank)
    logs.logger("backend").warning("%s", text)


def _peers_text(context: Context, call: Call) -> str:
    """What the ranks do that a message or one-sided operation waits for."""
    peers = [call.peer] if call.peer >= 0 else [*range(context.size)]
    peers = [peer for peer in peers if peer != context.rank]
    learned = learn(context, {context.ranks[peer] for peer in peers})
    return list_text(
        [f"{context.who(m)}: {state_text(context, context.ranks[m], learned)}" for m in peers]
    )


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
        "where": line_of_main_thread() if call is None else site_of_call(call),
        "links": links,
    }
