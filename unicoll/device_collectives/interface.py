"""The interface of a library with NCCL's API, as NCCL, RCCL and oneCCL are.

The functions do what the NCCL user guide says. Every function returns the library's result code: 0
is success, and :attr:`CollectiveLibrary.in_progress` is returned on a non-blocking communicator.
Functions that create something return it along with the code. Pointers, communicators, streams and
windows are plain integers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from unicoll.arrays.types import DType, Reduction
from unicoll.calls.options import CallOptions
from unicoll.errors import DistError

SUCCESS = 0
SUM, PROD, MAX, MIN, AVG = range(5)

DATA_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
"""ncclDataType_t of unicoll's element types; other types are moved as bytes.

All libraries have these numbers, and those of the reductions. The last two types need NCCL 2.24.
"""


class ResultCode(NamedTuple):
    """A result code: its name, the class of its exception, and its meaning."""

    name: str
    error: type[DistError]
    meaning: str


class NativeReduction(NamedTuple):
    """A reduction of one element type as a library computes it.

    Attributes:
        type: ncclDataType_t.
        op: ncclRedOp_t; negative if one has to be created with a factor.
        parts: elements of ``type`` per element.
    """

    type: int
    op: int
    parts: int

    @property
    def has_factor(self) -> bool:
        """True if the operation has to be created with a factor."""
        return self.op < 0


@dataclass(frozen=True)
class Config:
    """Options of a communicator (``ncclConfig_t``); None leaves the choice to the library and its
    environment.

    Attributes:
        blocking: whether calls return only when they are done. Otherwise the library starts a
            thread for every group.
        cga_cluster_size, min_ctas, max_ctas: sizes and numbers of thread blocks of its kernels.
        net_name: name of the network plug-in.
        split_share: whether communicators split from this one share its resources.
        traffic_class: traffic class of InfiniBand or RoCE (NCCL from 2.26).
        comm_name: name for the library's logs (NCCL from 2.27).
    """

    blocking: bool = True
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: bool | None = None
    traffic_class: int | None = None
    comm_name: str | None = None


class HandleSlot(Protocol):
    """The memory to which the library writes the handle of a new communicator or window
    (``ctypes.c_void_p`` is one).

    NCCL writes from a thread of its own until the communicator that makes the new one (for a first
    one, itself) is no longer "in progress": the caller keeps the slot until then.
    """

    value: int | None


class Operations(Protocol):
    """The functions that put work on a stream; counts are in elements of ``dtype``."""

    def all_reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> int: ...
    def broadcast(
        self, send: int, recv: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> int: ...
    def reduce(
        self,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        comm: int,
        stream: int,
    ) -> int: ...
    def all_gather(
        self, send: int, recv: int, count: int, dtype: int, comm: int, stream: int
    ) -> int:
        """``count`` elements are sent by each rank."""

    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> int:
        """``count`` elements are received by each rank."""

    def send(self, send: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int: ...
    def recv(self, recv: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int: ...
    def all_to_all(
        self, send: int, recv: int, count: int, dtype: int, comm: int, stream: int
    ) -> int:
        """NCCL from 2.28; ``count`` elements are sent by each rank to each."""

    # --- one-sided; NCCL from 2.29, all of them or none ---

    def put_signal(
        self,
        send: int,
        count: int,
        dtype: int,
        peer: int,
        window: int,
        offset: int,
        signal_index: int,
        context: int,
        flags: int,
        comm: int,
        stream: int,
    ) -> int:
        """``window`` is this rank's own; ``offset`` is in bytes; index, context and flags are 0."""

    def signal(
        self, peer: int, signal_index: int, context: int, flags: int, comm: int, stream: int
    ) -> int: ...
    def wait_signal(self, signals: Sequence[tuple[int, int]], comm: int, stream: int) -> int:
        """How many signals to wait for, by peer."""


class CollectiveLibrary(Operations, Protocol):
    """One loaded library.

    Attributes:
        name: for messages: ``"NCCL"``.
        codes: its result codes.
        in_progress: the code of what a non-blocking communicator has not finished.
        peer_errors: codes that the death of another rank may cause.
        log_hint: how to have the library log more.
        full_capability: the least compute capability of devices on which it does all of its
            reductions.
    """

    name: str
    codes: Mapping[int, ResultCode]
    in_progress: int
    peer_errors: Collection[int]
    log_hint: str
    full_capability: tuple[int, int]

    @property
    def version_text(self) -> str:
        """``"2.30.7"``."""

    @property
    def path(self) -> str:
        """The file that it was loaded from."""

    @property
    def splits_by_key(self) -> bool:
        """True if :meth:`comm_split` orders the ranks by key; otherwise they keep the parent's
        order."""

    @property
    def scales_one_rank(self) -> bool:
        """True if a reduction with a factor in a group of one rank multiplies all elements."""

    @property
    def sets_up_one_sided(self) -> bool:
        """True if it sets one-sided operations up with a communicator's first window."""

    def has(self, method: str) -> bool:
        """True if the library has the function of a method, for example ``"comm_shrink"``."""

    def symbol(self, method: str) -> str:
        """The library's name of a method's function: ``"ncclCommShrink"``."""

    def needed(self, method: str) -> str:
        """What a method needs that the library lacks, for errors: ``"NCCL 2.27; this is
        2.20.5"``."""

    def reduction(
        self, dtype: DType, reduction: Reduction, capability: tuple[int, int] | None = None
    ) -> NativeReduction | None:
        """A reduction as the library computes it, or None if it does not.

        Args:
            capability: the least compute capability of the devices; None for
                :attr:`full_capability`.
        """

    def may_share_device(self) -> bool:
        """True if the user allows several ranks on one device, for tests."""

    def ranks_per_id(self) -> int:
        """Ranks that connect with one id; 0 if the library takes one id for all."""

    def host_id(self) -> str:
        """The name that the user has given to this host for the library, or ""."""

    def connection_hint(self, addresses: Sequence[str]) -> str:
        """Why ranks may not connect to each other, for a warning.

        Args:
            addresses: on which unicoll listens.
        """

    def diagnosis(self) -> str:
        """What the library says of the ranks at a deadline; "" if it says nothing."""

    def last_error(self, comm: int = 0) -> str:
        """The library's text for the last error of this process, or of a communicator."""

    # --- communicators ---

    def unique_id(self) -> tuple[int, bytes]: ...
    def new_slot(self) -> HandleSlot:
        """Memory for the handle of a communicator."""

    def comm_init(
        self,
        size: int,
        unique_ids: Sequence[bytes],
        rank: int,
        config: Config,
        slot: HandleSlot | None = None,
    ) -> tuple[int, HandleSlot]:
        """A communicator on the current device; several ids need NCCL 2.23.

        Its handle is written to ``slot``, or to a new one, before the library waits for the other
        ranks.
        """

    def comm_split(
        self, comm: int, color: int | None, key: int, config: Config
    ) -> tuple[int, HandleSlot]:
        """With ``color`` None this rank takes part without becoming a member.

        The handle may be written later, while ``comm`` is in progress, also where the code is
        success; without a color it stays None.
        """

    def comm_shrink(
        self, comm: int, excluded: Sequence[int], config: Config, abort: bool
    ) -> tuple[int, HandleSlot]:
        """A communicator without some ranks, which do not call this; ``abort`` ends the operations
        of ``comm`` first."""

    def comm_unique_id(self, comm: int) -> tuple[int, bytes]:
        """An id for one :meth:`comm_grow` of a communicator that has no work; one of its ranks
        makes it."""

    def comm_grow(
        self,
        comm: int,
        size: int,
        unique_id: bytes | None,
        rank: int,
        config: Config,
        slot: HandleSlot | None = None,
    ) -> tuple[int, HandleSlot]:
        """A communicator with more ranks; its handle is written as by :meth:`comm_init`.

        Ranks of ``comm`` pass it with ``rank`` -1, and the one that has made the id passes the id.
        New ranks pass 0, the id and their rank, which is behind the ranks of ``comm``.
        """

    def comm_state(self, comm: int) -> tuple[int, int]:
        """ncclCommGetAsyncError: the call's own code, and the communicator's state."""

    def comm_finalize(self, comm: int) -> int: ...
    def comm_destroy(self, comm: int) -> int: ...
    def comm_abort(self, comm: int) -> int:
        """End all operations, also of threads in NCCL, and free the communicator: in a group call
        at its end."""

    def comm_revoke(self, comm: int) -> int: ...

    # --- operations ---

    def group_start(self) -> int: ...
    def group_end(self) -> int: ...
    def with_options(self, options: CallOptions) -> Operations:
        """The operations with options, which the collectives pass on in each call; NCCL from 2.31.
        May be reused."""

    def premul_sum(self, factor: bytes, dtype: int, comm: int) -> tuple[int, int]:
        """ncclRedOpCreatePreMulSum with a factor in host memory, as the bytes of one element."""

    def redop_destroy(self, op: int, comm: int) -> int: ...

    # --- memory ---

    def mem_alloc(self, nbytes: int) -> tuple[int, int]: ...
    def mem_free(self, ptr: int) -> int: ...
    def window_register(
        self, comm: int, ptr: int, nbytes: int, symmetric: bool
    ) -> tuple[int, HandleSlot]:
        """The window may be written later, while ``comm`` is in progress, also where the code is
        success."""

    def window_deregister(self, comm: int, window: int) -> int: ...
    def comm_register(self, comm: int, ptr: int, nbytes: int) -> tuple[int, int]:
        """Register memory on this rank alone. The handle is 0 if the library has no use for it."""

    def comm_deregister(self, comm: int, handle: int) -> int: ...


def describe(library: CollectiveLibrary) -> str:
    """Version and path for messages: ``NCCL 2.27.5 (/path/libnccl.so.2)``."""
    return f"{library.name} {library.version_text} ({library.path})"
