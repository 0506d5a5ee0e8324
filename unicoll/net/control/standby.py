"""The relay and the store that replace those of rank 0 when its process has ended before others.

Every process has a listening socket, and all ranks exchange the addresses when they join. No
process accepts connections there at first. When the process that hosts the relay ends, the lowest
remaining rank serves a relay on its listening socket, and a store if the job's store has ended,
too; the other ranks connect to it. The same happens when that process ends.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from unicoll.net.control.relay import Departure, PeerInfo, Relay, Takeover
from unicoll.net.wire.authenticated_server import listen
from unicoll.net.wire.interfaces import in_zone_of
from unicoll.net.wire.secret import Secret
from unicoll.process.fork_safety import guard

if TYPE_CHECKING:
    from unicoll.net.stores import Store
    from unicoll.net.stores.tcp import TCPStore

_STORE_TIMEOUT = timedelta(seconds=30)


class Standby:
    """This process's listening socket, and the relay and stores that it serves or uses in place of
    rank 0's.

    Args:
        store_ends_with_rank_0: True if the job's store may end with rank 0's process.
        host_timeout: that of :class:`Relay`.

    Attributes:
        port: of the listening socket; 0 before :meth:`listen`.
        store: the store that replaces the job's store, or None.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        key: bytes,
        host: str,
        store_ends_with_rank_0: bool,
        host_timeout: float | None = None,
    ) -> None:
        self.store: Store | None = None
        self._rank, self._size, self._key, self._host = rank, size, key, host
        self._host_timeout = host_timeout
        self._store_ends_with_rank_0 = store_ends_with_rank_0
        self._listener: socket.socket | None = None
        self.port = 0
        self._relay: Relay | None = None
        self._served: TCPStore | None = None
        self._used: TCPStore | None = None

    def listen(self) -> None:
        """Open the listening socket: the kernel accepts connections there as long as this process
        is alive."""
        self._listener = guard(listen(self._host))
        self.port = int(self._listener.getsockname()[1])

    def serve(
        self, departures: list[Departure], expected: Mapping[int, PeerInfo], how: str | None
    ) -> None:
        """Host the relay for the ``expected`` ranks, and a store if the job's has ended; no effect
        if repeated.

        ``how`` is that of :class:`Takeover`.
        """
        from unicoll.net.stores.tcp import TCPStore

        # The relay owns the socket from now on, and a repeated call finds none.
        listener, self._listener = self._listener, None
        if listener is None:
            return
        address = None
        # The store comes before the relay, which sends its address to each rank that connects.
        if self._store_ends_with_rank_0:
            secret = Secret(self._key, "the job")
            self._served = TCPStore(
                self._host, 0, None, True, _STORE_TIMEOUT, False, secret=secret, bind=self._host
            )
            address = self._host, self._served.port
        takeover = Takeover(listener, address, departures, dict(expected), how)
        self._relay = Relay(
            self._size, self._key, self._host, self._rank, takeover, self._host_timeout
        )

    def use_store(self, address: tuple[str, int], timeout: timedelta) -> None:
        """Use the store that the relay's process serves.

        Raises:
            DistNetworkError: the store cannot be reached.
        """
        from unicoll.net.stores import PrefixStore
        from unicoll.net.stores.signed import SignedStore
        from unicoll.net.stores.tcp import TCPStore

        # The store of the last relay has ended with its process.
        used, self._used = self._used, None
        if used is not None:
            used.close()
        host, port = in_zone_of(self._host, address[0]), address[1]
        secret = Secret(self._key, "the job")
        # This is the control thread, which detects lost ranks. It must not retry here for a process
        # that has ended in the meantime.
        self._used = TCPStore(
            host, port, None, False, _STORE_TIMEOUT, False, secret=secret, retry=False
        )
        self._used.set_timeout(timeout)
        self.store = SignedStore(PrefixStore("unicoll", self._used), self._key)

    def close(self) -> None:
        """Close the listening socket, the relay and the stores; idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        # Any thread may close this and be interrupted. The attributes stay, so a repeated close
        # begins again.
        for owned in (self._used, self._relay, self._served):
            if owned is not None:
                owned.close()
