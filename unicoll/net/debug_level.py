"""The debug level of this process, from ``UNICOLL_DEBUG`` or ``TORCH_DISTRIBUTED_DEBUG``."""

from __future__ import annotations

import logging
from enum import Enum, IntEnum

from unicoll.errors import DistTypeError
from unicoll.net import logs, settings

__all__ = ["DebugLevel", "apply", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]


class DebugLevel(IntEnum):
    """How much is logged and checked, as in torch.distributed."""

    OFF = 0
    """Nothing."""
    INFO = 1
    """Joining and leaving, the choice of backends and transports, groups; nothing per call."""
    DETAIL = 2
    """Each call too. Backends that do not compare the calls of the ranks themselves (NCCL) do so, before a collective
    is started."""

    __str__ = Enum.__str__


_SHOWN = {DebugLevel.OFF: None, DebugLevel.INFO: logging.INFO, DebugLevel.DETAIL: logging.DEBUG}

_level: DebugLevel | None = None  # None: not yet read from the environment


def get_debug_level() -> DebugLevel:
    """The debug level: what :func:`set_debug_level` has set, else that of the environment when it was first read.

    ``UNICOLL_DEBUG`` takes precedence over ``TORCH_DISTRIBUTED_DEBUG``; the values are OFF, INFO and DETAIL in upper or
    lower case.

    Raises:
        DistArgumentError: the variable has another value.
    """
    global _level
    if _level is None:
        _level = DebugLevel[settings.debug_level().upper()]
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of this process.

    What is logged per call, and the comparison of calls, applies to groups that are made afterwards. A group of NCCL
    must be made with the same level on all its ranks, if one of them has DETAIL.

    Raises:
        DistTypeError: not a DebugLevel.
    """
    global _level
    if not isinstance(level, DebugLevel):
        raise DistTypeError(f"set_debug_level: expected a DebugLevel, got {level!r}")
    _level = level
    apply()


def set_debug_level_from_env() -> None:
    """Set the debug level from the environment variables, as :func:`get_debug_level` reads them first.

    Raises:
        DistArgumentError: the variable has an unknown value.
    """
    set_debug_level(DebugLevel[settings.debug_level().upper()])


def apply() -> None:
    """Show the records of the debug level on stderr.

    Raises:
        DistArgumentError: ``UNICOLL_LOG_LEVEL`` or the variable of the debug level has an unknown value.
    """
    logs.configure(_SHOWN[get_debug_level()])
