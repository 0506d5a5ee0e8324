"""libnccl by ctypes: every function that the backend uses, with the signature of ``nccl.h`` 2.18 to
2.32."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_void_p
from types import SimpleNamespace
from typing import Any, cast

from nccl_comm.library.nccl import DIRECT, SYMBOLS, NcclFacts
from nccl_comm.library.structs import (
    ConfigStruct,
    UniqueId,
    WaitSignal,
    call_config_struct,
    config_struct,
)
from unicoll.calls.options import CallOptions
from unicoll.device_collectives import bindings
from unicoll.device_collectives.interface import Config, HandleSlot, Operations

_SHRINK_DEFAULT, _SHRINK_ABORT = 0x00, 0x01
_REVOKE_DEFAULT = 0

_out = POINTER(c_void_p)
_config = POINTER(ConfigStruct)
_comm = _stream = _ptr = _call_config = c_void_p

WITH_CONFIG = {
    name: f"{DIRECT[name]}Config"
    for name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
}
"""Collectives as functions whose additional last argument is an ``ncclCollConfig_t``; from 2.31."""
_WITHOUT_CONFIG = ("send", "recv", "put_signal", "signal", "wait_signal")
"""The other operations, which take no options."""


def _with_options(name: str) -> str:
    """The name of a collective with options among the functions."""
    return f"{name}_with_options"


ARGUMENTS: dict[str, tuple[Any, ...]] = bindings.ARGUMENTS | {
    "unique_id": (POINTER(UniqueId),),
    "comm_init": (_out, c_int, UniqueId, c_int, _config),
    "comm_init_scalable": (_out, c_int, c_int, c_int, POINTER(UniqueId), _config),
    "comm_split": (_comm, c_int, c_int, _out, _config),
    "comm_shrink": (_comm, POINTER(c_int), c_int, _out, _config, c_int),
    "comm_unique_id": (_comm, POINTER(UniqueId)),
    "comm_grow": (_comm, c_int, POINTER(UniqueId), c_int, _out, _config),
    "comm_state": (_comm, POINTER(c_int)),
    "comm_revoke": (_comm, c_int),
    "put_signal": (
        _ptr,
        c_size_t,
        c_int,
        c_int,
        c_void_p,
        c_size_t,
        c_int,
        c_int,
        c_uint,
        _comm,
        _stream,
    ),
    "signal": (c_int, c_int, c_int, c_uint, _comm, _stream),
    "wait_signal": (c_int, POINTER(WaitSignal), _comm, _stream),
}
ARGUMENTS |= {_with_options(name): (*ARGUMENTS[name], _call_config) for name in WITH_CONFIG}
_SYMBOLS = SYMBOLS | {_with_options(name): symbol for name, symbol in WITH_CONFIG.items()}
SIGNATURES = {_SYMBOLS[method]: arguments for method, arguments in ARGUMENTS.items()}
"""The arguments of each function; all return ncclResult_t but ncclGetLastError, which returns
text."""


class Bindings(NcclFacts, bindings.Bindings):
    """One loaded libnccl."""

    symbols = _SYMBOLS
    arguments = ARGUMENTS
    direct = frozenset((*DIRECT, *map(_with_options, WITH_CONFIG)))
    unique_id_type = UniqueId

    def config(self, config: Config) -> ctypes.Structure:
        return config_struct(config, self.version)

    # --- communicators ---

    def comm_shrink(
        self, comm: int, excluded: Sequence[int], config: Config, abort: bool
    ) -> tuple[int, HandleSlot]:
        """A communicator without some ranks; the slot is written while ``comm`` is in progress."""
        slot, options = c_void_p(), self.config(config)
        ranks = (c_int * len(excluded))(*excluded)
        flags = _SHRINK_ABORT if abort else _SHRINK_DEFAULT
        return self.keep(
            self._c.comm_shrink(comm, ranks, len(excluded), byref(slot), byref(options), flags),
            slot,
        )

    def comm_unique_id(self, comm: int) -> tuple[int, bytes]:
        """An id for growing a communicator that has no work, once; from 2.29."""
        unique_id = UniqueId()
        return self._c.comm_unique_id(comm, byref(unique_id)), bytes(unique_id)

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
        options = self.config(config)
        own_id = None if unique_id is None else byref(UniqueId.from_buffer_copy(unique_id))
        return self.keep(
            self._c.comm_grow(comm or None, size, own_id, rank, byref(slot), byref(options)), slot
        )

    def comm_state(self, comm: int) -> tuple[int, int]:
        """ncclCommGetAsyncError: the call's own code, and the communicator's state."""
        state = c_int()
        code = self._c.comm_state(comm, byref(state))
        return code, state.value

    def comm_revoke(self, comm: int) -> int:
        """Stop the operations of a communicator, but keep it; from 2.28.7."""
        code: int = self._c.comm_revoke(comm, _REVOKE_DEFAULT)
        return code

    # --- operations with options, a factor or a list ---

    def wait_signal(self, signals: Sequence[tuple[int, int]], comm: int, stream: int) -> int:
        """Make a stream wait for signals, whose list NCCL reads before this returns; from 2.29."""
        array = (WaitSignal * len(signals))(
            *(WaitSignal(count, peer, 0, 0) for peer, count in signals)
        )
        code: int = self._c.wait_signal(len(array), array, comm, stream)
        return code

    def with_options(self, options: CallOptions) -> Operations:
        """The operations with options, which the collectives pass to NCCL in each call; from
        2.31."""
        # NCCL reads the structure before a function returns. The result of byref() keeps the
        # structure alive, and the functions below keep that.
        config = byref(call_config_struct(options, self.version))
        collectives = {
            name: _with_last(getattr(self._c, _with_options(name)), config) for name in WITH_CONFIG
        }
        others = {name: getattr(self, name) for name in _WITHOUT_CONFIG}
        return cast(Operations, SimpleNamespace(**collectives, **others))


def _with_last(function: Callable[..., Any], last: Any) -> Callable[..., Any]:
    """The function with an additional last argument."""
    return lambda *arguments: function(*arguments, last)
