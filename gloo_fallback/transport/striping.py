"""Large messages over several connections to a peer at the same time: of several interfaces, or of
one.

The connections of a pair of ranks are as many as the interfaces that both listen on
(``UNICOLL_SOCKET_IFNAME``), or as ``UNICOLL_SOCKET_CONNECTIONS`` if that is more on both. A message
of :data:`STRIPED` bytes and more is cut into equal parts, one for each connection. Both sides know
its size, so they need no headers. Messages of compressed data are shorter, and cut from
:data:`STRIPED_COMPRESSED` bytes on.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import NamedTuple

from unicoll.net.wire.channel import Connection

STRIPED = 1 << 17
"""Bytes from which a message is cut: more than the exchange at the beginning of a collective
sends."""
STRIPED_COMPRESSED = 1 << 15
_SYSCALL_BYTES = 1 << 18
_TICK_MS = 100
_DONTWAIT = socket.MSG_DONTWAIT


class Stripe(NamedTuple):
    """A part of a message, and the connection that it takes to (``sends``) or from a peer."""

    sock: Connection
    peer: int
    view: memoryview
    sends: bool


def stripes(sockets: list[Connection], peer: int, view: memoryview, sends: bool) -> list[Stripe]:
    """The equal parts of a message, one for each connection."""
    bounds = [len(view) * i // len(sockets) for i in range(len(sockets) + 1)]
    return [
        Stripe(sock, peer, view[bounds[i] : bounds[i + 1]], sends) for i, sock in enumerate(sockets)
    ]


def transfer(
    parts: list[Stripe],
    tick: Callable[[], None],
    progressed: Callable[[], None],
    broken: Callable[[int, Exception | None], None],
) -> None:
    """Send and receive the parts of messages concurrently.

    Args:
        parts: to and from any peers, one for each connection and direction.
        tick: called every 0.1 s without progress; raises to stop.
        progressed: called while parts move; raises to stop.
        broken: called with a peer and the error of its connection, None at its end; raises.
    """
    left = list(parts)
    while left:
        # The deadline is checked here while parts move, and in the wait while none does: on a slow
        # link the wait may never last for a whole tick.
        if advance(left, broken):
            progressed()
        else:
            _wait(left, tick)


def advance(left: list[Stripe], broken: Callable[[int, Exception | None], None]) -> bool:
    """Send and receive what is possible without waiting, and drop it from ``left``; True if that is
    anything."""
    moved = False
    # The loop begins at the end, so that a part can be deleted within it. Each part moves a limited
    # number of bytes at a time, so all connections are served in turn.
    for i in range(len(left) - 1, -1, -1):
        sock, peer, view, sends = left[i]
        part = view[:_SYSCALL_BYTES]
        try:
            count = sock.send(part, _DONTWAIT) if sends else sock.recv_into(part, 0, _DONTWAIT)
        except BlockingIOError:
            continue
        except OSError as e:
            broken(peer, e)
        # A receive of no bytes is the end of the connection; parts are never empty.
        if not count:
            broken(peer, None)
        moved = True
        if count == len(view):
            del left[i]
        else:
            left[i] = Stripe(sock, peer, view[count:], sends)
    return moved


def _wait(parts: list[Stripe], tick: Callable[[], None]) -> None:
    """Wait until one of the connections is ready."""
    # A connection to a peer that both sends and receives is here twice. Its events are joined,
    # because registering it a second time would replace those of the first.
    events: dict[Connection, int] = {}
    for sock, _, _, sends in parts:
        events[sock] = events.get(sock, 0) | (select.POLLOUT if sends else select.POLLIN)
    poller = select.poll()
    for sock, mask in events.items():
        poller.register(sock, mask)
    if not poller.poll(_TICK_MS):
        tick()
