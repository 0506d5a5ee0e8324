"""A store over MPI, without address and port. Rank 0's process holds the values and serves the
other ranks.

Requests and replies are messages in the library's own duplicate of MPI_COMM_WORLD. A request
contains the tag of its reply, so any number of threads may make requests at once. Rank 0 serves on
a thread that polls with pauses; it ends when every process that has opened its store has closed it.

A broadcast of the address and key of a TCPStore of rank 0 was tried in place of this store, since
the control plane needs a connection to rank 0 anyway. It saved little: processes open their store
at different times, and MPI_Bcast has no deadline, so rank 0 needed a thread that calls MPI until
the last one has asked, which is most of this module; and a job with a port that a firewall blocks
would no longer learn from the store why a rank has not joined.
"""

from __future__ import annotations

import itertools
import math
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mpi_comm.runtime.init_finalize import Runtime, runtime
from unicoll.errors import DistNetworkError, DistStoreError
from unicoll.net.stores.client import RequestStore
from unicoll.net.stores.protocol import (
    REPLY,
    REQUEST,
    MalformedError,
    Status,
    StoreOp,
    max_value,
    pack_reply,
    unpack_fields,
    validate,
)
from unicoll.net.stores.table import Table, WaitRequired
from unicoll.process.interrupts import Changes, LazyThread
from unicoll.process.timeouts import backoff

_REQUESTS = 1
_FIRST_REPLY = 2
_ENVELOPE = struct.Struct("<qq")
"""Kind of the message, and the tag of the reply."""
_KIND_REQUEST, _KIND_CLOSE = 0, 1
_PAUSES_S = (5e-5, 5e-3, 1.3)
_SPIN_S = 0.002
"""Time after a request in which polling does not pause."""
_DRAIN_S = 2.0
"""How long rank 0 receives what the other processes have sent before it finalises MPI."""
_CLOSE_S = 2.0
"""How long a process tells rank 0, which may have died, that it has closed its store."""
_SLACK_S = 30.0
"""Time after a request's deadline that rank 0 has for the reply."""


class _WaitingRequest:
    """A request of another process that waits for keys."""

    __slots__ = ("deadline", "fields", "op", "tag", "to")

    def __init__(
        self, to: int, tag: int, op: StoreOp, fields: list[bytes], deadline: float
    ) -> None:
        self.to = to
        self.tag = tag
        self.op = op
        self.fields = fields
        self.deadline = deadline


class _Server:
    """The values, on rank 0, and the thread that serves the other processes.

    Args:
        mpi: MPI in this process.
        comm: the communicator of the requests.
    """

    def __init__(self, mpi: Runtime, comm: Any) -> None:
        self.table = Table()
        self.changed = Changes()
        self._mpi = mpi
        self._comm = comm
        self._max_value = max_value()
        self._waiting: list[_WaitingRequest] = []
        # The replies whose bytes MPI may still read, with their requests.
        self._sent: list[tuple[Any, bytes, int]] = []
        # How many open stores each other process has.
        self._clients: dict[int, int] = {}
        self._users = 0
        self._thread = LazyThread("unicoll-mpi-store")
        self._stop_at = math.inf
        mpi.before_end.append(self._stop)

    def _stop(self) -> None:
        """MPI is about to be finalized: receive that the other processes have closed their
        stores."""
        # From here on the thread continues for the other processes only: handles of this one need
        # not be closed at exit.
        self._stop_at = time.monotonic() + _DRAIN_S
        self._thread.join(2 * _DRAIN_S)

    def open(self) -> None:
        """A handle of this process was opened."""
        with self.changed.lock:
            # The thread decides with this lock held that it ends, and then leaves another one to
            # start. So it either sees this handle or is started again.
            self._users += 1
            if self._mpi.size > 1:
                self._thread.start(self._serve)

    def close(self) -> None:
        """A handle of this process was closed; the thread continues until the other processes have
        closed theirs."""
        with self.changed.lock:
            self._users -= 1

    def apply(
        self, op: StoreOp, fields: Sequence[bytes], deadline: float | None = None
    ) -> Sequence[bytes]:
        """Execute an operation for a thread of this process; WaitRequired if it still has to wait
        at ``deadline``."""
        refused: WaitRequired | None = None

        def attempt() -> tuple[Sequence[bytes]] | None:
            nonlocal refused
            try:
                reply = self.table.apply(op, fields, refused is not None)
            except WaitRequired as e:
                refused = e
                return None
            # The thread clears the keys, once it has tried the requests of other processes that
            # wait for them.
            if self.table.changed_keys:
                self.changed.notify_all()
            return (reply,)

        found = self.changed.wait_for(
            attempt, 0.0 if deadline is None else deadline - time.monotonic()
        )
        if found is None:
            assert refused is not None
            raise refused
        return found[0]

    # --- requests of the other processes ----------------------------------------------------------

    def _serve(self) -> None:
        pauses, spin_until = backoff(*_PAUSES_S), 0.0
        status = self._mpi.MPI.Status()
        while True:
            if self._mpi.call(self._poll, status):
                pauses, spin_until = backoff(*_PAUSES_S), time.monotonic() + _SPIN_S
            with self.changed.lock:
                now = time.monotonic()
                used = self._has_clients() or (self._users and self._stop_at == math.inf)
                if not used or now >= self._stop_at:
                    # A thread of this kind runs once, so the next store gets another one.
                    self._thread = LazyThread("unicoll-mpi-store")
                    return
            if now > spin_until:
                time.sleep(next(pauses))

    def _has_clients(self) -> bool:
        """True if another process has its store open, or waits for a reply."""
        # A process that has died closes nothing.
        lost = self._mpi.lost
        waiting = [*self._clients, *(request.to for request in self._waiting)]
        waiting += [to for _, _, to in self._sent]
        return any(process not in lost for process in waiting)

    def _poll(self, status: Any) -> bool:
        """Receive one request if there is one, and reply to waiting requests; returns True if there
        was one."""
        mpi = self._mpi.MPI
        message = self._comm.Improbe(mpi.ANY_SOURCE, _REQUESTS, status)
        if message is not None:
            data = bytearray(status.Get_count(mpi.BYTE))
            source = status.Get_source()
            message.Recv([data, mpi.BYTE])
            self._handle_message(source, data)
        # This may be the thread that makes all calls of MPI. No thread waits for that one while it
        # holds the lock.
        with self.changed.lock:
            changed = bool(self.table.changed_keys)
            self.table.changed_keys.clear()
            if changed:
                self.changed.notify_all()
        self._retry_waiting(changed)
        self._sent = [request for request in self._sent if not request[0].Test()]
        return message is not None

    def _handle_message(self, source: int, data: bytearray) -> None:
        kind, tag = _ENVELOPE.unpack_from(data)
        if kind == _KIND_CLOSE:
            handles = self._clients.get(source, 0) - 1
            if handles > 0:
                self._clients[source] = handles
            else:
                self._clients.pop(source, None)
            return
        body = memoryview(data)[_ENVELOPE.size :]
        _, code, seconds = REQUEST.unpack_from(body)
        # The first message of a handle has no operation: it says that the store was opened.
        if not code:
            self._clients[source] = self._clients.get(source, 0) + 1
            return
        try:
            fields = unpack_fields(body[REQUEST.size :])
            op = validate(code, fields, self._max_value)
        except MalformedError as e:
            self._reply(source, tag, Status.ERROR, (str(e).encode(),))
            return
        self._try_request(_WaitingRequest(source, tag, op, fields, time.monotonic() + seconds))

    def _try_request(self, request: _WaitingRequest) -> bool:
        """Reply to a request if it need not wait, else keep it; returns True if it has a reply."""
        try:
            with self.changed.lock:
                reply = self.table.apply(
                    request.op, request.fields, waited=request in self._waiting
                )
        except WaitRequired as state:
            if request.op.waits and time.monotonic() < request.deadline:
                if request not in self._waiting:
                    self._waiting.append(request)
                return False
            self._reply(request.to, request.tag, Status.TIMEOUT, state.keys)
        except DistStoreError as e:
            self._reply(request.to, request.tag, Status.ERROR, (str(e).encode(),))
        else:
            self._reply(request.to, request.tag, Status.OK, reply)
        return True

    def _retry_waiting(self, changed: bool) -> None:
        now = time.monotonic()
        for request in [w for w in self._waiting if changed or now >= w.deadline]:
            if self._try_request(request):
                self._waiting.remove(request)

    def _reply(self, to: int, tag: int, status: Status, fields: Sequence[bytes]) -> None:
        data = pack_reply(status, fields)
        self._sent.append((self._comm.Isend([data, self._mpi.MPI.BYTE], to, tag), data, to))


_server: _Server | None = None
_tags = itertools.count()
_unsent: list[Any] = []
"""Requests of messages that rank 0 has not taken in time, with the bytes that MPI may still
read."""


class MPIStore(RequestStore):
    """A store shared by all processes of MPI_COMM_WORLD, created by :meth:`open`."""

    def __init__(self, mpi: Runtime, comm: Any, server: _Server | None) -> None:
        super().__init__()
        self._mpi = mpi
        self._comm = comm
        self._server = server
        self._is_closed = False
        # Rank 0 serves until all handles that it knows of are closed, so it has to know of this one
        # before any request comes.
        if server is not None:
            server.open()
        elif mpi.rank != 0:
            self._send(_KIND_REQUEST, REQUEST.pack(0, 0, 0.0))

    @classmethod
    def open(cls, deadline: float) -> MPIStore:
        """The store of MPI_COMM_WORLD; every process calls this, and it returns when all have
        called it.

        Raises:
            OperationTimeoutError: not all have called it by ``deadline`` (``time.monotonic()``).
            BackendUnavailableError: MPI cannot be used in this process.
        """
        global _server
        mpi = runtime()
        comm = mpi.parent(deadline)
        if mpi.rank == 0 and _server is None:
            _server = _Server(mpi, comm)
        return cls(mpi, comm, _server)

    def _execute(
        self, op: StoreOp, fields: Sequence[bytes], seconds: float, name: str
    ) -> Sequence[bytes]:
        if self._is_closed:
            raise self._closed_error(name)
        if self._server is not None:
            deadline = time.monotonic() + seconds if op.waits else None
            try:
                return self._server.apply(op, fields, deadline)
            except WaitRequired as state:
                raise self._timeout_error(state.keys, seconds, name) from None
        return self._request(op, fields, seconds, name)

    def _request(
        self, op: StoreOp, fields: Sequence[bytes], seconds: float, name: str
    ) -> Sequence[bytes]:
        # The upper half of the tags belongs to the checks before communicators are created.
        tag = _FIRST_REPLY + next(_tags) % (self._mpi.largest_tag // 2 - _FIRST_REPLY)
        self._send(_KIND_REQUEST, self._pack(op, fields, seconds, name), tag)
        data = self._await_reply(tag, seconds, name)
        _, status = REPLY.unpack_from(data)
        reply = unpack_fields(memoryview(data)[REPLY.size :])
        if status == Status.TIMEOUT:
            raise self._timeout_error(reply, seconds, name)
        if status == Status.ERROR:
            raise DistStoreError(f"{name}: {reply[0].decode(errors='replace')}", op=name)
        return reply

    def _send(
        self, kind: int, body: bytes = b"", tag: int = 0, seconds: float | None = None
    ) -> None:
        data = _ENVELOPE.pack(kind, tag) + body
        request = self._mpi.call(self._comm.Isend, [data, self._mpi.MPI.BYTE], 0, _REQUESTS)
        limit = self._timeout + _SLACK_S if seconds is None else seconds
        try:
            self._poll_until(lambda: bool(request.Test()), time.monotonic() + limit, "send")
        except DistNetworkError:
            _unsent.append((request, data))
            raise

    def _await_reply(self, tag: int, seconds: float, name: str) -> bytearray:
        found: list[bytearray] = []

        def probe() -> bool:
            mpi = self._mpi.MPI
            status = mpi.Status()
            message = self._comm.Improbe(0, tag, status)
            if message is None:
                return False
            data = bytearray(status.Get_count(mpi.BYTE))
            message.Recv([data, mpi.BYTE])
            found.append(data)
            return True

        self._poll_until(probe, time.monotonic() + seconds + _SLACK_S, name)
        return found[0]

    def _poll_until(self, condition: Any, deadline: float, name: str) -> None:
        pauses, spin_until = backoff(*_PAUSES_S), time.monotonic() + _SPIN_S
        while not self._mpi.call(condition):
            now = time.monotonic()
            if now > deadline:
                raise DistNetworkError(
                    f"{name}: rank 0, which holds the store over MPI, does not reply", rank=0
                )
            if now > spin_until:
                time.sleep(next(pauses))

    def clone(self) -> MPIStore:
        """Another handle on the same store, with its own timeout."""
        clone = MPIStore(self._mpi, self._comm, self._server)
        clone._timeout = self._timeout
        return clone

    def close(self) -> None:
        """Closes this handle; rank 0 continues to serve until all processes have closed theirs."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        elif not self._mpi.MPI.Is_finalized():
            # Rank 0 may have died, and then nobody needs the message.
            with suppress(DistNetworkError):
                self._send(_KIND_CLOSE, seconds=_CLOSE_S)

    def __repr__(self) -> str:
        return f"MPIStore(rank {self._mpi.rank} of {self._mpi.size})"
