"""Errors with the words that torch's users, and their scripts, look for."""

from __future__ import annotations

from typing import NoReturn

from unicoll.errors import DistError, OperationTimeoutError
from unicoll.group import ProcessGroup

__all__ = ["in_torchs_words", "raise_monitored"]


def in_torchs_words(error: BaseException) -> BaseException:
    """The same error; a timeout says so as torch's backends do, too."""
    if isinstance(error, OperationTimeoutError) and not str(error).startswith("collective "):
        error.args = (f"collective operation timeout : {error}", *error.args[1:])
    return error


def raise_monitored(group: ProcessGroup, error: DistError, seconds: float, wait_all_ranks: bool) -> NoReturn:
    """Raise what torch's monitored_barrier raises: rank 0 names who is missing, the others say that they had come."""
    rank = group.rank()
    missing = [r for r, global_rank in enumerate(group.ranks) if global_rank in getattr(error, "missing", ())]
    if rank != 0:
        said = (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from"
            " rank 0. Please check rank 0 logs for faulty rank."
        )
    elif missing and wait_all_ranks:
        names = ", ".join(map(str, missing))
        said = f"Ranks {names} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms"
    elif missing:
        said = f"Rank {missing[0]} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms"
    else:
        said = "Rank 0 failed in monitoredBarrier"
    error.args = (f"{said}: {error}", *error.args[1:])
    raise error
