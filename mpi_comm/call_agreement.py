"""The agreement on calls, with which every collective over MPI begins: the ranks compare sequence number and signature.

It is an MPI_Allgather of a few bytes, a persistent request, which completes when all ranks have entered it. So a call
that differs between ranks raises on all ranks before data moves, and the wait for a missing rank is in the agreement,
where it can time out. MPI's own collective, which cannot be cancelled, comes after.

Behind the header each rank's contribution has room for a small array, with which the agreement is the whole collective
(:mod:`mpi_comm.small_arrays`).
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from unicoll.arrays.kernels import Flat
from unicoll.backend import Call

if TYPE_CHECKING:
    from mpi_comm.group_communicator import GroupCommunicator

_HEADER = struct.Struct("<qqq")
_PACK = _HEADER.pack_into
_COMPARE_ALL_LIMIT = 64
"""Ranks up to which each rank gathers all headers; larger groups compare maxima."""
_LARGEST_CONTRIBUTION, _MOST_GATHERED = 24 + 256, 2304
"""Bytes of a rank's contribution to an agreement, and of all of them together; a larger one would slow every call."""
_COMPLETION_S, _PAUSE_S = 0.5, 1e-3
"""How long to poll for the completion of a pending agreement after a failure, and the pause between polls."""


class CallAgreement:
    """The agreements of one group, one at a time.

    Args:
        group: the group, whose communicator has been created.

    Attributes:
        room: bytes of an array that the agreement carries; equal on all ranks.
    """

    def __init__(self, group: GroupCommunicator) -> None:
        self._group = group
        self._size = group.size
        self._mpi = group.mpi
        self._pending = False
        mpi, comm = self._mpi.MPI, group.comm
        self._compares_all = self._size <= _COMPARE_ALL_LIMIT
        self._stride = stride = min(_LARGEST_CONTRIBUTION, _MOST_GATHERED // self._size & ~7)
        self.room = stride - _HEADER.size if self._compares_all else 0
        if self._compares_all:
            self._header = bytearray(stride)
            self._received = bytearray(stride * self._size)
            self._own_headers, self._headers = self._views_of_headers()
            arguments: tuple[Any, ...] = ([self._header, mpi.BYTE], [self._received, mpi.BYTE])
            ready, start = getattr(comm, "Allgather_init", None), comm.Iallgather
        else:
            self._header = bytearray(2 * _HEADER.size)
            self._received = bytearray(2 * _HEADER.size)
            arguments = ([self._header, mpi.INT64_T], [self._received, mpi.INT64_T], mpi.MAX)
            ready, start = getattr(comm, "Allreduce_init", None), comm.Iallreduce
        self._persistent: Any = None
        try:
            if ready is not None:
                self._persistent = self._mpi.call(ready, *arguments)
        except NotImplementedError:  # MPI libraries before MPI 4
            pass
        self._start = self._start_persistent if self._persistent is not None else lambda: start(*arguments)
        self._is_fast = self._compares_all and self._persistent is not None and self._mpi.mpi_thread is None
        if self._is_fast:
            self._persistent_start, self._persistent_test = self._persistent.Start, self._persistent.Test

    def _views_of_headers(self) -> tuple[memoryview, memoryview]:
        """This rank's header as often as there are ranks, and the headers of all ranks: equal if the ranks agree."""
        words = _HEADER.size // 8
        own = np.frombuffer(self._header, np.int64, words)
        received = np.frombuffer(self._received, np.int64).reshape(self._size, self._stride // 8)
        return np.broadcast_to(own, (self._size, words)).data, received[:, :words].data

    def _start_persistent(self) -> Any:
        self._persistent.Start()
        return self._persistent

    def has_started(self, call: Call) -> bool:
        """True if the agreement on a call has started: other ranks may have received its header."""
        seq: int = _HEADER.unpack_from(self._header)[0]
        return seq == call.seq

    def agree(self, call: Call, value: int = 0) -> bool:
        """Wait until all ranks are in this call; returns True if ``value`` is equal on all of them and not negative.

        The arrays of :meth:`contributions` are exchanged, too.

        Raises:
            CollectiveMismatchError: the ranks are in different calls.
        """
        seq, signature = call.seq, call.signature
        _PACK(self._header, 0, seq, signature, value)
        self._pending = True
        if self._is_fast:
            self._persistent_start()
            test = self._persistent_test
            for _ in self._group.spins:
                if test():
                    break
            else:
                self._group.wait(self._persistent)
        else:
            if not self._compares_all:
                _PACK(self._header, _HEADER.size, ~seq, ~signature, ~value)
            self._group.complete(self._start, ())
        self._pending = False
        if self._compares_all:
            equal = self._headers == self._own_headers  # compared without creating Python objects
        else:
            equal = self._received == self._header
        return value >= 0 if equal else self._compare(call)

    def _compare(self, call: Call) -> bool:
        """The headers differ: return False if only their values do, else raise."""
        if not self._compares_all:
            highest, lowest = (_HEADER.unpack_from(self._received, at) for at in (0, _HEADER.size))
            if (highest[0], highest[1]) == (~lowest[0], ~lowest[1]):
                return False
            self._group.mismatch(call, -1, 0)
        for peer in range(self._size):
            seq, signature, _ = _HEADER.unpack_from(self._received, peer * self._stride)
            if (seq, signature) != (call.seq, call.signature):
                self._group.mismatch(call, peer, seq)
        return False

    def contributions(self, dtype: np.dtype[Any], count: int) -> tuple[Flat, list[Flat]]:
        """Memory of the agreement as arrays of at most :attr:`room` bytes.

        Returns:
            This rank's array, which the next agreement sends; and all ranks' arrays, which an agreement receives.
        """
        starts = range(_HEADER.size, len(self._received), self._stride)
        received = [np.frombuffer(self._received, dtype, count, start) for start in starts]
        return np.frombuffer(self._header, dtype, count, _HEADER.size), received

    # --- the end of the group -------------------------------------------------------------------------------------

    def complete_pending(self) -> bool:
        """Complete the pending agreement after a failure, which some ranks have started and others have not.

        Ranks differ by at most one agreement, because an agreement starts only after the last has completed. Returns
        True if no agreement is pending.
        """
        if not self._pending:
            request = self._mpi.call(self._start)
        elif self._persistent is not None:
            request = self._persistent
        else:
            return False
        deadline = time.monotonic() + _COMPLETION_S
        while time.monotonic() < deadline:
            if self._mpi.call(request.Test):
                return True
            time.sleep(_PAUSE_S)
        return False

    def free(self) -> None:
        """Free the persistent request, which is not active."""
        if self._persistent is not None:
            self._mpi.call(self._persistent.Free)

    @property
    def memory(self) -> tuple[Any, ...]:
        """What MPI may use while an agreement is pending, to be kept alive."""
        return self._persistent, self._header, self._received
