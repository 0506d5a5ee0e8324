"""Existing memory that is registered with a communicator: arrays, and the memory that an allocator's pool holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unicoll.backend import Registration
from unicoll.buffers import as_buffer
from unicoll.errors import BackendUnavailableError, DistArgumentError, DistTypeError

from .api import IN_PROGRESS
from .communicator import Communicator
from .structs import version_text

__all__ = ["Region", "Registered", "regions_of"]


class Region(NamedTuple):
    """Memory of a device."""

    device: int
    ptr: int
    nbytes: int

    def overlaps(self, ptr: int, nbytes: int) -> bool:
        """Whether some byte is in both."""
        return self.ptr < ptr + nbytes and ptr < self.ptr + self.nbytes


def regions_of(memory: Any) -> list[Region]:
    """The memory of a contiguous array of a GPU, or what a ``torch.cuda.MemPool`` holds now.

    Raises:
        DistTypeError: neither of them.
        DistArgumentError: it is empty, not contiguous, or not on a GPU.
    """
    if hasattr(memory, "snapshot"):
        found = [Region(s["device"], s["address"], s["total_size"]) for s in memory.snapshot()]
    elif hasattr(memory, "free_all_blocks"):
        raise DistTypeError(
            "register: CuPy's memory pools do not tell which memory they hold: register one large array and use parts"
            " of it"
        )
    else:
        buffer = as_buffer(memory, "register")
        if buffer.device.type != "cuda":
            raise DistArgumentError(f"register: {buffer} is not on a GPU", op="register")
        if buffer.unpack is not None:
            raise DistArgumentError(f"register: {buffer} is not contiguous", op="register")
        found = [Region(buffer.device.index or 0, buffer.ptr, buffer.nbytes)] if buffer.count else []
    if not found:
        raise DistArgumentError("register: there is no memory in it", op="register")
    if len({region.device for region in found}) > 1:
        raise DistArgumentError("register: the pool has memory of several devices", op="register")
    return found


class Registered(Registration):
    """Memory registered with one communicator.

    Args:
        communicator: with which.
        memory: what the user gave; it is kept until the end.
        regions: where it lies.
        symmetric: whether windows are wanted, where NCCL has them.
        deadline: on the clock of ``time.monotonic``.
        release: called with this by :meth:`close`.

    Raises:
        BackendUnavailableError: this NCCL registers nothing (it came with 2.19).
        DistError: NCCL has refused it.
    """

    def __init__(
        self,
        communicator: Communicator,
        memory: Any,
        regions: list[Region],
        symmetric: bool,
        deadline: float,
        release: Callable[[Registered], None],
    ) -> None:
        nccl = communicator.nccl
        if not nccl.has("ncclCommRegister"):
            raise BackendUnavailableError(
                f"register: NCCL {version_text(nccl.version)} registers no memory, which came with 2.19"
            )
        self.memory = memory
        self.regions = regions
        self._communicator = communicator
        self._release = release
        self._handles: list[tuple[Callable[[int, int], int], int]] = []
        self.windows: list[int] = []
        try:
            for region in regions:
                window = (
                    self._window(region, deadline) if symmetric and nccl.has("ncclCommWindowRegister") else 0
                )
                if window:
                    self._handles.append((nccl.window_deregister, window))
                    self.windows.append(window)
                else:  # NCCL gives no window where it has no use for one: on all ranks or none
                    self._handles.append((nccl.comm_deregister, self._buffer(region)))
        except BaseException:
            self.deregister()
            raise

    def _window(self, region: Region, deadline: float) -> int:
        comm, what = self._communicator, f"ncclCommWindowRegister of {region.nbytes} bytes"
        code, slot = comm.nccl.window_register(comm.handle, region.ptr, region.nbytes, True)
        if code == IN_PROGRESS:
            comm.await_ready(what, deadline, None)
        elif code:
            raise comm.error(code, what, None)
        return slot.value or 0

    def _buffer(self, region: Region) -> int:
        comm = self._communicator
        code, handle = comm.nccl.comm_register(comm.handle, region.ptr, region.nbytes)
        if code:
            raise comm.error(code, f"ncclCommRegister of {region.nbytes} bytes", None)
        return handle

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions)

    @property
    def symmetric(self) -> bool:
        return len(self.windows) == len(self.regions)

    def window_at(self) -> int:
        """NCCL's window; 0 if there is none, or several."""
        return self.windows[0] if self.symmetric and not self.closed and len(self.windows) == 1 else 0

    @property
    def closed(self) -> bool:
        return not self._handles

    def deregister(self) -> None:
        """Give all back to NCCL, which may not be using it; idempotent."""
        handles, self._handles = self._handles, []
        for deregister, handle in handles if self._communicator.handle else ():
            if handle:
                deregister(self._communicator.handle, handle)
        self.memory = None

    def close(self) -> None:
        if not self.closed:
            self._release(self)

    def __repr__(self) -> str:
        kind = "symmetric window" if self.symmetric else "registered"
        device = self._communicator.device
        return f"<Registration of {self.nbytes} bytes on cuda:{device}, {'closed' if self.closed else kind}>"
