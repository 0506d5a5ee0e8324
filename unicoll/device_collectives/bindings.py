"""The functions that all libraries with NCCL's API have, by ctypes.

Functions with the same signature as in the interface are the ctypes functions themselves, without a
Python wrapper: a call costs ctypes' conversion of its arguments and nothing more. ctypes lets other
threads run while the library works.
"""

from __future__ import annotations

import ctypes
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_void_p
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

from unicoll.device_collectives.interface import Config, HandleSlot
from unicoll.errors import DistBackendError

_HOST_IMMEDIATE = 1
_WINDOW_DEFAULT, _WINDOW_SYMMETRIC = 0x00, 0x01
_NO_COLOR = -1
"""NCCL_SPLIT_NOCOLOR."""

_EIGHT_BYTES_EACH = platform.machine() in ("x86_64", "aarch64")
"""True if C passes every integer and pointer argument in eight bytes, of which the function reads
those it needs.

Then all arguments can be declared as pointers, which ctypes converts in half the time that it needs
for numbers.
"""

_out, _comm, _stream, _ptr = POINTER(c_void_p), c_void_p, c_void_p, c_void_p

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "version": (POINTER(c_int),),
    "last_error": (_comm,),
    "comm_finalize": (_comm,),
    "comm_destroy": (_comm,),
    "comm_abort": (_comm,),
    "group_start": (),
    "group_end": (),
    "all_reduce": (_ptr, _ptr, c_size_t, c_int, c_int, _comm, _stream),
    "broadcast": (_ptr, _ptr, c_size_t, c_int, c_int, _comm, _stream),
    "reduce": (_ptr, _ptr, c_size_t, c_int, c_int, c_int, _comm, _stream),
    "all_gather": (_ptr, _ptr, c_size_t, c_int, _comm, _stream),
    "reduce_scatter": (_ptr, _ptr, c_size_t, c_int, c_int, _comm, _stream),
    "send": (_ptr, c_size_t, c_int, c_int, _comm, _stream),
    "recv": (_ptr, c_size_t, c_int, c_int, _comm, _stream),
    "all_to_all": (_ptr, _ptr, c_size_t, c_int, _comm, _stream),
    "premul_sum": (POINTER(c_int), c_void_p, c_int, c_int, _comm),
    "redop_destroy": (c_int, _comm),
    "mem_alloc": (_out, c_size_t),
    "mem_free": (_ptr,),
    "window_register": (_comm, _ptr, c_size_t, _out, c_int),
    "window_deregister": (_comm, c_void_p),
    "comm_register": (_comm, _ptr, c_size_t, _out),
    "comm_deregister": (_comm, c_void_p),
}
"""The arguments of a method's function; all return a result code but that of ``last_error``, which
returns text."""


class Bindings(ABC):
    """One loaded library, as :class:`~unicoll.device_collectives.interface.CollectiveLibrary`.

    A function that the library lacks raises DistBackendError when it is called.

    Args:
        library: the loaded library, a ``ctypes.CDLL``, with its functions as attributes.
        path: of its file.

    Attributes:
        symbols: the library's function of each method, by name.
        arguments: those of each method's function.
        direct: the methods that are the library's functions as they are; their arguments are
            positional.
        unique_id_type: the structure of an id, which functions take by value.

    Raises:
        DistBackendError: the version cannot be queried.
    """

    name: str
    symbols: ClassVar[Mapping[str, str]]
    arguments: ClassVar[Mapping[str, tuple[Any, ...]]]
    direct: ClassVar[Collection[str]]
    unique_id_type: ClassVar[type[ctypes.Structure]]

    def __init__(self, library: Any, path: str) -> None:
        self.path = path
        self._version = 0
        self._library = library
        self._slots: list[c_void_p] = []
        number = c_int()
        # This is the first call of the library, because NCCL reads the environment in it. No other
        # thread may change the environment meanwhile.
        code = self._function("version")(byref(number))
        if code:
            raise DistBackendError(f"{self.symbols['version']} of {path} returns {code}")
        self._version = number.value
        self._c = SimpleNamespace(**{method: self._function(method) for method in self.arguments})
        for method in self.direct:
            setattr(self, method, getattr(self._c, method))

    @property
    def version(self) -> int:
        """The library's number of its version."""
        return self._version

    @property
    @abstractmethod
    def version_text(self) -> str:
        """The version for messages."""

    @abstractmethod
    def config(self, config: Config) -> ctypes.Structure:
        """The options of a communicator as the library's structure."""

    def __repr__(self) -> str:
        return f"{self.name} {self.version_text} ({self.path})" if self._version else self.path

    def has_symbol(self, symbol: str) -> bool:
        """True if the library exports a function, for example ``"ncclCommShrink"``."""
        try:
            getattr(self._library, symbol)
        except AttributeError:
            return False
        return True

    def last_error(self, comm: int = 0) -> str:
        """The library's text for the last error of the process; "" if there was none."""
        text: bytes | None = self._c.last_error(comm)
        return (text or b"").decode(errors="replace").strip()

    # --- communicators ---

    def unique_id(self) -> tuple[int, bytes]:
        """A new id. NCCL starts a thread that listens for the ranks; the process must not fork
        afterwards."""
        unique_id = self.unique_id_type()
        return self._c.unique_id(byref(unique_id)), bytes(unique_id)

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
        """A communicator on the current device."""
        # A caller that passes a slot may read it on another thread while this call waits for other
        # ranks (Communicator._abort_start).
        slot = self.new_slot() if slot is None else slot
        options = self.config(config)
        ids = self.ids(unique_ids)
        if len(ids) == 1:
            return self._c.comm_init(byref(slot), size, ids[0], rank, byref(options)), slot
        return (
            self._c.comm_init_scalable(byref(slot), size, rank, len(ids), ids, byref(options)),
            slot,
        )

    def ids(self, unique_ids: Sequence[bytes]) -> ctypes.Array[Any]:
        """The ids as an array of structures.

        Raises:
            DistBackendError: one has another size.
        """
        nbytes = ctypes.sizeof(self.unique_id_type)
        for one in unique_ids:
            if len(one) != nbytes:
                raise DistBackendError(f"an id of {self.name} has {nbytes} bytes, not {len(one)}")
        return (self.unique_id_type * len(unique_ids)).from_buffer_copy(b"".join(unique_ids))

    def comm_split(
        self, comm: int, color: int | None, key: int, config: Config
    ) -> tuple[int, HandleSlot]:
        """Take part in a split; the slot is written while ``comm`` is in progress, and stays None
        without a color."""
        slot, options = c_void_p(), self.config(config)
        number = _NO_COLOR if color is None else color
        return self.keep(self._c.comm_split(comm, number, key, byref(slot), byref(options)), slot)

    # --- operations ---

    def premul_sum(self, factor: bytes, dtype: int, comm: int) -> tuple[int, int]:
        """An operation that multiplies by ``factor``, which the library reads before this returns,
        and sums."""
        op = c_int()
        scalar = (c_ubyte * len(factor)).from_buffer_copy(factor)
        code = self._c.premul_sum(byref(op), ctypes.addressof(scalar), dtype, _HOST_IMMEDIATE, comm)
        return code, op.value

    # --- memory ---

    def mem_alloc(self, nbytes: int) -> tuple[int, int]:
        """Memory of the current device that the library can register as a window."""
        slot = c_void_p()
        code = self._c.mem_alloc(byref(slot), nbytes)
        return code, slot.value or 0

    def window_register(
        self, comm: int, ptr: int, nbytes: int, symmetric: bool
    ) -> tuple[int, HandleSlot]:
        """Register memory, on all ranks; the slot is written while ``comm`` is in progress."""
        slot = c_void_p()
        flags = _WINDOW_SYMMETRIC if symmetric else _WINDOW_DEFAULT
        return self.keep(self._c.window_register(comm, ptr, nbytes, byref(slot), flags), slot)

    def comm_register(self, comm: int, ptr: int, nbytes: int) -> tuple[int, int]:
        """Register memory on this rank alone, for transports without copies."""
        slot = c_void_p()
        code = self._c.comm_register(comm, ptr, nbytes, byref(slot))
        return code, slot.value or 0

    # --- helpers ---

    def keep(self, code: int, slot: c_void_p) -> tuple[int, c_void_p]:
        """Keep the memory to which the library will write, for good: a caller that stops waiting
        may drop the slot.

        The code does not show whether the library has written: it can be success for what has only
        begun.
        """
        self._slots.append(slot)
        return code, slot

    def _function(self, method: str) -> Callable[..., Any]:
        """A method's function with its signature, or one that raises because the library lacks
        it."""
        symbol = self.symbols[method]
        if not self.has_symbol(symbol):
            return self._missing(symbol)
        found = getattr(self._library, symbol)
        found.restype = c_char_p if method == "last_error" else c_int
        arguments = self.arguments[method]
        # This is for the direct functions only: all of their arguments are integers and addresses,
        # while others take a structure by value.
        found.argtypes = (
            (c_void_p,) * len(arguments)
            if method in self.direct and _EIGHT_BYTES_EACH
            else arguments
        )
        return found  # type: ignore[no-any-return]

    def _missing(self, symbol: str) -> Callable[..., NoReturn]:
        def missing(*_: object) -> NoReturn:
            raise DistBackendError(f"{self!r} has no {symbol}")

        return missing
