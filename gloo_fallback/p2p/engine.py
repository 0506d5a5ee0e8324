"""Point-to-point messages of a group: matched by (peer, tag) in order, with queues of unexpected
messages.

The sender makes the connection. A thread that waits runs progress: it reads from all of the group's
message connections, so two ranks that send to each other before either receives do not deadlock,
however large the messages. Progress of asynchronous operations that no thread waits for runs on a
thread that sleeps in ``epoll``.

A blocking receive first polls its sender's ring or socket for a short time (the socket not if ranks
outnumber cores), then sleeps on all connections. A small blocking send is one write to the ring, or
one system call.

An exception of a signal's handler may end the thread's work at any point. So ``unsure`` is set
before a connection, or what matches its messages, changes, and cleared once they are right again.
Whoever finds it set leaves all as it is. The interrupted thread, which has released the lock by
then, fails the group, else :meth:`P2PEngine.check_deadlines`. Only a receive that is interrupted
while nothing changes, and of which nothing has come, is taken back.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

from gloo_fallback.p2p.connection import PeerConnection
from gloo_fallback.p2p.connector import Connector
from gloo_fallback.p2p.frames import IncomingMessage, PendingMessage
from gloo_fallback.p2p.progress import ProgressEngine
from gloo_fallback.shm.ring_buffer import RingReader
from gloo_fallback.transport.topology import TransportPreference, transport_preference
from unicoll.backend import Call, operation_errors
from unicoll.backend.connections import MESSAGES, Endpoint
from unicoll.backend.group_state import GroupState
from unicoll.backend.host import MessageMatcher
from unicoll.calls.callback_thread import CallbackThread
from unicoll.calls.error_marks import leaves_doubt, mark_unchanged
from unicoll.calls.ops import PROBE
from unicoll.calls.work import HostCompletion
from unicoll.errors import DistError, OperationTimeoutError, RankLostError
from unicoll.net.control.wait_graph import MessageState
from unicoll.net.wire.channel import Connection
from unicoll.net.wire.records import TamperedError
from unicoll.process.interrupts import raised_by_handler

_BUFFER_BYTES = 1 << 16
_MAX_RECEIVES = 16
"""Reads from one connection before the others are read."""
_MOST_POLLED = 32
"""With more connections than this, a receive from any source sleeps on all of them without polling
their rings."""


class P2PEngine:
    """One group's point-to-point traffic.

    Args:
        state: of the group.
        endpoint: this process's listener.
        spins: polls of a connection before sleeping; 0 if ranks outnumber cores.
        died: called on the progress thread with the exception that ended it; fails the group.

    Attributes:
        state, died: as above.
        context: the group.
        lock: held while connections, queues or messages change.
        open: the connections, by descriptor.
        buffer: received data without a known destination.
        unsure: True while a thread that holds the lock changes connections; else a change was
            interrupted.
    """

    def __init__(
        self,
        state: GroupState,
        endpoint: Endpoint,
        spins: int,
        died: Callable[[BaseException], object],
    ) -> None:
        self.state = state
        self.context = context = state.context
        self.died = died
        self._endpoint = endpoint
        self._share = transport_preference() is not TransportPreference.TCP
        # It is reentrant: functions that hold it call others that take it, and a finalizer or a
        # signal's handler may make a call on the thread that holds it.
        self.lock = threading.RLock()
        self._connections: list[PeerConnection | None] = [None] * context.size
        self.open: dict[int, PeerConnection] = {}
        self.unsure = False
        # The set has all operations that have not ended, for abort(): an interrupt may have kept
        # one out of the queues or removed it from them.
        self._in_flight: set[PendingMessage] = set()
        self._matcher: MessageMatcher[PendingMessage, IncomingMessage] = MessageMatcher(
            context.size
        )
        self._connector = Connector(self, endpoint)
        # Operations that the group's failure has ended wait here, with its error, for
        # report_completed().
        self._ended: deque[tuple[PendingMessage, BaseException | None]] = deque()
        # Dropped connections wait here: the peer, the operations that needed the connection, and
        # the error. The search for the reason takes up to half a second, so report_completed()
        # makes it without the lock.
        self._dropped: deque[tuple[int, list[PendingMessage], Exception | None]] = deque()
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._progress = ProgressEngine(self, spins)
        self._callbacks = CallbackThread("unicoll-callbacks")
        self._closed = False
        # The next receive from any source polls the connection at this place first.
        self._turn = 0
        # This is the last line because it adds the connections that have come already.
        endpoint.listen(context.name, self.add_connection)

    # --- the operations ---------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Send, receive or probe, and return when the array may be used again."""
        if self._send_at_once(call) if call.inputs else self._receive_at_once(call):
            return
        # A finalizer or a signal's handler may make this call while its thread runs progress for
        # another one. The lock of progress is then not given back here.
        owner = self._progress.owner
        pending = None
        try:
            # The name `pending` is set behind _accept(): if that raises an error of the library, it
            # has cancelled the message itself, and an interrupt in it leaves an unknown state.
            posted = PendingMessage(call, None)
            self._accept(posted)
            pending = posted
            if not pending.completion.done():
                # Only the progress thread connects for queued sends.
                if self._connector.queue:
                    self._progress.wake_thread()
                self._progress.until_done(pending)
        except BaseException as e:
            self._progress.give_back(owner == get_ident())
            if pending is not None and not pending.completion.done():
                if not leaves_doubt(e):
                    self._cancel(pending)
                # A receive of which nothing has come is as if it had not been made, so its
                # interrupt does not fail the group.
                elif self._take_back(pending):
                    mark_unchanged(e)
            raise
        # The message has ended, so this only raises its error.
        pending.completion.wait(None)

    def _cancel(self, pending: PendingMessage) -> None:
        """Cancel a message that an error of the library has ended."""
        self._withdraw(pending)
        self._in_flight.discard(pending)
        # A message that was cut has ended its connection, and with that other operations.
        self.report_completed()

    def _take_back(self, pending: PendingMessage) -> bool:
        """Cancel an interrupted receive or probe; False if it may have changed something."""
        with self.lock:
            # A send may have left in part. A receive that is not posted any more has been matched,
            # and data of the message may be in its array.
            if self.unsure or pending.call.inputs or pending not in self._matcher.posted:
                return False
            self._matcher.cancel(pending)
            self._in_flight.discard(pending)
        return True

    def fail(self, cause: BaseException) -> None:
        """Fail the group because an interrupt has left the connections in an unknown state."""
        error = operation_errors.member_failed_error(self.context, "sending or receiving in", cause)
        self.state.announce(error)

    def post(self, call: Call) -> HostCompletion:
        """Send or receive in the background."""
        if call.inputs and self._send_at_once(call):
            completion = HostCompletion((call,))
            completion.finish()
            return completion
        pending = PendingMessage(call, self._progress.until_done)
        # The thread that ends the message may be the program's, in a wait for another one; an
        # interrupt there must not lose callbacks.
        pending.completion.callback_thread = self._callbacks
        self._accept(pending)
        # Maybe no thread ever waits for this message, so the progress thread has to run.
        if not pending.completion.done():
            self._progress.wake_thread()
        return pending.completion

    def iprobe(self, call: Call) -> bool:
        """True if a message that a probe matches has come; ``call`` is the probe."""
        pending = PendingMessage(call, None)
        with self.lock:
            self.state.check()
            if self._matcher.post_probe(pending):
                return True
        # The probe stays posted while this thread reads what has come. If another thread runs
        # progress, that one reads.
        before = self._progress.owner == get_ident()
        try:
            if not before and self._progress.try_acquire():
                self._progress.receive_available()
        finally:
            with self.lock:
                self._matcher.cancel(pending)
            self._progress.give_back(before)
        return pending.completion.done()

    def _send_at_once(self, call: Call) -> bool:
        """Send a small message in one system call; False if it was not sent, because another is
        queued before it."""
        connection = self._connections[call.peer]
        # These are read without the lock. What has changed meanwhile is seen below, where the lock
        # is held.
        if connection is None or self.state.error is not None:
            return False
        with self.lock:
            if self._connector.queue and self._connector.has_queued_send_to(call.peer):
                return False
            if connection.sender.awaits_answer:
                # The peer's answer to the offer of a ring may have come; until it is read, messages
                # use the socket.
                self._receive_available(connection)
            if self.unsure:
                return False
            self.unsure = True
            sent = not connection.closed and connection.sender.try_send(call)
            self.unsure = False
        if self._ended or self._dropped:
            self.report_completed()
        # The socket has not taken all of the message. The rest leaves only if some thread runs
        # progress.
        if connection.sender.blocked:
            self._progress.wake_thread()
        return sent

    def _receive_at_once(self, call: Call) -> bool:
        """Receive a small message that is next in a sender's ring, if no other receive waits; False
        if none is."""
        # An earlier receive gets the next message first, and an unexpected message is older than
        # those in the ring.
        if call.op is PROBE or not self._matcher.empty(call.peer):
            return False
        rings = self._rings(call.peer)
        # Another thread runs progress, or this one does so in an outer call (see until_done).
        if not rings or self._progress.owner:
            return False
        taken = False
        try:
            # The poll tells the senders to send no notices. A thread that sleeps in epoll would
            # then not be woken, so only the thread that runs progress may poll.
            if not self._progress.try_acquire():
                return False
            sender = self._progress.poll_rings(rings)
            if sender is not None:
                with self.lock:
                    # The rings were polled without the lock. Since then another thread may have
                    # posted a receive or dropped the connection, or the group may have failed.
                    if (
                        not (sender.closed or self.unsure)
                        and self._matcher.empty(call.peer)
                        and self.state.error is None
                    ):
                        self.unsure = True
                        try:
                            taken = sender.receiver.take(call)
                        except OSError as error:
                            self.connection_ended(sender, error)
                        self.unsure = False
        except BaseException:
            self._progress.give_back(False)
            raise
        self._progress.release()
        # The receive may have completed a queued send, or dropped the connection.
        if self._ended or self._dropped:
            self.report_completed()
        return taken

    def _rings(self, peer: int) -> list[tuple[PeerConnection, RingReader]]:
        """The connections that a receive from a peer, or from any, polls; none if some of them do
        not use a ring."""
        if peer >= 0:
            connection = self._connections[peer]
            if connection is None:
                return []
            connections = [connection]
        else:
            connections = list(self.open.values())
            count = len(connections)
            if count > _MOST_POLLED:
                return []
            # Start with another one each time: a busy sender must not keep the others waiting.
            if count > 1:
                self._turn = (self._turn + 1) % count
                connections = connections[self._turn :] + connections[: self._turn]
        rings = []
        for connection in connections:
            reader = connection.receiver.reader
            # A message from this peer may come on the socket, or be announced there only, so polls
            # of the rings could miss it.
            if reader is None or not reader.strong or not connection.receiver.shared:
                return []
            rings.append((connection, reader))
        return rings

    def _accept(self, pending: PendingMessage) -> None:
        self.state.check()
        call = pending.call
        self._in_flight.add(pending)
        try:
            # A blocking send connects on its own thread and without the lock, because the attempt
            # may last until its deadline; other threads go on meanwhile. It does not if an earlier
            # send to this peer waits for the connection, which comes first.
            sends_now = bool(call.inputs) and not pending.background
            if (
                sends_now
                and call.peer != self.context.rank
                and self._connections[call.peer] is None
                and not self._connector.has_queued_send_to(call.peer)
            ):
                self._connector.connect(pending)
            with self.lock:
                # The group may have failed while this thread connected or waited for the lock.
                self.state.check()
                # A change was interrupted: the message is queued nowhere, and ends with the group,
                # which fails.
                if self.unsure:
                    pass
                elif call.op is PROBE:
                    if self._matcher.post_probe(pending):
                        self.finish(pending)
                elif not call.inputs:
                    message = self._matcher.post_receive(pending)
                    if message is not None:
                        self._match_unexpected(pending, message)
                elif call.peer == self.context.rank:
                    self._send_to_self(pending)
                else:
                    self._queue(pending)
        except DistError:
            # The caller gets the error, and no completion that it could wait for.
            if not pending.completion.done():
                self._cancel(pending)
            raise
        self.report_completed()

    def _queue(self, pending: PendingMessage) -> None:
        """Queue a send behind earlier ones, also those that wait for the connection."""
        connection = self._connections[pending.call.peer]
        if connection is not None and connection.sender.awaits_answer:
            # The peer's answer to the offer of a ring may have come.
            self._receive_available(connection)
        if (
            connection is None
            or connection.closed
            or self._connector.has_queued_send_to(pending.call.peer)
        ):
            self._connector.queue.append(pending)
            # The progress thread, which connects, may sleep in epoll until data arrives.
            self._progress.wake()
            return
        self.change(connection.sender.enqueue, pending)

    def _match_unexpected(self, pending: PendingMessage, message: IncomingMessage) -> None:
        """Match a new receive with an unexpected message, which may be incomplete."""
        if not pending.call.accepts(message.code, message.size):
            message.mismatched = pending
        else:
            message.redirect_to(pending)
        if message.got == message.size:
            self.complete(message)

    def _send_to_self(self, pending: PendingMessage) -> None:
        """Deliver a message to this rank: to the receive that it matches, else as a copy."""
        call, view = pending.call, pending.view
        assert call.tag is not None
        if not self.deliver(call.peer, call.tag, call.inputs[0].dtype.code, view):
            message = IncomingMessage(call.peer, call.tag, call.inputs[0].dtype.code, len(view))
            self.begin(message)
            message.view[:] = view
            message.got = message.size
            self.complete(message)
        self.finish(pending)
        if self._progress.active:
            # The receive that has just ended may be that of a thread that sleeps in epoll until
            # data arrives.
            self._progress.wake()

    # --- for ProgressEngine -----------------------------------------------------------------------

    def pending(self) -> bool:
        """True if any operation is pending."""
        return bool(self._connector.queue) or self.has_connected_operations()

    def has_connected_operations(self) -> bool:
        """True if any operation that needs no further connection is pending."""
        if self._matcher.posted:
            return True
        # This is called without the lock, so the connections are copied: other threads add and drop
        # some meanwhile.
        for connection in [*self.open.values()]:
            sender = connection.sender
            if sender.outbox or sender.remainder or sender.control_frames:
                return True
            if connection.receiver.message is not None:
                return True
        return False

    @property
    def has_queued_connects(self) -> bool:
        """True if sends wait for a connection, which only the progress thread makes."""
        return bool(self._connector.queue)

    def serve(self, descriptor: int, event: int) -> None:
        """Handle an epoll event of a connection."""
        with self.lock:
            connection = self.open.get(descriptor)
            # The connection was dropped after epoll had reported the event.
            if connection is None:
                return
            if event & select.EPOLLOUT:
                self.change(connection.sender.flush)
            # Errors and the end of the connection are found by reading.
            if event & ~select.EPOLLOUT:
                # Only the rest of a long message is read at once. What else is there epoll reports
                # again, because it is level-triggered.
                for _ in range(_MAX_RECEIVES):
                    if (
                        not self._receive_available(connection)
                        or connection.receiver.message is None
                        or connection.closed
                    ):
                        break

    def _receive_available(self, connection: PeerConnection) -> bool:
        """Receive the data that has arrived from a peer; False if there is none."""
        if self.unsure:
            return False
        found = True
        self.unsure = True
        try:
            connection.receiver.receive(self.buffer)
        except BlockingIOError as error:
            # A BlockingIOError without a number is that of a signal's handler.
            if error.errno is None:
                raise
            found = False
        except (OSError, EOFError) as error:
            self.connection_ended(connection, error)
        self.unsure = False
        return found

    def change(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function that changes a connection, unless a change was interrupted; the caller
        holds the lock."""
        if self.unsure:
            return
        # The mark is not cleared in a `finally`: an exception in the middle of the change has to
        # leave it set, so that no thread uses the connection any more.
        self.unsure = True
        function(*arguments)
        self.unsure = False

    def connection_ended(self, connection: PeerConnection, error: OSError | EOFError) -> None:
        """Drop a connection whose read has raised, while ``unsure``; raise the exception if it is a
        handler's."""
        if isinstance(error, OSError) and raised_by_handler(error):
            raise error
        self.drop_connection(connection.peer, error)

    def check_deadlines(self, now: float) -> None:
        """Check the group's error, deadlines and lost ranks; called every 0.1 s."""
        # A call that fails the group does not end the messages itself (HostBackend.fail). The
        # thread that runs progress does it here, if the control thread has not.
        if self.state.error is not None:
            self.abort()
            return
        control = self.context.job.control
        departed = control.departed if control is not None else {}
        died = operation_errors.first_dead_member(self.context)
        with self.lock:
            # No other thread is within a change while this one holds the lock. So the mark is that
            # of a thread which was interrupted in one and has not failed the group yet, or cannot.
            in_doubt = self.unsure
            # The first send that waits for a connection is left out: the attempt to connect checks
            # its deadline, and names the address in its error.
            operations = [*self._matcher.posted, *[*self._connector.queue][1:]]
            operations += [p for c in self.open.values() for p in c.sender.outbox]
            operations += [p for p in map(_receiver, self.open.values()) if p is not None]
        if in_doubt:
            self.fail(InterruptedError("a message was interrupted"))
            return
        for pending in operations:
            peer = pending.call.peer
            if peer >= 0:
                rank = self.context.ranks[peer]
                # While there is a connection, what the rank sent before its end may still be in it;
                # reading finds its end.
                if rank in departed and self._connections[peer] is None:
                    self._end(pending, self.lost_error(pending.call, rank, departed[rank]))
            # A receive from any rank that is matched already waits for the rest of a message from
            # its source.
            elif died is not None and pending.call.source < 0:
                self._end(pending, self.lost_error(pending.call, died, departed[died]))
            if now >= pending.deadline and not pending.completion.done():
                self._time_out(pending)

    # --- connections ------------------------------------------------------------------------------

    def connection_to(self, peer: int) -> PeerConnection | None:
        """The connection to a member, or None."""
        return self._connections[peer]

    def connect_pending(self) -> None:
        """Make the connections that sends wait for, until a peer does not answer; on the progress
        thread."""
        while self._connector.queue and self._connector.connect_next():
            pass

    def add_connection(self, global_rank: int, sock: Connection) -> None:
        """A connection was made from either side."""
        peer = self.context.ranks.index(global_rank)
        with self.lock:
            # The engine may be closed, or another thread may have added this connection first (see
            # Connector.connect). Or another thread has dropped it, and closed its socket, since it
            # arrived: a closed socket cannot be registered.
            if self._closed or self._connections[peer] is not None or sock.fileno() < 0:
                return
            connection = self._connections[peer] = PeerConnection(
                self, peer, sock, self._progress.poll, self._share
            )
            self.open[connection.descriptor] = connection

    # --- callbacks of connections (under the lock) ------------------------------------------------

    def is_awaited(self, peer: int, tag: int) -> bool:
        """True if a posted receive or probe matches such a message."""
        return self._matcher.is_awaited(peer, tag)

    def deliver(self, peer: int, tag: int, code: int, body: memoryview) -> bool:
        """Copy a whole message into the posted receive that it matches and fits; False if there is
        none."""
        pending = self._matcher.find_receive(peer, tag)
        if pending is None or not pending.call.accepts(code, len(body)):
            return False
        # The receive is matched before its array is written: an interrupt may take a posted one
        # back.
        self._matcher.match(pending, peer, tag, code, len(body))
        pending.view[: len(body)] = body
        pending.call.write_back()
        self.finish(pending)
        return True

    def begin(self, message: IncomingMessage) -> None:
        """Match a message whose header has arrived, or queue it as unexpected."""
        peer, tag, code, size = message.peer, message.tag, message.code, message.size
        pending = self._matcher.find_receive(peer, tag)
        if pending is not None and pending.call.accepts(code, size):
            self._matcher.match(pending, peer, tag, code, size)
            message.redirect_to(pending)
            return
        # This comes before the match: if there is no memory, the receive is still posted, and fails
        # with the connection.
        message.allocate()
        if pending is not None:
            self._matcher.match(pending, peer, tag, code, size)
            # The message is received to its end, because others follow it on the connection. The
            # receive fails then, and the group stays usable.
            message.mismatched = pending
        else:
            for probe in self._matcher.add_unexpected(message):
                self.finish(probe)

    def complete(self, message: IncomingMessage) -> None:
        """Finish the receive of a complete message, if there is one yet."""
        if message.receive is not None:
            message.receive.call.write_back()
            self.finish(message.receive)
        elif (receive := message.mismatched) is not None:
            error = operation_errors.message_mismatch_error(
                self.context, receive.call, message.size, message.code
            )
            self.finish(receive, error)

    # --- ends -------------------------------------------------------------------------------------

    def finish(self, pending: PendingMessage, error: BaseException | None = None) -> None:
        """Finish a send whose data has left, or a receive."""
        pending.completion.finish(error)
        self._in_flight.discard(pending)

    def report_completed(self) -> None:
        """Finish what the group's failure, or the end of a connection, has ended; called without
        the lock."""
        # An entry is removed once it is finished, so an interrupt loses none. Another thread may
        # finish it, too.
        while self._ended or self._dropped:
            try:
                while self._ended:
                    ended = self._ended[0]
                    ended[0].completion.finish(ended[1])
                    self._in_flight.discard(ended[0])
                    self._ended.remove(ended)
                dropped = self._dropped[0]
                self._fail_operations(*dropped)
                self._dropped.remove(dropped)
            except (IndexError, ValueError):
                # Another thread was faster and has removed the entry.
                continue

    def drop_connection(self, peer: int, error: Exception | None = None) -> None:
        """Close the connection to a peer; the operations that need it fail."""
        connection = self._connections[peer]
        if connection is None:
            return
        self._connections[peer] = None
        del self.open[connection.descriptor]
        # The descriptor is unregistered before forget() closes the socket: the system may give it
        # to a socket of another thread then.
        connection.close()
        self._endpoint.forget((self.context.name, MESSAGES, self.context.ranks[peer]))
        operations = [*connection.sender.outbox, *self._matcher.cancel_all(peer)]
        receiver = _receiver(connection)
        if receiver is not None:
            operations.append(receiver)
        if connection.receiver.message is not None:
            # A later receive must not match a message whose rest will never come.
            self._matcher.discard(connection.receiver.message)
        if operations:
            self._dropped.append((peer, operations, error))

    def _fail_operations(
        self, peer: int, operations: list[PendingMessage], error: Exception | None
    ) -> None:
        """Finish the operations of a dropped connection with the reason."""
        operations = [pending for pending in operations if not pending.completion.done()]
        if not operations:
            return
        rank = self.context.ranks[peer]
        if isinstance(error, TamperedError):
            for pending in operations:
                pending.completion.finish(
                    self.state.error
                    or operation_errors.tampered_error(self.context, rank, error, pending.call)
                )
            self._in_flight.difference_update(operations)
            return
        latest = max(pending.deadline for pending in operations)
        # A peer that dies, leaves or fails the group closes its connections. The control plane says
        # which it was, but its notice may come later than the end of the connection.
        member, why = self.state.find_ended_member(peer, latest) or (
            peer,
            f"{self.context.who(peer)} closed its connection",
        )
        rank = self.context.ranks[member]
        for pending in operations:
            pending.completion.finish(self.state.error or self.lost_error(pending.call, rank, why))
        self._in_flight.difference_update(operations)

    def lost_error(self, call: Call, rank: int, reason: str) -> RankLostError:
        """The error of a send or receive that global rank ``rank`` can no longer take part in."""
        return operation_errors.rank_lost_error(
            self.context, call, self.context.ranks.index(rank), reason
        )

    def timeout_error(
        self, pending: PendingMessage, begun: bool = False, others: str = ""
    ) -> OperationTimeoutError:
        """The error of a message after its deadline; ``begun`` if a part of it was transferred."""
        call = pending.call
        other = call.peer if call.peer >= 0 or not begun else call.source
        state = "only a part of the message was transferred" if begun else ""
        return operation_errors.message_timeout_error(self.context, call, other, state, others)

    def _end(self, pending: PendingMessage, error: BaseException) -> None:
        with self.lock:
            if self.unsure:
                return
            self.unsure = True
            self._withdraw(pending)
            self.finish(pending, error)
            self.unsure = False

    def _time_out(self, pending: PendingMessage) -> None:
        with self.lock:
            if self.unsure:
                return
            self.unsure = True
            begun = self._withdraw(pending)
            others = "" if pending.call.inputs else self._matcher.others(pending.call)
            self.finish(pending, self.timeout_error(pending, begun, others))
            self.unsure = False

    def _withdraw(self, pending: PendingMessage) -> bool:
        """Cancel a send or receive; True if part of its data had moved, so that its connection was
        closed."""
        with self.lock:
            for connection in self.open.values():
                begun = pending.begun and pending in connection.sender.outbox
                # Without the rest of this message the stream would be unreadable, so the connection
                # ends.
                if begun or _receiver(connection) is pending:
                    self.drop_connection(connection.peer)
                    return True
            self._matcher.cancel(pending)
            for queue in (self._connector.queue, *(c.sender.outbox for c in self.open.values())):
                if pending in queue:
                    queue.remove(pending)
            return False

    def abort(self) -> None:
        """Make all pending operations raise the error with which the group has ended."""
        error = self.state.error
        assert error is not None
        with self.lock:
            # Their waiters are woken by report_completed(), without the lock.
            self._ended.extend((pending, error) for pending in [*self._in_flight])
            self._matcher.cancel_all()
            self._connector.queue.clear()
            for peer in range(len(self._connections)):
                self.drop_connection(peer)
            # No connection and no posted operation is left that could be in a wrong state.
            self.unsure = False
        self.report_completed()
        # The operation for which a thread sleeps in epoll may have ended here.
        self._progress.wake()

    # --- for the search of deadlocks (MessageQueues) ----------------------------------------------

    def needs_peer(self, call: Call) -> bool:
        """True for a receive of which nothing has come, and for a queued send that needs the
        receiver to read."""
        with self.lock:
            queues = [c.sender.outbox for c in self.open.values() if c.unsent > 0]
            return any(
                pending.call is call
                for queue in (self._matcher.posted, *queues)
                for pending in queue
            )

    def others(self, call: Call) -> str:
        """The messages with other tags that have come, for a text about a receive that waits."""
        with self.lock:
            return self._matcher.others(call)

    def message_state(self, peer: int) -> MessageState:
        """The state of the messages to and from a member."""
        with self.lock:
            connection, dials = self._connections[peer], self._connector.has_queued_send_to(peer)
            if connection is None or connection.closed:
                return MessageState(delivered=not dials)
            delivered = connection.delivered and not dials
            # A thread that runs progress reads what comes, so the buffers do not limit the peer's
            # sends.
            receive_space = (
                -1 if self._progress.active or self.pending() else connection.receive_space
            )
            return MessageState(
                1, 1, delivered, connection.all_read, connection.unsent, receive_space
            )

    @property
    def has_callbacks(self) -> bool:
        """True if callbacks are attached to messages in flight."""
        return self._callbacks.pending

    def drain(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for pending sends."""
        deadline = time.monotonic() + timeout
        while self._unsent() and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> bool:
        """Make all pending operations raise, and close the connections; True if all was sent."""
        # This is asked first, because abort() drops the connections.
        unsent = self._unsent()
        with self.lock:
            # A connection that arrived behind abort() would be registered at the epoll object,
            # which is closed below.
            self._closed = True
        self.abort()
        self._progress.close()
        self._callbacks.close()
        return not unsent

    def _unsent(self) -> bool:
        with self.lock:
            return any(connection.has_unsent for connection in self.open.values())


def _receiver(connection: PeerConnection) -> PendingMessage | None:
    """The receive of the incomplete message of a connection, or None."""
    message = connection.receiver.message
    return None if message is None else message.receive or message.mismatched
