"""Limits on the clients of a server whose handshake is not done.

Such clients are limited in number, in time (:data:`HANDSHAKE_SECONDS`), in accepts per second and
in descriptors, so that connections that never authenticate cost little and cannot keep members of
the job out.
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

from unicoll.net.wire.handshake import HANDSHAKE_SECONDS

MAX_UNAUTHENTICATED = 1024
"""Connections without a finished handshake that a server keeps; fewer if the limit of open files is
low."""
SILENT_SECONDS, SLOW_SECONDS = 0.25, 0.5
"""Age at which a client that has sent nothing, or not enough, may be evicted for a new one. A byte
per connection is cheap: with the second one, too, :data:`MAX_UNAUTHENTICATED` places are enough for
all accepts that the rate allows."""
ACCEPTS_PER_SECOND = 2000
"""Accepts per second beyond the first :data:`MAX_UNAUTHENTICATED`; accepts that authenticate do not
count."""

T = TypeVar("T")


class Admission(Generic[T]):
    """The unauthenticated clients of one server, in the order of their arrival."""

    def __init__(self) -> None:
        # All clients, and those that have sent nothing, with the time of their accept. Clients are
        # added with the present time and never move, so the first entry of each dict is the oldest.
        self._accepted: dict[T, float] = {}
        self._silent: dict[T, float] = {}
        # The number of accepts that the rate allows now.
        self._allowance = float(MAX_UNAUTHENTICATED)
        self._allowance_time = time.monotonic()

    def may_accept(self) -> bool:
        """True if the rate allows another accept now."""
        now = time.monotonic()
        more = (now - self._allowance_time) * ACCEPTS_PER_SECOND
        self._allowance = min(MAX_UNAUTHENTICATED, self._allowance + more)
        self._allowance_time = now
        return self._allowance >= 1

    def count_accept(self) -> None:
        """A connection was accepted."""
        self._allowance -= 1

    @property
    def full(self) -> bool:
        """True if there are as many unauthenticated clients as a server keeps."""
        return len(self._accepted) >= max_unauthenticated()

    def add(self, client: T) -> None:
        """A new client, whose handshake begins."""
        self._accepted[client] = self._silent[client] = time.monotonic()

    def received(self, client: T) -> None:
        """The client has sent bytes of its handshake."""
        self._silent.pop(client, None)

    def authenticated(self, client: T) -> None:
        """The client's handshake is done; its accept no longer counts."""
        self.discard(client)
        self._allowance += 1

    def discard(self, client: T) -> None:
        """Forget a client."""
        self._accepted.pop(client, None)
        self._silent.pop(client, None)

    def evictable(self, any_age: bool = False) -> T | None:
        """The client to disconnect in favour of a new one: the oldest that is old enough, or of any
        age."""
        now = time.monotonic()
        # Silent clients come first: a member sends its hello as soon as it is connected. If none of
        # them is old enough, the oldest client has sent something, or is too young as well.
        for clients, seconds in ((self._silent, SILENT_SECONDS), (self._accepted, SLOW_SECONDS)):
            for client, since in clients.items():
                if any_age or since + seconds <= now:
                    return client
                break
        return None

    def expired(self) -> Iterator[T]:
        """The clients whose time for the handshake is over; the caller discards each one."""
        now = time.monotonic()
        while self._accepted:
            client, accepted = next(iter(self._accepted.items()))
            if accepted + HANDSHAKE_SECONDS > now:
                break
            yield client

    def next_expiry(self) -> float | None:
        """When the next client expires (``time.monotonic()``); None without clients."""
        oldest = next(iter(self._accepted.values()), None)
        return None if oldest is None else oldest + HANDSHAKE_SECONDS


def max_unauthenticated() -> int:
    """Unauthenticated connections that a server keeps under the limit of open files."""
    limit = _descriptor_limit()
    return MAX_UNAUTHENTICATED if limit is None else min(MAX_UNAUTHENTICATED, max(16, limit // 8))


def uses_last_descriptors(sock: socket.socket) -> bool:
    """True if few descriptors are left besides this one; the kernel assigns the lowest free
    number."""
    limit = _descriptor_limit()
    return limit is not None and sock.fileno() >= limit - min(64, limit // 8)


def _descriptor_limit() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
