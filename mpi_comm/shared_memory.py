"""Large host arrays on one host: moved by the shared memory of the group's other backend, which is faster than MPI.

The ranks compare their calls by MPI's agreement first, so all calls of the group have one order and differences between
the ranks are found as always. Whether the other backend has shared memory, the ranks find out in a barrier of it before
the first large array; the result is equal on all of them.
"""

from __future__ import annotations

import numpy as np

from mpi_comm.group_communicator import GroupCommunicator
from mpi_comm.small_arrays import contribution
from unicoll.backend import Call
from unicoll.backend.call import ProxyCall
from unicoll.backend.host_backend import HostBackend
from unicoll.backend.ops import OPS
from unicoll.errors import DistError

__all__ = ["SharedMemory"]

_LEAST_REDUCED, _LEAST_MOVED = 1 << 14, 1 << 18
"""Bytes of a rank's contribution from which shared memory is faster than MPI: in reductions, in other collectives."""
_BARRIER = OPS["barrier"]
_EXCHANGED = frozenset(("gather", "scatter", "all_to_all", "all_to_all_single"))
"""Collectives whose sizes the signature does not cover."""


class SharedMemory:
    """The large calls of one group, done by another backend.

    Args:
        communicator: the group's communicator.
        backend: of the same group.
    """

    def __init__(self, communicator: GroupCommunicator, backend: HostBackend) -> None:
        self.backend = backend
        self._communicator = communicator
        self._usable: bool | None = None  # None until the first large call

    def move(self, call: Call, equal: bool) -> bool:
        """Do a call on which all ranks have agreed, if it is large and shared memory can be used.

        Args:
            call: the one in progress.
            equal: True if the value on which the ranks have agreed is equal.

        Returns:
            False if nothing was done; equal on all ranks.
        """
        if self._usable is False or (not equal and call.op.name in _EXCHANGED):
            return False
        communicator = self._communicator
        least = _LEAST_MOVED if call.reduce is None else _LEAST_REDUCED
        if contribution(communicator, call) < least:
            return False
        if not isinstance((call.inputs or call.outputs)[0].flat, np.ndarray):
            return False
        backend = self.backend
        backend.queue.in_background = communicator.in_background
        try:
            if self._usable is None:
                self._usable = self._find_out(call)
                if not self._usable:
                    return False
            backend.perform(call)
        except DistError as e:  # all ranks raise it
            communicator.abort(e)
            raise
        return True

    def _find_out(self, call: Call) -> bool:
        barrier = ProxyCall(call, _BARRIER, (), (), call.timeout)
        barrier.signature = hash((call.signature, _BARRIER.code))
        self.backend.perform(barrier)
        return self.backend.shares_memory

    def describe(self) -> str:
        """Which arrays go through shared memory, for ``explain()``."""
        what = (
            f"host arrays from {_LEAST_REDUCED >> 10} KiB in reductions, {_LEAST_MOVED >> 10} KiB in other collectives,"
            f" go through the shared memory of {self.backend.name}"
        )
        if self._usable is None:
            return f"{what} if the first of them finds that all ranks have it"
        return what if self._usable else f"no shared memory for host arrays: {self.backend.describe()}"
