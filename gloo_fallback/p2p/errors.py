"""The errors of messages that were not delivered."""

from __future__ import annotations

from gloo_fallback.p2p.frames import PendingMessage
from unicoll.backend import Call, Context, operation_errors
from unicoll.errors import OperationTimeoutError, RankLostError


def timed_out(context: Context, pending: PendingMessage, begun: bool, others: str) -> OperationTimeoutError:
    """The error of a send, receive or probe after its deadline.

    Args:
        begun: True if part of the message was transferred.
        others: as for :func:`unicoll.backend.operation_errors.message_timeout_error`.
    """
    call = pending.call
    other = call.peer if call.peer >= 0 or not begun else call.source
    state = "only a part of the message was transferred" if begun else ""
    return operation_errors.message_timeout_error(context, call, other, state, others)


def lost(context: Context, call: Call, rank: int, reason: str) -> RankLostError:
    """The error of a send or receive that global rank ``rank`` can no longer take part in."""
    return operation_errors.rank_lost_error(context, call, context.ranks.index(rank), reason)
