"""The errors of messages that were not delivered."""

from __future__ import annotations

from gloo_fallback.p2p.frames import IncomingMessage, PendingMessage
from unicoll.arrays.types import DTYPES
from unicoll.backend import Call, Context, failure_diagnosis
from unicoll.errors import AuthenticationError, MessageMismatchError, OperationTimeoutError, RankLostError
from unicoll.net.records import TamperedError

_NAMES = {d.code: d.name for d in DTYPES}


def message_mismatch(context: Context, call: Call, message: IncomingMessage) -> MessageMismatchError:
    """The error of a receive whose array has another size or type than the message."""
    buffer = call.outputs[0]
    received = f"{message.size} bytes of {_NAMES.get(message.code, '?')}"
    return MessageMismatchError(
        f"{call.describe()}: {context.who(call.source)} sent {received}, the array holds {buffer.nbytes} bytes of"
        f" {buffer.dtype}",
        group=context.name,
        rank=context.ranks[call.source],
        op=call.op.name,
    )


def timed_out(context: Context, pending: PendingMessage, begun: bool) -> OperationTimeoutError:
    """The error of a send or receive after its deadline; ``begun`` if part of the message has moved."""
    call = pending.call
    other = call.peer if call.peer >= 0 or not begun else call.source
    state = "has moved only part of it" if begun else ""
    return failure_diagnosis.message_timed_out(context, call, other, state)


def lost(context: Context, call: Call, rank: int, reason: str) -> RankLostError:
    """The error of a send or receive that global rank ``rank`` can no longer take part in."""
    return failure_diagnosis.lost(context, call, context.ranks.index(rank), reason)


def tampered(context: Context, call: Call, rank: int, error: TamperedError) -> AuthenticationError:
    """The error of a send or receive on whose connection the data of global rank ``rank`` was altered."""
    who = context.who(context.ranks.index(rank))
    return AuthenticationError(
        f"{call.describe()}: {who}: {error.strerror}", group=context.name, rank=rank, op=call.op.name
    )
