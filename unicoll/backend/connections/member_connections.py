"""TCP connections between the members of a group, for backends whose library does not connect the
ranks by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from unicoll.backend import operation_errors
from unicoll.backend.connections.endpoint import MESSAGES, Endpoint
from unicoll.backend.host.host_backend import HostBackend
from unicoll.calls.call import Call
from unicoll.errors import RankLostError
from unicoll.net.wire.channel import Connection
from unicoll.net.wire.records import TamperedError

_TICK_S = 0.1

Read = Callable[[int], bytearray]
"""``read(size)`` returns the next ``size`` bytes of a connection; EOFError or OSError when the
connection has ended."""


class MemberConnections:
    """TCP connections between the members of a group, each made when one of its two ranks first
    sends.

    Both ends are authenticated: they have proved the job's key and their ranks. UNICOLL_CHANNEL
    protects the data.

    Args:
        backend: of the group.
        receive: called with a member's rank in the group and a function that reads from the
            connection to that member, on a thread for each connection; reads until EOFError or
            OSError. Another exception, and data that fails the integrity check, fail the group.
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
        """The connection to the peer of a send; its ``send`` raises TimeoutError if it makes no
        progress for 0.1 s.

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
            raise operation_errors.rank_lost_error(context, call, call.peer, str(e)) from e
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
        except TamperedError as e:
            context = self._backend.context
            error = operation_errors.tampered_error(context, context.ranks[peer], e)
            self._backend.abort(operation_errors.announce(context, error))
        except (OSError, EOFError):
            # Sends and receives that need this member find its end by HostBackend.check().
            pass
        except BaseException as e:
            self._backend.thread_failed(e)


def _read(connection: Connection, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        try:
            count = connection.recv_into(rest)
        # The timeout of 0.1 s is for sends, and a socket has one for both directions. A receive
        # lasts until data comes or the connection ends.
        except TimeoutError:
            continue
        if not count:
            raise EOFError
        rest = rest[count:]
    return data
