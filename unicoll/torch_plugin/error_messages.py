"""Error messages in torch's format, which scripts search for."""

from __future__ import annotations

from typing import NoReturn

from unicoll.errors import DistError, OperationTimeoutError
from unicoll.group.process_group import ProcessGroup
from unicoll.process.excepthook import forget_frames


def adapt_for_torch(error: DistError) -> None:
    """Forget the frames inside unicoll; give the message of a timeout the prefix of torch's
    backends."""
    forget_frames(error)
    if isinstance(error, OperationTimeoutError) and not str(error).startswith("collective "):
        error.args = (f"collective operation timeout : {error}", *error.args[1:])


def raise_monitored(
    group: ProcessGroup, error: DistError, seconds: float, wait_all_ranks: bool
) -> NoReturn:
    """Raise the error with the message of torch's monitored_barrier: on rank 0 it names the missing
    ranks."""
    rank = group.rank()
    missing = [
        r
        for r, global_rank in enumerate(group.ranks)
        if global_rank in getattr(error, "missing", ())
    ]
    if rank != 0:
        message = (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting"
            " for send/recv from rank 0. Please check rank 0 logs for faulty rank."
        )
    elif missing and wait_all_ranks:
        names = ", ".join(map(str, missing))
        message = f"Ranks {names} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms"
    elif missing:
        message = f"Rank {missing[0]} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms"
    else:
        message = "Rank 0 failed in monitoredBarrier"
    error.args = (f"{message}: {error}", *error.args[1:])
    forget_frames(error)
    raise error
