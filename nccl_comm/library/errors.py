"""NCCL's result codes and the exceptions for them."""

from __future__ import annotations

from typing import NamedTuple

from nccl_comm.library.interface import Nccl
from nccl_comm.library.structs import version_text
from unicoll.arrays.cuda import CudaError
from unicoll.errors import (
    DistArgumentError,
    DistBackendError,
    DistError,
    DistNetworkError,
    OperationTimeoutError,
    RankLostError,
)


class Code(NamedTuple):
    """A value of ncclResult_t: its name, the class of its exception, and its meaning."""

    name: str
    error: type[DistError]
    meaning: str


CODES: dict[int, Code] = {
    0: Code("ncclSuccess", DistBackendError, "no error, though one was expected"),
    1: Code("ncclUnhandledCudaError", CudaError, "a CUDA call failed within NCCL"),
    2: Code(
        "ncclSystemError",
        DistNetworkError,
        "a system call failed: a connection to a peer, or shared memory, files or memory ran out",
    ),
    3: Code("ncclInternalError", DistBackendError, "a check within NCCL failed, or memory was corrupted"),
    4: Code("ncclInvalidArgument", DistArgumentError, "an argument has a value that NCCL refuses"),
    5: Code(
        "ncclInvalidUsage", DistBackendError, "an invalid use of NCCL, or devices that it does not support"
    ),
    6: Code(
        "ncclRemoteError", RankLostError, "a peer process ended, or the network to it failed; NCCL names none"
    ),
    7: Code("ncclInProgress", DistBackendError, "the operation has not finished"),
    8: Code("ncclTimeout", OperationTimeoutError, "the operation took longer than NCCL's limit"),
}
"""All codes of ncclResult_t up to 2.32."""

_HINT = "NCCL_DEBUG=WARN in the environment makes NCCL log more"


def error_for(
    code: int,
    nccl: Nccl,
    comm: int,
    what: str,
    group: str | None,
    op: str | None,
    seq: int | None,
    departed: str = "",
) -> DistError:
    """The exception for one of NCCL's codes.

    Args:
        code: ncclResult_t.
        nccl: the library that returned it; its last error is added.
        comm: the communicator, or 0.
        what: the function, or the call's description.
        group, op, seq: attributes of the exception, as far as they are known.
        departed: a member that has left the job, which may be the cause; "" if none has.
    """
    entry = CODES.get(code) or Code(f"code {code}", DistBackendError, "unknown to this version of unicoll")
    detail = _one_line(nccl.last_error(comm))
    where = f" on group {group!r}" if group is not None and repr(group) not in what else ""
    message = (
        f"{what}{where}: {entry.name} of NCCL {version_text(nccl.version)}: {entry.meaning};"
        f"{f' {departed};' if departed else ''} {f'NCCL reports: {detail}' if detail else _HINT}"
    )
    return entry.error(message, group=group, op=op, seq=seq)


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
