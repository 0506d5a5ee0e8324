"""oneCCL's result codes."""

from __future__ import annotations

from unicoll.device_collectives.interface import ResultCode
from unicoll.devices.device_runtime import DeviceError
from unicoll.errors import DistArgumentError, DistBackendError, DistNetworkError

IN_PROGRESS = 6
PEER_ERRORS = (1, 2, 3, 11)
"""Codes that the death of another rank may cause: errors of the system, internal ones, exceptions
of a plug-in."""
CODES: dict[int, ResultCode] = {
    0: ResultCode("onecclSuccess", DistBackendError, "no error, though one was expected"),
    1: ResultCode("onecclError", DistBackendError, "an error of no other kind"),
    2: ResultCode(
        "onecclSystemError",
        DistNetworkError,
        "a system call failed: a connection to a peer, or shared memory, files or memory ran out",
    ),
    3: ResultCode("onecclInternalError", DistBackendError, "a check within oneCCL failed"),
    4: ResultCode(
        "onecclInvalidArgument", DistArgumentError, "an argument has a value that oneCCL refuses"
    ),
    5: ResultCode("onecclInvalidUsage", DistBackendError, "an invalid use of oneCCL"),
    6: ResultCode("onecclInProgress", DistBackendError, "the operation has not finished"),
    7: ResultCode("onecclFailureGPU", DeviceError, "the GPU failed"),
    8: ResultCode("onecclFailureCPU", DistBackendError, "the CPU failed"),
    9: ResultCode("onecclAllocFailureCPU", DistBackendError, "host memory ran out"),
    10: ResultCode("onecclAllocFailureGPU", DeviceError, "memory of the GPU ran out"),
    11: ResultCode("onecclPluginException", DistBackendError, "an exception in oneCCL's plug-in"),
    12: ResultCode(
        "onecclNotImplemented", DistBackendError, "the plug-in does not have the function"
    ),
}
"""All codes of onecclResult_t of 2022.1."""
