"""Timeouts, deadlines and growing pauses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

from unicoll.errors import DistArgumentError, DistTypeError

Timeout = timedelta | float | None
"""A timedelta or seconds; None is a default."""


def to_seconds(timeout: Timeout) -> float | None:
    """A timedelta or a number of seconds as seconds; None stays None."""
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, int | float):
        return float(timeout)
    raise DistTypeError(f"timeout: expected a timedelta or seconds, got {timeout!r}")


def positive_seconds(timeout: Timeout) -> float | None:
    """:func:`to_seconds`; DistArgumentError if that is not positive."""
    seconds = to_seconds(timeout)
    # This form refuses NaN, too.
    if seconds is not None and not seconds > 0:
        raise DistArgumentError(f"timeout: {timeout} is not a positive time")
    return seconds


def seconds_left(deadline: float, least: float = 0.0) -> float:
    """Seconds until ``deadline`` (``time.monotonic()``), at least ``least``; many calls read 0 as
    "no limit"."""
    return max(least, deadline - time.monotonic())


def backoff(first: float, longest: float, factor: float = 2.0) -> Iterator[float]:
    """Pauses in seconds for a retry loop: from ``first``, each ``factor`` times the last, up to
    ``longest``."""
    pause = first
    while True:
        yield pause
        pause = min(factor * pause, longest)
