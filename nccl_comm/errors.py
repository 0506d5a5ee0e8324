"""NCCL's result codes as errors of ours."""

from __future__ import annotations

from typing import NamedTuple

from unicoll.errors import (
    DistArgumentError,
    DistBackendError,
    DistError,
    DistNetworkError,
    OperationTimeoutError,
    RankLostError,
)
from unicoll.streams import CudaError

from .api import Nccl
from .structs import version_text

__all__ = ["CODES", "Code", "error_for"]


class Code(NamedTuple):
    """A value of ncclResult_t: its name, the error that it becomes, and what it means."""

    name: str
    error: type[DistError]
    meaning: str


CODES: dict[int, Code] = {
    0: Code("ncclSuccess", DistBackendError, "nothing went wrong, though an error was expected"),
    1: Code("ncclUnhandledCudaError", CudaError, "a call of CUDA failed within NCCL"),
    2: Code(
        "ncclSystemError",
        DistNetworkError,
        "a call of the system failed: a connection to a peer, or shared memory, files or memory that ran out",
    ),
    3: Code("ncclInternalError", DistBackendError, "NCCL failed within, or memory was corrupted"),
    4: Code("ncclInvalidArgument", DistArgumentError, "an argument has a value that NCCL refuses"),
    5: Code("ncclInvalidUsage", DistBackendError, "NCCL cannot be used in this way, or on these devices"),
    6: Code(
        "ncclRemoteError", RankLostError, "a peer process ended, or the network to it failed; NCCL names none"
    ),
    7: Code("ncclInProgress", DistBackendError, "it has not finished"),
    8: Code("ncclTimeout", OperationTimeoutError, "it took longer than NCCL was told to wait"),
}
"""All codes of ncclResult_t up to 2.32."""

_MORE = "NCCL_DEBUG=WARN in the environment makes NCCL say more"


def error_for(
    code: int,
    nccl: Nccl,
    comm: int,
    what: str,
    group: str | None,
    op: str | None,
    seq: int | None,
    rank: int | None = None,
) -> DistError:
    """The error to raise for a code of NCCL's.

    Args:
        code: ncclResult_t.
        nccl: the library that answered it, which is asked for its last error.
        comm: the communicator, or 0.
        what: what was being done: a function or a call's description.
        group, op, seq, rank: where, as far as it is known.
    """
    known = CODES.get(code) or Code(f"code {code}", DistBackendError, "unknown to this version of unicoll")
    said = _one_line(nccl.last_error(comm))
    where = f" on group {group!r}" if group is not None and repr(group) not in what else ""
    message = (
        f"{what}{where}: {known.name} of NCCL {version_text(nccl.version)}: {known.meaning};"
        f" {f'NCCL says: {said}' if said else _MORE}"
    )
    return known.error(message, group=group, rank=rank, op=op, seq=seq)


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
