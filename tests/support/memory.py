"""Memory: whether arrays are freed, and the shared memory that this process has mapped or open."""

from __future__ import annotations

import gc
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["freed", "mapped_bytes", "memory_files", "segments"]


def freed(*references: weakref.ref[Any]) -> list[bool]:
    """True for each array that is freed; waits, since a thread that looks at the calls refers to them meanwhile."""
    deadline = time.monotonic() + 60
    while any(reference() is not None for reference in references) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return [reference() is None for reference in references]


def segments() -> list[list[str]]:
    """The fields of the lines of this library's segments in the table of mappings of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split() for line in lines if "memfd:unicoll" in line]


def mapped_bytes() -> int:
    """Bytes of this library's segments that this process maps."""
    ends = [[int(x, 16) for x in fields[0].split("-")] for fields in segments()]
    return sum(last - first for first, last in ends)


def memory_files() -> list[str]:
    """The files without a name in memory (memfd) that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(
            FileNotFoundError
        ):  # closed in the meantime, like the descriptor that listed the directory
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [file for file in found if "memfd" in file]
