"""The agreement on calls, with which every collective over MPI begins: the ranks compare sequence
number and signature.

It is an all-gather of a few bytes, which completes when all ranks have entered it. So a call that
differs between ranks raises on all ranks before data moves, and the wait for a missing rank is in
the agreement, where it can time out. MPI's own collective, which cannot be cancelled, comes after.

In small groups the all-gather is a persistent message to each other rank, which is as fast as
MPI_Allgather_init; in larger ones it is MPI_Iallgather. MPI's persistent collectives are not used:
MPI_Allgather_init of Intel MPI 2021.18 receives old data, or crashes, from its second start.

Behind the header each rank's contribution has room for a small array, with which the agreement is
the whole collective (:mod:`mpi_comm.small_arrays`).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from unicoll.arrays.kernels import Flat
from unicoll.backend import Call

if TYPE_CHECKING:
    from mpi_comm.group_communicator import GroupCommunicator

_HEADER = struct.Struct("<qqq")
_PACK = _HEADER.pack_into
_MESSAGES_LIMIT = 8
"""Ranks up to which each sends its header to each other rank."""
_COMPARE_ALL_LIMIT = 64
"""Ranks up to which each rank gathers all headers; larger groups compare maxima."""
_LARGEST_CONTRIBUTION, _MOST_GATHERED = 24 + 256, 2304
"""Bytes of a rank's contribution to an agreement, and of all of them together; a larger one would
slow every call."""
_COMPLETION_S, _PAUSE_S = 0.5, 1e-3
"""How long to poll for the completion of a pending agreement after a failure, and the pause between
polls."""


class _Messages:
    """An all-gather by persistent messages to and from each other rank. It is used as a request of
    MPI.

    Args:
        parts: each rank's part of the memory; that of this rank is sent.
    """

    def __init__(self, mpi: Any, comm: Any, rank: int, tag: int, parts: list[memoryview]) -> None:
        others = [peer for peer in range(len(parts)) if peer != rank]
        self._requests = [
            *(comm.Recv_init([parts[peer], mpi.BYTE], peer, tag) for peer in others),
            *(comm.Send_init([parts[rank], mpi.BYTE], peer, tag) for peer in others),
        ]
        self._start_all, self._test_all = mpi.Prequest.Startall, mpi.Request.Testall

    def start(self) -> _Messages:
        self._start_all(self._requests)
        return self

    def Test(self) -> bool:
        done: bool = self._test_all(self._requests)
        return done

    def free(self) -> None:
        for request in self._requests:
            request.Free()


class CallAgreement:
    """The agreements of one group, one at a time.

    Args:
        group: the group, whose communicator has been created.
        tag: MPI's tag of the messages.

    Attributes:
        room: bytes of an array that the agreement carries; equal on all ranks.
        pending: True while an agreement is in progress.
    """

    def __init__(self, group: GroupCommunicator, tag: int) -> None:
        self._group = group
        self._size = group.size
        self._mpi = group.mpi
        self.pending = False
        mpi, comm = self._mpi.MPI, group.comm
        self._compares_all = self._size <= _COMPARE_ALL_LIMIT
        # A multiple of 8, since the headers are compared as rows of 64-bit integers.
        self._stride = stride = min(_LARGEST_CONTRIBUTION, _MOST_GATHERED // self._size & ~7)
        self.room = stride - _HEADER.size if self._compares_all else 0
        if self._compares_all:
            self._received = bytearray(stride * self._size)
            # What this rank sends lies where its part of the received memory is. So MPI_Iallgather
            # works in place, and all headers are in one array, without a copy.
            self._header = memoryview(self._received)[stride * group.rank :][:stride]
            self._own_headers, self._headers = self._views_of_headers()
        else:
            self._received = bytearray(2 * _HEADER.size)
            self._header = memoryview(bytearray(2 * _HEADER.size))
        self._messages: _Messages | None = None
        if self._size <= _MESSAGES_LIMIT:
            parts = [memoryview(self._received)[i * stride :][:stride] for i in range(self._size)]
            self._messages = self._mpi.call(_Messages, mpi, comm, group.rank, tag, parts)
            self._start: Callable[[], Any] = self._messages.start
        elif self._compares_all:
            self._start = lambda: comm.Iallgather(mpi.IN_PLACE, [self._received, mpi.BYTE])
        else:
            send, receive = [self._header, mpi.INT64_T], [self._received, mpi.INT64_T]
            self._start = lambda: comm.Iallreduce(send, receive, mpi.MAX)
        # With an MPI thread each poll would be a switch to it and back. There complete() hands the
        # request over, and that thread tests it.
        self._is_fast = self._messages is not None and self._mpi.mpi_thread is None

    def _views_of_headers(self) -> tuple[memoryview, memoryview]:
        """This rank's header as often as there are ranks, and the headers of all ranks: equal if
        the ranks agree."""
        words = _HEADER.size // 8
        received = np.frombuffer(self._received, np.int64).reshape(self._size, self._stride // 8)
        headers = received[:, :words]
        return np.broadcast_to(headers[self._group.rank], headers.shape).data, headers.data

    def has_started(self, call: Call) -> bool:
        """True if the agreement on a call has started: other ranks may have received its header."""
        seq: int = _HEADER.unpack_from(self._header)[0]
        return seq == call.seq

    def agree(self, call: Call, value: int = 0) -> bool:
        """Wait until all ranks are in this call; returns True if ``value`` is equal on all of them
        and not negative.

        The arrays of :meth:`contributions` are exchanged, too.

        Raises:
            CollectiveMismatchError: the ranks are in different calls.
        """
        seq, signature = call.seq, call.signature
        _PACK(self._header, 0, seq, signature, value)
        # This is set before MPI gets the memory and stays set after an exception, so close() knows
        # that the agreement may be in progress. No other agreement follows then: the group has
        # failed.
        self.pending = True
        if self._is_fast:
            # These are the first polls of GroupCommunicator.wait(), without the cost of calls. An
            # exception in them loses no request, since the persistent ones belong to
            # self._messages.
            messages = self._start()
            test = messages.Test
            for _ in self._group.spins:
                if test():
                    break
            else:
                self._group.wait(messages)
        else:
            if not self._compares_all:
                # The maximum of the complements is the complement of the minimum. So one reduction
                # shows both, and with equal headers its result is this rank's own contribution.
                _PACK(self._header, _HEADER.size, ~seq, ~signature, ~value)
            self._group.complete(self._start, ())
        self.pending = False
        if self._compares_all:
            # Memoryviews are compared without creating Python objects.
            equal = self._headers == self._own_headers
        else:
            equal = self._received == self._header
        return value >= 0 if equal else self._compare(call)

    def _compare(self, call: Call) -> bool:
        """The headers differ: return False if only their values do, else raise."""
        if not self._compares_all:
            highest, lowest = (_HEADER.unpack_from(self._received, at) for at in (0, _HEADER.size))
            if (highest[0], highest[1]) == (~lowest[0], ~lowest[1]):
                return False
            # Maxima do not say which rank differs, so the error names the ranks by the reports that
            # are requested of them.
            self._group.mismatch(-1, 0)
        for peer in range(self._size):
            seq, signature, _ = _HEADER.unpack_from(self._received, peer * self._stride)
            if (seq, signature) != (call.seq, call.signature):
                self._group.mismatch(peer, seq)
        return False

    def contributions(self, dtype: np.dtype[Any], count: int) -> tuple[Flat, list[Flat]]:
        """Memory of the agreement as arrays of at most :attr:`room` bytes.

        Returns:
            This rank's array, which the next agreement sends; and all ranks' arrays, which an
            agreement receives.
        """
        starts = range(_HEADER.size, len(self._received), self._stride)
        received = [np.frombuffer(self._received, dtype, count, start) for start in starts]
        return np.frombuffer(self._header, dtype, count, _HEADER.size), received

    # --- the end of the group ---------------------------------------------------------------------

    def complete_pending(self) -> bool:
        """Complete the pending agreement after a failure, which some ranks have started and others
        have not.

        Ranks differ by at most one agreement, because an agreement starts only after the last has
        completed. Returns True if no agreement is pending.
        """
        if not self.pending:
            # Members that have started this agreement wait for the header of this rank. What it
            # says does not matter any more: the group is closed.
            request = self._mpi.call(self._start)
        elif self._messages is not None:
            request = self._messages
        else:
            # The thread that waited for the request has given it up, so nothing here can test it.
            return False
        deadline = time.monotonic() + _COMPLETION_S
        while time.monotonic() < deadline:
            if self._mpi.call(request.Test):
                return True
            time.sleep(_PAUSE_S)
        return False

    def free(self) -> None:
        """Free the persistent requests, which are not active."""
        if self._messages is not None:
            self._mpi.call(self._messages.free)

    @property
    def memory(self) -> tuple[Any, ...]:
        """What MPI may use while an agreement is pending, to be kept alive."""
        return self._messages, self._header, self._received
