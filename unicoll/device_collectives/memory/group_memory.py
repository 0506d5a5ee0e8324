"""The memory that is registered with a group's communicator: symmetric arrays, registered arrays
and pools, windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unicoll.arrays.types import DType
from unicoll.backend import OneSidedCall
from unicoll.device_collectives.communicators.communicator import Communicator
from unicoll.device_collectives.in_flight import InFlight
from unicoll.device_collectives.memory.one_sided import check_put, no_window
from unicoll.device_collectives.memory.registered_memory import Region, RegisteredMemory
from unicoll.device_collectives.memory.symmetric_memory import DeviceArray, SymmetricMemory
from unicoll.device_collectives.memory.window_agreement import Extent
from unicoll.errors import DistArgumentError

_ALIGNMENT = 4096
"""NCCL_WIN_REQUIRED_ALIGNMENT."""


class GroupMemory:
    """Memory that is registered with one communicator; callers hold the group's lock.

    Args:
        set_up_one_sided: called after the first window, on all ranks, with a deadline.
    """

    def __init__(
        self, comm: Communicator, in_flight: InFlight, set_up_one_sided: Callable[[float], None]
    ) -> None:
        self._comm = comm
        self._set_up_one_sided = set_up_one_sided
        self._had_window = False
        self._symmetric = SymmetricMemory(comm, in_flight)
        self._registered: list[RegisteredMemory] = []

    def allocate(self, shape: tuple[int, ...], dtype: DType, deadline: float) -> DeviceArray:
        """A new array in symmetric memory; see :meth:`SymmetricMemory.allocate`."""
        made = self._symmetric.allocate(shape, dtype, deadline)
        self._note_window(made.window, deadline)
        return made

    def _note_window(self, window: int, deadline: float) -> None:
        if window and not self._had_window:
            self._set_up_one_sided(deadline)
            self._had_window = True

    def register(
        self,
        memory: Any,
        regions: list[Region],
        symmetric: bool,
        deadline: float,
        close: Callable[[RegisteredMemory], None],
    ) -> RegisteredMemory:
        """Register existing memory.

        Args:
            memory: the user's array or pool, kept alive until the end.
            close: called by the registration's ``close``; calls :meth:`remove` in the end.

        Raises:
            DistArgumentError: the memory of a symmetric window is in another one, or at another
                offset on other ranks.
        """
        symmetric = symmetric and self._comm.library.has("window_register")
        if symmetric:
            # This comes before the registration, which waits for all ranks without limit: a rank
            # that is missing, or that has to refuse its memory, is found here.
            self._agree(regions, deadline)
        registered = RegisteredMemory(self._comm, memory, regions, symmetric, deadline, close)
        self._registered.append(registered)
        self._note_window(next(iter(registered.windows), 0), deadline)
        return registered

    def remove(self, registered: RegisteredMemory) -> None:
        """Deregister memory that no operation uses."""
        registered.deregister()
        if registered in self._registered:
            self._registered.remove(registered)

    def prepare_one_sided(self, call: OneSidedCall) -> None:
        """Set the window of a put; DistArgumentError if the put does not fit in it, or there was no
        window."""
        if not self._had_window:
            raise no_window(call, self._comm.context.name)
        if call.op.name != "put":
            return
        windows = self._windows()
        # The window is found by id: the call refers to the user's object, so no other object has
        # its id.
        target, call.handle = windows.get(id(call.window), (None, 0))
        check_put(call, target, [region for region, _ in windows.values()])

    def _windows(self) -> dict[int, tuple[Region, int]]:
        """By ``id`` of the user's object: the memory of a symmetric window, and the library's
        handle."""
        found = {id(r): (r.regions[0], r.single_window()) for r in self._registered}
        for array in self._symmetric.arrays:
            found[id(array)] = Region(array.device, array.ptr, array.nbytes), array.window
        return {key: (region, window) for key, (region, window) in found.items() if window}

    def _agree(self, regions: list[Region], deadline: float) -> None:
        """Refuse what the library would refuse, or misplace, on all ranks."""
        extents = [Extent(r.nbytes, r.ptr - self._comm.runtime.allocation(r.ptr)) for r in regions]
        failure = self._overlap(regions) or _misaligned(extents)
        failed = self._symmetric.agree("register", extents, failure, deadline)
        if failed:
            raise DistArgumentError(f"register: {failed}", op="register")

    def _overlap(self, regions: list[Region]) -> str:
        """NCCL's behaviour is undefined for memory that is in two symmetric windows of a
        communicator."""
        taken = [r for each in self._registered if each.symmetric for r in each.regions]
        taken += [Region(a.device, a.ptr, a.nbytes) for a in self._symmetric.arrays]
        if any(r.overlaps(t.ptr, t.nbytes) for r in regions for t in taken):
            return (
                "part of the memory is already in a symmetric window of group"
                f" {self._comm.context.name!r}"
            )
        return ""

    # --- teardown ---------------------------------------------------------------------------------

    def deregister(self) -> None:
        """Deregister everything before the communicator ends; nothing is in flight. Symmetric
        arrays stay allocated."""
        self._symmetric.deregister()
        for registered in self._registered:
            registered.deregister()

    def close(self, ended: bool) -> None:
        """After the communicator has ended; with ``ended=False`` it was abandoned, and its kernels
        may still run."""
        self._symmetric.close(ended)
        # Otherwise the registrations keep the user's memory, which kernels may still use.
        if ended:
            for registered in self._registered:
                registered.deregister()


def _misaligned(extents: list[Extent]) -> str:
    over = next((rest for extent in extents if (rest := extent.offset % _ALIGNMENT)), 0)
    return (
        f"{over} bytes too far for a window, which begins at a multiple of {_ALIGNMENT}"
        if over
        else ""
    )
