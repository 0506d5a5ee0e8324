"""The contender ``floor``: only the copies, or only the bytes over sockets, that an operation
cannot do without.

Its time is a lower bound for the others, not the time of an operation: nothing is reduced, and no
result is checked.

Between ranks that share memory each rank writes as many bytes as it gets of the result, by one
``numpy.copyto`` from and to memory of its own, all ranks at once, and the ranks then exchange one
flag through shared memory. For an all_reduce that is one memcpy of the array by all ranks.

Over TCP each rank sends the operation's bytes to the next rank and receives as many from the one
before, both at once, through plain blocking sockets with the kernel's buffer sizes: ``sendall`` on
a thread of its own, ``recv_into`` on the caller's. For the symmetric operations that is nccl-tests'
factor times the size (2 ranks, all_reduce: the size each way). Operations with a root, and prefix
reductions, are a chain that begins or ends at the root: each link carries what a rank beyond it
needs.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.arrays.types import DType
from unicoll.bench.arrays import BenchArrays, Unsupported, storage_array
from unicoll.bench.contract import BenchCase, BenchJob, Call, Contender, ping_pong
from unicoll.bench.distributed import own_address
from unicoll.bench.operations import IN, Operation
from unicoll.process import environment

_LINE = 16
"""Flags of 8 bytes from one rank's to the next one's: two cache lines."""
_LOOKS = 200
"""Looks at a flag before the processor is yielded."""
_INLINE = 1 << 15
"""Bytes that the buffers of a connection hold in any case: they are sent without the other
thread."""
_CONNECT_S = 30.0


def bytes_written(case: BenchCase) -> int:
    """Bytes of the result that this rank does not have before the call; a prefix's first rank
    counts its own."""
    if case.op.name == "broadcast" and case.at_root:
        return 0
    parts = case.op.expected(case.call_rank, case.counts.shown)
    return sum(part.length for part in parts) * case.dtype.itemsize


def bytes_on_links(case: BenchCase) -> tuple[int, int]:
    """Bytes that this rank sends to the next rank, and receives from the one before.

    Raises:
        Unsupported: ping-pong of more than two ranks, in which the next rank is not the peer.
    """
    op, ranks = case.op, case.size
    total = max(case.counts.send, case.counts.recv) * case.dtype.itemsize
    if op.name == "barrier":
        return 1, 1
    if op.name == "latency":
        if ranks > 2:
            raise Unsupported("over TCP the floor of a ping-pong needs exactly 2 ranks")
        return total, total
    row = op.collective
    if row is None or not (row.rooted or row.prefix):
        return (int(total * op.factor(ranks)),) * 2
    first = (case.root + (row.root_name == "dst")) % ranks if row.rooted else 0
    place = (case.rank - first) % ranks
    links = [total] * (ranks - 1)
    if row.scattered:
        links = [total // ranks * (ranks - 1 - i) for i in range(ranks - 1)]
    elif not row.in_place:
        links = [total // ranks * (i + 1) for i in range(ranks - 1)]
    return links[place] if place < ranks - 1 else 0, links[place - 1] if place else 0


class Floor(Contender):
    """The bytes of an operation, moved by ``numpy.copyto`` or by sockets, and nothing else."""

    checked = False
    _medium: _Memory | _Sockets | None = None

    def reason(self) -> str | None:
        return None if hasattr(os, "memfd_create") else "this system has no memfd"

    def open(self, job: BenchJob) -> None:
        wanted: list[Any] = [None] * job.size
        dist.all_gather_object(wanted, environment.choice("UNICOLL_TRANSPORT") == "tcp")
        over_tcp = job.size > 1 and (any(wanted) or len(set(job.hosts)) > 1)
        self._medium = _Sockets(job) if over_tcp else _Memory(job)

    def close(self) -> None:
        if self._medium is not None:
            self._medium.close()
        self._medium = None

    def describe(self) -> str:
        assert self._medium is not None
        return f"a lower bound: {self._medium.text}"

    def family(self, array_name: str | None, dtype: DType) -> BenchArrays:
        return BenchArrays(storage_array)

    def placements(self, op: Operation) -> tuple[str, ...]:
        return op.placements[:1]

    def call(self, case: BenchCase, send: Any, recv: Any) -> Call:
        assert self._medium is not None
        return self._medium.call(case, send, recv)


class _Memory:
    """Copies by all ranks of one host, and flags in a memfd that they share."""

    text = (
        "each rank writes its result once by numpy.copyto, all at once, and the ranks exchange a"
        " flag"
    )

    def __init__(self, job: BenchJob) -> None:
        self._rank, self._size, self._timeout = job.rank, job.size, job.timeout
        self._yields = job.size > len(os.sched_getaffinity(0))
        shared: Any = import_module("gloo_fallback.shm.segment")
        start, location = shared.SharedSegment.START, [None]
        if job.rank == 0:
            self._segment, location[0] = shared.create_offer(start + job.size * _LINE * 8)
        dist.broadcast_object_list(location, src=0)
        if job.rank:
            self._segment = shared.open_offer(location[0])
        self._flags = self._segment.memory[start:].cast("Q")
        self._met = self._sent = self._received = 0

    def call(self, case: BenchCase, send: Any, recv: Any) -> Call:
        length = bytes_written(case)
        # The memory is written: otherwise all of it would be the kernel's one page of zeros.
        source = np.ones(length, np.uint8)
        array = recv if case.placement != IN or recv.nbytes >= send.nbytes else send
        copy = partial(np.copyto, array.view(np.uint8)[:length], source)
        if case.op.name == "latency":

            def send_flag() -> None:
                copy()
                self._sent += 1
                self._flags[self._rank * _LINE + 1] = self._sent

            return ping_pong(case.rank, send_flag, self._receive_flag)

        def copy_and_meet() -> None:
            copy()
            self._meet()

        return copy_and_meet

    def _receive_flag(self) -> None:
        self._received += 1
        self._await((1 - self._rank) * _LINE + 1, self._received)

    def _meet(self) -> None:
        self._met += 1
        self._flags[self._rank * _LINE] = self._met
        for rank in range(self._size):
            self._await(rank * _LINE, self._met)

    def _await(self, at: int, value: int) -> None:
        flags, looks = self._flags, 0
        deadline = 0.0
        while flags[at] < value:
            looks += 1
            if looks > _LOOKS or self._yields:
                os.sched_yield()
            if looks % 1024 == 0:
                deadline = deadline or time.monotonic() + self._timeout
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"floor: rank {at // _LINE} has not arrived within {self._timeout:g} s"
                    )

    def close(self) -> None:
        self._flags.release()
        self._segment.close()


class _Sockets:
    """One connection to the next rank and one from the rank before; a thread sends what exceeds
    their buffers."""

    text = (
        "each rank sends the operation's bytes to the next rank and receives as many, by sendall"
        " and recv_into"
    )

    def __init__(self, job: BenchJob) -> None:
        self._timeout = job.timeout
        host = "127.0.0.1" if len(set(job.hosts)) == 1 else own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # The token is sent over the job's authenticated connections, and admits the rank before
        # this one in the ring.
        token = os.urandom(16)
        where: list[Any] = [None] * job.size
        with socket.create_server((host, 0), family=family) as listener:
            dist.all_gather_object(where, (host, listener.getsockname()[1], token))
            host, port, expected = where[(job.rank + 1) % job.size]
            with ExitStack() as opened:
                self._next = opened.enter_context(
                    socket.create_connection((host, port), _CONNECT_S)
                )
                self._next.sendall(expected)
                self._before = _accepted(listener, token)
                opened.pop_all()
        limit = struct.pack("ll", int(job.timeout), int(job.timeout % 1 * 1e6))
        for sock in (self._next, self._before):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(True)
            # settimeout() would poll before each call.
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, limit)
        self._tasks: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._send_tasks, name="unicoll-bench-floor", daemon=True
        )
        self._thread.start()

    def call(self, case: BenchCase, send: Any, recv: Any) -> Call:
        out, into = (memoryview(bytearray(b"\1") * n) for n in bytes_on_links(case))
        if case.op.name == "latency":
            return ping_pong(
                case.rank, partial(self._exchange, out, into[:0]), partial(self._fill, into)
            )
        return partial(self._exchange, out, into)

    def _exchange(self, out: memoryview, into: memoryview) -> None:
        if len(out) <= _INLINE:
            if out:
                self._send(out)
            self._fill(into)
            return
        self._tasks.put(out)
        self._fill(into)
        if (error := self._sent.get(timeout=self._timeout + _CONNECT_S)) is not None:
            raise error

    def _fill(self, into: memoryview) -> None:
        while into:
            try:
                count = self._before.recv_into(into)
            except BlockingIOError:
                raise TimeoutError(
                    f"floor: the rank before has not sent within {self._timeout:g} s"
                ) from None
            if not count:
                raise ConnectionError("floor: the rank before has closed its connection")
            into = into[count:]

    def _send(self, data: memoryview) -> None:
        try:
            self._next.sendall(data)
        except BlockingIOError:
            raise TimeoutError(
                f"floor: the next rank has not received within {self._timeout:g} s"
            ) from None

    def _send_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._send(task)
                self._sent.put(None)
            except OSError as e:
                self._sent.put(e)

    def close(self) -> None:
        self._tasks.put(None)
        for sock in (self._next, self._before):
            # The shutdown ends a send that waits.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._next.close()
        self._before.close()


def _accepted(listener: socket.socket, token: bytes) -> socket.socket:
    """The first connection that begins with the token."""
    deadline = time.monotonic() + _CONNECT_S
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        sock, _ = listener.accept()
        sock.settimeout(_CONNECT_S / 10)
        with suppress(OSError):
            if sock.recv(len(token), socket.MSG_WAITALL) == token:
                return sock
        sock.close()
    raise TimeoutError("floor: the rank before has not connected")
