"""A store over MPI: no address, no port. Rank 0's process keeps the values and answers the others' requests.

Requests and replies are messages in the library's own copy of MPI's world. A request names the tag of its reply, so
any number of threads may ask at once. Rank 0 serves on a thread that naps between its looks; it ends when every
process that has asked has closed its store.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from unicoll.errors import DistNetworkError, DistStoreError
from unicoll.stores.requests import RequestStore, seconds_left
from unicoll.stores.table import NotYet, Table
from unicoll.stores.wire import (
    REPLY,
    REQUEST,
    WAITING,
    MalformedError,
    Op,
    Status,
    max_value,
    pack_reply,
    unpack_fields,
    validate,
)

from .runtime import Runtime, runtime

__all__ = ["MPIStore"]

_REQUESTS = 1
_FIRST_REPLY = 2
_ENVELOPE = struct.Struct("<qq")
"""What is asked (a request, or goodbye), and the tag of the reply."""
_ASK, _GOODBYE = 0, 1
_SHORTEST_S, _LONGEST_S = 5e-5, 5e-3
_EAGER_S = 0.002
_SLACK_S = 30.0
"""How much later than its deadline an answer of rank 0 may come."""


class _Waiting:
    """A request that waits for keys: of another process (``to``), or of a thread here."""

    __slots__ = ("deadline", "fields", "op", "tag", "to")

    def __init__(self, to: int, tag: int, op: Op, fields: list[bytes], deadline: float) -> None:
        self.to = to
        self.tag = tag
        self.op = op
        self.fields = fields
        self.deadline = deadline


class _Server:
    """The values, on rank 0; and the thread that answers the others.

    Args:
        mpi: MPI in this process.
        comm: where requests come.
    """

    def __init__(self, mpi: Runtime, comm: Any) -> None:
        self.table = Table()
        self.changed = threading.Condition()
        self._mpi = mpi
        self._comm = comm
        self._largest = max_value()
        self._waiting: list[_Waiting] = []
        self._sent: list[tuple[Any, bytes, int]] = []
        self._clients: dict[int, int] = {}  # open stores by process
        self._users = 0
        self._thread: threading.Thread | None = None
        self._stopping = False
        mpi.before_end.append(self._stop)

    def _stop(self) -> None:
        """MPI ends."""
        self._stopping = True
        thread = self._thread
        if thread is not None:
            thread.join(2.0)

    def open(self) -> None:
        """Somebody here uses the store."""
        with self.changed:
            self._users += 1
            if self._thread is None and self._mpi.size > 1:
                self._thread = threading.Thread(target=self._serve, name="unicoll-mpi-store", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """One user less; the thread goes on until the other processes have closed theirs."""
        with self.changed:
            self._users -= 1

    def apply(self, op: Op, fields: Sequence[bytes], deadline: float | None = None) -> Sequence[bytes]:
        """Do an operation for a thread of this process, waiting until ``deadline``; NotYet when it has passed."""
        with self.changed:
            while True:
                try:
                    reply = self.table.apply(op, fields)
                except NotYet:
                    if deadline is None or time.monotonic() >= deadline:
                        raise
                    self.changed.wait(seconds_left(deadline))
                    continue
                if self.table.touched:
                    self.changed.notify_all()
                return reply

    # --- the others ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        nap, eager = _SHORTEST_S, 0.0
        status = self._mpi.MPI.Status()
        while True:
            if self._mpi.call(self._turn, status):
                nap, eager = _SHORTEST_S, time.monotonic() + _EAGER_S
            with self.changed:
                if self._stopping or not (self._users or self._wanted()):
                    self._thread = None
                    return
            if time.monotonic() > eager:
                time.sleep(nap)
                nap = min(1.3 * nap, _LONGEST_S)

    def _wanted(self) -> bool:
        """Whether another process has its store open, or waits for an answer."""
        lost = self._mpi.lost
        waiting = [*self._clients, *(request.to for request in self._waiting)]
        waiting += [to for _, _, to in self._sent]
        return any(place not in lost for place in waiting)

    def _turn(self, status: Any) -> bool:
        """Take one request if there is one, and answer what can be answered."""
        mpi = self._mpi.MPI
        message = self._comm.Improbe(mpi.ANY_SOURCE, _REQUESTS, status)
        if message is not None:
            data = bytearray(status.Get_count(mpi.BYTE))
            source = status.Get_source()
            message.Recv([data, mpi.BYTE])
            self._take(source, data)
        with self.changed:
            touched = bool(self.table.touched)
            self.table.touched.clear()
            if touched:
                self.changed.notify_all()
        self._answer_waiting(touched)
        self._sent = [request for request in self._sent if not request[0].Test()]
        return message is not None

    def _take(self, source: int, data: bytearray) -> None:
        kind, tag = _ENVELOPE.unpack_from(data)
        if kind == _GOODBYE:
            left = self._clients.get(source, 0) - 1
            if left > 0:
                self._clients[source] = left
            else:
                self._clients.pop(source, None)
            return
        body = memoryview(data)[_ENVELOPE.size :]
        _, code, seconds = REQUEST.unpack_from(body)
        if not code:  # the first word of a store that has just been opened
            self._clients[source] = self._clients.get(source, 0) + 1
            return
        try:
            fields = unpack_fields(body[REQUEST.size :])
            op = validate(code, fields, self._largest)
        except MalformedError as e:
            self._reply(source, tag, Status.ERROR, (str(e).encode(),))
            return
        self._try(_Waiting(source, tag, op, fields, time.monotonic() + seconds))

    def _try(self, request: _Waiting) -> bool:
        """Answer a request if it can be answered by now, else keep it; whether it was answered."""
        try:
            with self.changed:
                reply = self.table.apply(request.op, request.fields)
        except NotYet as state:
            if request.op in WAITING and time.monotonic() < request.deadline:
                if request not in self._waiting:
                    self._waiting.append(request)
                return False
            self._reply(request.to, request.tag, Status.TIMEOUT, state.keys)
        except DistStoreError as e:
            self._reply(request.to, request.tag, Status.ERROR, (str(e).encode(),))
        else:
            self._reply(request.to, request.tag, Status.OK, reply)
        return True

    def _answer_waiting(self, touched: bool) -> None:
        now = time.monotonic()
        for request in [w for w in self._waiting if touched or now >= w.deadline]:
            if self._try(request):
                self._waiting.remove(request)

    def _reply(self, to: int, tag: int, status: Status, fields: Sequence[bytes]) -> None:
        data = pack_reply(status, fields)
        self._sent.append((self._comm.Isend([data, self._mpi.MPI.BYTE], to, tag), data, to))


_server: _Server | None = None
_tags = itertools.count()


class MPIStore(RequestStore):
    """A store that all processes of MPI's world share (see :class:`unicoll.stores.Store` for its methods).

    Made by :meth:`open`, which every process calls.
    """

    def __init__(self, mpi: Runtime, comm: Any, server: _Server | None) -> None:
        super().__init__()
        self._mpi = mpi
        self._comm = comm
        self._server = server
        self._closed_here = False
        if server is not None:
            server.open()
        elif mpi.rank != 0:
            self._tell(_ASK, REQUEST.pack(0, 0, 0.0))

    @classmethod
    def open(cls, deadline: float) -> MPIStore:
        """The store of MPI's world; returns when all processes have called it.

        Raises:
            OperationTimeoutError: they have not by ``deadline`` (``time.monotonic()``).
            BackendUnavailableError: MPI cannot be used in this process.
        """
        global _server
        mpi = runtime()
        comm = mpi.parent(deadline)
        if mpi.rank == 0 and _server is None:
            _server = _Server(mpi, comm)
        return cls(mpi, comm, _server)

    def _run(self, op: Op, fields: Sequence[bytes], seconds: float, name: str) -> Sequence[bytes]:
        if self._closed_here:
            raise self._closed(name)
        if self._server is not None:
            deadline = time.monotonic() + seconds if op in WAITING else None
            try:
                return self._server.apply(op, fields, deadline)
            except NotYet as state:
                raise self._timed_out(state.keys, seconds, name) from None
        return self._ask(op, fields, seconds, name)

    def _ask(self, op: Op, fields: Sequence[bytes], seconds: float, name: str) -> Sequence[bytes]:
        tag = _FIRST_REPLY + next(_tags) % (self._mpi.largest_tag // 2 - _FIRST_REPLY)
        self._tell(_ASK, self._pack(op, fields, seconds, name), tag)
        data = self._await_reply(tag, seconds, name)
        _, status = REPLY.unpack_from(data)
        reply = unpack_fields(memoryview(data)[REPLY.size :])
        if status == Status.TIMEOUT:
            raise self._timed_out(reply, seconds, name)
        if status == Status.ERROR:
            raise DistStoreError(f"{name}: {reply[0].decode(errors='replace')}", op=name)
        return reply

    def _tell(self, kind: int, body: bytes = b"", tag: int = 0) -> None:
        data = _ENVELOPE.pack(kind, tag) + body
        request = self._mpi.call(self._comm.Isend, [data, self._mpi.MPI.BYTE], 0, _REQUESTS)
        self._wait(lambda: bool(request.Test()), time.monotonic() + self._timeout + _SLACK_S, "send")

    def _await_reply(self, tag: int, seconds: float, name: str) -> bytearray:
        found: list[bytearray] = []

        def look() -> bool:
            mpi = self._mpi.MPI
            status = mpi.Status()
            message = self._comm.Improbe(0, tag, status)
            if message is None:
                return False
            data = bytearray(status.Get_count(mpi.BYTE))
            message.Recv([data, mpi.BYTE])
            found.append(data)
            return True

        self._wait(look, time.monotonic() + seconds + _SLACK_S, name)
        return found[0]

    def _wait(self, look: Any, deadline: float, name: str) -> None:
        nap, eager = _SHORTEST_S, time.monotonic() + _EAGER_S
        while not self._mpi.call(look):
            now = time.monotonic()
            if now > deadline:
                raise DistNetworkError(
                    f"{name}: rank 0, which keeps the store over MPI, does not answer", rank=0
                )
            if now > eager:
                time.sleep(nap)
                nap = min(1.3 * nap, _LONGEST_S)

    def clone(self) -> MPIStore:
        """A further handle on the same store, with its own timeout."""
        twin = MPIStore(self._mpi, self._comm, self._server)
        twin._timeout = self._timeout
        return twin

    def close(self) -> None:
        """Closes this handle; rank 0 goes on serving until all processes have closed theirs."""
        if self._closed_here:
            return
        self._closed_here = True
        if self._server is not None:
            self._server.close()
        elif not self._mpi.MPI.Is_finalized():
            self._tell(_GOODBYE)

    def __repr__(self) -> str:
        return f"MPIStore(rank {self._mpi.rank} of {self._mpi.size})"
