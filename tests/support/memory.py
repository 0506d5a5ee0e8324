"""Whether arrays are freed."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

__all__ = ["freed"]


def freed(*references: weakref.ref[Any]) -> list[bool]:
    """True for each array that is freed; waits, since a thread that looks at the calls refers to them meanwhile."""
    deadline = time.monotonic() + 60
    while any(reference() is not None for reference in references) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return [reference() is None for reference in references]
