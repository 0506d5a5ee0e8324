"""The loggers of unicoll, and the handler that shows their records on stderr.

All loggers are below ``unicoll``. A filter adds to each record the attributes ``rank`` (of this
process in the job; None before it has joined) and ``host``, for applications that configure logging
themselves. The root logger is unchanged.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import cache

from unicoll.process import environment

_configuring = threading.Lock()
_rank: int | None = None
_handler: logging.Handler | None = None
# The level of the logger "unicoll" before the handler needed a lower one; None if it has not
# changed.
_level_before: int | None = None


# Until Python 3.13 an exception of a signal's handler in getLogger(), or in the first
# isEnabledFor() of a level, leaves logging's lock held, and other threads wait for it without end.
# So operations do neither: a logger is made once, and the levels are looked up here.
@cache
def logger(name: str = "") -> logging.Logger:
    """The logger ``unicoll.<name>``, or ``unicoll``."""
    made = logging.getLogger(f"unicoll.{name}" if name else "unicoll")
    made.addFilter(_identify)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        made.isEnabledFor(level)
    return made


def set_rank(rank: int | None) -> None:
    """Set this process's rank in the job, for later records."""
    global _rank
    _rank = rank


def configure(level: int | None) -> None:
    """Show unicoll's records on stderr, or not.

    Args:
        level: the lowest level that is shown, of :mod:`logging`; None shows none.
            ``UNICOLL_LOG_LEVEL`` takes precedence, then ``TORCH_CPP_LOG_LEVEL``: with INFO and a
            debug level, DEBUG is shown (torch.distributed's table).

    Raises:
        DistArgumentError: one of these variables has an unknown value.
    """
    name = environment.choice("UNICOLL_LOG_LEVEL")
    if name != "off":
        level = getattr(logging, name.upper())
    elif torchs := environment.torch_log_level():
        detailed = torchs == "info" and level is not None
        level = logging.DEBUG if detailed else getattr(logging, torchs.upper())
    with _configuring:
        _replace_handler(level)


def _replace_handler(level: int | None) -> None:
    global _handler, _level_before
    top = logger()
    if _handler is not None:
        top.removeHandler(_handler)
        _handler = None
    if _level_before is not None:
        top.setLevel(_level_before)
        _level_before = None
    if level is None:
        return
    _handler = _Stderr()
    _handler.setFormatter(_Format())
    _handler.setLevel(level)
    top.addHandler(_handler)
    if top.getEffectiveLevel() > level:
        _level_before = top.level
        top.setLevel(level)


def _identify(record: logging.LogRecord) -> bool:
    """The filter of all loggers of unicoll; it drops no record."""
    record.rank, record.host = _rank, os.uname().nodename
    return True


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stderr`` is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            self.stream = sys.stderr
            super().emit(record)


class _Format(logging.Formatter):
    """``[rank 2 node7] 12:03:11.123 INFO unicoll.group: text``."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(where)s %(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        rank, host = getattr(record, "rank", None), getattr(record, "host", "")
        record.where = f"[{host}]" if rank is None else f"[rank {rank} {host}]"
        return super().format(record)


# This makes the logger of the modules that log to ``unicoll`` itself.
logger()
