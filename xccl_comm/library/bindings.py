"""oneCCL by ctypes, with the signatures of ``oneapi/ccl.h`` 2022.1.

Since 2022 oneCCL has a C API with NCCL's functions, whose numbers of element types and reductions
are NCCL's. A plug-in moves the data: the one for GPUs, or the one for the CPU, which ``CCL_PLUGIN``
chooses.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from unicoll.arrays.types import DType, Reduction
from unicoll.device_collectives import bindings
from unicoll.device_collectives.interface import Config, HandleSlot, NativeReduction
from unicoll.device_collectives.reductions import native_reduction
from unicoll.devices.device_runtime import DeviceRuntime
from unicoll.errors import DistArgumentError
from xccl_comm.library.errors import CODES, IN_PROGRESS, PEER_ERRORS

_UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF
_OPTIONS = ("cga_cluster_size", "min_ctas", "max_ctas", "net_name", "split_share", "traffic_class")
"""Options of a communicator that are refused."""


@contextmanager
def defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for oneCCL within the block, unless the user has set them.

    They are removed afterwards: a torch for XPU in this process, and child processes, have a oneCCL
    of their own.
    """
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class UniqueId(ctypes.Structure):
    """onecclUniqueId; functions take it by value."""

    _fields_ = [("data", c_char * 4096)]


class ConfigStruct(ctypes.Structure):
    """onecclConfig_t."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
        ("multiThreaded", c_int),
        ("plugin", c_uint),
    ]


_out, _comm, _config = POINTER(c_void_p), c_void_p, POINTER(ConfigStruct)

DIRECT = {
    "comm_finalize": "onecclCommFinalize",
    "comm_destroy": "onecclCommDestroy",
    "group_start": "onecclGroupStart",
    "group_end": "onecclGroupEnd",
    "all_reduce": "onecclAllReduce",
    "broadcast": "onecclBroadcast",
    "reduce": "onecclReduce",
    "all_gather": "onecclAllGather",
    "reduce_scatter": "onecclReduceScatter",
    "send": "onecclSend",
    "recv": "onecclRecv",
    "all_to_all": "onecclAllToAll",
    "redop_destroy": "onecclRedOpDestroy",
    "comm_deregister": "onecclCommDeregister",
}
"""Methods of the interface that are the library's functions as they are; their arguments are
positional."""
SYMBOLS = DIRECT | {
    "version": "onecclGetVersion",
    "last_error": "onecclGetLastError",
    "unique_id": "onecclGetUniqueId",
    "set_device": "onecclSetDevice",
    "comm_init": "onecclCommInitRankConfig",
    "comm_split": "onecclCommSplit",
    "comm_rank": "onecclCommUserRank",
    "premul_sum": "onecclRedOpCreatePreMulSum",
    "comm_register": "onecclCommRegister",
}
"""The library's function of a method.

oneCCL's windows are not used, since it has no puts. onecclCommAbort is not among the functions: up
to 2022.1 it only returns onecclNotImplemented. There is no onecclCommGetAsyncError.
"""
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **{method: arguments for method, arguments in bindings.ARGUMENTS.items() if method in SYMBOLS},
    "unique_id": (POINTER(UniqueId),),
    "set_device": (c_uint,),
    "comm_init": (_out, c_size_t, UniqueId, c_int, _config),
    "comm_split": (_comm, c_int, c_int, _out, _config),
    "comm_rank": (_comm, POINTER(c_int)),
}


class OneCCL(bindings.Bindings):
    """One loaded libccl.

    Attributes:
        device_type: of the arrays that its plug-in serves.
    """

    name = "oneCCL"
    device_type = "xpu"
    codes = CODES
    in_progress = IN_PROGRESS
    peer_errors = PEER_ERRORS
    log_hint = "CCL_LOG_LEVEL=info in the environment makes oneCCL log more"
    full_capability = (0, 0)
    # In 2022.1 oneCCL has the argument and ignores it.
    splits_by_key = False
    scales_one_rank = True
    sets_up_one_sided = False
    symbols = SYMBOLS
    arguments = ARGUMENTS
    direct = frozenset(DIRECT)
    unique_id_type = UniqueId

    @property
    def version_text(self) -> str:
        """``"2022.1"`` of 20220100; the number does not contain the patch."""
        major, rest = divmod(self.version, 10000)
        return f"{major}.{rest // 100}"

    def config(self, config: Config) -> ConfigStruct:
        given = [name for name in _OPTIONS if getattr(config, name) is not None]
        if given:
            raise DistArgumentError(f"{', '.join(given)}: {self!r} does not take these options")
        made = ConfigStruct(size=ctypes.sizeof(ConfigStruct), magic=_MAGIC, version=self.version)
        for name in ("cgaClusterSize", "minCTAs", "maxCTAs", "splitShare"):
            setattr(made, name, _UNDEFINED)
        made.blocking = 1
        # Threads of their own issue the operations of the groups.
        made.multiThreaded = 1
        return made

    def has(self, method: str) -> bool:
        return method in SYMBOLS and self.has_symbol(SYMBOLS[method])

    def symbol(self, method: str) -> str:
        return SYMBOLS[method]

    def needed(self, method: str) -> str:
        return "the backend nccl"

    def reduction(
        self, dtype: DType, reduction: Reduction, capability: tuple[int, int] | None = None
    ) -> NativeReduction | None:
        return None if dtype.name.startswith("float8") else native_reduction(dtype, reduction)

    def comm_state(self, comm: int) -> tuple[int, int]:
        """oneCCL reports no asynchronous errors."""
        return 0, 0

    def may_share_device(self) -> bool:
        return False

    def ranks_per_id(self) -> int:
        return 0

    def host_id(self) -> str:
        return ""

    def connection_hint(self, addresses: Sequence[str]) -> str:
        return (
            "CCL_KVS_IFACE chooses oneCCL's network interface; CCL_LOG_LEVEL=info logs the"
            " addresses"
        )

    def diagnosis(self) -> str:
        """oneCCL says nothing of the ranks."""
        return ""


class XpuOneCCL(OneCCL):
    """oneCCL on XPUs; a stream is the address of a ``sycl::queue``, whose work is in order."""

    def __init__(self, library: Any, path: str, runtime: DeviceRuntime) -> None:
        super().__init__(library, path)
        self._runtime = runtime

    def comm_init(
        self, size: int, unique_ids: Sequence[bytes], rank: int, config: Config, slot: Any = None
    ) -> tuple[int, HandleSlot]:
        """A communicator on the calling thread's current device, which oneCCL is told."""
        slot = self.new_slot() if slot is None else slot
        code: int = self._c.set_device(max(0, self._runtime.current_device()))
        return (code, slot) if code else super().comm_init(size, unique_ids, rank, config, slot)
