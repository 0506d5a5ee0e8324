"""NCCL's rules for threads: calls of the simulated NCCL that must not run at the same time are faults.

NCCL's documentation (usage/threadsafety.rst, and "Fault Tolerance" in usage/communicators.rst): a communicator is used
by one thread at a time, though its state may be queried meanwhile; operations on communicators of one device are issued
by one thread at a time; no thread is in NCCL while its communicator is aborted: an abort frees memory that it uses.

Many of NCCL's functions ask for the thread's device, change it, and set it again. The device of a thread without a
context is device 0: the thread has a context there afterwards, which takes memory of another rank's device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tests.simulated_nccl.streams import Scheduler

__all__ = ["Kind", "ActiveCalls"]


class Kind(Enum):
    """The kind of a call for a communicator."""

    QUERY = "queries its state"
    USE = "uses it"
    ISSUE = "issues operations on its device"
    END = "ends it"


@dataclass(frozen=True, eq=False)
class _ActiveCall:
    """A thread in a call."""

    call: str
    kind: Kind
    comm: Any
    thread: int = field(default_factory=threading.get_ident)

    def clashes(self, other: _ActiveCall) -> bool:
        """True if NCCL forbids both at the same time."""
        if self.thread == other.thread:
            return False
        kinds = {self.kind, other.kind}
        if self.comm is other.comm:
            return Kind.QUERY not in kinds or Kind.END in kinds
        return kinds == {Kind.ISSUE} and self.comm.device == other.comm.device


class ActiveCalls:
    """The calls of NCCL in which threads of this process are.

    Args:
        scheduler: records clashes as faults.
        current_device: the calling thread's device; -1 if it has no context.

    Attributes:
        current: the calls.
        pause: called within every call; a delay there makes calls overlap.
    """

    def __init__(self, scheduler: Scheduler, current_device: Callable[[], int]) -> None:
        self._current_device = current_device
        self.pause: Callable[[], object] = lambda: None
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self.current: list[_ActiveCall] = []

    @contextmanager
    def enter(self, call: str, kind: Kind, comm: Any) -> Iterator[None]:
        """The calling thread is in a call for a communicator."""
        entered = _ActiveCall(call, kind, comm)
        if kind is not Kind.QUERY and comm.device and self._current_device() == -1:
            self._scheduler.fault(f"{call} on device {comm.device}, by a thread without a context")
        with self._lock:
            clashes = [other for other in self.current if entered.clashes(other)]
            self.current.append(entered)
        for other in clashes:
            where = "of one communicator" if other.comm is comm else f"on device {comm.device}"
            self._scheduler.fault(f"two threads in NCCL {where}: {call} while another is in {other.call}")
        try:
            self.pause()
            yield
        finally:
            with self._lock:
                self.current.remove(entered)
