"""Sends and receives of a backend that can only move bytes: connections to the members, and messages without a receive.

A backend whose library connects the ranks or matches messages by itself needs neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from unicoll.arrays.types import DTYPES
from unicoll.backend import failure_diagnosis
from unicoll.backend.call import Call
from unicoll.backend.endpoint import MESSAGES, Endpoint
from unicoll.backend.host_backend import HostBackend
from unicoll.errors import MessageMismatchError, RankLostError
from unicoll.net.channel import Connection

_TICK_S = 0.1
_DTYPE_NAMES = {d.code: d.name for d in DTYPES}

Read = Callable[[int], bytearray]
"""``read(size)`` returns the next ``size`` bytes of a connection; EOFError or OSError when the connection has ended."""


class MemberConnections:
    """TCP connections between the members of a group, each made when one of its two ranks first sends.

    Both ends have proved that they hold the job's key and which rank they are; UNICOLL_CHANNEL protects the data.

    Args:
        backend: of the group.
        receive: called with a member's rank in the group and a function that reads from the connection to that member,
            on a thread for each connection; reads until EOFError or OSError. Another exception fails the group.
    """

    def __init__(self, backend: HostBackend, receive: Callable[[int, Read], None]) -> None:
        self._backend = backend
        self._receive = receive
        context = backend.context
        self._group = f"{context.backend}/{context.name}"
        self._endpoint: Endpoint | None = None
        if context.size > 1:
            self._endpoint = Endpoint.of(context.job)
            self._endpoint.listen(self._group, self._connected)

    def connect(self, call: Call, deadline: float) -> Connection:
        """The connection to the peer of a send; its ``send`` raises TimeoutError if it makes no progress for 0.1 s.

        Raises:
            OperationTimeoutError: the peer has not answered by the deadline.
            RankLostError: it has died, or left the group.
        """
        assert self._endpoint is not None
        context = self._backend.context
        key = self._group, MESSAGES, context.ranks[call.peer]
        try:
            connection = self._endpoint.connect(key, partial(self._backend.check, call, deadline))
        except RankLostError as e:
            raise failure_diagnosis.lost(context, call, call.peer, str(e)) from e
        connection.settimeout(_TICK_S)
        return connection

    def close(self) -> None:
        """Close the connections; what was sent before still arrives."""
        if self._endpoint is not None:
            self._endpoint.close_group(self._group)

    def _connected(self, rank: int, connection: Connection) -> None:
        connection.settimeout(_TICK_S)
        peer = self._backend.context.ranks.index(rank)
        name = f"unicoll-{self._backend.context.name}-from-{peer}"
        threading.Thread(target=self._read, args=(peer, connection), name=name, daemon=True).start()

    def _read(self, peer: int, connection: Connection) -> None:
        try:
            self._receive(peer, partial(_read, connection))
        except (OSError, EOFError):
            pass  # sends and receives notice by HostBackend.check
        except BaseException as e:
            self._backend.thread_failed(e)


def _read(connection: Connection, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        try:
            count = connection.recv_into(rest)
        except TimeoutError:
            continue
        if not count:
            raise EOFError
        rest = rest[count:]
    return data


class _Message(NamedTuple):
    peer: int
    tag: int
    code: int
    data: bytearray


class Inbox:
    """The messages that have arrived at a rank of a group and are not received yet, in the order of their arrival.

    Args:
        backend: of the group.
    """

    def __init__(self, backend: HostBackend) -> None:
        self._backend = backend
        self._arrived = threading.Condition()
        self._messages: list[_Message] = []

    def put(self, peer: int, tag: int, code: int, data: bytearray) -> None:
        """Add a message; called on any thread.

        Args:
            peer: the sender's rank in the group.
            tag: of the send.
            code: of the element type, :attr:`unicoll.arrays.types.DType.code`.
            data: the elements.
        """
        with self._arrived:
            self._messages.append(_Message(peer, tag, code, data))
            self._arrived.notify_all()

    def receive(self, call: Call, deadline: float) -> None:
        """Do a receive: wait for the first message that matches it and copy the message to the array of the call.

        Raises:
            OperationTimeoutError: none has come by the deadline, a value of time.monotonic.
            RankLostError: its sender has died, or left the job.
            MessageMismatchError: it has another size or element type than the array.
        """
        with self._arrived:
            while (found := self._find(call)) is None:
                self._backend.check(call, deadline)
                self._arrived.wait(_TICK_S)
            self._messages.remove(found)
        call.source = found.peer
        buffer = call.outputs[0]
        if (found.code, len(found.data)) != (buffer.dtype.code, buffer.nbytes):
            context = self._backend.context
            raise MessageMismatchError(
                f"{call.describe()}: {context.who(found.peer)} sent {len(found.data)} bytes of"
                f" {_DTYPE_NAMES.get(found.code, '?')}, the array holds {buffer.nbytes} bytes of {buffer.dtype}",
                group=context.name,
                rank=context.ranks[found.peer],
                op=call.op.name,
            )
        assert buffer.flat is not None
        buffer.flat.view(np.uint8)[:] = np.frombuffer(found.data, np.uint8)
        call.write_back()

    def _find(self, call: Call) -> _Message | None:
        for message in self._messages:
            if message.tag == call.tag and call.peer in (message.peer, -1):
                return message
        return None
