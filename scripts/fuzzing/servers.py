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

from unicoll.backend import Call, Context, operation_errors
from unicoll.backend.connections.endpoint import _Listener
from unicoll.calls.ops import OPS
from unicoll.errors import DistError
from unicoll.net.control.client import ControlClient
from unicoll.net.control.relay import Relay
from unicoll.net.control.reports import Reports
from unicoll.net.stores import FileStore, TCPStore
from unicoll.net.stores.client import RequestStore
from unicoll.net.stores.connections import ConnectionPool
from unicoll.net.stores.file_log import FIRST_LINE
from unicoll.net.stores.protocol import MalformedError, Status, StoreOp, pack_reply, pack_request
from unicoll.net.stores.table import Table
from unicoll.net.stores.tcp_server import StoreServer, _ClientState
from unicoll.net.wire.authenticated_server import Client, Server
from unicoll.net.wire.framed_server import frame, read_frame
from unicoll.net.wire.secret import Secret
from unicoll.process.interrupts import Changes

from .harness import KEY, Found, Target, chunks, pair

__all__ = ["Frames", "Store"]

READ = 1


class Driver:
    """Calls the event handlers of a server in place of its thread.

    Args:
        server: whose thread is not started.
        expected: exceptions that :meth:`Server.received` may raise, which close the connection;
            None for all.
    """

    def __init__(self, server: Server, expected: tuple[type[Exception], ...] | None) -> None:
        self.server: Any = server
        received = server.received
        self._error: Exception | None = None
        self.refused = False
        """True if a part of the last input was refused."""

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

    def feed(
        self, client: Client, theirs: socket.socket, data: bytes, disconnects: bool = True
    ) -> None:
        """Makes the server read what a client sends; then the client disconnects."""
        self.refused = False
        try:
            for chunk in chunks(data):
                theirs.sendall(chunk)
                self._handle(client)
            if disconnects:
                theirs.shutdown(socket.SHUT_WR)
                self._handle(client)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has closed the connection
        finally:
            if disconnects:
                theirs.close()
        if disconnects and client in self.server._clients:
            raise Found("a closed connection is not removed")
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _handle(self, client: Client) -> None:
        self.server._handle_events(client, READ)
        self.server.tick()
        self.server._expire()
        self.server._select_timeout()

    def close(self) -> None:
        """Closes the sockets, like the thread at its end."""
        self.server.should_stop = lambda: True
        self.server._serve()


class Unstarted:
    """Mixin for a server whose thread is not started."""

    def start(self) -> None:
        pass


class _Store(Unstarted, StoreServer):
    pass


class _Relay(Unstarted, Relay):
    pass


class _Listener(Unstarted, _Listener):
    pass


def listener() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0))
    return sock


def multi_get(store: TCPStore) -> None:
    if len(store.multi_get(["k", "l"])) != 2:
        raise Found("a reply to two keys with another number of values")


class Store(Target):
    """The store's server, its client, and a file store's file, by the first byte of an input."""

    def __init__(self) -> None:
        self._driver = Driver(_Store([listener()], Secret(KEY, "fuzz")), (MalformedError,))
        self._driver.server._client_count = 1 << 40  # the clients are added without a handshake
        self._good, self._good_end = self._driver.client(0, _ClientState())
        requests = [
            pack_request(StoreOp.SET, [b"k", b"5"]),
            pack_request(StoreOp.GET, [b"k"]),
            pack_request(StoreOp.GET, [b"none"], 0.0),
            pack_request(StoreOp.GET, [b"none"], 1e300),
            pack_request(StoreOp.ADD, [b"n", b"-3"]),
            pack_request(StoreOp.COMPARE_SET, [b"k", b"5", b"6"]),
            pack_request(StoreOp.WAIT, [b"k", b"none"], 3.0),
            pack_request(StoreOp.CHECK, [b"k"]),
            pack_request(StoreOp.DELETE, [b"k"]),
            pack_request(StoreOp.NUM_KEYS, []),
            pack_request(StoreOp.LIST_KEYS, []),
            pack_request(StoreOp.APPEND, [b"k", b"x"]),
            pack_request(StoreOp.TRY_GET, [b"k"]),
            pack_request(StoreOp.MULTI_GET, [b"k", b"n"]),
            pack_request(StoreOp.MULTI_SET, [b"a", b"1", b"b", b"2"]),
            pack_request(StoreOp.QUEUE_PUSH, [b"q", b"1"]),
            pack_request(StoreOp.QUEUE_POP, [b"q"], 1.0),
            pack_request(StoreOp.QUEUE_TRY_POP, [b"q"]),
            pack_request(StoreOp.QUEUE_LEN, [b"q"]),
            pack_request(StoreOp.AT_LEAST, [b"n", b"7"], 1.0),
        ]
        replies = [
            pack_reply(Status.OK, fields)
            for fields in ([], [b"1"], [b"value"], [b"a", b"b"], [b"-5", b""])
        ] + [pack_reply(Status.TIMEOUT, [b"k", b"\xff"]), pack_reply(Status.ERROR, [b"why"])]
        changes = [
            FIRST_LINE + b"".join(requests[i] for i in at)
            for at in ((0,), (0, 4, 5), (0, 11, 14), (15, 15, 17, 8))
        ]
        self.valid = [b"\0" + r for r in requests] + [
            b"\0" + a + b for a in requests for b in requests[:3]
        ]
        self.valid += [bytes([1 + kind]) + reply for kind in range(20) for reply in replies]
        self.valid += [b"\xff" + log for log in changes for _ in range(3)]
        self._folder = tempfile.TemporaryDirectory()
        self._client = TCPStore.__new__(TCPStore)
        RequestStore.__init__(self._client, 1.0)
        self._client._attach(
            ConnectionPool(["nowhere.invalid"], 1, Secret(KEY, "fuzz"), "fuzz"), None, "fuzz"
        )
        store = self._client
        self._calls: list[Callable[[], Any]] = [
            lambda: store.set("k", "v"),
            lambda: store.get("k"),
            lambda: store.try_get("k"),
            lambda: store.add("k", 1),
            lambda: store.compare_set("k", "a", "b"),
            lambda: store.wait(["k"]),
            lambda: store.check(["k"]),
            lambda: store.delete_key("k"),
            store.num_keys,
            store.list_keys,
            lambda: store.append("k", "v"),
            lambda: multi_get(store),
            lambda: store.multi_set(["k"], ["v"]),
            lambda: store.queue_pop("k"),
            lambda: store.queue_pop("k", False),
            lambda: store.queue_len("k"),
            lambda: store.queue_push("k", "v"),
        ]

    def run(self, data: bytes) -> bool:
        kind, sent = data[0] if data else 0, data[1:]
        if 1 <= kind <= 20:
            return self._replied(self._calls[kind % len(self._calls)], sent)
        return self._file(sent) if kind == 255 else self._served(sent)

    def _served(self, sent: bytes) -> bool:
        server = self._driver.server
        server._table, server._timers = Table(), []
        client, theirs = self._driver.client(1, _ClientState())
        self._driver.feed(client, theirs, sent)
        refused = self._driver.refused
        self._driver.feed(
            self._good,
            self._good_end,
            pack_request(StoreOp.SET, [b"good", b"1"]),
            disconnects=False,
        )
        if self._good_end.recv(1000) != pack_reply(Status.OK, ()):
            raise Found("another client gets a wrong reply")
        if server._waiters:
            raise Found("the request of a disconnected client still waits")
        return not refused

    def _replied(self, call: Callable[[], Any], sent: bytes) -> bool:
        with pair(sent) as sock:
            self._client._pool._users = {sock: None}
            try:
                call()
            except DistError:
                return False
            return True

    def _file(self, sent: bytes) -> bool:
        path = os.path.join(self._folder.name, "store")
        Path(path).write_bytes(sent)
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
        self._client._pool._users.clear()
        self._client.close()
        self._good_end.close()
        self._driver.close()
        self._folder.cleanup()


class Frames(Target):
    """The control plane's relay and client, the data listener and single frames, by the first byte
    of an input."""

    def __init__(self) -> None:
        job: Any = SimpleNamespace(addresses=["127.0.0.1"], key=KEY, rank=0)
        self._relay = Driver(_Relay(4, KEY, "127.0.0.1"), None)
        self._good, self._good_end = self._relay.client(0)
        self._good_end.setblocking(False)
        self._relay.feed(
            self._good,
            self._good_end,
            frame({"t": "hello", "rank": 0, "host": "h", "pid": 1}),
            False,
        )
        data_listener = _Listener(
            job, lambda key: b"ABC"[len(key[0]) % 3 :][:1], lambda key, sock: sock.close()
        )
        self._data_listener = Driver(data_listener, None)
        error = {
            "type": "RankLostError",
            "message": "gone",
            "fields": {"group": "g", "rank": 1, "seq": 5},
        }
        barrier = Call(OPS["barrier"], (), (), 1.0)
        messages: list[dict[str, Any]] = [
            {"t": "hello", "rank": 1, "host": "h", "pid": 5},
            {"t": "joined"},
            {"t": "initialized"},
            {"t": "bye", "error": "why", "how": ""},
            {"t": "fail", "group": "g", "members": [0, 1], "error": error},
            {"t": "joined", "ranks": [0, 1]},
            {"t": "ask", "group": "g", "backend": "gloo", "to": [0, 1], "from": 1, "id": 1},
            {"t": "gone", "ranks": [[1, "why", "died"]]},
            {"t": "tell", "to": [0], "from": 1, "id": 1, "report": {"seq": 1}},
            {
                "t": "tell",
                "to": [0],
                "from": 1,
                "id": 1,
                "report": operation_errors.report(None, None),
            },
            {
                "t": "tell",
                "to": [0],
                "from": 1,
                "id": 1,
                "report": operation_errors.report(barrier, None),
            },
            {"t": "tell", "to": [0], "from": 2, "id": 1, "report": {"unknown": True}},
            {"t": "ready", "peers": [["h", 1], ["h", 2]]},
            {"group": "g", "kind": "c", "rank": 1},
            {"group": "gg", "kind": "m", "rank": 1},
        ]
        frames = [frame(message) for message in messages]
        inputs = [
            *frames,
            *(frames[0] + one for one in frames),
            b"".join(frames),
            frame({"t": "ask"}) * 3,
        ]
        self.valid = [bytes([kind]) + one for kind in range(4) for one in inputs]

    def run(self, data: bytes) -> bool:
        kind, sent = data[0] % 4 if data else 0, data[1:]
        return (self._relayed, self._controlled, self._called, self._single)[kind](resized(sent))

    def _relayed(self, sent: bytes) -> bool:
        client, theirs = self._relay.client(1)
        self._relay.feed(client, theirs, sent)
        refused = self._relay.refused
        forwarded = self._drained()
        self._relay.feed(self._good, self._good_end, frame({"t": "joined"}), disconnects=False)
        if not self._drained().endswith(frame({"t": "joined", "ranks": [0]})):
            raise Found("another rank gets no answer")
        self._relay.server._failures.clear()
        self._relay.server._members.pop(1, None)
        self._controlled(forwarded)  # data from one member to another
        return not refused

    def _drained(self) -> bytes:
        forwarded = b""
        try:
            while data := self._good_end.recv(1 << 20):
                forwarded += data
            raise Found("another rank has lost its connection")
        except BlockingIOError:
            return forwarded

    def _controlled(self, sent: bytes) -> bool:
        control = ControlClient(0, 4, KEY, "127.0.0.1")
        control._reports._received[1] = {}
        control.watch("g", "gloo", lambda error: None, lambda: {"seq": 1})
        with pair(sent) as sock:
            control._connection._sock = sock
            control._receive_from(sock)
        if 0 not in control.departed:
            raise Found("the end of the connection is not detected")
        self._read_reports(dict(control._reports._received[1]))
        return self._single(sent)

    def _read_reports(self, reports: dict[Any, Any]) -> None:
        """Reports of members are used in errors."""
        requests = Reports(0, (), Changes(), lambda message: None, lambda: False)
        control = SimpleNamespace(
            collect_reports=requests.collect_reports,
            departed={},
            describe=lambda rank: f"rank {rank}",
        )
        context: Any = Context(SimpleNamespace(rank=0, control=control), "g", (0, 1, 2), 1.0)  # type: ignore[arg-type]
        call = Call(OPS["barrier"], (), (), 1.0)
        with (
            mock.patch.object(requests, "request_reports", return_value=reports),
            mock.patch("unicoll.net.control.reports._UNKNOWN_S", 0.0),
        ):
            operation_errors.timeout_error(context, call)
            operation_errors.mismatch_error(context, call, 1, 5)

    def _called(self, sent: bytes) -> bool:
        client, theirs = self._data_listener.client(1)
        self._data_listener.feed(client, theirs, sent)
        return not self._data_listener.refused

    def _single(self, sent: bytes) -> bool:
        accepted = False
        with pair(sent) as sock:
            try:
                while True:
                    if not isinstance(read_frame(sock), dict):
                        raise Found("a message that is not a dict")
                    accepted = True
            except (EOFError, OSError, ValueError):
                return accepted

    def close(self) -> None:
        self._good_end.close()
        self._relay.close()
        self._data_listener.close()


def resized(sent: bytes) -> bytes:
    """Half of the inputs get the correct length of the first frame; otherwise few would reach the
    JSON parser."""
    if len(sent) > 4 and zlib.crc32(sent) % 2:
        (length,) = struct.unpack_from("<I", sent)
        if length > len(sent) - 4:
            return struct.pack("<I", len(sent) - 4) + sent[4:]
    return sent
