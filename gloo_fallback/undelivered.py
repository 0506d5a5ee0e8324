"""Why a message was not delivered, in words."""

from __future__ import annotations

from unicoll.backend import Call, Context
from unicoll.channel import TamperedError
from unicoll.errors import AuthenticationError, MessageMismatchError, OperationTimeoutError, RankLostError
from unicoll.observe import inquest
from unicoll.types import DTYPES

from .letters import Letter, Message

__all__ = ["lost", "misfit", "tampered", "too_late"]

_NAMES = {d.code: d.name for d in DTYPES}


def misfit(context: Context, call: Call, message: Message) -> MessageMismatchError:
    """The error of a receive whose array is of another size or type than the message."""
    buffer = call.outputs[0]
    came = f"{message.size} bytes of {_NAMES.get(message.code, '?')}"
    return MessageMismatchError(
        f"{call.describe()}: {context.who(call.source)} sent {came}, the array holds {buffer.nbytes} bytes of"
        f" {buffer.dtype}",
        group=context.name,
        rank=context.ranks[call.source],
        op=call.op.name,
    )


def too_late(context: Context, letter: Letter, begun: bool) -> OperationTimeoutError:
    """The error of a send or receive whose deadline has passed, perhaps in the middle of the message."""
    call = letter.call
    other = call.peer if call.peer >= 0 or not begun else call.source
    who = context.who(other) if other >= 0 else "no rank"
    state = "has moved only part of it" if begun else "has not taken part"
    return OperationTimeoutError(
        f"{call.describe()} on group {context.name!r} timed out after {call.timeout:g} s: {who} {state}",
        group=context.name,
        op=call.op.name,
    )


def lost(context: Context, call: Call, rank: int, why: str) -> RankLostError:
    """The error of a send or receive that global rank ``rank`` can no longer take part in."""
    return inquest.lost(context, call, context.ranks.index(rank), why)


def tampered(context: Context, call: Call, rank: int, error: TamperedError) -> AuthenticationError:
    """The error of a send or receive whose connection carried what global rank ``rank`` has not sent."""
    who = context.who(context.ranks.index(rank))
    return AuthenticationError(
        f"{call.describe()}: {who}: {error.strerror}", group=context.name, rank=rank, op=call.op.name
    )
