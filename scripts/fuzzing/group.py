"""What the members of a group send each other over data connections: messages and collectives."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from gloo_fallback.algorithms import over_sockets
from gloo_fallback.backend import GlooBackend
from gloo_fallback.p2p.engine import P2PEngine
from gloo_fallback.p2p.frames import (
    ANSWER,
    HEADER,
    MAGIC,
    MESSAGE,
    NOTICE,
    OFFER,
    SWITCH,
    PendingMessage,
    frame,
)
from gloo_fallback.p2p.sender import MessageSender
from gloo_fallback.shm import segment
from gloo_fallback.shm.ring_buffer import CHUNK, RING, RingReader, RingWriter
from gloo_fallback.transport import exchange, topology
from unicoll.arrays.conversion import Buffer
from unicoll.arrays.types import BY_NAME, ReduceOp
from unicoll.backend import Call, Context
from unicoll.backend.connections.endpoint import Key
from unicoll.backend.group_state import GroupState
from unicoll.calls.ops import OPS
from unicoll.errors import DistError

from .harness import HANG_SECONDS, Found, Target, chunks

__all__ = ["Collectives", "Messages"]

TIMEOUT = 2 * HANG_SECONDS
DOUBLE, BYTE = BY_NAME["float64"], BY_NAME["uint8"]
PEER = 1
LARGE = CHUNK + 1
"""Bytes of messages that are written to the ring in chunks."""


def context_of(rank: int, endpoint: Any) -> Context:
    """A group of two whose connections come from ``endpoint``."""
    job: Any = SimpleNamespace(
        rank=rank, size=2, control=None, ended={}, shared=lambda name, make: endpoint
    )
    return Context(job, "fuzz", (0, 1), TIMEOUT)


def buffer(count: int, dtype: Any = DOUBLE) -> Buffer:
    array = np.zeros(count, dtype.storage)
    return Buffer(array, dtype, array.shape, array)


class Endpoint:
    """In place of a process's listener: one connection for each channel, made before."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._sock = sock
        self.arrived: Callable[[int, socket.socket], None]

    def read_directory(self) -> None:
        pass

    def listen(self, group: str, arrived: Callable[[int, socket.socket], None]) -> None:
        self.arrived = arrived

    def connect(self, key: Key, check: Callable[[], None]) -> Any:
        return self._sock

    def connections_to(self, peer: int, check: Callable[[], None]) -> int:
        return 1

    def describe(self, peer: int, sock: Any) -> str:
        return f"rank {peer}"

    def unanswered(self, group: str) -> list[str]:
        return []

    def forget(self, key: Key) -> None:
        pass

    def close_group(self, group: str) -> None:
        pass


# --- messages -------------------------------------------------------------------------------------


class _KeptInlet(RingReader):
    def close(self) -> None:
        pass


class _KeptOutlet(RingWriter):
    def close(self) -> None:
        pass


class Messages(Target):
    """A point-to-point engine with pending receives and sends.

    The first byte says how the rest arrives: 0 on the socket, 1 on the socket while rings are
    mapped, 2 in the ring, 3 on the socket while rings are used whose positions come in notices.
    """

    def __init__(self) -> None:
        self._patches = [
            mock.patch.object(segment, "boot_id", return_value="boot"),
            mock.patch.object(
                MessageSender, "_on_this_host", return_value=True
            ),  # sockets here have no address
        ]
        for patch in self._patches:
            patch.start()
        self._from_peer = RingWriter()
        self._inlet = _KeptInlet(self._from_peer.offer)
        self._outlet = _KeptOutlet()
        self._outlet.ready = True
        self._long, self._sent = buffer(LARGE, BYTE), buffer(LARGE, BYTE)

        def header(kind: int, code: int, tag: int, size: int) -> bytes:
            return HEADER.pack(MAGIC, kind, code, 0, tag, size, 0)

        small = header(MESSAGE, DOUBLE.code, 1, 64) + b"a" * 64
        long = header(MESSAGE, BYTE.code, 2, 5000) + b"b" * 5000
        early = header(MESSAGE, DOUBLE.code, 3, 16) + b"c" * 16
        empty = header(MESSAGE, DOUBLE.code, 3, 0)
        offer = frame(OFFER, len(self._from_peer.offer)) + self._from_peer.offer
        texts = [
            b'{"boot": "boot", "pid": 1e400, "fd": 0, "size": 5, "token": 5}',
            b"",
            b"[" * 3000,
            b"[1]",
            b"\xff",
        ]
        others = [frame(ANSWER), frame(ANSWER, 13), frame(NOTICE, 32, RING), offer, frame(SWITCH)]
        others += [frame(OFFER, len(text)) + text for text in texts]
        inputs = [small, long, early, empty, small + long + early, early + early + small, *others]
        inputs += [small + others[0] + long]
        inputs += [one + small + early for one in others]
        self.valid = [bytes([way]) + one for way in (0, 1, 3) for one in inputs]
        self.valid += [b"\x02" + one for one in self._ring_contents()]

    def _ring_contents(self) -> list[bytes]:
        """Messages as they lie in a ring."""
        writer, contents = RingWriter(), []
        for messages in (
            [(1, 64)],
            [(2, 5000), (1, 64)],
            [(4, LARGE)],
            [(3, 16), (3, 0), (4, LARGE), (1, 64)],
        ):
            start = writer.position
            for tag, size in messages:
                code = BYTE.code if tag in (2, 4) else DOUBLE.code
                if size <= CHUNK:
                    writer.put(code, tag, bytes(size))
                else:
                    writer.begin(code, tag, size)
                    writer.write(memoryview(bytes(size)))
            contents.append(bytes(writer._memory[start : writer.position]))
        writer.close()
        return contents

    def run(self, data: bytes) -> bool:
        endpoint = Endpoint()
        state = GroupState(context_of(0, endpoint))
        engine = P2PEngine(state, endpoint, 0, lambda cause: None)  # type: ignore[arg-type]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            try:
                endpoint.arrived(PEER, ours)
                way = data[0] % 4 if data else 0
                if way:
                    self._give_rings(engine, used=way > 1, strong=way < 3)
                return self._exchange(engine, theirs, data[1:], way == 2)
            finally:
                state.close()
                engine.close()

    def _give_rings(self, engine: P2PEngine, used: bool, strong: bool) -> None:
        connection = engine._connections[PEER]
        assert connection is not None
        for end in (self._inlet, self._outlet):
            end.words[0] = end.words[16] = end.position = 0
            end.strong = strong
        self._inlet._checked = self._inlet.written = self._outlet.read = 0
        self._outlet.position = RING - 128  # space for a header
        sender, receiver = connection.sender, connection.receiver
        sender.reader = receiver.reader = self._inlet
        sender.writer, sender._may_offer = self._outlet, False
        receiver.shared = used

    def _exchange(
        self, engine: P2PEngine, theirs: socket.socket, sent: bytes, shared: bool
    ) -> bool:
        operations: list[PendingMessage] = []

        def begin(op: str, peer: int, tag: int, data: Buffer) -> None:
            given, taken = ((data,), ()) if op == "send" else ((), (data,))
            pending = PendingMessage(Call(OPS[op], given, taken, TIMEOUT, peer=peer, tag=tag), None)
            if engine._connections[PEER] is not None:
                operations.append(pending)
                engine._accept(pending)

        begin("recv", PEER, 1, buffer(8))
        begin("recv", -1, 2, buffer(5000, BYTE))
        begin("recv", PEER, 4, self._long)
        begin("send", PEER, 1, buffer(100))
        begin("send", PEER, 1, self._sent)
        for i, chunk in enumerate(chunks(sent)):
            if shared:
                self._put(chunk)
                engine._progress._receive_shared(True)
            else:
                self._send(theirs, chunk)
            self._serve(engine)
            if i == 0:
                begin("recv", PEER, 3, buffer(2))
        theirs.shutdown(socket.SHUT_WR)
        self._serve(engine)
        if engine._connections[PEER] is not None:
            raise Found("a connection that has ended is not dropped")
        return sum(self._is_done(engine, pending) for pending in operations) > 0

    def _is_done(self, engine: P2PEngine, pending: PendingMessage) -> bool:
        """Whether a send or receive is done without an error."""
        call = pending.call
        if not pending.completion.done():
            if call.peer == PEER or pending not in engine._matcher.posted:
                raise Found(
                    f"{call.op.name} with tag {call.tag} waits for a connection that is over"
                )
            return False
        error = pending.completion.exception()
        if error is not None and not isinstance(error, DistError):
            raise error
        return error is None and call.op.name == "recv"

    def _put(self, chunk: bytes) -> None:
        """Append to the ring."""
        at = self._inlet.words[0]
        chunk = chunk[: RING - at]
        self._inlet._memory[at : at + len(chunk)] = chunk
        self._inlet.words[0] = self._inlet.written = at + len(chunk)

    def _send(self, theirs: socket.socket, chunk: bytes) -> None:
        try:
            theirs.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has been dropped

    def _serve(self, engine: P2PEngine) -> None:
        while (connection := engine._connections[PEER]) is not None:
            if not select.select([connection.sock], [], [], 0)[0]:
                break
            engine.serve(connection.descriptor, select.EPOLLIN)
        engine.report_completed()

    def close(self) -> None:
        for patch in self._patches:
            patch.stop()
        for end in (self._from_peer, self._inlet, self._outlet):
            end._memory = memoryview(b"")
            end._segment.close()


# --- collectives ----------------------------------------------------------------------------------


class _Recording:
    """A member's end of a connection that keeps what is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent = b""

    def send(self, view: Any, *flags: int) -> int:
        count = self._sock.send(view, *flags)
        self.sent += bytes(view[:count])
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def _calls() -> list[Callable[[int], Call]]:
    """Collectives, as the rank given makes them."""

    def call(op: str, given: tuple[Buffer, ...], taken: tuple[Buffer, ...], root: int = -1) -> Call:
        reduce = ReduceOp.SUM if OPS[op].reduces else None
        made = Call(OPS[op], given, taken, TIMEOUT, reduce, root)
        made.in_counts, made.out_counts = (
            tuple(b.count for b in given),
            tuple(b.count for b in taken),
        )
        return made

    def all_reduce(count: int) -> Callable[[int], Call]:
        return lambda rank: call("all_reduce", *(2 * [(buffer(count),)]))

    def gather(rank: int, counts: tuple[int, int], refused: str = "") -> Call:
        room = tuple(map(buffer, counts)) if rank == 1 and not refused else ()
        made = call("gather", (buffer(counts[rank]),), room, 1)
        made.refused = refused if rank == 1 else ""
        return made

    def scatter(rank: int, count: int, own: int) -> Call:
        return call(
            "scatter", (buffer(count), buffer(count)) if rank == 1 else (), (buffer(own),), 1
        )

    return [
        lambda rank: call("barrier", (), ()),
        all_reduce(4),
        all_reduce(300),
        lambda rank: call("broadcast", *(2 * [(buffer(200),)]), 1),
        lambda rank: call("all_gather", (buffer(2 + rank),), (buffer(2), buffer(3))),
        lambda rank: call("all_gather", (buffer(100),), (buffer(100), buffer(100))),
        lambda rank: gather(rank, (2, 2)),
        lambda rank: gather(rank, (2, 3)),
        lambda rank: gather(rank, (2, 2), "why"),
        lambda rank: scatter(rank, 3, 3),
        lambda rank: scatter(rank, 300, 300),
        lambda rank: scatter(rank, 3, 4),
        lambda rank: call("all_to_all", (buffer(2), buffer(2)), (buffer(2), buffer(2))),
        lambda rank: call("reduce_scatter_tensor", (buffer(600),), (buffer(300),)),
    ]


class Collectives(Target):
    """A member's collective on a new group: the first byte says which; the rest is what the other
    member sends.

    The valid inputs are what a real other member has sent. Messages count as large from a few
    hundred bytes on.
    """

    def __init__(self) -> None:
        self._patches = [
            mock.patch.dict("os.environ", UNICOLL_TRANSPORT="tcp"),
            mock.patch.object(over_sockets, "SMALL", 512),
            mock.patch.object(exchange, "_EAGER_LIMIT", 256),
            mock.patch.object(topology, "boot_id", return_value="boot"),
        ]
        for patch in self._patches:
            patch.start()
        self._calls = _calls()
        self.valid = [bytes([i]) + self._recorded(call) for i, call in enumerate(self._calls)]

    def _recorded(self, call: Callable[[int], Call]) -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            recording = _Recording(theirs)
            other = threading.Thread(target=self._run, args=(1, recording, call))
            other.start()
            self._run(0, ours, call)
            other.join()
        return recording.sent

    def _run(self, rank: int, sock: Any, call: Callable[[int], Call]) -> bool:
        backend = GlooBackend(context_of(rank, Endpoint(sock)))
        backend._spins = 0
        try:
            backend.run(call(rank))
        except DistError:
            return False
        finally:
            backend.close()
        return True

    def run(self, data: bytes) -> bool:
        call = self._calls[(data[0] if data else 0) % len(self._calls)]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[1:])
            theirs.shutdown(socket.SHUT_WR)
            return self._run(0, ours, call)

    def close(self) -> None:
        for patch in self._patches:
            patch.stop()
