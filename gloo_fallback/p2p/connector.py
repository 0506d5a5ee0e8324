"""The sends that wait for a connection to their peer, and the attempts to connect."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from gloo_fallback.p2p.frames import PendingMessage
from unicoll.backend.connections import MESSAGES, Endpoint
from unicoll.errors import RankLostError

if TYPE_CHECKING:
    from gloo_fallback.p2p.engine import P2PEngine

_ATTEMPT_S = 1.0
"""Seconds for which the progress thread waits for a peer that does not answer while sends to others
wait."""
_MAX_ATTEMPT_S = 8.0
"""Maximum of that time while only operations on existing connections are pending; it doubles with
each attempt."""


class _PostponedError(Exception):
    """A peer does not answer, and other sends or messages wait for this thread."""


class Connector:
    """Connects to the peers of sends.

    Args:
        engine: holds the connections.
        endpoint: this process's listener.

    Attributes:
        queue: the sends whose peer has no connection yet, in order.
    """

    def __init__(self, engine: P2PEngine, endpoint: Endpoint) -> None:
        self.queue: deque[PendingMessage] = deque()
        self._engine = engine
        self._endpoint = endpoint
        # The engine's lock is held while the queue changes: the threads of the program add sends to
        # it, and the progress thread takes them out.
        self._lock = engine.lock
        self._attempt_s = _ATTEMPT_S

    def has_queued_send_to(self, peer: int) -> bool:
        """True if a send to a peer is queued."""
        with self._lock:
            return any(pending.call.peer == peer for pending in self.queue)

    def connect(self, pending: PendingMessage, queued: bool = False) -> None:
        """Connect to the peer of a send, which is ``queued`` if other peers' sends may wait for
        this attempt to end.

        Raises:
            RankLostError: the peer has ended.
            OperationTimeoutError: the send's deadline has passed.
            DistError: the group has failed.
        """
        engine, context, peer = self._engine, self._engine.context, pending.call.peer
        rank, started = context.ranks[peer], time.monotonic()

        def check() -> None:
            engine.state.check()
            if time.monotonic() >= pending.deadline:
                raise engine.timeout_error(pending)

        def postpone() -> None:
            seconds = time.monotonic() - started
            # A blocking send connects on the thread of its caller, where no other send waits for
            # it. Queued sends share the progress thread.
            if not queued or seconds < _ATTEMPT_S:
                return
            with self._lock:
                if any(other.call.peer != peer for other in self.queue):
                    raise _PostponedError
                # While the progress thread connects, it runs no progress for the operations on
                # existing connections.
                if seconds >= self._attempt_s and engine.has_connected_operations():
                    self._attempt_s = min(2 * self._attempt_s, _MAX_ATTEMPT_S)
                    raise _PostponedError

        try:
            sock = self._endpoint.connect((context.name, MESSAGES, rank), check, postpone)
        except RankLostError as e:
            raise engine.lost_error(pending.call, rank, str(e)) from e
        # The endpoint puts a new connection into its table first and passes it to add_connection()
        # then. A thread that finds it in the table may be here in between, so it adds the
        # connection itself; the second call does nothing.
        engine.add_connection(rank, sock)

    def connect_next(self) -> bool:
        """Connect to the peer of the first send, and queue the send there; False if that was
        postponed."""
        with self._lock:
            if not self.queue:
                return True
            pending = self.queue[0]
        peer, engine = pending.call.peer, self._engine
        error: BaseException | None = None
        if engine.connection_to(peer) is None:
            try:
                self.connect(pending, queued=True)
                self._attempt_s = _ATTEMPT_S
            except _PostponedError:
                # The sends to other peers come first. The sort is stable, so the sends to each peer
                # keep their order.
                with self._lock:
                    self.queue = deque(sorted(self.queue, key=lambda p: p.call.peer == peer))
                return False
            # The error ends this send alone; an exception that leaves the progress thread would
            # fail the group.
            except BaseException as e:
                error = e
        with self._lock:
            if not self.queue or self.queue[0] is not pending:
                # The lock was not held during the attempt: the send has been aborted or has timed
                # out meanwhile.
                return True
            connection = engine.connection_to(peer)
            if error is not None:
                self.queue.popleft()
                engine.finish(pending, error)
            # If the connection has ended since, the send stays in the queue and the next round
            # connects again.
            elif connection is not None:
                self.queue.popleft()
                engine.change(connection.sender.enqueue, pending)
        engine.report_completed()
        return True
