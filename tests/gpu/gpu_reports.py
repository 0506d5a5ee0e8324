"""Reports of a stage of scripts/gpu_check, in the process of a test."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from tests.gpu.check.record import Reporter

__all__ = ["reported"]


def reported(seconds: float, tell: Callable[[Reporter], None]) -> list[dict[str, Any]]:
    """The lines that a function reports within a time."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines, os.fdopen(writing, "w"):
        tell(Reporter(writing, seconds))
        os.write(writing, b"\n")
        found = []
        while line := lines.readline().strip():
            found.append(json.loads(line))
        return found
