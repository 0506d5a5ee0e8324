"""Counters of calls, bytes and seconds by operation and group, as a dict and as a Prometheus text
file.

    unicoll.metrics.enable()
    ...
    unicoll.metrics.snapshot()["all_reduce", "world"].bytes

With ``UNICOLL_METRICS_FILE`` set, ``init_process_group`` enables them, and the file is rewritten
every few seconds and when the process leaves the job. ``{rank}`` in the name is the rank. Without
it, in a job of several ranks, the launcher ``unirun`` writes one file of that name with all ranks
(with several nodes ``.nodeN`` is inserted before the suffix); under other launchers each rank
writes a file with ``.rankN`` before the suffix. The format is Prometheus's text exposition format,
which the textfile collector of node_exporter reads:
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import os
from pathlib import Path

from unicoll.api import world
from unicoll.errors import NotInitializedError
from unicoll.group.call_counters import Counters, counters_of_process, write_file

__all__ = ["Counters", "disable", "enable", "reset", "snapshot", "write"]


def enable() -> None:
    """Count the calls that start from now on, on all groups of the job; no effect if they are
    counted already.

    Raises:
        NotInitializedError: there is no default group.
    """
    counters_of_process.enable(world.current("metrics.enable"))


def disable() -> None:
    """Count no more calls; the counters keep their values."""
    counters_of_process.disable()


def reset() -> None:
    """Set all counters to zero."""
    counters_of_process.reset()


def snapshot() -> dict[tuple[str, str], Counters]:
    """The counters by operation and name of the group."""
    return counters_of_process.snapshot()


def write(path: str | os.PathLike[str]) -> None:
    """Write the counters to a file in Prometheus's text format, replacing it at once.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        rank = str(world.current("metrics.write").rank)
    except NotInitializedError:
        rank = ""
    write_file(Path(path), rank)
