"""The outcome of a call that may fail: its exception and its duration."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.support.worker import Failure

CallOutcome = tuple[Failure | None, float]
"""The exception of a call, or None, and its duration in seconds."""


def outcome_of(call: Callable[[], Any]) -> CallOutcome:
    """Make a call and return its outcome."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return Failure.of(error), time.monotonic() - start
    return None, time.monotonic() - start


def failure_of(call: Callable[[], Any]) -> Failure | None:
    """Make a call; returns its exception, or None."""
    return outcome_of(call)[0]
