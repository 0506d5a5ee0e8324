"""Which threads are in the simulated NCCL at the same time, and which of them NCCL does not allow there.

NCCL's documentation (usage/threadsafety.rst, and "Fault Tolerance" in usage/communicators.rst): a communicator is used
by one thread at a time, though its state may be asked meanwhile; operations on communicators of one device are issued
by one thread at a time; no thread is in NCCL while its communicator is aborted: an abort frees what that thread uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from simulated_streams import Scheduler

__all__ = ["Kind", "Visits"]


class Kind(Enum):
    """What a call does to its communicator."""

    ASK = "asks for its state"
    USE = "uses it"
    ISSUE = "puts operations on its device"
    END = "gives it back"


@dataclass(frozen=True, eq=False)
class _Visit:
    """A thread in a call."""

    call: str
    kind: Kind
    comm: Any
    thread: int = field(default_factory=threading.get_ident)

    def clashes(self, other: _Visit) -> bool:
        """Whether NCCL forbids both at the same time."""
        if self.thread == other.thread:
            return False
        kinds = {self.kind, other.kind}
        if self.comm is other.comm:
            return Kind.ASK not in kinds or Kind.END in kinds
        return kinds == {Kind.ISSUE} and self.comm.device == other.comm.device


class Visits:
    """The calls of NCCL that threads of this process are in.

    Args:
        scheduler: where clashes are recorded as faults.

    Attributes:
        strict: whether clashes are recorded.
        pause: called within every call: what takes its time there lets calls meet that can.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.strict = False
        self.pause: Callable[[], object] = lambda: None
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._now: list[_Visit] = []

    @contextmanager
    def within(self, call: str, kind: Kind, comm: Any) -> Iterator[None]:
        """A thread is in a call for a communicator."""
        mine = _Visit(call, kind, comm)
        with self._lock:
            clashes = [other for other in self._now if mine.clashes(other)]
            self._now.append(mine)
        for other in clashes if self.strict else ():
            where = "of one communicator" if other.comm is comm else f"on device {comm.device}"
            self._scheduler.fault(f"two threads in NCCL {where}: {call} while another is in {other.call}")
        try:
            self.pause()
            yield
        finally:
            with self._lock:
                self._now.remove(mine)
