"""Large host arrays on one host: moved by the shared memory of the group's other backend, which is
faster than MPI.

The ranks compare their calls by MPI's agreement first, so all calls of the group have one order,
and calls that differ raise. Before the first large array or allocation, a barrier of the other
backend shows whether it has shared memory, equally on all ranks. Symmetric memory is that of the
other backend, which also executes the exchanges of an allocation.
"""

from __future__ import annotations

import numpy as np

from mpi_comm.group_communicator import GroupCommunicator
from mpi_comm.small_arrays import contribution
from unicoll.backend import Call
from unicoll.backend.host import HostBackend
from unicoll.calls.call import ProxyCall
from unicoll.calls.ops import OPS
from unicoll.errors import BackendUnavailableError, DistError

_LEAST_REDUCED, _LEAST_MOVED = 1 << 14, 1 << 18
"""Bytes of a rank's contribution from which shared memory is faster than MPI: in reductions, in
other collectives."""
_BARRIER = OPS["barrier"]
_EXCHANGED = frozenset(("gather", "scatter", "all_to_all", "all_to_all_single"))
"""Collectives whose sizes the signature does not cover."""


class LargeHostArrays:
    """The collectives of large arrays of one group, executed by another backend.

    Args:
        communicator: the group's communicator.
        backend: of the same group.
    """

    def __init__(self, communicator: GroupCommunicator, backend: HostBackend) -> None:
        self.backend = backend
        self._communicator = communicator
        # None until the first large call or allocation, whose barrier decides it.
        self._usable: bool | None = None

    def move(self, call: Call, equal: bool) -> bool:
        """Do a call on which all ranks have agreed, if it is large or allocates, and shared memory
        can be used.

        Args:
            call: the one in progress.
            equal: True if the value on which the ranks have agreed is equal.

        Returns:
            False if nothing was done; equal on all ranks.

        Raises:
            BackendUnavailableError: it allocates symmetric memory, and there is no shared memory.
        """
        # The exchanges of an allocation have an operation of their own, which is not in the table.
        allocates = call.op.name not in OPS
        if not allocates and not self._is_faster(call, equal):
            return False
        communicator, backend = self._communicator, self.backend
        # The delegate's own queue does not execute this call, and its slots ask that queue how long
        # to poll before they sleep.
        backend.queue.in_background = communicator.in_background
        try:
            if self._usable is None:
                self._usable = self._determine_usable(call)
            if self._usable:
                backend.perform(call)
        except DistError as e:
            # All ranks raise it. The delegate has failed; this backend has to raise the error in
            # later calls, too.
            communicator.state.abort(e)
            raise
        # This is outside of the handler, because nothing has failed: the group stays usable.
        if allocates and not self._usable:
            raise BackendUnavailableError(f"{call.describe()}: {self.describe()}", op=call.op.name)
        return self._usable

    def _is_faster(self, call: Call, equal: bool) -> bool:
        """True if shared memory, unless it cannot be used, is faster than MPI for a call; equal on
        all ranks."""
        if self._usable is False or (not equal and call.op.name in _EXCHANGED):
            return False
        least = _LEAST_MOVED if call.reduce is None else _LEAST_REDUCED
        if contribution(self._communicator, call) < least:
            return False
        return isinstance((call.inputs or call.outputs)[0].flat, np.ndarray)

    def _determine_usable(self, call: Call) -> bool:
        barrier = ProxyCall(call, _BARRIER, (), (), call.timeout)
        # The delegate compares its calls, too. The barrier belongs to the user's call, so its
        # signature does not equal that of a barrier of the user.
        barrier.signature = hash((call.signature, _BARRIER.code))
        self.backend.perform(barrier)
        return self.backend.shares_memory

    def describe(self) -> str:
        """Which arrays go through shared memory, for ``explain()``."""
        what = (
            f"host arrays from {_LEAST_REDUCED >> 10} KiB in reductions, {_LEAST_MOVED >> 10} KiB"
            f" in other collectives, go through the shared memory of {self.backend.name}"
        )
        if self._usable is None:
            return f"{what} if the first of them finds that all ranks have it"
        return (
            what if self._usable else f"no shared memory for host arrays: {self.backend.describe()}"
        )
