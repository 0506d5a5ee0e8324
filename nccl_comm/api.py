"""NCCL as the backend sees it: a small protocol, which the ctypes layer and the tests' simulated NCCL implement.

Meanings are those of the NCCL user guide. Every function returns NCCL's result code (0 is success, 7 "in progress" on a
non-blocking communicator); the ones that make something return it along with the code. Pointers, communicators,
streams and windows are plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unicoll.options import CallOptions

__all__ = [
    "AVG",
    "DATA_TYPES",
    "IN_PROGRESS",
    "MAX",
    "MIN",
    "OF_OTHERS",
    "PROD",
    "SUCCESS",
    "SUM",
    "UNIQUE_ID_BYTES",
    "Config",
    "Nccl",
    "Slot",
]

SUCCESS, IN_PROGRESS = 0, 7
OF_OTHERS = (2, 3, 6)
"""Codes that the death of another rank may be behind: system, internal and remote errors."""
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
"""ncclDataType_t of our element types; what is missing here is moved as bytes. The last two need NCCL 2.24."""


@dataclass(frozen=True)
class Config:
    """What a communicator may be told (``ncclConfig_t``); None leaves the choice to NCCL and its environment.

    Attributes:
        blocking: whether calls return only when they are done. Otherwise NCCL starts a thread for every group.
        cga_cluster_size, min_ctas, max_ctas: how much of the GPU its kernels take.
        net_name: network plug-in.
        split_share: whether communicators split from it share its resources.
        traffic_class: of InfiniBand or RoCE (2.26).
        comm_name: for NCCL's own logs (2.27).
    """

    blocking: bool = True
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: bool | None = None
    traffic_class: int | None = None
    comm_name: str | None = None


class Slot(Protocol):
    """Where NCCL puts a new communicator, some time before that is ready (``ctypes.c_void_p`` is one).

    NCCL writes to it from a thread of its own until the communicator it was made from (for a fresh one, itself) is no
    longer "in progress": whoever began it keeps the slot until then.
    """

    value: int | None


class Nccl(Protocol):
    """One NCCL library."""

    @property
    def version(self) -> int:
        """As NCCL codes it: 23007 is 2.30.7."""

    @property
    def path(self) -> str:
        """Where it was loaded from."""

    def has(self, function: str) -> bool:
        """Whether the library exports a function, for example ``"ncclCommShrink"``."""

    def last_error(self, comm: int = 0) -> str:
        """NCCL's own words on the last error of this process, or of a communicator."""

    # --- communicators ---

    def unique_id(self) -> tuple[int, bytes]: ...
    def comm_init(self, size: int, unique_ids: Sequence[bytes], rank: int, config: Config) -> tuple[int, Slot]:
        """A communicator on the current device; its handle is there at once. Several ids need 2.23."""

    def comm_split(self, comm: int, color: int | None, key: int, config: Config) -> tuple[int, Slot]:
        """``color`` None takes part without becoming a member.

        The handle may come later: while ``comm`` is in progress. For those without a color it stays None.
        """

    def comm_shrink(
        self, comm: int, excluded: Sequence[int], config: Config, abort: bool
    ) -> tuple[int, Slot]:
        """A communicator without some ranks, who do not call it; ``abort`` ends what ``comm`` is doing first."""

    def comm_unique_id(self, comm: int) -> tuple[int, bytes]:
        """An id for one :meth:`comm_grow` of a communicator that has no work; one of its ranks makes it. From 2.29."""

    def comm_grow(
        self, comm: int, size: int, unique_id: bytes | None, rank: int, config: Config
    ) -> tuple[int, Slot]:
        """A communicator with more ranks; its handle is there at once.

        Ranks of ``comm`` give it with ``rank`` -1, and the one that has made the id gives that. New ones give 0, the id
        and their rank, which comes after those of ``comm``.
        """

    def comm_state(self, comm: int) -> tuple[int, int]:
        """ncclCommGetAsyncError: the call's own code, and the communicator's state."""

    def comm_finalize(self, comm: int) -> int: ...
    def comm_destroy(self, comm: int) -> int: ...
    def comm_abort(self, comm: int) -> int: ...
    def comm_revoke(self, comm: int) -> int: ...

    # --- operations; counts are in elements of ``dtype`` ---

    def group_start(self) -> int: ...
    def group_end(self) -> int: ...
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
        """``count`` is what each rank sends."""

    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> int:
        """``count`` is what each rank receives."""

    def send(self, send: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int: ...
    def recv(self, recv: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int: ...
    def all_to_all(self, send: int, recv: int, count: int, dtype: int, comm: int, stream: int) -> int:
        """From 2.28; ``count`` is what each rank sends to each."""

    # --- one rank alone; from 2.29, all or none of them ---

    def put_signal(
        self, send: int, count: int, dtype: int, peer: int, window: int, offset: int, signal_index: int, context: int,
        flags: int, comm: int, stream: int,
    ) -> int:  # fmt: skip
        """``window`` is this rank's own; ``offset`` is in bytes; index, context and flags are 0."""

    def signal(self, peer: int, signal_index: int, context: int, flags: int, comm: int, stream: int) -> int: ...
    def wait_signal(self, signals: Sequence[tuple[int, int]], comm: int, stream: int) -> int:
        """How many signals to wait for, by peer."""

    # --- the same with options for the call; from 2.31, all or none of them ---

    def call_config(self, options: CallOptions) -> Any:
        """``ncclCollConfig_t``, to be the last argument of the functions below; it may be used for many calls."""

    def all_reduce_config(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: int, stream: int, config: Any
    ) -> int: ...
    def broadcast_config(
        self, send: int, recv: int, count: int, dtype: int, root: int, comm: int, stream: int, config: Any
    ) -> int: ...
    def reduce_config(
        self, send: int, recv: int, count: int, dtype: int, op: int, root: int, comm: int, stream: int, config: Any
    ) -> int: ...
    def all_gather_config(
        self, send: int, recv: int, count: int, dtype: int, comm: int, stream: int, config: Any
    ) -> int: ...
    def reduce_scatter_config(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: int, stream: int, config: Any
    ) -> int: ...
    def all_to_all_config(
        self, send: int, recv: int, count: int, dtype: int, comm: int, stream: int, config: Any
    ) -> int: ...

    # --- operations that are made ---

    def premul_sum(self, factor: bytes, dtype: int, comm: int) -> tuple[int, int]:
        """ncclRedOpCreatePreMulSum with a factor in host memory, as the bytes of one element."""

    def redop_destroy(self, op: int, comm: int) -> int: ...

    # --- memory ---

    def mem_alloc(self, nbytes: int) -> tuple[int, int]: ...
    def mem_free(self, ptr: int) -> int: ...
    def window_register(self, comm: int, ptr: int, nbytes: int, symmetric: bool) -> tuple[int, Slot]:
        """Like a handle, the window may come later: while ``comm`` is in progress."""

    def window_deregister(self, comm: int, window: int) -> int: ...
    def comm_register(self, comm: int, ptr: int, nbytes: int) -> tuple[int, int]:
        """Register memory on this rank alone; from 2.19. The handle is 0 where NCCL has no use for it."""

    def comm_deregister(self, comm: int, handle: int) -> int: ...
