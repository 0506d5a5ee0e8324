"""How a call that may fail ended, as a rank tells it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from unicoll.testing.worker import Failure

Story = tuple[Failure | None, float]
"""How a call ended, and how many seconds it took."""


def story_of(call: Callable[[], Any]) -> Story:
    """Make a call and tell how it ended."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return Failure.of(error), time.monotonic() - start
    return None, time.monotonic() - start


def failure_of(call: Callable[[], Any]) -> Failure | None:
    """Make a call; its exception, if it raises."""
    return story_of(call)[0]
