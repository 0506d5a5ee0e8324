"""Which errors a call has raised to the program.

A call with device arrays returns before its operation has ended, and so does an asynchronous one. If the group fails
afterwards, and the program makes no other call of it, nothing tells the program that the results are wrong; closing the
group raises the error then. All operations and calls of one backend of a failed group have the same error object.
"""

from __future__ import annotations

from unicoll.backend.interrupts import mark

_MARK = "_unicoll_delivered"


def mark_delivered(error: BaseException | None) -> None:
    """Say that a call raises ``error`` to the program, or returns it; None is ignored."""
    if error is not None:
        mark(error, _MARK)  # closing the group raises what cannot be marked again


def is_delivered(error: BaseException) -> bool:
    """True if the program has got ``error`` from a call."""
    return hasattr(error, _MARK)
