"""The common part of all calls of the simulated NCCL: versions, refusals, and the state that each call requires."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

from nccl_comm.library.errors import IN_PROGRESS
from nccl_comm.library.nccl import NcclFacts
from tests.simulated_nccl.communicators import Communicator, Machine, Result
from tests.simulated_nccl.cuda import Simulation
from tests.simulated_nccl.network import Network
from tests.simulated_nccl.rendezvous import RendezvousServer
from tests.simulated_nccl.thread_rules import ActiveCalls, Kind
from unicoll.device_collectives.interface import SUCCESS
from unicoll.devices.device_runtime import DeviceError

__all__ = ["SET_UP_BY_WINDOWS", "Calls", "Refused", "Slot", "function"]

F = TypeVar("F", bound=Callable[..., Any])

_SINCE = {
    "ncclCommRevoke": 22807,
    "ncclCommShrink": 22700,
    "ncclCommWindowRegister": 22700,
    "ncclCommWindowDeregister": 22700,
    "ncclAlltoAll": 22800,
    "ncclAllReduceConfig": 23100,
    "ncclCommFinalize": 21800,
    "ncclCommSplit": 21800,
    "ncclRedOpCreatePreMulSum": 21100,
    "ncclRedOpDestroy": 21100,
    "ncclCommGetUniqueId": 22900,
    "ncclCommGrow": 22900,
    "ncclCommInitRankScalable": 22300,
    "ncclPutSignal": 22900,
    "ncclSignal": 22900,
    "ncclWaitSignal": 22900,
    "ncclCommRegister": 21900,
    "ncclCommDeregister": 21900,
    "ncclMemAlloc": 21900,
    "ncclMemFree": 21900,
    "ncclGetLastError": 21300,
    "ncclCommInitRankConfig": 21700,
}
"""First versions of functions; the library has all others in every version."""
SET_UP_BY_WINDOWS = 23100
"""The first version that sets one-sided operations up with the first window, and not within the first of them."""


class Refused(Exception):
    """A call that NCCL refuses, with its code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def function(name: str, kind: Kind, nothing: Callable[[], Any] | None = None) -> Callable[[F], F]:
    """Make a method a function of NCCL: the version has it, a refusal becomes its code, and a call for a communicator
    is checked against the rules for threads.

    Args:
        name: NCCL's.
        kind: what it does with its communicator.
        nothing: makes what is returned with the code of a refusal.
    """

    def decorate(method: F) -> F:
        parameters = [*inspect.signature(method).parameters]
        place = parameters.index("comm") - 1 if "comm" in parameters else None

        @wraps(method)
        def call(self: Calls, *args: Any) -> Any:
            self._needs(name)
            comm = self._comms.get(args[place]) if place is not None else None
            with self.active_calls.enter(name, kind, comm) if comm is not None else nullcontext():
                found = self._call(method, self, *args, uses_device=kind is Kind.USE)
            return (found, nothing()) if nothing is not None and isinstance(found, int) else found

        return cast(F, call)

    return decorate


class Slot:
    """Memory for the handle of a new communicator (:class:`unicoll.device_collectives.interface.HandleSlot`)."""

    def __init__(self) -> None:
        self.value: int | None = None


class Calls(NcclFacts):
    """One process's NCCL without its functions; see :class:`tests.simulated_nccl.nccl.SimulatedNccl`."""

    def __init__(self, simulation: Simulation, version: int = 23007, prompt: bool = False) -> None:
        self._simulation = simulation
        self._version = version
        self._prompt = prompt
        self.network = Network(RendezvousServer().accept)
        self.machine = Machine(
            simulation.scheduler, simulation.memory, self.network, simulation.cuda.capability
        )
        self.active_calls = ActiveCalls(simulation.scheduler, simulation.cuda.current_device)
        self._comms: dict[int, Communicator] = {}
        self._destroyed: set[int] = set()
        self._handles = itertools.count(0x70000, 0x100)
        self._last_error = ""

    @property
    def version(self) -> int:
        return self._version

    @property
    def path(self) -> str:
        return "simulated/libnccl.so.2"

    def has_symbol(self, symbol: str) -> bool:
        return self._version >= _SINCE.get(symbol, 0)

    def last_error(self, comm: int = 0) -> str:
        return self._last_error

    @property
    def communicators(self) -> list[Communicator]:
        """The communicators that have been created and not destroyed."""
        return list(self._comms.values())

    def inject(self, code: int) -> None:
        """Set an asynchronous error on all communicators; kernels go on running, as in NCCL."""
        with self._simulation.scheduler.lock:
            for comm in self._comms.values():
                comm.error = code

    # --- calls in general ---

    def _call(self, call: Callable[..., Any], *args: Any, uses_device: bool = False) -> Any:
        """The result of a call, or the code with which it is refused."""
        try:
            if uses_device:
                self._simulation.scheduler.check()
            return call(*args)
        except (Refused, DeviceError) as error:
            self._last_error = str(error)
            return error.code if isinstance(error, Refused) else Result.CUDA_ERROR

    def _needs(self, function: str) -> None:
        if not self.has_symbol(function):
            self._simulation.scheduler.fault(f"call of {function}, which NCCL {self._version} lacks")
            raise AttributeError(f"undefined symbol: {function} (NCCL {self._version})")

    def _existing(self, handle: int) -> Communicator:
        comm = self._comms.get(handle)
        if comm is None:
            if handle in self._destroyed:
                self._simulation.scheduler.fault(f"use of communicator {handle:#x}, which has been destroyed")
            raise Refused(Result.INVALID_ARGUMENT, f"{handle:#x} is not a communicator")
        return comm

    def _usable(self, handle: int, poison: bool = False) -> Communicator:
        """A communicator without an earlier call in progress, and without an error."""
        comm = self._existing(handle)
        with self._simulation.scheduler.lock:
            if comm.error != SUCCESS:
                raise Refused(comm.error, "the communicator has an asynchronous error")
            if comm.busy:
                if poison:
                    comm.error = Result.INVALID_ARGUMENT
                text = "attempt to use a communicator before the previous operation returned ncclSuccess"
                raise Refused(Result.INVALID_ARGUMENT, text)
        return comm

    def _add(self, comm: Communicator) -> int:
        handle = next(self._handles)
        self._comms[handle] = comm
        return handle

    def _forget(self, handle: int) -> None:
        del self._comms[handle]
        self._destroyed.add(handle)

    @staticmethod
    def _result(*comms: Communicator | None) -> int:
        """The result code of a call: "in progress" if a communicator is non-blocking, else after waiting for the
        end."""
        for comm in comms:
            if comm is not None and not comm.config.blocking:
                return IN_PROGRESS
        for comm in comms:
            if comm is not None and (code := comm.wait_ready()) != SUCCESS:
                return code
        return SUCCESS

    @classmethod
    def _begun(cls, *comms: Communicator | None) -> int:
        """As :meth:`_result`, but success for a non-blocking communicator that is in progress.

        NCCL (2.18 to 2.30) drops "in progress" in the functions that make a communicator from another, and from 2.28 on
        in ncclCommWindowRegister.
        """
        code = cls._result(*comms)
        return SUCCESS if code == IN_PROGRESS else code

    def _writer(self, slot: Slot, make: Callable[[], int]) -> Callable[[], None]:
        """A function that writes a new handle to its slot, as NCCL does later; a slot that is gone by then is a
        fault."""
        reference = weakref.ref(slot)

        def write() -> None:
            target = reference()
            if target is None:
                self._simulation.scheduler.fault("NCCL wrote a new handle to memory that was freed")
            else:
                target.value = make()

        return write
