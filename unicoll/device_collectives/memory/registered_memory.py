"""Existing memory that is registered with a communicator: arrays, and the memory of an allocator's
pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unicoll.arrays.conversion import as_buffer
from unicoll.backend import Registration
from unicoll.device_collectives.communicators.communicator import Communicator
from unicoll.errors import BackendUnavailableError, DistArgumentError, DistTypeError


class Region(NamedTuple):
    """Memory of a device."""

    device: int
    ptr: int
    nbytes: int

    def overlaps(self, ptr: int, nbytes: int) -> bool:
        """True if both have a byte in common."""
        return self.ptr < ptr + nbytes and ptr < self.ptr + self.nbytes


def regions_of(memory: Any) -> list[Region]:
    """The memory of a contiguous array on a GPU, or the memory that a ``torch.cuda.MemPool`` holds
    now.

    Raises:
        DistTypeError: the object is neither of them.
        DistArgumentError: the memory is empty, not contiguous, not on a GPU, or on several devices.
    """
    if hasattr(memory, "snapshot"):
        found = [Region(s["device"], s["address"], s["total_size"]) for s in memory.snapshot()]
    elif hasattr(memory, "free_all_blocks"):
        raise DistTypeError(
            "register: CuPy's memory pools do not list the memory that they hold: register one"
            " large array and use slices of it"
        )
    else:
        buffer = as_buffer(memory, "register")
        if buffer.device.type == "cpu":
            raise DistArgumentError(f"register: {buffer} is not on a GPU", op="register")
        if buffer.unpack is not None:
            raise DistArgumentError(f"register: {buffer} is not contiguous", op="register")
        found = (
            [Region(buffer.device.index or 0, buffer.ptr, buffer.nbytes)] if buffer.count else []
        )
    if not found:
        raise DistArgumentError("register: the array or pool is empty", op="register")
    if len({region.device for region in found}) > 1:
        raise DistArgumentError("register: the pool has memory of several devices", op="register")
    return found


class RegisteredMemory(Registration):
    """Memory registered with one communicator.

    Args:
        memory: the user's array or pool, kept alive until the end.
        symmetric: whether windows are wanted; the library has them.
        release: called with this registration by :meth:`close`.

    Raises:
        BackendUnavailableError: the library registers no memory (NCCL before 2.19).
        DistError: the library has refused the memory.
    """

    def __init__(
        self,
        communicator: Communicator,
        memory: Any,
        regions: list[Region],
        symmetric: bool,
        deadline: float,
        release: Callable[[RegisteredMemory], None],
    ) -> None:
        library = communicator.library
        if not library.has("comm_register"):
            raise BackendUnavailableError(
                f"register: memory registration needs {library.needed('comm_register')}"
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
                    communicator.register_window(region.ptr, region.nbytes, deadline)
                    if symmetric
                    else 0
                )
                if window:
                    self._handles.append((library.window_deregister, window))
                    self.windows.append(window)
                else:
                    # NCCL gives no window if it has no use for one: on all ranks or on none. Then
                    # the region is registered as a buffer.
                    self._handles.append((library.comm_deregister, self._buffer(region)))
        except BaseException:
            # This deregisters the regions that were registered before the one that failed.
            self.deregister()
            raise

    def _buffer(self, region: Region) -> int:
        comm = self._communicator
        code, handle = comm.library.comm_register(comm.handle, region.ptr, region.nbytes)
        if code:
            what = f"{comm.library.symbol('comm_register')} of {region.nbytes} bytes"
            raise comm.error(code, what, None)
        return handle

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions)

    @property
    def symmetric(self) -> bool:
        return len(self.windows) == len(self.regions)

    def single_window(self) -> int:
        """The library's handle of the window; 0 if there is none, or several."""
        return (
            self.windows[0] if self.symmetric and not self.closed and len(self.windows) == 1 else 0
        )

    @property
    def closed(self) -> bool:
        return not self._handles

    def deregister(self) -> None:
        """Deregister all regions, which no operation uses; idempotent."""
        # The list is emptied first, so that each handle is deregistered once: close() and the end
        # of the group both come here.
        handles, self._handles = self._handles, []
        # Registrations end with their communicator.
        for deregister, handle in handles if self._communicator.handle else ():
            if handle:
                deregister(self._communicator.handle, handle)
        self.memory = None

    def close(self) -> None:
        if not self.closed:
            self._release(self)

    def __repr__(self) -> str:
        kind = "symmetric window" if self.symmetric else "registered"
        place = f"{self._communicator.runtime.device_type}:{self._communicator.device}"
        return (
            f"<Registration of {self.nbytes} bytes on {place}, {'closed' if self.closed else kind}>"
        )
