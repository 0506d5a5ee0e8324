"""Memory of the members that a group's communicator knows: registering it, and taking it back."""

from __future__ import annotations

import time
from typing import Any

from unicoll.errors import DistArgumentError
from unicoll.streams import on_device

from .communicator import Communicator
from .lifecycle import Supervised
from .registration import Region, Registered, regions_of

__all__ = ["Exposing"]


class Exposing(Supervised):
    """What a group does with memory that its communicator knows."""

    _device: int

    def _connect(self, device: int, deadline: float) -> Communicator:
        """Make the communicator."""
        raise NotImplementedError

    def register(self, memory: Any, symmetric: bool) -> Registered:
        regions = regions_of(memory)
        deadline = time.monotonic() + self.context.timeout
        with self._lock:
            comm = self._awake("register", regions[0].device, deadline)
            if symmetric:
                self._refuse_twice(regions)
            with on_device(self.cuda, self._device):
                made = Registered(comm, memory, regions, symmetric, deadline, self._unregister)
            self._registered.append(made)
        return made

    def _refuse_twice(self, regions: list[Region]) -> None:
        """NCCL's behaviour is undefined for memory that is in two symmetric windows of a communicator."""
        taken = [r for each in self._registered if each.symmetric for r in each.regions]
        arrays = self._symmetric.arrays if self._symmetric is not None else []
        taken += [Region(a.device, a.ptr, a.nbytes) for a in arrays]
        if any(r.overlaps(t.ptr, t.nbytes) for r in regions for t in taken):
            raise DistArgumentError(
                f"register: memory of it is in a symmetric window of group {self.context.name!r} already",
                op="register",
            )

    def _unregister(self, registered: Registered) -> None:
        """Wait for what is on its way, which may use the memory, and give that back to NCCL."""
        self._stop_ending()
        with self._lock:
            if self.error is None:
                self.await_idle(f"closing {registered!r}", self.context.timeout)
            with on_device(self.cuda, self._device):
                registered.deregister()
            if registered in self._registered:
                self._registered.remove(registered)

    def _awake(self, what: str, device: int, deadline: float) -> Communicator:
        """The communicator for memory of a device."""
        self._refuse_ended()
        comm = self._comm if self._comm is not None else self._connect(device, deadline)
        if device != self._device:
            raise DistArgumentError(
                f"{what}: the memory is on cuda:{device}, but group {self.context.name!r} is bound to"
                f" cuda:{self._device} on this rank",
                op=what,
            )
        return comm
