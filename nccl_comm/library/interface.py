"""The interface between the backend and NCCL, implemented by the ctypes layer and by the simulated NCCL of the tests.

The functions do what the NCCL user guide says. Every function returns NCCL's result code (0 is success, 7 "in progress"
on a non-blocking communicator); functions that create something return it along with the code. Pointers, communicators,
streams and windows are plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unicoll.backend.options import CallOptions

SUCCESS, IN_PROGRESS = 0, 7
PEER_ERRORS = (2, 3, 6)
"""Codes that the death of another rank may cause: system, internal and remote errors."""
UNIQUE_ID_BYTES = 128
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
"""ncclDataType_t of unicoll's element types; other types are moved as bytes. The last two need NCCL 2.24."""


@dataclass(frozen=True)
class Config:
    """Options of a communicator (``ncclConfig_t``); None leaves the choice to NCCL and its environment.

    Attributes:
        blocking: whether calls return only when they are done. Otherwise NCCL starts a thread for every group.
        cga_cluster_size, min_ctas, max_ctas: sizes and numbers of thread blocks of its kernels.
        net_name: name of the network plug-in.
        split_share: whether communicators split from this one share its resources.
        traffic_class: traffic class of InfiniBand or RoCE (from 2.26).
        comm_name: name for NCCL's logs (from 2.27).
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
    """The memory to which NCCL writes the handle of a new communicator or window (``ctypes.c_void_p`` is one).

    NCCL writes from a thread of its own until the communicator that makes the new one (for a first one, itself) is no
    longer "in progress": the caller keeps the slot until then.
    """

    value: int | None


class Operations(Protocol):
    """The functions that put work on a stream; counts are in elements of ``dtype``."""

    @property
    def version(self) -> int:
        """NCCL's version number: 23007 is 2.30.7."""

    def all_reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> int: ...
    def broadcast(
        self, send: int, recv: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> int: ...
    def reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, root: int, comm: int, stream: int
    ) -> int: ...
    def all_gather(self, send: int, recv: int, count: int, dtype: int, comm: int, stream: int) -> int:
        """``count`` elements are sent by each rank."""

    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> int:
        """``count`` elements are received by each rank."""

    def send(self, send: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int: ...
    def recv(self, recv: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int: ...
    def all_to_all(self, send: int, recv: int, count: int, dtype: int, comm: int, stream: int) -> int:
        """From 2.28; ``count`` elements are sent by each rank to each."""

    # --- one-sided; from 2.29, all of them or none ---

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


class Nccl(Operations, Protocol):
    """One NCCL library."""

    @property
    def path(self) -> str:
        """The file that it was loaded from."""

    def has(self, function: str) -> bool:
        """True if the library exports a function, for example ``"ncclCommShrink"``."""

    def last_error(self, comm: int = 0) -> str:
        """NCCL's text for the last error of this process, or of a communicator."""

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
        """A communicator on the current device; several ids need 2.23.

        Its handle is written to ``slot``, or to a new one, before NCCL waits for the other ranks.
        """

    def comm_split(self, comm: int, color: int | None, key: int, config: Config) -> tuple[int, HandleSlot]:
        """With ``color`` None this rank takes part without becoming a member.

        The handle may be written later, while ``comm`` is in progress, also where the code is success; without a color
        it stays None.
        """

    def comm_shrink(
        self, comm: int, excluded: Sequence[int], config: Config, abort: bool
    ) -> tuple[int, HandleSlot]:
        """A communicator without some ranks, which do not call this; ``abort`` ends the operations of ``comm``
        first."""

    def comm_unique_id(self, comm: int) -> tuple[int, bytes]:
        """An id for one :meth:`comm_grow` of a communicator that has no work; one of its ranks makes it. From 2.29."""

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

        Ranks of ``comm`` pass it with ``rank`` -1, and the one that has made the id passes the id. New ranks pass 0,
        the id and their rank, which is behind the ranks of ``comm``.
        """

    def comm_state(self, comm: int) -> tuple[int, int]:
        """ncclCommGetAsyncError: the call's own code, and the communicator's state."""

    def comm_finalize(self, comm: int) -> int: ...
    def comm_destroy(self, comm: int) -> int: ...
    def comm_abort(self, comm: int) -> int:
        """End all operations, also of threads in NCCL, and free the communicator: in a group call at its end."""

    def comm_revoke(self, comm: int) -> int: ...

    # --- operations ---

    def group_start(self) -> int: ...
    def group_end(self) -> int: ...
    def with_options(self, options: CallOptions) -> Operations:
        """The operations with options, which the collectives pass to NCCL in each call; from 2.31. May be reused."""

    def premul_sum(self, factor: bytes, dtype: int, comm: int) -> tuple[int, int]:
        """ncclRedOpCreatePreMulSum with a factor in host memory, as the bytes of one element."""

    def redop_destroy(self, op: int, comm: int) -> int: ...

    # --- memory ---

    def mem_alloc(self, nbytes: int) -> tuple[int, int]: ...
    def mem_free(self, ptr: int) -> int: ...
    def window_register(self, comm: int, ptr: int, nbytes: int, symmetric: bool) -> tuple[int, HandleSlot]:
        """The window may be written later, while ``comm`` is in progress, also where the code is success."""

    def window_deregister(self, comm: int, window: int) -> int: ...
    def comm_register(self, comm: int, ptr: int, nbytes: int) -> tuple[int, int]:
        """Register memory on this rank alone; from 2.19. The handle is 0 if NCCL has no use for it."""

    def comm_deregister(self, comm: int, handle: int) -> int: ...
