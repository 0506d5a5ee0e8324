"""Point-to-point messages of a group: matched by (peer, tag) in order, with queues of unexpected messages.

The sender makes the connection. A thread that waits runs progress: it reads from all of the group's message
connections, so two ranks that send to each other before either receives do not deadlock, however large the messages.
Progress of asynchronous operations that no thread waits for runs on a thread that sleeps in ``epoll``.

A blocking receive first polls its sender's connection a few times (not if ranks outnumber cores), then sleeps on all
of them. A small blocking send is one system call.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable

from gloo_fallback.p2p.connection import PeerConnection
from gloo_fallback.p2p.errors import lost, message_mismatch, tampered, timed_out
from gloo_fallback.p2p.frames import IncomingMessage, PendingMessage
from gloo_fallback.p2p.matcher import MessageMatcher
from gloo_fallback.p2p.progress import ProgressEngine
from gloo_fallback.shm.ring_buffer import SHARED_THRESHOLD
from gloo_fallback.transport.topology import TransportPreference, transport_preference
from unicoll.backend import Call, Context, failure_diagnosis
from unicoll.backend.endpoint import MESSAGES, Endpoint
from unicoll.backend.work import HostCompletion
from unicoll.errors import DistError, DistNetworkError, RankLostError
from unicoll.net.channel import Connection
from unicoll.net.control.wait_graph import LinkState
from unicoll.net.records import TamperedError

_BUFFER_BYTES = 1 << 16
_MAX_RECEIVES = 16
"""Reads from one connection before the others are read."""
_ATTEMPT_S = 1.0
"""Seconds for which the progress thread waits for a peer that does not answer while sends to others wait."""


class _PostponedError(Exception):
    """A peer does not answer, and sends wait for connections to other peers."""


class P2PEngine:
    """One group's point-to-point traffic.

    Args:
        context: the group.
        endpoint: this process's listener.
        spins: polls of a connection before sleeping; 0 if ranks outnumber cores.
        died: called on the progress thread with the exception that ended it; fails the group.

    Attributes:
        context, died: as above.
    """

    def __init__(
        self, context: Context, endpoint: Endpoint, spins: int, died: Callable[[BaseException], object]
    ) -> None:
        self.context = context
        self.died = died
        self._endpoint = endpoint
        self._spins = spins
        self._share = transport_preference() is not TransportPreference.TCP
        self._lock = threading.RLock()
        self._connections: list[PeerConnection | None] = [None] * context.size
        self._open: dict[int, PeerConnection] = {}  # by descriptor
        self._matcher = MessageMatcher(context.size)
        self._to_connect: deque[PendingMessage] = deque()
        # ended operations and their errors, reported once the lock is released
        self._ended: deque[tuple[PendingMessage, BaseException | None]] = deque()
        # dropped connections: the peer, the operations that needed the connection, the error
        self._dropped: deque[tuple[int, list[PendingMessage], Exception | None]] = deque()
        self._error: DistError | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._progress = ProgressEngine(self, spins)
        self._closed = False
        endpoint.listen(context.name, self._add_connection)

    # --- the operations ---------------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Send or receive, and return when the array may be used again."""
        if call.inputs and self._send_at_once(call):
            return
        pending = PendingMessage(call, None)
        try:
            self._accept(pending)
            if not pending.completion.done():
                if self._to_connect:
                    self._progress.wake_thread()
                self._progress.until_done(pending)
        except BaseException:
            if not pending.completion.done():  # interrupted: no thread waits for it any more
                self._withdraw(pending)
            raise
        pending.completion.wait(None)

    def post(self, call: Call) -> HostCompletion:
        """Send or receive in the background."""
        if call.inputs and self._send_at_once(call):
            completion = HostCompletion((call,))
            completion.finish()
            return completion
        pending = PendingMessage(call, self._progress.until_done)
        try:
            self._accept(pending)
        except BaseException:
            if not pending.completion.done():  # the caller has no completion to wait for
                self._withdraw(pending)
            raise
        if not pending.completion.done():
            self._progress.wake_thread()
        return pending.completion

    def _send_at_once(self, call: Call) -> bool:
        """Send a small message in one system call; False if it was not sent, because another is queued before it."""
        connection = self._connections[call.peer]
        if connection is None or self._error is not None:
            return False
        with self._lock:
            if (
                (self._to_connect and self._awaits_connection(call.peer))
                or connection.closed
                or not connection.try_send(call)
            ):
                return False
        if connection.blocked:
            self._progress.wake_thread()
        return True

    def _accept(self, pending: PendingMessage) -> None:
        if self._error is not None:
            raise self._error
        call = pending.call
        sends_now = bool(call.inputs) and not pending.background
        if sends_now and self._connections[call.peer] is None and not self._awaits_connection(call.peer):
            self._connect(pending)
        with self._lock:
            if self._error is not None:
                raise self._error
            if not call.inputs:
                message = self._matcher.post_receive(pending)
                if message is not None:
                    self._match_unexpected(pending, message)
            else:
                self._queue(pending)
        self.report_completed()

    def _awaits_connection(self, peer: int) -> bool:
        with self._lock:
            return any(pending.call.peer == peer for pending in self._to_connect)

    def _queue(self, pending: PendingMessage) -> None:
        """Queue a send behind earlier ones, also those that wait for the connection."""
        connection = self._connections[pending.call.peer]
        if connection is not None and connection.awaits_answer and len(pending.view) >= SHARED_THRESHOLD:
            self._receive_available(connection)  # the answer may be there
        if connection is None or connection.closed or self._awaits_connection(pending.call.peer):
            self._to_connect.append(pending)
            self._progress.wake()  # the thread that connects may sleep until data arrives
            return
        connection.outbox.append(pending)
        if len(connection.outbox) == 1:
            connection.flush()

    def _match_unexpected(self, pending: PendingMessage, message: IncomingMessage) -> None:
        """Match a new receive with an unexpected message, which may be incomplete."""
        if not message.fits(pending):
            message.mismatched = pending
        else:
            message.redirect_to(pending)
        if message.got == message.size:
            self.complete(pending.call.source, message)

    # --- for ProgressEngine -------------------------------------------------------------------------------------------

    def pending(self) -> bool:
        """True if any operation is pending."""
        if self._matcher.posted or self._to_connect:
            return True
        return any(connection.busy for connection in self._open.copy().values())

    def spin(self, pending: PendingMessage) -> bool:
        """Poll the connection of an operation a few times; True if data arrived."""
        peer = pending.call.peer
        connection = self._connections[peer] if peer >= 0 else None
        if connection is None:
            return False
        lock, receive, buffer = self._lock, connection.receive, self._buffer
        for _ in range(self._spins):
            with lock:
                if connection.closed:
                    return True
                try:
                    receive(buffer)
                except BlockingIOError:
                    continue
                except (OSError, EOFError) as error:
                    self._drop_connection(peer, error)
            return True
        return False

    def serve(self, descriptor: int, event: int) -> None:
        """Handle an epoll event of a connection."""
        with self._lock:
            connection = self._open.get(descriptor)
            if connection is None:
                return
            if event & select.EPOLLOUT:
                connection.flush()
            if event & ~select.EPOLLOUT:
                for _ in range(_MAX_RECEIVES):
                    if (
                        not self._receive_available(connection)
                        or connection.message is None
                        or connection.closed
                    ):
                        break

    def _receive_available(self, connection: PeerConnection) -> bool:
        """Receive the data that has arrived from a peer; False if there is none."""
        try:
            connection.receive(self._buffer)
        except BlockingIOError:
            return False
        except (OSError, EOFError) as error:
            self._drop_connection(connection.peer, error)
        return True

    def check_deadlines(self, now: float) -> None:
        """Check deadlines and lost ranks; called every 0.1 s."""
        control = self.context.job.control
        departed = control.departed if control is not None else {}
        died = failure_diagnosis.died(self.context)
        with self._lock:
            operations = [*self._matcher.posted, *(p for c in self._open.values() for p in c.outbox)]
            operations += [p for p in map(_receiver, self._open.values()) if p is not None]
        for pending in operations:
            peer = pending.call.peer
            if peer >= 0:
                rank = self.context.ranks[peer]
                if rank in departed and self._connections[peer] is None:
                    self._end(pending, lost(self.context, pending.call, rank, departed[rank]))
            elif died is not None and pending.call.source < 0:
                self._end(pending, lost(self.context, pending.call, died, departed[died]))
            if now >= pending.deadline and not pending.completion.done():
                self._time_out(pending)

    # --- connections ----------------------------------------------------------------------------------------------

    def _add_connection(self, global_rank: int, sock: Connection) -> None:
        peer = self.context.ranks.index(global_rank)
        with self._lock:
            # another thread may have dropped the connection, and closed its socket, since it arrived
            if self._closed or self._connections[peer] is not None or sock.fileno() < 0:
                return
            connection = self._connections[peer] = PeerConnection(
                self, peer, sock, self._progress.poll, self._share
            )
            self._open[connection.descriptor] = connection

    def _connect(self, pending: PendingMessage, queued: bool = False) -> None:
        """Connect to the peer of a send, which is ``queued`` if other peers' sends may wait for this attempt to end."""
        peer = pending.call.peer
        rank, started = self.context.ranks[peer], time.monotonic()

        def check() -> None:
            now = time.monotonic()
            if self._error is not None:
                raise self._error
            if now >= pending.deadline:
                raise timed_out(self.context, pending, begun=False)
            if queued and now - started >= _ATTEMPT_S:
                with self._lock:
                    if any(other.call.peer != peer for other in self._to_connect):
                        raise _PostponedError

        try:
            sock = self._endpoint.connect((self.context.name, MESSAGES, rank), check)
        except RankLostError as e:
            raise lost(self.context, pending.call, rank, str(e)) from e
        self._add_connection(rank, sock)

    def connect_pending(self) -> None:
        """Make the connections that sends wait for; on the progress thread, because it may take long."""
        while self._to_connect:
            self._connect_next()

    def _connect_next(self) -> None:
        with self._lock:
            if not self._to_connect:
                return
            pending = self._to_connect[0]
        error: BaseException | None = None
        if self._connections[pending.call.peer] is None:
            try:
                self._connect(pending, queued=True)
            except _PostponedError:
                with self._lock:  # those to other peers first
                    peer = pending.call.peer
                    self._to_connect = deque(sorted(self._to_connect, key=lambda p: p.call.peer == peer))
                return
            except BaseException as e:
                error = e
        with self._lock:
            if not self._to_connect or self._to_connect[0] is not pending:
                return  # aborted meanwhile
            connection = self._connections[pending.call.peer]
            if error is not None:
                self._to_connect.popleft()
                self._ended.append((pending, error))
            elif connection is not None:
                self._to_connect.popleft()
                connection.outbox.append(pending)
                if len(connection.outbox) == 1:
                    connection.flush()
        self.report_completed()

    # --- callbacks of connections (under the lock) ------------------------------------------------------------------

    def deliver(self, peer: int, tag: int, code: int, body: memoryview) -> bool:
        """Copy a whole message into the posted receive that it matches and fits; False if there is none."""
        pending = self._matcher.find_receive(peer, tag)
        if pending is None or len(pending.view) != len(body) or pending.call.outputs[0].dtype.code != code:
            return False
        self._matcher.match(pending, peer)
        pending.view[:] = body
        pending.call.write_back()
        self.finish(pending)
        return True

    def begin(self, peer: int, message: IncomingMessage) -> None:
        """Match a message whose header has arrived, or queue it as unexpected."""
        pending = self._matcher.find_receive(peer, message.tag)
        if pending is not None and message.fits(pending):
            self._matcher.match(pending, peer)
            message.receive = pending
            message.view = pending.view
            return
        message.allocate()  # if it fails, the receive is still posted, and fails with the connection
        if pending is not None:
            self._matcher.match(pending, peer)
            message.mismatched = pending
        else:
            self._matcher.add_unexpected(peer, message)

    def complete(self, peer: int, message: IncomingMessage) -> None:
        """Finish the receive of a complete message, if there is one yet."""
        if message.receive is not None:
            message.receive.call.write_back()
            self.finish(message.receive)
        elif message.mismatched is not None:
            self.finish(message.mismatched, message_mismatch(self.context, message.mismatched.call, message))

    # --- ends -----------------------------------------------------------------------------------------------------

    def finish(self, pending: PendingMessage, error: BaseException | None = None) -> None:
        """Finish a send whose data has left, or a receive."""
        if pending.background:
            self._ended.append((pending, error))  # its callbacks must run without the lock
        else:
            pending.completion.finish(error)

    def report_completed(self) -> None:
        """Finish the completions of ended operations; called without the lock."""
        while self._ended or self._dropped:
            try:
                while self._ended:
                    pending, error = self._ended.popleft()
                    pending.completion.finish(error)
                peer, operations, why = self._dropped.popleft()
            except IndexError:  # another thread was faster
                return
            self._fail_operations(peer, operations, why)

    def _drop_connection(self, peer: int, error: Exception | None = None) -> None:
        """Close the connection to a peer; the operations that need it fail."""
        connection = self._connections[peer]
        if connection is None:
            return
        self._connections[peer] = None
        del self._open[connection.descriptor]
        connection.close()
        self._endpoint.forget((self.context.name, MESSAGES, self.context.ranks[peer]))
        operations = [*connection.outbox, *self._matcher.cancel_all(peer)]
        receiver = _receiver(connection)
        if receiver is not None:
            operations.append(receiver)
        if connection.message is not None:
            self._matcher.discard(peer, connection.message)
        if operations:
            self._dropped.append((peer, operations, error))

    def _fail_operations(self, peer: int, operations: list[PendingMessage], error: Exception | None) -> None:
        """Finish the operations of a dropped connection with the reason."""
        operations = [pending for pending in operations if not pending.completion.done()]
        if not operations:
            return
        rank = self.context.ranks[peer]
        if isinstance(error, TamperedError):
            for pending in operations:
                pending.completion.finish(self._error or tampered(self.context, pending.call, rank, error))
            return
        control = self.context.job.control
        why = f"{self.context.who(peer)} closed its connection"
        if control is not None and self._error is None:
            lost_rank = control.find_lost_rank(rank, self.context.ranks, 0.5)
            if lost_rank is not None:
                rank, why = lost_rank, control.departed[lost_rank]
        for pending in operations:
            pending.completion.finish(self._error or lost(self.context, pending.call, rank, why))

    def _end(self, pending: PendingMessage, error: BaseException) -> None:
        with self._lock:
            self._matcher.cancel(pending)
        pending.completion.finish(error)

    def _time_out(self, pending: PendingMessage) -> None:
        begun = self._withdraw(pending)
        pending.completion.finish(timed_out(self.context, pending, begun))

    def _withdraw(self, pending: PendingMessage) -> bool:
        """Cancel a send or receive; True if part of its data had moved, so that its connection was closed."""
        with self._lock:
            for connection in self._open.values():
                begun = pending.begun and pending in connection.outbox
                if begun or _receiver(connection) is pending:  # the rest of the stream would be unreadable
                    self._drop_connection(connection.peer)
                    return True
            self._matcher.cancel(pending)
            for queue in (self._to_connect, *(connection.outbox for connection in self._open.values())):
                if pending in queue:
                    queue.remove(pending)
            return False

    def abort(self, error: DistError) -> None:
        """Make all pending and all later operations raise ``error``."""
        with self._lock:
            self._error = self._error or error
            for pending in (*self._matcher.cancel_all(), *self._to_connect):
                self._ended.append((pending, self._error))
            self._to_connect.clear()
            for peer in range(len(self._connections)):
                self._drop_connection(peer)
        self.report_completed()
        self._progress.wake()

    # --- for the search of deadlocks (MessageQueues) ----------------------------------------------------------------

    def awaits_peer(self, call: Call) -> bool:
        """True for a receive of which nothing has come, and for a queued send that needs the receiver to read."""
        with self._lock:
            queues = [c.outbox for c in self._open.values() if c.unsent > 0]
            return any(pending.call is call for queue in (self._matcher.posted, *queues) for pending in queue)

    def link(self, peer: int) -> LinkState:
        """The state of the messages to and from a member."""
        with self._lock:
            connection, dials = self._connections[peer], self._awaits_connection(peer)
            if connection is None or connection.closed:
                return LinkState(delivered=not dials)
            delivered = connection.delivered and not dials
            takes = -1 if self._progress.active or self.pending() else connection.takes
            return LinkState(1, 1, delivered, connection.all_read, connection.unsent, takes)

    @property
    def has_callbacks(self) -> bool:
        """True if callbacks are attached to messages in flight."""
        with self._lock:
            pending = [*self._matcher.posted, *self._to_connect]
            pending += [p for c in self._open.values() for p in (*c.outbox, _receiver(c)) if p is not None]
            return any(p.completion.has_callbacks for p in pending)

    def close(self, timeout: float) -> bool:
        """Finish pending sends within ``timeout`` seconds and release everything; True if all were sent."""
        deadline = time.monotonic() + timeout
        while (unsent := self._unsent()) and time.monotonic() < deadline:
            time.sleep(0.005)
        with self._lock:
            self._closed = True  # a connection that arrives from now on would not be ended
        self.abort(DistNetworkError(f"group {self.context.name!r} was closed", group=self.context.name))
        self._progress.close()
        return not unsent

    def _unsent(self) -> bool:
        with self._lock:
            return any(connection.has_unsent for connection in self._open.values())


def _receiver(connection: PeerConnection) -> PendingMessage | None:
    """The receive of the incomplete message of a connection, or None."""
    message = connection.message
    return None if message is None else message.receive or message.mismatched
