"""The store, the control plane and the data listener."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gloo_fallback.endpoint import _Door
from unicoll import auth
from unicoll.backend import Call, Context
from unicoll.errors import DistError
from unicoll.frames import frame, read_frame
from unicoll.observe import inquest
from unicoll.observe.control import Control
from unicoll.observe.relay import Relay
from unicoll.ops import OPS
from unicoll.server import Client, Server
from unicoll.stores import FileStore, TCPStore
from unicoll.stores.file import _TITLE
from unicoll.stores.links import Links
from unicoll.stores.requests import RequestStore
from unicoll.stores.table import Table
from unicoll.stores.tcp_server import StoreServer, _Waiting
from unicoll.stores.wire import MalformedError, Op, Status, pack_reply, pack_request

from .harness import KEY, Found, Target, pair, pieces

__all__ = ["Frames", "Store"]

READ = 1


class Turns:
    """A server whose turns are called here, in place of its thread's.

    Args:
        server: made without starting its thread.
        expected: what a client may cause in :meth:`Server.received`; None for anything, since that ends its connection.
    """

    def __init__(self, server: Server, expected: tuple[type[Exception], ...] | None) -> None:
        self.server: Any = server
        received = server.received
        self._error: Exception | None = None
        self.refused = False
        """Whether something of the last input was refused."""

        def recording(client: Client) -> None:
            try:
                received(client)
            except Exception as error:
                self.refused = True
                if expected is not None and not isinstance(error, expected):
                    self._error = error
                raise

        vars(server)["received"] = recording

    def client(self, rank: int, state: Any = None) -> tuple[Client, socket.socket]:
        """An authenticated client, and its end of the connection."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        client = Client(ours, None)  # type: ignore[arg-type]
        client.rank, client.state = rank, state
        self.server._clients.add(client)
        self.server._selector.register(ours, READ, client)
        return client, theirs

    def feed(self, client: Client, theirs: socket.socket, data: bytes, leaves: bool = True) -> None:
        """Has the server read what a client sends; then the client leaves."""
        self.refused = False
        try:
            for piece in pieces(data):
                theirs.sendall(piece)
                self._turn(client)
            if leaves:
                theirs.shutdown(socket.SHUT_WR)
                self._turn(client)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has been dropped
        finally:
            if leaves:
                theirs.close()
        if leaves and client in self.server._clients:
            raise Found("a connection that has ended is not dropped")
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _turn(self, client: Client) -> None:
        self.server._turn(client, READ)
        self.server.tick()
        self.server._expire()
        self.server._patience()

    def close(self) -> None:
        """As the thread does at its end."""
        self.server.finished = lambda: True
        self.server._serve()


class Unstarted:
    """Before a server's class: its thread is not started."""

    def start(self) -> None:
        pass


class _Store(Unstarted, StoreServer):
    pass


class _Relay(Unstarted, Relay):
    pass


class _Listener(Unstarted, _Door):
    pass


def listener() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0))
    return sock


def multi_get(store: TCPStore) -> None:
    if len(store.multi_get(["k", "l"])) != 2:
        raise Found("a reply to two keys with another number of values")


class Store(Target):
    """The store's server, its client, and a file store's file; the first byte of an input says which."""

    def __init__(self) -> None:
        self._turns = Turns(_Store([listener()], auth.Secret(KEY, "fuzz")), (MalformedError,))
        self._turns.server._joined = 1 << 40  # clients are made here, without a handshake
        self._good, self._good_end = self._turns.client(0, _Waiting())
        requests = [
            pack_request(Op.SET, [b"k", b"5"]), pack_request(Op.GET, [b"k"]), pack_request(Op.GET, [b"none"], 0.0),
            pack_request(Op.GET, [b"none"], 1e300), pack_request(Op.ADD, [b"n", b"-3"]),
            pack_request(Op.COMPARE_SET, [b"k", b"5", b"6"]), pack_request(Op.WAIT, [b"k", b"none"], 3.0),
            pack_request(Op.CHECK, [b"k"]), pack_request(Op.DELETE, [b"k"]), pack_request(Op.NUM_KEYS, []),
            pack_request(Op.LIST_KEYS, []), pack_request(Op.APPEND, [b"k", b"x"]), pack_request(Op.TRY_GET, [b"k"]),
            pack_request(Op.MULTI_GET, [b"k", b"n"]), pack_request(Op.MULTI_SET, [b"a", b"1", b"b", b"2"]),
            pack_request(Op.QUEUE_PUSH, [b"q", b"1"]), pack_request(Op.QUEUE_POP, [b"q"], 1.0),
            pack_request(Op.QUEUE_TRY_POP, [b"q"]), pack_request(Op.QUEUE_LEN, [b"q"]),
            pack_request(Op.AT_LEAST, [b"n", b"7"], 1.0),
        ]  # fmt: skip
        replies = [
            pack_reply(Status.OK, fields) for fields in ([], [b"1"], [b"value"], [b"a", b"b"], [b"-5", b""])
        ] + [pack_reply(Status.TIMEOUT, [b"k", b"\xff"]), pack_reply(Status.ERROR, [b"why"])]
        changes = [_TITLE + b"".join(requests[i] for i in at) for at in ((0,), (0, 4, 5), (0, 11, 14), (15, 15, 17, 8))]
        self.valid = [b"\0" + r for r in requests] + [b"\0" + a + b for a in requests for b in requests[:3]]
        self.valid += [bytes([1 + way]) + reply for way in range(20) for reply in replies]
        self.valid += [b"\xff" + log for log in changes for _ in range(3)]
        self._folder = tempfile.TemporaryDirectory()
        self._client = TCPStore.__new__(TCPStore)
        RequestStore.__init__(self._client, 1.0)
        self._client._use(Links(["nowhere.invalid"], 1, auth.Secret(KEY, "fuzz"), "fuzz"), None, "fuzz")
        store = self._client
        self._calls: list[Callable[[], Any]] = [
            lambda: store.set("k", "v"), lambda: store.get("k"), lambda: store.try_get("k"), lambda: store.add("k", 1),
            lambda: store.compare_set("k", "a", "b"), lambda: store.wait(["k"]), lambda: store.check(["k"]),
            lambda: store.delete_key("k"), store.num_keys, store.list_keys, lambda: store.append("k", "v"),
            lambda: multi_get(store), lambda: store.multi_set(["k"], ["v"]), lambda: store.queue_pop("k"),
            lambda: store.queue_pop("k", False), lambda: store.queue_len("k"), lambda: store.queue_push("k", "v"),
        ]  # fmt: skip

    def run(self, data: bytes) -> bool:
        way, said = data[0] if data else 0, data[1:]
        if 1 <= way <= 20:
            return self._replied(self._calls[way % len(self._calls)], said)
        return self._file(said) if way == 255 else self._served(said)

    def _served(self, said: bytes) -> bool:
        server = self._turns.server
        server._table, server._timers = Table(), []
        client, theirs = self._turns.client(1, _Waiting())
        self._turns.feed(client, theirs, said)
        refused = self._turns.refused
        self._turns.feed(self._good, self._good_end, pack_request(Op.SET, [b"good", b"1"]), leaves=False)
        if self._good_end.recv(1000) != pack_reply(Status.OK, ()):
            raise Found("another client gets a wrong reply")
        if server._waiters:
            raise Found("the request of a client that has gone still waits")
        return not refused

    def _replied(self, call: Callable[[], Any], said: bytes) -> bool:
        with pair(said) as sock:
            self._client._links._idle[:] = [sock]
            try:
                call()
            except DistError:
                return False
            return True

    def _file(self, said: bytes) -> bool:
        path = os.path.join(self._folder.name, "store")
        Path(path).write_bytes(said)
        try:
            with FileStore(path) as store:
                store.try_get("k")
                store.num_keys()
        except DistError:
            return False
        finally:
            Path(path).unlink(missing_ok=True)
        return True

    def close(self) -> None:
        self._client._links._idle.clear()
        self._client.close()
        self._good_end.close()
        self._turns.close()
        self._folder.cleanup()


class Frames(Target):
    """The control plane's relay, a rank's end of it, the data listener and single frames; the first byte says which."""

    def __init__(self) -> None:
        job: Any = SimpleNamespace(addresses=["127.0.0.1"], key=KEY, rank=0)
        self._relay = Turns(_Relay(4, KEY, "127.0.0.1"), None)
        self._good, self._good_end = self._relay.client(0)
        self._good_end.setblocking(False)
        self._relay.feed(self._good, self._good_end, frame({"t": "hello", "rank": 0, "host": "h", "pid": 1}), False)
        door = _Listener(job, lambda key: b"ABC"[len(key[0]) % 3 :][:1], lambda key, sock: sock.close())
        self._door = Turns(door, None)
        error = {"type": "RankLostError", "message": "gone", "fields": {"group": "g", "rank": 1, "seq": 5}}
        barrier = Call(OPS["barrier"], (), (), 1.0)
        messages: list[dict[str, Any]] = [
            {"t": "hello", "rank": 1, "host": "h", "pid": 5}, {"t": "joined"}, {"t": "bye", "error": "why", "how": ""},
            {"t": "fail", "group": "g", "members": [0, 1], "error": error}, {"t": "joined", "ranks": [0, 1]},
            {"t": "ask", "group": "g", "to": [0, 1], "from": 1, "id": 1}, {"t": "gone", "ranks": [[1, "why", "died"]]},
            {"t": "tell", "to": [0], "from": 1, "id": 1, "report": {"seq": 1}},
            {"t": "tell", "to": [0], "from": 1, "id": 1, "report": inquest.report(None, None)},
            {"t": "tell", "to": [0], "from": 1, "id": 1, "report": inquest.report(barrier, None)},
            {"t": "tell", "to": [0], "from": 2, "id": 1, "report": {"unknown": True}},
            {"t": "ready", "peers": [["h", 1], ["h", 2]]},
            {"group": "g", "kind": "c", "rank": 1}, {"group": "gg", "kind": "m", "rank": 1},
        ]  # fmt: skip
        frames = [frame(message) for message in messages]
        inputs = [*frames, *(frames[0] + one for one in frames), b"".join(frames), frame({"t": "ask"}) * 3]
        self.valid = [bytes([way]) + one for way in range(4) for one in inputs]

    def run(self, data: bytes) -> bool:
        way, said = data[0] % 4 if data else 0, data[1:]
        return (self._relayed, self._controlled, self._called, self._single)[way](resized(said))

    def _relayed(self, said: bytes) -> bool:
        client, theirs = self._relay.client(1)
        self._relay.feed(client, theirs, said)
        refused = self._relay.refused
        told = self._drained()
        self._relay.feed(self._good, self._good_end, frame({"t": "joined"}), leaves=False)
        if not self._drained().endswith(frame({"t": "joined", "ranks": [0]})):
            raise Found("another rank gets no answer")
        self._relay.server._failed.clear()
        self._relay.server._members.pop(1, None)
        self._controlled(told)  # what one member has sent to another
        return not refused

    def _drained(self) -> bytes:
        told = b""
        try:
            while data := self._good_end.recv(1 << 20):
                told += data
            raise Found("another rank has lost its connection")
        except BlockingIOError:
            return told

    def _controlled(self, said: bytes) -> bool:
        control = Control(0, 4, KEY, "127.0.0.1")
        control._asked[1] = {}
        control.watch("g", lambda error: None, lambda: {"seq": 1})
        with pair(said) as sock:
            control._sock = sock
            control._listen(sock)
        if 0 not in control.departed:
            raise Found("the end of the connection goes unnoticed")
        self._read_reports(dict(control._asked[1]))
        return self._single(said)

    def _read_reports(self, reports: dict[Any, Any]) -> None:
        """What members report of themselves goes into errors."""
        control = SimpleNamespace(ask=lambda group, ranks: reports, departed={}, who=lambda rank: f"rank {rank}")
        context: Any = Context(SimpleNamespace(rank=0, control=control), "g", 0, (0, 1, 2), 1.0)  # type: ignore[arg-type]
        call = Call(OPS["barrier"], (), (), 1.0)
        with mock.patch.object(inquest, "_UNKNOWN_S", 0.0):
            inquest.timed_out(context, call)
            inquest.mismatch(context, call, 1, 5)

    def _called(self, said: bytes) -> bool:
        client, theirs = self._door.client(1)
        self._door.feed(client, theirs, said)
        return not self._door.refused

    def _single(self, said: bytes) -> bool:
        taken = False
        with pair(said) as sock:
            try:
                while True:
                    if not isinstance(read_frame(sock), dict):
                        raise Found("a message that is no dict")
                    taken = True
            except (EOFError, OSError, ValueError):
                return taken

    def close(self) -> None:
        self._good_end.close()
        self._relay.close()
        self._door.close()


def resized(said: bytes) -> bytes:
    """Half of the inputs with the length that the first frame really has: else few would come as far as its JSON."""
    if len(said) > 4 and zlib.crc32(said) % 2:
        (length,) = struct.unpack_from("<I", said)
        if length > len(said) - 4:
            return struct.pack("<I", len(said) - 4) + said[4:]
    return said
