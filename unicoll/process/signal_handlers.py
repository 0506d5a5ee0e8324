"""Which signals a process handles, from Linux's /proc."""

from __future__ import annotations


def is_caught(number: int, pid: int | str = "self") -> bool:
    """True if a process has a handler for a signal, also one that is not of Python's; False if that
    is unknown."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    except (OSError, StopIteration, ValueError):
        return False
