"""Marks on exceptions that end a call: whether the call has changed anything, and whether a call
has raised the error.

An exception that is not the library's (:mod:`unicoll.process.interrupts` says where CPython raises
them) ends a call at a point that is not known, and other ranks may be in the call. So the group
fails, with an error that names the exception, unless the call has said that it has changed nothing
(:func:`mark_unchanged`). So does an error of the device: this rank cannot do its part of a call that
the others may be in.

A call with device arrays returns before its operation has ended, and so does an asynchronous one.
If the group fails afterwards, and the program makes no other call of it, nothing tells the program
that the results are wrong; closing the group raises the error then, unless a call has raised it
(:func:`mark_delivered`). All operations and calls of one backend of a failed group have the same
error object.
"""

from __future__ import annotations

from unicoll.devices.device_runtime import DeviceError
from unicoll.errors import DistError

_UNCHANGED = "_unicoll_changed_nothing"
_DELIVERED = "_unicoll_delivered"


def _mark(error: BaseException, name: str) -> None:
    """Set an attribute of ``error``; an exception whose class has slots keeps none."""
    try:
        setattr(error, name, True)
    except AttributeError:
        pass


def mark_unchanged(error: BaseException) -> None:
    """Say that the call which ``error`` ends has changed nothing, on any rank: as if it had not
    been made."""
    # An exception that cannot be marked fails the group.
    _mark(error, _UNCHANGED)


def mark_changed(error: BaseException) -> None:
    """The opposite of :func:`mark_unchanged`: the call is one of several, and an earlier one has
    changed something."""
    if hasattr(error, _UNCHANGED):
        delattr(error, _UNCHANGED)


def leaves_doubt(error: BaseException) -> bool:
    """True if the state of a group is not known any more because ``error`` ends one of its
    calls."""
    known = isinstance(error, DistError) and not isinstance(error, DeviceError)
    return not known and not hasattr(error, _UNCHANGED)


def mark_delivered(error: BaseException | None) -> None:
    """Say that a call raises ``error`` to the program, or returns it; None is ignored."""
    if error is not None:
        # An error that cannot be marked is raised once more when the group is closed.
        _mark(error, _DELIVERED)


def is_delivered(error: BaseException) -> bool:
    """True if the program has got ``error`` from a call."""
    return hasattr(error, _DELIVERED)
