"""What depends on NCCL's version: functions, reductions, known defects; and its result codes and
names of functions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nccl_comm import ras
from nccl_comm.library.errors import CODES, IN_PROGRESS, PEER_ERRORS
from nccl_comm.library.structs import version_text
from nccl_comm.transport_report import connecting, settings
from unicoll.arrays.types import DType, Reduction
from unicoll.device_collectives.interface import NativeReduction
from unicoll.device_collectives.reductions import native_reduction
from unicoll.process import environment

FP8_VERSION = 22400
"""The first version with the 8-bit floating types (2.24)."""
FP8_CAPABILITY = (9, 0)
"""The least compute capability of a group's devices with which NCCL reduces them."""
_SCALES_ONE_RANK = 22907
"""The first version in which a reduction of one rank multiplies all elements by the factor."""
_SETS_UP_ONE_SIDED = 23100

DIRECT = {
    "comm_finalize": "ncclCommFinalize",
    "comm_destroy": "ncclCommDestroy",
    "comm_abort": "ncclCommAbort",
    "group_start": "ncclGroupStart",
    "group_end": "ncclGroupEnd",
    "all_reduce": "ncclAllReduce",
    "broadcast": "ncclBroadcast",
    "reduce": "ncclReduce",
    "all_gather": "ncclAllGather",
    "reduce_scatter": "ncclReduceScatter",
    "send": "ncclSend",
    "recv": "ncclRecv",
    "all_to_all": "ncclAlltoAll",
    "put_signal": "ncclPutSignal",
    "signal": "ncclSignal",
    "redop_destroy": "ncclRedOpDestroy",
    "mem_free": "ncclMemFree",
    "window_deregister": "ncclCommWindowDeregister",
    "comm_deregister": "ncclCommDeregister",
}
"""Methods of the interface that are the library's functions as they are; their arguments are
positional."""
SYMBOLS = DIRECT | {
    "version": "ncclGetVersion",
    "last_error": "ncclGetLastError",
    "unique_id": "ncclGetUniqueId",
    "comm_init": "ncclCommInitRankConfig",
    "comm_init_scalable": "ncclCommInitRankScalable",
    "comm_split": "ncclCommSplit",
    "comm_shrink": "ncclCommShrink",
    "comm_unique_id": "ncclCommGetUniqueId",
    "comm_grow": "ncclCommGrow",
    "comm_revoke": "ncclCommRevoke",
    "comm_state": "ncclCommGetAsyncError",
    "wait_signal": "ncclWaitSignal",
    "with_options": "ncclAllReduceConfig",
    "premul_sum": "ncclRedOpCreatePreMulSum",
    "mem_alloc": "ncclMemAlloc",
    "window_register": "ncclCommWindowRegister",
    "comm_register": "ncclCommRegister",
}
"""The library's function of a method; of ``with_options`` one of them, since NCCL has all or
none."""
_NEEDED = {
    "comm_register": "2.19",
    "window_register": "2.27",
    "put_signal": "2.29",
    "with_options": "2.31",
}
"""The first versions with functions that an error can name."""


def nccl_reduction(
    dtype: DType, reduction: Reduction, version: int, capability: tuple[int, int] = FP8_CAPABILITY
) -> NativeReduction | None:
    """The reduction in NCCL of a version, on devices with this compute capability at least, or
    None."""
    if dtype.name.startswith("float8") and (version < FP8_VERSION or capability < FP8_CAPABILITY):
        return None
    return native_reduction(dtype, reduction)


class NcclFacts:
    """What follows from the version, for
    :class:`unicoll.device_collectives.interface.CollectiveLibrary`.

    The class that is derived from this one has ``version``, NCCL's number (23007 is 2.30.7), and
    ``has_symbol``.
    """

    name = "NCCL"
    codes = CODES
    in_progress = IN_PROGRESS
    peer_errors = PEER_ERRORS
    log_hint = "NCCL_DEBUG=WARN in the environment makes NCCL log more"
    full_capability = FP8_CAPABILITY
    splits_by_key = True

    if TYPE_CHECKING:

        @property
        def version(self) -> int: ...
        def has_symbol(self, symbol: str) -> bool: ...

    @property
    def version_text(self) -> str:
        return version_text(self.version)

    @property
    def scales_one_rank(self) -> bool:
        return self.version >= _SCALES_ONE_RANK

    @property
    def sets_up_one_sided(self) -> bool:
        return self.version >= _SETS_UP_ONE_SIDED

    def has(self, method: str) -> bool:
        return self.has_symbol(SYMBOLS[method])

    def symbol(self, method: str) -> str:
        return SYMBOLS[method]

    def needed(self, method: str) -> str:
        return f"{self.name} {_NEEDED[method]}; this is {self.version_text}"

    def reduction(
        self, dtype: DType, reduction: Reduction, capability: tuple[int, int] | None = None
    ) -> NativeReduction | None:
        return nccl_reduction(dtype, reduction, self.version, capability or FP8_CAPABILITY)

    def may_share_device(self) -> bool:
        """NCCL has a variable of its own for that."""
        return bool(environment.flag("UNICOLL_NCCL_SHARE_DEVICE"))

    def ranks_per_id(self) -> int:
        """NCCL's documentation and torch recommend 128."""
        if not self.has("comm_init_scalable"):
            return 0
        return environment.number("UNICOLL_NCCL_RANKS_PER_ROOT")

    def host_id(self) -> str:
        return os.environ.get("NCCL_HOSTID", "")

    def connection_hint(self, addresses: Sequence[str]) -> str:
        return f"{connecting(addresses, settings(self.name))}; NCCL_DEBUG=INFO logs the addresses"

    def diagnosis(self) -> str:
        said = ras.status(settings(self.name)) if self.version >= ras.SINCE else ""
        return f"NCCL's RAS says:\n{said}" if said else ""
