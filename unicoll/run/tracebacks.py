"""The exceptions that workers have recorded, and their tracebacks, each distinct one once with its
ranks."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from unicoll.net.objects.received_json import MALFORMED, read_json
from unicoll.process.formatting import ranks_text, signal_name

_VARIES = re.compile(r"\b(?i:pid) \d+|#\d+\b|\b0x[0-9a-fA-F]+\b")


CONSEQUENCES = ("unicoll.errors.RankLostError", "unicoll.errors.GroupAbortedError")
"""Errors that report the failure of another rank."""
DETECTION_DELAY = 0.1
"""Seconds by which the detection of an end may be late; errors that it causes in other ranks must
not look earlier."""


class ExceptionRecord(NamedTuple):
    """An uncaught exception that a worker has recorded.

    Attributes:
        time: on the clock of ``time.monotonic``; None if it was not written by worker_main.py.
        traceback: as printed, with unicoll's own frames folded.
        named: the ranks that it names as missing or lost, or as the only one whose call differs.
        consequence: True if it only reports the failure of another rank.
        final: True if it certainly ended the program (worker_main.py wrote it), not perhaps only a
            function.
    """

    time: float | None
    message: str
    traceback: str
    consequence: bool
    final: bool
    named: tuple[int, ...] = ()


def read_record(path: str, directory: int | None = None) -> ExceptionRecord | None:
    """Read an error file in torch's format; None if it does not exist or is malformed.

    ``directory`` is the descriptor of the directory that a relative path starts from.
    """
    try:
        content = read_json(path, directory)
        message = content["message"]
        extra = content.get("unicoll", {})
        if isinstance(message, str):
            text = traceback = message
        else:
            text = message["message"]
            callstack = message.get("extraInfo", {}).get("py_callstack")
            traceback = extra.get("traceback") or callstack or text
        return ExceptionRecord(
            # The clock of another time namespace may be ahead.
            time=(
                min(extra["monotonic_ns"] / 1e9, time.monotonic())
                if "monotonic_ns" in extra
                else None
            ),
            message=str(text),
            traceback=str(traceback),
            consequence=any(name in CONSEQUENCES for name in extra.get("classes", ())),
            final=bool(extra) and bool(extra.get("final", True)),
            named=tuple(extra.get("named", ())),
        )
    except (OSError, *MALFORMED):
        return None


def describe_exit(status: int, pid: int) -> str:
    """A worker's end as text, from its exit status (``-N`` for signal N)."""
    if status >= 0:
        return f"exit code {status}, no exception recorded"
    hint = " (often the kernel's out-of-memory killer)" if -status == signal.SIGKILL else ""
    return f"Signal {-status} ({signal_name(-status)}) received by PID {pid}{hint}"


def keys(text: str, rank: int) -> set[str]:
    """Keys of a rank's text; two ranks have the same error if they share a key.

    Pids, sequence numbers and addresses are masked in both keys, the rank's own number in one of
    them. (Not in both: in an error that lists all ranks and is the same on all of them, every rank
    would mask another number.)
    """
    same = _VARIES.sub("_", text)
    return {same, re.sub(rf"(?i)\brank {rank}\b", "rank _", same)}


@dataclass
class _Group:
    """Ranks with the same traceback."""

    keys: set[str] = field(default_factory=set)
    # The texts that are not printed yet, by rank.
    texts: dict[int, str] = field(default_factory=dict)
    # The rank whose text was printed for all.
    shown: int | None = None


class Tracebacks:
    """The uncaught exceptions of the workers."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []

    def add(self, rank: int, text: str) -> None:
        new = keys(text, rank)
        group = next((one for one in self._groups if one.keys & new), None)
        if group is None:
            group = _Group()
            self._groups.append(group)
        group.keys |= new
        group.texts[rank] = text

    def take(self, last: int | None = None) -> str:
        """The tracebacks that were not yet returned, as lines, in order of arrival, with rank
        ``last``'s at the end."""
        groups = sorted(
            filter(lambda one: one.texts, self._groups), key=lambda one: last in one.texts
        )
        return "".join(map(_take, groups))


def _take(group: _Group) -> str:
    found, group.texts = group.texts, {}
    ranks = ranks_text(list(found))
    if group.shown is not None:
        return f"{ranks}: the same as rank {group.shown}\n"
    group.shown = rank = min(found)
    whose = "" if len(set(found.values())) == 1 else f" (this is rank {rank}'s)"
    return f"{ranks}{whose}:\n" + found[rank].rstrip("\n") + "\n"
