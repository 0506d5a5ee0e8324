"""The debug level of this process, from ``UNICOLL_DEBUG`` or ``TORCH_DISTRIBUTED_DEBUG``."""

from __future__ import annotations

import logging
from enum import Enum, IntEnum
from typing import Protocol
from weakref import WeakSet

from unicoll.errors import DistTypeError
from unicoll.process import environment, logs


class DebugLevel(IntEnum):
    """How much is logged and checked, as in torch.distributed."""

    OFF = 0
    """Nothing."""
    INFO = 1
    """Joining and leaving, the choice of backends and transports, groups; nothing per call."""
    DETAIL = 2
    """Each call, too. With backends that do not compare the ranks' calls (NCCL), unicoll compares
    each collective before it starts."""

    __str__ = Enum.__str__


_SHOWN = {DebugLevel.OFF: None, DebugLevel.INFO: logging.INFO, DebugLevel.DETAIL: logging.DEBUG}


class _Listener(Protocol):
    def debug_level_changed(self) -> None: ...


_listeners: WeakSet[_Listener] = WeakSet()
# None until it is read from the environment.
_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """The debug level: what :func:`set_debug_level` has set, else that of the environment when it
    was first read.

    ``UNICOLL_DEBUG`` takes precedence over ``TORCH_DISTRIBUTED_DEBUG``; the values are OFF, INFO
    and DETAIL in upper or lower case.

    Raises:
        DistArgumentError: the variable has another value.
    """
    global _level
    if _level is None:
        _level = DebugLevel[environment.debug_level().upper()]
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of this process; what is logged changes at once, also for the calls of
    existing groups.

    Whether the ranks of a group of NCCL compare their calls is decided when the group is made, by
    the level at that time, and a later level does not change it: a rank that compares waits for all
    others to do so. If one rank of such a group has DETAIL then, all must have it. Calls in
    progress are not affected.

    Raises:
        DistTypeError: not a DebugLevel.
    """
    global _level
    if not isinstance(level, DebugLevel):
        raise DistTypeError(f"set_debug_level: expected a DebugLevel, got {level!r}")
    _level = level
    apply()
    for listener in [*_listeners]:
        listener.debug_level_changed()


def add_listener(listener: _Listener) -> None:
    """Call ``listener.debug_level_changed()`` after the level was set, as long as the object
    exists."""
    _listeners.add(listener)


def set_debug_level_from_env() -> None:
    """Set the debug level from the environment variables, as :func:`get_debug_level` reads them
    first.

    Raises:
        DistArgumentError: the variable has an unknown value.
    """
    set_debug_level(DebugLevel[environment.debug_level().upper()])


def apply() -> None:
    """Show the records of the debug level on stderr.

    Raises:
        DistArgumentError: ``UNICOLL_LOG_LEVEL`` or the variable of the debug level has an unknown
            value.
    """
    logs.configure(_SHOWN[get_debug_level()])
