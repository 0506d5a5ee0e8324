"""NCCL's result codes."""

from __future__ import annotations

from unicoll.device_collectives.interface import ResultCode
from unicoll.devices.device_runtime import DeviceError
from unicoll.errors import (
    DistArgumentError,
    DistBackendError,
    DistNetworkError,
    OperationTimeoutError,
    RankLostError,
)

IN_PROGRESS = 7
PEER_ERRORS = (2, 3, 6)
"""Codes that the death of another rank may cause: system, internal and remote errors."""
CODES: dict[int, ResultCode] = {
    0: ResultCode("ncclSuccess", DistBackendError, "no error, though one was expected"),
    1: ResultCode("ncclUnhandledCudaError", DeviceError, "a CUDA call failed within NCCL"),
    2: ResultCode(
        "ncclSystemError",
        DistNetworkError,
        "a system call failed: a connection to a peer, or shared memory, files or memory ran out",
    ),
    3: ResultCode(
        "ncclInternalError", DistBackendError, "a check within NCCL failed, or memory was corrupted"
    ),
    4: ResultCode(
        "ncclInvalidArgument", DistArgumentError, "an argument has a value that NCCL refuses"
    ),
    5: ResultCode(
        "ncclInvalidUsage",
        DistBackendError,
        "an invalid use of NCCL, or devices that it does not support",
    ),
    6: ResultCode(
        "ncclRemoteError",
        RankLostError,
        "a peer process ended, or the network to it failed; NCCL names none",
    ),
    7: ResultCode("ncclInProgress", DistBackendError, "the operation has not finished"),
    8: ResultCode(
        "ncclTimeout", OperationTimeoutError, "the operation took longer than NCCL's limit"
    ),
}
"""All codes of ncclResult_t up to 2.32."""
