"""libnccl by ctypes: every function that the backend uses, with the signature of ``nccl.h`` 2.18 to 2.32.

Functions with the same signature as in the protocol are the ctypes functions themselves, without a Python wrapper: a
call costs ctypes' conversion of its arguments and nothing more. ctypes lets other threads run while NCCL works.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from types import SimpleNamespace
from typing import Any, NoReturn, cast

from nccl_comm.library.interface import UNIQUE_ID_BYTES, Config, HandleSlot, Operations
from nccl_comm.library.structs import (
    NO_COLOR,
    ConfigStruct,
    UniqueId,
    WaitSignal,
    call_config_struct,
    config_struct,
    version_text,
)
from unicoll.backend.options import CallOptions
from unicoll.errors import DistBackendError

_HOST_IMMEDIATE = 1
_WINDOW_DEFAULT, _WINDOW_SYMMETRIC = 0x00, 0x01
_SHRINK_DEFAULT, _SHRINK_ABORT = 0x00, 0x01
_REVOKE_DEFAULT = 0

_EIGHT_BYTES_EACH = platform.machine() in ("x86_64", "aarch64")
"""True if C passes every integer and pointer argument in eight bytes, of which the function reads those it needs.

Then all arguments can be declared as pointers, which ctypes converts in half the time that it needs for numbers.
"""

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
"""Methods of the protocol that are the library's functions as they are; their arguments are positional."""

_out = POINTER(c_void_p)
_config = POINTER(ConfigStruct)
_comm = _stream = _ptr = _call_config = c_void_p

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclGetLastError": (_comm,),
    "ncclCommInitRankConfig": (_out, c_int, UniqueId, c_int, _config),
    "ncclCommInitRankScalable": (_out, c_int, c_int, c_int, POINTER(UniqueId), _config),
    "ncclCommSplit": (_comm, c_int, c_int, _out, _config),
    "ncclCommShrink": (_comm, POINTER(c_int), c_int, _out, _config, c_int),
    "ncclCommGetUniqueId": (_comm, POINTER(UniqueId)),
    "ncclCommGrow": (_comm, c_int, POINTER(UniqueId), c_int, _out, _config),
    "ncclCommGetAsyncError": (_comm, POINTER(c_int)),
    "ncclCommFinalize": (_comm,),
    "ncclCommDestroy": (_comm,),
    "ncclCommAbort": (_comm,),
    "ncclCommRevoke": (_comm, c_int),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (_ptr, _ptr, c_size_t, c_int, c_int, _comm, _stream),
    "ncclBroadcast": (_ptr, _ptr, c_size_t, c_int, c_int, _comm, _stream),
    "ncclReduce": (_ptr, _ptr, c_size_t, c_int, c_int, c_int, _comm, _stream),
    "ncclAllGather": (_ptr, _ptr, c_size_t, c_int, _comm, _stream),
    "ncclReduceScatter": (_ptr, _ptr, c_size_t, c_int, c_int, _comm, _stream),
    "ncclSend": (_ptr, c_size_t, c_int, c_int, _comm, _stream),
    "ncclRecv": (_ptr, c_size_t, c_int, c_int, _comm, _stream),
    "ncclAlltoAll": (_ptr, _ptr, c_size_t, c_int, _comm, _stream),
    "ncclPutSignal": (_ptr, c_size_t, c_int, c_int, c_void_p, c_size_t, c_int, c_int, c_uint, _comm, _stream),
    "ncclSignal": (c_int, c_int, c_int, c_uint, _comm, _stream),
    "ncclWaitSignal": (c_int, POINTER(WaitSignal), _comm, _stream),
    "ncclRedOpCreatePreMulSum": (POINTER(c_int), c_void_p, c_int, c_int, _comm),
    "ncclRedOpDestroy": (c_int, _comm),
    "ncclMemAlloc": (_out, c_size_t),
    "ncclMemFree": (_ptr,),
    "ncclCommWindowRegister": (_comm, _ptr, c_size_t, _out, c_int),
    "ncclCommWindowDeregister": (_comm, c_void_p),
    "ncclCommRegister": (_comm, _ptr, c_size_t, _out),
    "ncclCommDeregister": (_comm, c_void_p),
}
"""The arguments of each function; all return ncclResult_t but ncclGetLastError, which returns text."""

WITH_CONFIG = {
    name: f"{DIRECT[name]}Config"
    for name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
}
"""Collectives as functions whose additional last argument is an ``ncclCollConfig_t``; from 2.31."""
SIGNATURES |= {symbol: (*SIGNATURES[DIRECT[name]], _call_config) for name, symbol in WITH_CONFIG.items()}

_POSITIONAL = {*DIRECT.values(), *WITH_CONFIG.values()}
_WITHOUT_CONFIG = ("send", "recv", "put_signal", "signal", "wait_signal")
"""The other operations, which take no options."""


class Bindings:
    """One loaded libnccl, as :class:`nccl_comm.library.interface.Nccl`.

    A function that the library lacks raises DistBackendError when it is called.

    Args:
        library: the loaded library, a ``ctypes.CDLL``, with NCCL's functions as attributes.

    Raises:
        DistBackendError: ncclGetVersion fails.
    """

    def __init__(self, library: Any, path: str) -> None:
        self.path = path
        self.version = 0
        self._library = library
        self._slots: list[c_void_p] = []
        number = c_int()
        # The first call, because NCCL reads the environment in it, which no other thread may change meanwhile.
        code = self._function("ncclGetVersion")(byref(number))
        if code:
            raise DistBackendError(f"ncclGetVersion of {path} returns {code}")
        self.version = number.value
        self._c = SimpleNamespace(**{symbol: self._function(symbol) for symbol in SIGNATURES})
        for name, symbol in DIRECT.items():
            setattr(self, name, getattr(self._c, symbol))

    def __repr__(self) -> str:
        return f"NCCL {version_text(self.version)} ({self.path})" if self.version else self.path

    def has(self, function: str) -> bool:
        """True if the library exports a function, for example ``"ncclCommShrink"``."""
        try:
            getattr(self._library, function)
        except AttributeError:
            return False
        return True

    def last_error(self, comm: int = 0) -> str:
        """NCCL's text for the last error of the process; "" if there was none."""
        text: bytes | None = self._c.ncclGetLastError(comm)
        return (text or b"").decode(errors="replace").strip()

    # --- communicators ---

    def unique_id(self) -> tuple[int, bytes]:
        """A new id. NCCL starts a thread that listens for the ranks; the process must not fork afterwards."""
        unique_id = UniqueId()
        return self._c.ncclGetUniqueId(byref(unique_id)), bytes(unique_id)

    def new_slot(self) -> c_void_p:
        """Memory for the handle of a communicator."""
        return c_void_p()

    def comm_init(
        self,
        size: int,
        unique_ids: Sequence[bytes],
        rank: int,
        config: Config,
        slot: Any = None,
    ) -> tuple[int, HandleSlot]:
        """A communicator on the current device; several ids need 2.23."""
        for one in unique_ids:
            if len(one) != UNIQUE_ID_BYTES:
                raise DistBackendError(f"an NCCL id has {UNIQUE_ID_BYTES} bytes, not {len(one)}")
        slot = self.new_slot() if slot is None else slot
        options = config_struct(config, self.version)
        ids = (UniqueId * len(unique_ids)).from_buffer_copy(b"".join(unique_ids))
        if len(ids) == 1:
            return self._c.ncclCommInitRankConfig(byref(slot), size, ids[0], rank, byref(options)), slot
        return self._c.ncclCommInitRankScalable(byref(slot), size, rank, len(ids), ids, byref(options)), slot

    def comm_split(self, comm: int, color: int | None, key: int, config: Config) -> tuple[int, HandleSlot]:
        """Take part in a split; the slot is written while ``comm`` is in progress, and stays None without a color."""
        slot, options = c_void_p(), config_struct(config, self.version)
        number = NO_COLOR if color is None else color
        return self._keep(self._c.ncclCommSplit(comm, number, key, byref(slot), byref(options)), slot)

    def comm_shrink(
        self, comm: int, excluded: Sequence[int], config: Config, abort: bool
    ) -> tuple[int, HandleSlot]:
        """A communicator without some ranks; the slot is written while ``comm`` is in progress."""
        slot, options = c_void_p(), config_struct(config, self.version)
        ranks = (c_int * len(excluded))(*excluded)
        flags = _SHRINK_ABORT if abort else _SHRINK_DEFAULT
        return self._keep(
            self._c.ncclCommShrink(comm, ranks, len(excluded), byref(slot), byref(options), flags), slot
        )

    def comm_unique_id(self, comm: int) -> tuple[int, bytes]:
        """An id for growing a communicator that has no work, once; from 2.29."""
        unique_id = UniqueId()
        return self._c.ncclCommGetUniqueId(comm, byref(unique_id)), bytes(unique_id)

    def comm_grow(
        self,
        comm: int,
        size: int,
        unique_id: bytes | None,
        rank: int,
        config: Config,
        slot: Any = None,
    ) -> tuple[int, HandleSlot]:
        """A communicator with more ranks; from 2.29."""
        slot = self.new_slot() if slot is None else slot
        options = config_struct(config, self.version)
        own_id = None if unique_id is None else byref(UniqueId.from_buffer_copy(unique_id))
        return self._keep(
            self._c.ncclCommGrow(comm or None, size, own_id, rank, byref(slot), byref(options)), slot
        )

    def comm_state(self, comm: int) -> tuple[int, int]:
        """ncclCommGetAsyncError: the call's own code, and the communicator's state."""
        state = c_int()
        code = self._c.ncclCommGetAsyncError(comm, byref(state))
        return code, state.value

    def comm_revoke(self, comm: int) -> int:
        """Stop the operations of a communicator, but keep it; from 2.28.7."""
        code: int = self._c.ncclCommRevoke(comm, _REVOKE_DEFAULT)
        return code

    # --- operations with options, a factor or a list ---

    def wait_signal(self, signals: Sequence[tuple[int, int]], comm: int, stream: int) -> int:
        """Make a stream wait for signals, whose list NCCL reads before this returns; from 2.29."""
        array = (WaitSignal * len(signals))(*(WaitSignal(count, peer, 0, 0) for peer, count in signals))
        code: int = self._c.ncclWaitSignal(len(array), array, comm, stream)
        return code

    def with_options(self, options: CallOptions) -> Operations:
        """The operations with options, which the collectives pass to NCCL in each call; from 2.31."""
        config = byref(call_config_struct(options, self.version))  # NCCL reads it before it returns
        collectives = {
            name: _with_last(getattr(self._c, symbol), config) for name, symbol in WITH_CONFIG.items()
        }
        others = {name: getattr(self, name) for name in _WITHOUT_CONFIG}
        return cast(Operations, SimpleNamespace(version=self.version, **collectives, **others))

    def premul_sum(self, factor: bytes, dtype: int, comm: int) -> tuple[int, int]:
        """An operation that multiplies by ``factor``, which NCCL reads before this returns, and sums."""
        op = c_int()
        scalar = (c_ubyte * len(factor)).from_buffer_copy(factor)
        code = self._c.ncclRedOpCreatePreMulSum(
            byref(op), ctypes.addressof(scalar), dtype, _HOST_IMMEDIATE, comm
        )
        return code, op.value

    # --- memory ---

    def mem_alloc(self, nbytes: int) -> tuple[int, int]:
        """Memory of the current device that NCCL can register as a window; from 2.19."""
        slot = c_void_p()
        code = self._c.ncclMemAlloc(byref(slot), nbytes)
        return code, slot.value or 0

    def window_register(self, comm: int, ptr: int, nbytes: int, symmetric: bool) -> tuple[int, HandleSlot]:
        """Register memory, on all ranks; the slot is written while ``comm`` is in progress; from 2.27."""
        slot = c_void_p()
        flags = _WINDOW_SYMMETRIC if symmetric else _WINDOW_DEFAULT
        return self._keep(self._c.ncclCommWindowRegister(comm, ptr, nbytes, byref(slot), flags), slot)

    def comm_register(self, comm: int, ptr: int, nbytes: int) -> tuple[int, int]:
        """Register memory on this rank alone, for transports without copies; from 2.19."""
        slot = c_void_p()
        code = self._c.ncclCommRegister(comm, ptr, nbytes, byref(slot))
        return code, slot.value or 0

    # --- helpers ---

    def _keep(self, code: int, slot: c_void_p) -> tuple[int, c_void_p]:
        """Keep the memory to which NCCL will write, for good: a caller that stops waiting may drop the slot.

        The code does not show whether NCCL has written: it can be success for what has only begun.
        """
        self._slots.append(slot)
        return code, slot

    def _function(self, symbol: str) -> Callable[..., Any]:
        """A function of the library with its signature, or one that raises because the library lacks it."""
        if not self.has(symbol):
            return self._missing(symbol)
        found = getattr(self._library, symbol)
        found.restype = c_char_p if symbol == "ncclGetLastError" else c_int
        found.argtypes = SIGNATURES[symbol]
        if symbol in _POSITIONAL and _EIGHT_BYTES_EACH:
            found.argtypes = (c_void_p,) * len(SIGNATURES[symbol])
        return found  # type: ignore[no-any-return]

    def _missing(self, symbol: str) -> Callable[..., NoReturn]:
        def missing(*_: object) -> NoReturn:
            raise DistBackendError(f"{self!r} has no {symbol}")

        return missing


def _with_last(function: Callable[..., Any], last: Any) -> Callable[..., Any]:
    """The function with an additional last argument."""
    return lambda *arguments: function(*arguments, last)
