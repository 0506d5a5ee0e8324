#!/usr/bin/env python3
"""Malformed input for the parsers that read what peers send: `fuzz.py [codec|handshake|store|frames]`.

Inputs are valid ones with flipped bits, cut or spliced, with other lengths and extreme numbers, and random bytes.
Findings are exceptions that the parser does not document, a pass of the handshake without its proof, an unpickling or
other execution of code, a hang, much memory, and a server that no longer serves its other clients. Each is printed with
the seed and the input in hexadecimal digits, which `--replay` runs again; then the exit code is 1.

Servers run without their thread: an input arrives over a socketpair and the server's turn is called. What the codec
and the table of the store read is in memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import random
import resource
import secrets
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

ROOT = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    sys.path[0] = ROOT  # in the place of this file's directory, where Python looks first

import numpy as np  # noqa: E402 - needs the path

import unicoll.server  # noqa: E402
from gloo_fallback.endpoint import _Door  # noqa: E402
from unicoll import auth, codec  # noqa: E402
from unicoll.errors import AuthenticationError, DistError, DistNetworkError  # noqa: E402
from unicoll.frames import frame, read_frame  # noqa: E402
from unicoll.observe.control import Control  # noqa: E402
from unicoll.observe.relay import Relay  # noqa: E402
from unicoll.server import Client, Server  # noqa: E402
from unicoll.stores import FileStore, TCPStore  # noqa: E402
from unicoll.stores.file import _TITLE  # noqa: E402
from unicoll.stores.links import Links  # noqa: E402
from unicoll.stores.requests import RequestStore  # noqa: E402
from unicoll.stores.table import Table  # noqa: E402
from unicoll.stores.tcp_server import StoreServer, _Waiting  # noqa: E402
from unicoll.stores.wire import MalformedError, Op, Status, pack_reply, pack_request  # noqa: E402

KEY = b"k" * 32
HANG_SECONDS = 5.0
MEMORY = 256 << 20
LONGEST = 64 * 1024
MOST_FINDINGS = 10
READ = 1
NUMBERS = (
    0, 1, 2, 63, 64, 100, 127, 128, 255, 4096, 2**15, 2**16 - 1, 2**16, 2**20, 2**20 + 1, 2**30, 2**31 - 1, 2**31,
    2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
TEXTS = (
    b"-1", b"9" * 39, b"9" * 4300, b"-" + b"9" * 4301, b"1e400", b"NaN", b"Infinity", b"null", b"[" * 3000,
    b'{"t":' * 2000, b"\xff\xfe", b"\xed\xa0\x80", b"\0", b"", b'"t"', b"true", b"[]", b"{}", b"0x10", b"1_0",
)  # fmt: skip


class Found(Exception):
    """Something that no input may do."""


class Hung(BaseException):
    """An input took too long; no handler of exceptions takes it."""


# --- inputs ---------------------------------------------------------------------------------------------------------


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A valid input with some changes; ``other`` is one to splice with."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(made) + 1)
        end = min(len(made), at + rng.choice((1, 2, 4, 8, 32)))
        kind = rng.randrange(9)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = rng.randrange(256)
        elif kind == 2:
            del made[at:]
        elif kind == 3:
            made[at:] = other[rng.randrange(len(other) + 1) :]
        elif kind == 4:
            size = rng.choice((1, 2, 4, 8))
            made[at : at + size] = (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
        elif kind == 5:
            made[at:at] = random_bytes(rng, 16)
        elif kind == 6:
            made[at:at] = made[at:end] * rng.choice((1, 2, 50))
        elif kind == 7:
            del made[at:end]
        elif kind == 8:
            made[at:end] = rng.choice(TEXTS)
    return bytes(made[:LONGEST])


def random_bytes(rng: random.Random, most: int) -> bytes:
    return bytes(rng.randrange(256) for _ in range(rng.randrange(most + 1)))


def generate(rng: random.Random, target: Target) -> bytes:
    """An input: mostly a valid one that was changed."""
    kind = rng.randrange(50)
    if kind == 0:
        return rng.choice(target.valid)
    if kind < 4:
        return bytes([rng.randrange(256)]) + random_bytes(rng, 300)
    return mutated(rng, rng.choice(target.valid), rng.choice(target.valid))


# --- what is watched ------------------------------------------------------------------------------------------------

_EXECUTION = {
    "pickle.find_class", "exec", "compile", "import", "marshal.loads", "os.system", "os.exec", "os.posix_spawn",
    "subprocess.Popen", "ctypes.dlopen", "os.fork",
}  # fmt: skip
_executed: list[str] = []
_watching = False


def _audit(event: str, args: Any) -> None:
    if _watching and event in _EXECUTION:
        _executed.append(f"{event} {args!r:.80}")


def _unpickled(data: Any, **_: Any) -> NoReturn:
    _executed.append("pickle.loads")
    raise Found("unpickled")


def _no_nonce(size: int) -> bytes:
    return b"\5" * size


def _too_long(*_: Any) -> NoReturn:
    raise Hung(f"more than {HANG_SECONDS:g} s")


@contextmanager
def watched() -> Iterator[None]:
    """Fixed nonces, no pickles, an alarm for hangs, and execution of code recorded."""
    before = signal.signal(signal.SIGALRM, _too_long)
    if not getattr(sys, "_unicoll_audited", False):
        sys.addaudithook(_audit)  # for ever
        sys._unicoll_audited = True  # type: ignore[attr-defined]
    try:
        with (
            mock.patch.object(pickle, "loads", _unpickled),
            mock.patch.object(secrets, "token_bytes", _no_nonce),
            mock.patch.object(unicoll.server, "_peer", return_value="fuzz:1"),  # sockets here have no address
        ):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


def check(target: Target, data: bytes) -> bool:
    """Whether the parser took an input.

    Raises:
        Exception, Hung: a finding.
    """
    global _watching
    _executed.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    _watching = True
    try:
        took = target.run(data)
    finally:
        _watching = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    if _executed:
        raise Found(f"executed: {', '.join(_executed)}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > MEMORY:
        raise Found(f"{grown >> 20} MiB of memory for {len(data)} bytes")
    return took


class Target(ABC):
    """A kind of parser.

    Attributes:
        valid: inputs that are taken.
    """

    valid: Sequence[bytes]

    @abstractmethod
    def run(self, data: bytes) -> bool:
        """Whether the parser took an input; any exception is a finding. Depends on ``data`` alone."""

    def close(self) -> None:  # noqa: B027 - optional
        """Give back what it holds."""


# --- the codec ------------------------------------------------------------------------------------------------------


class Codec(Target):
    """Objects in untrusted jobs. What is read can be written and read again."""

    def __init__(self) -> None:
        shared = ["x" * 100, b"y" * 100, 1 << 600]
        circle: list[Any] = [1]
        circle.append(circle)
        deep: Any = None
        for _ in range(codec.MAX_DEPTH):
            deep = [deep]
        objects: list[Any] = [
            None, True, -5, 1 << 70, 2.5, 1j, "text", "\ud800", b"bytes", bytearray(b"array"), (1, (2, "3")),
            {"a": [1, 2], (1, 2): {3, 4}, frozenset({5, (6, 7)}): None}, shared * 3, circle, deep,
            np.arange(6, dtype=">i4").reshape(2, 3), np.zeros((0, 4)), np.array(3.0), np.float16(2), np.bool_(True),
            np.array([True, False]), np.datetime64("2020-01-01"), np.array([1, 2], "m8[25s]"), np.complex64(1j),
        ]  # fmt: skip
        self.valid = [codec.dumps(obj, False) for obj in objects]
        self.valid += [b"\2" + pickle.dumps(obj) for obj in (1, {"a": Op.SET}, os.getcwd)]

    def run(self, data: bytes) -> bool:
        try:
            obj = codec.loads(data, False)
        except DistError:
            return False
        codec.loads(codec.dumps(obj, False), False)
        return True


# --- the handshake --------------------------------------------------------------------------------------------------


class Handshake(Target):
    """Both sides; the first byte of an input says which. Only the proof of the key is taken."""

    def __init__(self) -> None:
        with watched():
            hello = auth._hello(KEY, b"store", 0, 1)
            server_hello = auth._hello(KEY, b"store")
        client = hello + auth._proof(KEY, b"client", server_hello, hello)
        mine = auth._hello(KEY, b"store")
        self._hello = server_hello
        self._client = client
        with watched():
            mine = auth._hello(KEY, b"store")
        self._server = server_hello + bytes([auth.ACCEPTED]) + auth._proof(KEY, b"server", server_hello, mine)
        refusals = [server_hello + bytes([code]) for code in range(2, 8)]
        others = [auth._hello(KEY, b"data"), auth._hello(b"", b"store"), b"HTTP/1.1 400 Bad Request\r\n\r\n"]
        self.valid = [bytes([way]) + said for way in (0, 1) for said in (client, client + b"rest", *others)]
        self.valid += [b"\2" + said for said in (self._server, *refusals, *others)]

    def run(self, data: bytes) -> bool:
        way, said = data[0] % 3 if data else 0, data[1:]
        try:
            (self._machine, self._blocking, self._client_side)[way](said)
        except (AuthenticationError, DistNetworkError):
            return False
        if not said.startswith(self._server if way == 2 else self._client):
            raise Found("accepted without a proof")
        return True

    def _machine(self, said: bytes) -> None:
        machine = auth.ServerHandshake(KEY, b"store")
        for piece in pieces(said):
            machine.feed(piece)
            machine.outgoing()
        if not machine.done:
            raise AuthenticationError("not done")

    def _blocking(self, said: bytes) -> None:
        with pair(said) as sock:
            auth.server_handshake(sock, KEY, b"store", time.monotonic() + HANG_SECONDS)

    def _client_side(self, said: bytes) -> None:
        with pair(said) as sock:
            auth.client_handshake(sock, KEY, b"store", time.monotonic() + HANG_SECONDS)


def pieces(data: bytes) -> list[bytes]:
    """An input in up to three pieces, which depend on it alone."""
    rng = random.Random(zlib.crc32(data))
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(3)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


@contextmanager
def pair(said: bytes) -> Iterator[socket.socket]:
    """A connection whose other end has said something and then closed its direction."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        yield ours


# --- servers --------------------------------------------------------------------------------------------------------


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
            lambda: store.multi_get(["k", "l"]), lambda: store.multi_set(["k"], ["v"]), lambda: store.queue_pop("k"),
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
        messages: list[dict[str, Any]] = [
            {"t": "hello", "rank": 1, "host": "h", "pid": 5}, {"t": "joined"}, {"t": "bye", "error": "why", "how": ""},
            {"t": "fail", "group": "g", "members": [0, 1], "error": error}, {"t": "joined", "ranks": [0, 1]},
            {"t": "ask", "group": "g", "to": [0, 1], "from": 1, "id": 1}, {"t": "gone", "ranks": [[1, "why", "died"]]},
            {"t": "tell", "to": [0], "from": 1, "id": 1, "report": {"seq": 1}},
            {"t": "ready", "peers": [["h", 1], ["h", 2]]},
            {"group": "g", "channel": "c", "rank": 1}, {"group": "gg", "channel": "m", "rank": 1},
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
        control.watch("g", lambda error: None, lambda: {"seq": 1})
        with pair(said) as sock:
            control._sock = sock
            control._listen(sock)
        if 0 not in control.departed:
            raise Found("the end of the connection goes unnoticed")
        return self._single(said)

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


TARGETS: dict[str, type[Target]] = {"codec": Codec, "handshake": Handshake, "store": Store, "frames": Frames}


# --- the program ----------------------------------------------------------------------------------------------------


def fuzz(name: str, inputs: int, seed: int) -> int:
    """Runs so many inputs; how many findings there were."""
    rng = random.Random(f"{name} {seed}")
    target = TARGETS[name]()
    found: set[str] = set()
    taken = done = 0
    started = time.monotonic()
    try:
        with watched():
            for done in range(1, inputs + 1):
                data = generate(rng, target)
                try:
                    taken += check(target, data)
                except (Exception, Hung) as error:
                    report(name, seed, done, data, error, found)
                    target.close()
                    target = TARGETS[name]()
                if len(found) >= MOST_FINDINGS:
                    break
    finally:
        target.close()
    seconds = time.monotonic() - started
    print(
        f"{name}: {done} inputs, {taken} taken, {len(found)} findings, {seconds:.1f} s, {done / seconds:.0f} a second",
        flush=True,
    )
    return len(found)


def report(name: str, seed: int, number: int, data: bytes, error: BaseException, found: set[str]) -> None:
    """Prints a finding, once for each place that it comes from."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind = f"{type(error).__name__} {place.filename}:{place.lineno}"
    if kind in found:
        return
    found.add(kind)
    print(f"FINDING {name}, seed {seed}, input {number}: {type(error).__name__}: {error!s:.300}")
    print("".join(traceback.format_tb(error.__traceback__)[-3:]).rstrip())
    print(f"  fuzz.py {name} --replay {data.hex()}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=sorted(TARGETS), help="all of them if it is left out")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many for each target (100000)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="a random one")
    parser.add_argument("--replay", metavar="HEX", help="one input again")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    if args.replay is not None:
        if args.target is None:
            parser.error("--replay needs the target")
        target = TARGETS[args.target]()
        with watched():
            print("taken" if check(target, bytes.fromhex(args.replay)) else "refused")
        target.close()
        return 0
    print(f"seed {args.seed}", flush=True)
    findings = sum(fuzz(name, args.inputs, args.seed) for name in ([args.target] if args.target else TARGETS))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
