"""Memory of the members that a group's communicator knows: registering it, and taking it back."""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from unicoll.backend import Call, OneSidedCall
from unicoll.errors import DistArgumentError
from unicoll.streams import on_device

from .communicator import Communicator
from .lifecycle import Supervised
from .one_sided import refuse_one_sided, refuse_put
from .registration import Region, Registered, regions_of

__all__ = ["Exposing"]


class Exposing(Supervised):
    """What a group does with memory that its communicator knows."""

    _device: int

    @abstractmethod
    def _put(self, calls: tuple[Call, ...], comm: Communicator, stream: int) -> None:
        """Put a call on the caller's stream."""

    @abstractmethod
    def _context_of(self, stream: int) -> AbstractContextManager[None]:
        """Make our device the current one, if the stream is named by it."""

    @abstractmethod
    def _connect(self, device: int, deadline: float) -> Communicator:
        """Make the communicator."""

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

    def one_sided(self, call: OneSidedCall) -> None:
        refuse_one_sided(call, self.nccl)
        buffer = call.inputs[0]
        if buffer.device.type != "cuda":
            raise DistArgumentError(f"{call.op.name}: {buffer} is not on a GPU", op=call.op.name)
        with self._lock:
            comm = self._awake(call.op.name, buffer.device.index or 0, time.monotonic() + call.timeout)
            if call.op.name == "put":
                known = self._known_windows()
                target, call.handle = known.get(id(call.window), (None, 0))
                refuse_put(call, target, [region for region, _ in known.values()])
            with self._context_of(buffer.stream):
                self._put((call,), comm, buffer.stream)

    def _known_windows(self) -> dict[int, tuple[Region, int]]:
        """By the identity of what the user has of a window: its memory, and NCCL's window."""
        found = {id(r): (r.regions[0], r.window_at()) for r in self._registered}
        for array in self._symmetric.arrays if self._symmetric is not None else ():
            found[id(array)] = Region(array.device, array.ptr, array.nbytes), array.window
        return {name: (region, window) for name, (region, window) in found.items() if window}

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
