"""Exceptions that end a call and are not the library's (:mod:`unicoll.net.interrupts` says where CPython raises them).

What the call has done until then is not known, and other ranks may be in it. So the group fails, with an error that
names the exception, unless the call has said that it has changed nothing (:func:`mark_unchanged`).
"""

from __future__ import annotations

from unicoll.errors import DistError

_MARK = "_unicoll_changed_nothing"


def mark(error: BaseException, name: str) -> None:
    """Set an attribute of ``error``; an exception whose class has slots keeps none."""
    try:
        setattr(error, name, True)
    except AttributeError:
        pass


def mark_unchanged(error: BaseException) -> None:
    """Say that the call which ``error`` ends has changed nothing, on any rank: as if it had not been made."""
    mark(error, _MARK)  # the group fails by what cannot be marked


def mark_changed(error: BaseException) -> None:
    """The opposite of :func:`mark_unchanged`: the call is one of several, and an earlier one has changed something."""
    if hasattr(error, _MARK):
        delattr(error, _MARK)


def leaves_doubt(error: BaseException) -> bool:
    """True if the state of a group is not known any more because ``error`` ends one of its calls."""
    return not isinstance(error, DistError) and not hasattr(error, _MARK)
