"""Progress and receives of messages, with stand-ins for the engine of a group."""

from __future__ import annotations

import os
import select
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gloo_fallback.p2p.frames import IncomingMessage
from gloo_fallback.p2p.progress import ProgressEngine
from gloo_fallback.p2p.receiver import MessageReceiver
from gloo_fallback.shm.ring_buffer import CHUNK, RingReader, RingWriter
from gloo_fallback.shm.segment import has_strong_ordering
from tests.gloo.test_shared_p2p import write


class Engine:
    """Ends an operation with the last byte of a pipe, and reports it later, as the engine of a group does."""

    def __init__(self, count: int) -> None:
        self.open: dict[int, Any] = {}
        self.lock = threading.Lock()
        self.reported = False
        self._left = count

    def pending(self) -> bool:
        return not self.reported

    def connection_to(self, peer: int) -> None:
        return None

    def serve(self, descriptor: int, event: int) -> None:
        assert os.read(descriptor, 1)
        self._left -= 1

    def report_completed(self) -> None:
        self.reported = self._left == 0

    def check_deadlines(self, now: float) -> None:
        pass


class ConnectingEngine(Engine):
    """A send is queued for a new connection directly after the progress thread has looked for such sends."""

    def __init__(self) -> None:
        super().__init__(1)
        self.has_queued_connects = False
        self.connected = threading.Event()

    def connect_pending(self) -> None:
        if self.has_queued_connects:
            self.has_queued_connects = False
            self.connected.set()
        elif not self.connected.is_set():
            self.has_queued_connects = True


def test_a_thread_that_waits_takes_over_only_when_no_send_awaits_a_connection() -> None:
    """That thread makes no connections: the send waited until its operation had ended."""
    engine: Any = ConnectingEngine()
    progress = ProgressEngine(engine, 0)
    progress._waiters = 1
    try:
        progress.wake_thread()
        assert engine.connected.wait(30)
    finally:
        progress.close()


class Poll:
    """An epoll object that counts the waits without an event."""

    def __init__(self, poll: select.epoll) -> None:
        self._poll = poll
        self.close = poll.close
        self.empty_waits = 0

    def poll(self, timeout: float, maximum: int) -> list[tuple[int, int]]:
        events = self._poll.poll(timeout, maximum)
        self.empty_waits += timeout > 0 and not events
        return events


@pytest.mark.parametrize("count", [1, 62, 63, 64, 65, 128])
def test_nothing_is_waited_for_once_the_operation_has_ended(count: int) -> None:
    engine: Any = Engine(count)
    progress = ProgressEngine(engine, 0)
    source, sink = os.pipe()
    progress.poll.register(source, select.EPOLLIN)
    poll: Any = Poll(progress.poll)
    progress.poll = poll
    os.write(sink, bytes(count))
    pending: Any = SimpleNamespace(
        call=SimpleNamespace(peer=0), completion=SimpleNamespace(done=lambda: engine.reported)
    )
    try:
        progress.until_done(pending)
    finally:
        progress.close()
        os.close(source)
        os.close(sink)
    assert poll.empty_waits == 0


class Receives:
    """Awaits one message with tag 1."""

    def __init__(self, data: bytearray) -> None:
        self.received: list[int] = []
        self._data = memoryview(data)

    def is_awaited(self, peer: int, tag: int) -> bool:
        return tag == 1 and 1 not in self.received

    def deliver(self, peer: int, tag: int, code: int, body: memoryview) -> bool:
        if not self.is_awaited(peer, tag):
            return False
        self._data[:] = body
        self.received.append(tag)
        return True

    def begin(self, message: IncomingMessage) -> None:
        if self.is_awaited(message.peer, message.tag):
            receive: Any = object()
            message.receive, message.view = receive, self._data
        else:
            message.allocate()

    def complete(self, message: IncomingMessage) -> None:
        self.received.append(message.tag)


@pytest.mark.skipif(
    not has_strong_ordering(), reason="each notice is received with all that was written before"
)
@pytest.mark.parametrize("count", [8, CHUNK, CHUNK + 1, 1 << 20])
def test_a_message_that_is_not_awaited_stays_in_the_ring(count: int) -> None:
    """It stays behind an awaited one for the receive that comes for it, and is received if something waits behind."""
    received, sent = bytearray(count), [bytes([tag]) * count for tag in range(3)]
    receives, writer = Receives(received), RingWriter()
    engine, sender, sock = (cast("Any", x) for x in (receives, SimpleNamespace(), SimpleNamespace()))
    receiver = MessageReceiver(engine, 0, sock, True, sender)
    receiver.reader, receiver.shared = RingReader(writer.offer), True
    for tag in (1, 2):
        assert next(write(writer, tag, sent[tag]), True)  # without waiting for space
    receiver.receive_shared()
    assert (receives.received, bytes(received)) == ([1], sent[1])
    assert receiver.has_shared_data
    receiver.receive_shared()
    assert receives.received == [1, 2]
    assert not receiver.has_shared_data
    writer.close()
    receiver.reader.close()
