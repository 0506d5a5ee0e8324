"""The memory that a group's communicator knows: symmetric arrays, registered arrays and pools, windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nccl_comm.communicators.communicator import Communicator
from nccl_comm.in_flight import PendingWork
from nccl_comm.memory.one_sided import check_put
from nccl_comm.memory.registration import Region, RegisteredMemory
from nccl_comm.memory.symmetric import DeviceArray, SymmetricMemory
from unicoll.arrays.types import DType
from unicoll.backend import OneSidedCall
from unicoll.errors import DistArgumentError

__all__ = ["MemoryRegistry"]


class MemoryRegistry:
    """Memory that is registered with one communicator; callers hold the group's lock.

    Args:
        comm: the communicator.
        operations: the group's operations in flight.
    """

    def __init__(self, comm: Communicator, operations: Iterable[PendingWork]) -> None:
        self._comm = comm
        self._symmetric = SymmetricMemory(comm, operations)
        self._registered: list[RegisteredMemory] = []

    def allocate(self, shape: tuple[int, ...], dtype: DType, timeout: float) -> DeviceArray:
        """A new array in symmetric memory; see :meth:`SymmetricMemory.allocate`."""
        return self._symmetric.allocate(shape, dtype, timeout)

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
            regions: its memory.
            symmetric: whether windows are wanted.
            deadline: on the clock of ``time.monotonic``.
            close: called by the registration's ``close``; calls :meth:`remove` in the end.

        Raises:
            DistArgumentError: a symmetric window is wanted for memory that is in one.
        """
        if symmetric:
            self._refuse_overlap(regions)
        registered = RegisteredMemory(self._comm, memory, regions, symmetric, deadline, close)
        self._registered.append(registered)
        return registered

    def remove(self, registered: RegisteredMemory) -> None:
        """Deregister memory that no operation uses."""
        registered.deregister()
        if registered in self._registered:
            self._registered.remove(registered)

    def prepare_put(self, call: OneSidedCall) -> None:
        """Set the NCCL window of a put; raise DistArgumentError if the put does not fit in it."""
        windows = self._windows()
        target, call.handle = windows.get(id(call.window), (None, 0))
        check_put(call, target, [region for region, _ in windows.values()])

    def _windows(self) -> dict[int, tuple[Region, int]]:
        """By ``id`` of the user's object: the memory of a symmetric window, and NCCL's handle."""
        found = {id(r): (r.regions[0], r.single_window()) for r in self._registered}
        for array in self._symmetric.arrays:
            found[id(array)] = Region(array.device, array.ptr, array.nbytes), array.window
        return {key: (region, window) for key, (region, window) in found.items() if window}

    def _refuse_overlap(self, regions: list[Region]) -> None:
        """NCCL's behaviour is undefined for memory that is in two symmetric windows of a communicator."""
        taken = [r for each in self._registered if each.symmetric for r in each.regions]
        taken += [Region(a.device, a.ptr, a.nbytes) for a in self._symmetric.arrays]
        if any(r.overlaps(t.ptr, t.nbytes) for r in regions for t in taken):
            raise DistArgumentError(
                f"register: part of the memory is already in a symmetric window of group {self._comm.context.name!r}",
                op="register",
            )

    # --- reaping and teardown -----------------------------------------------------------------------------------

    @property
    def can_reap(self) -> bool:
        """True if dropped symmetric memory can be freed."""
        return self._symmetric.ready

    def reap(self) -> None:
        """Free dropped symmetric memory; no other thread is in NCCL with the communicator."""
        self._symmetric.reap()

    def deregister(self) -> None:
        """Deregister everything before the communicator ends; nothing is in flight. Symmetric arrays stay allocated."""
        self._symmetric.deregister()
        for registered in self._registered:
            registered.deregister()

    def close(self, ended: bool) -> None:
        """After the communicator has ended; with ``ended=False`` it was abandoned, and its kernels may still run."""
        self._symmetric.close(ended)
        if ended:
            for registered in self._registered:
                registered.deregister()
