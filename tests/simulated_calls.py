"""What all calls of the simulated NCCL have in common: versions, refusals, and who may be called when."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from simulated_comm import Communicator, Machine, Result
from simulated_cuda import Simulation
from simulated_network import Network
from simulated_rooms import Lobby
from simulated_threads import Kind, Visits

from nccl_comm.api import IN_PROGRESS, SUCCESS
from unicoll.streams import CudaError

__all__ = ["Calls", "Refused", "Slot"]

_SINCE = {
    "ncclCommRevoke": 22807, "ncclCommShrink": 22700, "ncclCommWindowRegister": 22700,
    "ncclCommWindowDeregister": 22700, "ncclAlltoAll": 22800, "ncclAllReduceConfig": 23100,
    "ncclCommFinalize": 21800, "ncclCommSplit": 21800, "ncclRedOpCreatePreMulSum": 21100, "ncclRedOpDestroy": 21100,
    "ncclCommGetUniqueId": 22900, "ncclCommGrow": 22900, "ncclCommInitRankScalable": 22300,
    "ncclPutSignal": 22900, "ncclSignal": 22900, "ncclWaitSignal": 22900,
    "ncclCommRegister": 21900, "ncclCommDeregister": 21900,
    "ncclMemAlloc": 21900, "ncclMemFree": 21900, "ncclGetLastError": 21300, "ncclCommInitRankConfig": 21700,
}  # fmt: skip
"""Versions from which functions are there; all others always are."""


class Refused(Exception):
    """A call that NCCL refuses, with its code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Slot:
    """Where the handle of a new communicator is written (:class:`nccl_comm.api.Slot`)."""

    def __init__(self) -> None:
        self.value: int | None = None


class Calls:
    """One process's NCCL without its functions; see :class:`simulated_nccl.SimulatedNccl`."""

    def __init__(self, simulation: Simulation, version: int = 23007, prompt: bool = False) -> None:
        self._simulation = simulation
        self._version = version
        self._prompt = prompt
        self.network = Network(Lobby().welcome)
        self.machine = Machine(simulation.scheduler, simulation.memory, self.network)
        self.visits = Visits(simulation.scheduler)
        self._comms: dict[int, Communicator] = {}
        self._former: set[int] = set()
        self._handles = itertools.count(0x70000, 0x100)
        self._last_error = ""

    @property
    def version(self) -> int:
        return self._version

    @property
    def path(self) -> str:
        return "simulated/libnccl.so.2"

    def has(self, function: str) -> bool:
        return self._version >= _SINCE.get(function, 0)

    def last_error(self, comm: int = 0) -> str:
        return self._last_error

    @property
    def communicators(self) -> list[Communicator]:
        """Those that have been made and not given back."""
        return list(self._comms.values())

    def inject(self, code: int) -> None:
        """Give all communicators an asynchronous error; what runs goes on, as with NCCL."""
        with self._simulation.scheduler.lock:
            for comm in self._comms.values():
                comm.error = code

    # --- calls in general ---

    def _call(self, function: Callable[..., int], *args: Any) -> int:
        """The code of a call."""
        try:
            return function(*args)
        except Refused as refused:
            self._last_error = str(refused)
            return refused.code
        except CudaError as error:
            self._last_error = str(error)
            return Result.CUDA_ERROR

    def _needs(self, function: str) -> None:
        if not self.has(function):
            self._simulation.scheduler.fault(f"call of {function}, which NCCL {self._version} does not have")
            raise AttributeError(f"undefined symbol: {function} (NCCL {self._version})")

    def _visit(self, name: str, kind: Kind, handle: int, function: Callable[[], int]) -> int:
        """The code of a call for a communicator."""
        comm = self._comms.get(handle)
        if comm is None:
            return self._call(function)
        with self.visits.within(name, kind, comm):
            return self._call(function)

    def _known(self, handle: int) -> Communicator:
        comm = self._comms.get(handle)
        if comm is None:
            if handle in self._former:
                self._simulation.scheduler.fault(
                    f"use of communicator {handle:#x}, which has been given back"
                )
            raise Refused(Result.INVALID_ARGUMENT, f"{handle:#x} is no communicator")
        return comm

    def _usable(self, handle: int, poison: bool = False) -> Communicator:
        """A communicator that no earlier call is still busy with, and that has no error."""
        comm = self._known(handle)
        with self._simulation.scheduler.lock:
            if comm.error != SUCCESS:
                raise Refused(comm.error, "the communicator has an asynchronous error")
            if comm.busy:
                if poison:
                    comm.error = Result.INVALID_ARGUMENT
                text = "attempt to use a communicator before the previous operation returned ncclSuccess"
                raise Refused(Result.INVALID_ARGUMENT, text)
        return comm

    def _made(self, comm: Communicator) -> int:
        handle = next(self._handles)
        self._comms[handle] = comm
        return handle

    def _forget(self, handle: int) -> None:
        del self._comms[handle]
        self._former.add(handle)

    @staticmethod
    def _settle(*comms: Communicator | None) -> int:
        """The answer of a call that goes on in the background, or that blocks until it is done."""
        for comm in comms:
            if comm is not None and not comm.config.blocking:
                return IN_PROGRESS
        for comm in comms:
            if comm is not None:
                comm.wait_ready()
                if comm.error != SUCCESS:
                    return comm.error
        return SUCCESS

    def _writer(self, slot: Slot, make: Callable[[], int]) -> Callable[[], None]:
        """What writes a new handle to its slot, as NCCL does from a thread of its own: the slot had better be there."""
        place = weakref.ref(slot)

        def write() -> None:
            kept = place()
            if kept is None:
                self._simulation.scheduler.fault("NCCL wrote a new handle to memory that was given back")
            else:
                kept.value = make()

        return write
