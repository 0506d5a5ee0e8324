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

from gloo_fallback import algorithms, links, nodes, ring, segment
from gloo_fallback.backend import GlooBackend
from gloo_fallback.endpoint import MESSAGES, Key
from gloo_fallback.letters import ANSWER, CREDIT, HEADER, MAGIC, MESSAGE, OFFER, PART, SHARED, Letter, frame
from gloo_fallback.lines import Line
from gloo_fallback.messages import Mailroom
from gloo_fallback.ring import SHARED_FROM, Inlet, Outlet
from unicoll.backend import Call, Context
from unicoll.buffers import Buffer
from unicoll.errors import DistError
from unicoll.ops import OPS
from unicoll.types import BY_NAME, ReduceOp

from .harness import HANG_SECONDS, Found, Target, pieces

__all__ = ["Collectives", "Messages"]

TIMEOUT = 2 * HANG_SECONDS
DOUBLE, BYTE = BY_NAME["float64"], BY_NAME["uint8"]
PEER = 1
LARGE = SHARED_FROM
"""Bytes of messages that go through the ring."""


def context_of(rank: int, endpoint: Any) -> Context:
    """A group of two whose connections come from ``endpoint``."""
    job: Any = SimpleNamespace(rank=rank, size=2, control=None, shared=lambda name, make: endpoint)
    return Context(job, "fuzz", rank, (0, 1), TIMEOUT)


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

    def listen(self, group: str, channel: str, arrived: Callable[[int, socket.socket], None]) -> None:
        if channel == MESSAGES:
            self.arrived = arrived

    def connect(self, key: Key, check: Callable[[], None]) -> Any:
        return self._sock

    def forget(self, key: Key) -> None:
        pass

    def close_group(self, group: str) -> None:
        pass


# --- messages -------------------------------------------------------------------------------------------------------


class _KeptInlet(Inlet):
    def close(self) -> None:
        pass


class _KeptOutlet(Outlet):
    def close(self) -> None:
        pass


class Messages(Target):
    """A mailroom with receives and sends under way; the first byte says whether rings have been agreed on."""

    def __init__(self) -> None:
        self._patches = [
            mock.patch.object(segment, "boot_id", return_value="boot"),
            mock.patch.object(Line, "_is_near", return_value=True),  # sockets here have no address
            mock.patch.object(ring, "_LEAST", LARGE // 4),
        ]
        for patch in self._patches:
            patch.start()
        self._from_peer = Outlet()
        self._inlet = _KeptInlet(self._from_peer.offer)
        self._outlet = _KeptOutlet()
        self._outlet.ready = True
        self._long, self._sent = buffer(LARGE, BYTE), buffer(LARGE, BYTE)

        def header(kind: int, code: int, tag: int, size: int, part: int = 0) -> bytes:
            return HEADER.pack(MAGIC, kind, code, 0, tag, size, part)

        small = header(MESSAGE, DOUBLE.code, 1, 64) + b"a" * 64
        long = header(MESSAGE, BYTE.code, 2, 5000) + b"b" * 5000
        early = header(MESSAGE, DOUBLE.code, 3, 16) + b"c" * 16
        shared = header(SHARED, BYTE.code, 4, LARGE, LARGE // 4) + header(PART, 0, 4, LARGE, LARGE // 2)
        shared += header(PART, 0, 4, LARGE, LARGE // 4)
        empty = header(MESSAGE, DOUBLE.code, 3, 0)
        offer = frame(OFFER, len(self._from_peer.offer)) + self._from_peer.offer
        texts = [b'{"boot": "boot", "pid": 1e400, "fd": 0, "size": 5, "token": 5}', b"", b"[" * 3000, b"[1]", b"\xff"]
        others = [frame(ANSWER), frame(ANSWER, 13), frame(CREDIT, 0, 1 << 19), offer]
        others += [frame(OFFER, len(text)) + text for text in texts]
        inputs = [small, long, early, empty, small + long + early, early + early + small, *others]
        inputs += [shared, shared + small, small + others[0] + long]
        inputs += [shared[: HEADER.size] + one + shared[HEADER.size :] for one in others[:5]]
        inputs += [one + small + early for one in others]
        self.valid = [bytes([way]) + one for way in (0, 1) for one in inputs]

    def run(self, data: bytes) -> bool:
        endpoint = Endpoint()
        room = Mailroom(context_of(0, endpoint), endpoint)  # type: ignore[arg-type]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            try:
                endpoint.arrived(PEER, ours)
                if data[:1] and data[0] % 2:
                    self._give_rings(room)
                return self._exchange(room, theirs, data[1:])
            finally:
                room.close(0.0)

    def _give_rings(self, room: Mailroom) -> None:
        line = room._lines[PEER]
        assert line is not None
        self._inlet._at = self._inlet.owed = self._outlet._at = 0
        self._outlet.free = LARGE // 4  # room for one part
        line.inlet, line.outlet, line._may_offer = self._inlet, self._outlet, False

    def _exchange(self, room: Mailroom, theirs: socket.socket, said: bytes) -> bool:
        letters: list[Letter] = []

        def begin(op: str, peer: int, tag: int, data: Buffer) -> None:
            given, taken = ((data,), ()) if op == "send" else ((), (data,))
            letter = Letter(Call(OPS[op], given, taken, TIMEOUT, peer=peer, tag=tag), None)
            if room._lines[PEER] is not None:
                letters.append(letter)
                room._accept(letter)

        begin("recv", PEER, 1, buffer(8))
        begin("recv", -1, 2, buffer(5000, BYTE))
        begin("recv", PEER, 4, self._long)
        begin("send", PEER, 1, buffer(100))
        begin("send", PEER, 1, self._sent)
        for i, piece in enumerate(pieces(said)):
            self._send(theirs, piece)
            self._serve(room)
            if i == 0:
                begin("recv", PEER, 3, buffer(2))
        theirs.shutdown(socket.SHUT_WR)
        self._serve(room)
        if room._lines[PEER] is not None:
            raise Found("a connection that has ended is not dropped")
        return sum(self._is_done(room, letter) for letter in letters) > 0

    def _is_done(self, room: Mailroom, letter: Letter) -> bool:
        """Whether a send or receive is done without an error."""
        call = letter.call
        if not letter.completion.done():
            if call.peer == PEER or letter not in room._sorter.posted:
                raise Found(f"{call.op.name} with tag {call.tag} waits for a connection that is over")
            return False
        error = letter.completion.exception()
        if error is not None and not isinstance(error, DistError):
            raise error
        return error is None and call.op.name == "recv"

    def _send(self, theirs: socket.socket, piece: bytes) -> None:
        try:
            theirs.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has been dropped

    def _serve(self, room: Mailroom) -> None:
        while (line := room._lines[PEER]) is not None:
            if not select.select([line.sock], [], [], 0)[0]:
                break
            room.serve(line.number, select.EPOLLIN)
        room.announce()

    def close(self) -> None:
        for patch in self._patches:
            patch.stop()
        for end in (self._from_peer, self._inlet, self._outlet):
            end._memory = memoryview(b"")
            end._segment.close()


# --- collectives ----------------------------------------------------------------------------------------------------


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
        made.in_counts, made.out_counts = tuple(b.count for b in given), tuple(b.count for b in taken)
        return made

    def all_reduce(count: int) -> Callable[[int], Call]:
        return lambda rank: call("all_reduce", *(2 * [(buffer(count),)]))

    def gather(rank: int, counts: tuple[int, int], refused: str = "") -> Call:
        room = tuple(map(buffer, counts)) if rank == 1 and not refused else ()
        made = call("gather", (buffer(counts[rank]),), room, 1)
        made.refused = refused if rank == 1 else ""
        return made

    def scatter(rank: int, count: int, own: int) -> Call:
        return call("scatter", (buffer(count), buffer(count)) if rank == 1 else (), (buffer(own),), 1)

    return [
        lambda rank: call("barrier", (), ()),
        all_reduce(4), all_reduce(300),
        lambda rank: call("broadcast", *(2 * [(buffer(200),)]), 1),
        lambda rank: call("all_gather", (buffer(2 + rank),), (buffer(2), buffer(3))),
        lambda rank: call("all_gather", (buffer(100),), (buffer(100), buffer(100))),
        lambda rank: gather(rank, (2, 2)), lambda rank: gather(rank, (2, 3)), lambda rank: gather(rank, (2, 2), "why"),
        lambda rank: scatter(rank, 3, 3), lambda rank: scatter(rank, 300, 300), lambda rank: scatter(rank, 3, 4),
        lambda rank: call("all_to_all", (buffer(2), buffer(2)), (buffer(2), buffer(2))),
        lambda rank: call("reduce_scatter_tensor", (buffer(600),), (buffer(300),)),
    ]  # fmt: skip


class Collectives(Target):
    """A member's collective on a new group: the first byte says which; the rest is what the other member sends.

    The valid inputs are what a real other member has sent. Messages count as large from a few hundred bytes on.
    """

    def __init__(self) -> None:
        self._patches = [
            mock.patch.dict("os.environ", UNICOLL_TRANSPORT="tcp"),
            mock.patch.object(algorithms, "SMALL", 512),
            mock.patch.object(links, "_CROSSING", 256),
            mock.patch.object(nodes, "boot_id", return_value="boot"),
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
