"""The protection of connections: data arrive unchanged, and tampering is detected."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import p2p_jobs
from tests.support.interrupts import Point, Points
from tests.support.ranks import run_ranks
from tests.unit import channel_jobs as jobs
from tests.unit.interrupt_points import interrupt_at
from tests.unit.on_path import on_path
from unicoll.errors import AuthenticationError, DistError, DistNetworkError
from unicoll.net.control.departures import Departures
from unicoll.net.control.group_failures import pack_error, unpack_error
from unicoll.net.control.relay import Relay
from unicoll.net.stores import TCPStore
from unicoll.net.wire import channel, handshake_messages, tls
from unicoll.net.wire.channel import Channel, authenticate
from unicoll.net.wire.framed_server import frame, handshake_address, read_frame
from unicoll.net.wire.handshake_messages import Protection
from unicoll.net.wire.records import MAX_DATA, MacRecords, TamperedError
from unicoll.net.wire.secret import Key, Secret, new_key
from unicoll.net.wire.tls import TlsRecords
from unicoll.process.interrupts import Changes, InterruptedStreamError

KEY = new_key()
KINDS = ["mac", "tls by certificate", *(["tls by key"] if getattr(ssl, "HAS_PSK", False) else [])]
PROTECTED = ["mac", "tls"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "mac":
        monkeypatch.setattr(ssl, "HAS_PSK", request.param == "tls by key", raising=False)
    return str(request.param)


def made(kind: str, key: Key = KEY, theirs: Key = KEY) -> tuple[Any, Any]:
    """Both sides' records, before any exchange."""
    cls = MacRecords if kind == "mac" else tls.TlsRecords
    return cls(key, server=False), cls(theirs, server=True)


def ready(kind: str) -> tuple[Any, Any]:
    """Both sides' records, ready for data."""
    client, server = made(kind)
    for _ in range(3):
        server.open(client.outgoing())
        client.open(server.outgoing())
    assert client.ready
    assert server.ready
    return client, server


# --- records --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 1000, 1 << 20])
def test_records_in_chunks_of_any_size(kind: str, chunk: int) -> None:
    client, server = ready(kind)
    for sender, receiver in ((client, server), (server, client)):
        data = [os.urandom(size) for size in (1, 19, 20, 5000, 3, 40_000)]
        sent = b"".join(bytes(sender.seal(d)) for d in data)
        received = b"".join(bytes(receiver.open(sent[i : i + chunk])) for i in range(0, len(sent), chunk))
        assert received == b"".join(data)
    if kind.startswith("tls"):
        assert not any(d in sent for d in data if len(d) > 100)


def flipped(sent: list[bytes]) -> list[bytes]:
    at = random.randrange(len(sent[1]))
    return [
        sent[0],
        sent[1][:at] + bytes([sent[1][at] ^ 1 << random.randrange(8)]) + sent[1][at + 1 :],
        *sent[2:],
    ]


ATTACKS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a bit is changed": flipped,
    "a record is left out": lambda sent: [sent[0], *sent[2:]],
    "a record is repeated": lambda sent: [sent[0], sent[1], sent[1], *sent[2:]],
    "two are exchanged": lambda sent: [sent[0], sent[2], sent[1], *sent[3:]],
    "bytes are left out": lambda sent: [sent[0], sent[1][:-3], *sent[2:]],
    "bytes are added": lambda sent: [sent[0], sent[1] + b"xyz", *sent[2:]],
    "a record of the other direction": lambda sent: [sent[-1], *sent[:-1]],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_tampering_is_detected(kind: str, attack: str) -> None:
    for seed in range(25):
        random.seed(seed)
        client, server = ready(kind)
        data = [os.urandom(size) for size in (100, 100, 100, 3000)]
        sent = [bytes(client.seal(d)) for d in data]
        changed = ATTACKS[attack]([*sent, bytes(server.seal(data[0]))])[: len(sent) + 1]
        got = b""
        with pytest.raises(TamperedError, match="the integrity check of its connection failed"):
            for record in [
                *changed,
                *([] if len(changed) > len(sent) else [bytes(server.seal(b"x"))]),
                b"\xff" * 4000,
            ]:
                got += bytes(server.open(record))
        assert b"".join(data).startswith(got)


def test_different_keys_are_detected(kind: str) -> None:
    client, server = made(kind, theirs=new_key())
    with pytest.raises(TamperedError):
        for _ in range(3):
            server.open(client.outgoing())
            client.open(server.outgoing())
        server.open(client.seal(b"x"))


class RelayEndpoint:
    """One of the two TLS connections of a relay, which has all public data, including the certificate's key."""

    def __init__(self, server: bool) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls._context(Key(), server, uses_psk=False).wrap_bio(
            self._in, self._out, server_side=server
        )
        self.got = b""
        self.open(b"")

    def open(self, received: bytes) -> None:
        self._in.write(received)
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self.got += self._tls.read(1000)

    def outgoing(self) -> bytes:
        return self._out.read()

    def pass_on(self, data: bytes) -> bytes:
        self._tls.write(data)
        return self._out.read()


def test_a_relay_that_terminates_tls_on_both_sides_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay forwards each side's proof to the other side."""
    monkeypatch.setattr(ssl, "HAS_PSK", False, raising=False)
    client, server = made("tls by certificate")
    to_client, to_server = RelayEndpoint(server=True), RelayEndpoint(server=False)
    for relay, side in ((to_client, client), (to_server, server)):
        for _ in range(3):
            relay.open(side.outgoing())
            side.open(relay.outgoing())
    assert len(to_client.got) == len(to_server.got) == 32
    for side, forged in (
        (client, to_client.pass_on(to_server.got)),
        (server, to_server.pass_on(to_client.got)),
    ):
        with pytest.raises(TamperedError, match="passes through a third process"):
            side.open(forged)
        assert not side.ready


@pytest.mark.skipif(not getattr(ssl, "HAS_PSK", False), reason="this Python has no pre-shared keys")
def test_a_server_with_a_certificate_instead_of_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    client = tls.TlsRecords(KEY, server=False)
    monkeypatch.setattr(ssl, "HAS_PSK", False)
    server = tls.TlsRecords(KEY, server=True)
    with pytest.raises(TamperedError):
        for _ in range(3):
            server.open(client.outgoing())
            client.open(server.outgoing())


# --- over a socket --------------------------------------------------------------------------------------------------


@pytest.fixture
def ends(kind: str) -> Iterator[tuple[Channel, Channel]]:
    sockets = socket.socketpair()
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    client, server = ready(kind)
    yield Channel(sockets[0], client), Channel(sockets[1], server)
    for sock in sockets:
        sock.close()


def test_a_blocked_send_is_continued(ends: tuple[Channel, Channel]) -> None:
    """As on a socket whose buffer is full, except that the next data must begin with the same bytes."""
    sender, receiver = ends
    data, got = memoryview(os.urandom(3 * MAX_DATA + 11)), bytearray()
    space = memoryview(bytearray(50_000))
    sent = blocked = 0
    while len(got) < len(data):
        try:
            if sent < len(data):
                sent += sender.send(
                    data[sent : sent + random.randrange(MAX_DATA, 3 * MAX_DATA)], socket.MSG_DONTWAIT
                )
        except BlockingIOError:
            blocked += 1
        with contextlib.suppress(BlockingIOError):
            got += space[: receiver.recv_into(space, 0, socket.MSG_DONTWAIT)]
    assert got == data
    assert blocked
    assert not receiver.pending
    with pytest.raises(BlockingIOError):
        receiver.recv(1, socket.MSG_DONTWAIT)


def test_reads_of_any_size(ends: tuple[Channel, Channel]) -> None:
    """Sending no bytes, and receiving into an empty buffer, return at once, as on a socket."""
    sender, receiver = ends
    assert sender.send(b"") == 0
    assert receiver.recv_into(memoryview(bytearray())) == 0
    sender.sendall(b"0123456789")
    assert receiver.recv(3) == b"012"
    assert receiver.pending
    space = bytearray(4)
    assert receiver.recv_into(memoryview(space), 2) == 2
    assert receiver.recv_into(memoryview(space)[1:]) == 3
    assert space == b"3567"
    sender.shutdown(socket.SHUT_WR)
    assert receiver.recv(10) == b"89"
    assert receiver.recv(10) == b""
    assert receiver.recv_into(memoryview(space)) == 0


def test_both_directions_concurrently(ends: tuple[Channel, Channel]) -> None:
    data = os.urandom(1 << 20)

    def receive(end: Channel) -> bytes:
        whole = bytearray()
        while len(whole) < len(data):
            whole += end.recv(1 << 16)
        return bytes(whole)

    with ThreadPoolExecutor(4) as pool:
        received = [pool.submit(receive, end) for end in ends]
        sent = [pool.submit(end.sendall, data) for end in ends]
        assert [task.result(60) for task in received + sent] == [data, data, None, None]


# --- exceptions of a signal's handler -------------------------------------------------------------------------------


@pytest.fixture
def fresh(kind: str) -> Iterator[Callable[[], tuple[Channel, Channel]]]:
    """Makes new ends of a connection, for each point."""
    with contextlib.ExitStack() as stack:

        def make() -> tuple[Channel, Channel]:
            stack.pop_all().close()
            first, second = map(stack.enter_context, socket.socketpair())
            client, server = ready(kind)
            return Channel(first, client), Channel(second, server)

        yield make


def received(end: Channel) -> bytes:
    """All that has arrived."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := end.recv(1 << 16, socket.MSG_DONTWAIT):
            data += chunk
    return data


@pytest.mark.parametrize("size", [5, 2500])
@pytest.mark.parametrize("how", ["send", "sendall"])
def test_an_interrupted_send(
    fresh: Callable[[], tuple[Channel, Channel]], how: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one raises an error, or its data come behind all or nothing of the interrupted one."""
    monkeypatch.setattr(channel, "MAX_DATA", 1000)
    first, second = os.urandom(size), os.urandom(1500)
    whole = first if how == "sendall" else first[:1000]

    def trial(point: Point | None) -> Points:
        sender, receiver = fresh()
        points = interrupt_at(lambda: getattr(sender, how)(first), point)[1]
        try:
            sender.sendall(second)
        except InterruptedStreamError:
            sender.shutdown(socket.SHUT_WR)
            assert first.startswith(received(receiver))
        else:
            assert received(receiver) in (second, whole + second), points.raised
        return points

    for point in dict.fromkeys(trial(None).seen):
        trial(point)


def test_an_interrupted_send_in_parts(fresh: Callable[[], tuple[Channel, Channel]]) -> None:
    """After a full buffer the same data are passed again: all of them arrive once, or there is an error."""
    data = os.urandom(MAX_DATA)

    def trial(point: Point | None) -> Points:
        sender, receiver = fresh()
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        got = b""

        def send() -> None:
            with contextlib.suppress(BlockingIOError):
                sender.send(data, socket.MSG_DONTWAIT)

        send()
        got += received(receiver)
        points = interrupt_at(send, point)[1]
        try:
            sent = 0
            while not sent:
                got += received(receiver)
                with contextlib.suppress(BlockingIOError):
                    sent = sender.send(data, socket.MSG_DONTWAIT)
        except InterruptedStreamError:
            assert points.raised
            return points
        assert got + received(receiver) == data
        return points

    for point in dict.fromkeys(trial(None).seen):
        trial(point)


@pytest.mark.parametrize("how", ["recv", "recv_into"])
@pytest.mark.parametrize("size", [4, 2000])
def test_an_interrupted_receive(
    fresh: Callable[[], tuple[Channel, Channel]], how: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has consumed nothing, or the next one raises an error."""
    monkeypatch.setattr(channel, "MAX_DATA", 1000)
    data = os.urandom(1700)

    def receive(end: Channel) -> bytes:
        if how == "recv":
            return end.recv(size)
        space = memoryview(bytearray(size))
        return bytes(space[: end.recv_into(space)])

    def trial(point: Point | None) -> Points:
        sender, receiver = fresh()
        sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)
        space = memoryview(bytearray(size))
        call = partial(receiver.recv, size) if how == "recv" else partial(receiver.recv_into, space)
        interrupted, points = interrupt_at(call, point)
        try:
            rest = receive(receiver)
            rest += received(receiver)
        except InterruptedStreamError:
            assert points.raised
        else:
            assert rest == data if interrupted else data.endswith(rest)
        return points

    for point in dict.fromkeys(trial(None).seen):
        trial(point)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("ended"), TimeoutError("ended"), BlockingIOError("ended")]
)
@pytest.mark.parametrize("how", ["send", "receive"])
def test_any_exception_of_a_handler_leaves_doubt(
    ends: tuple[Channel, Channel], how: str, error: BaseException
) -> None:
    """Also one that a socket could raise: it may come after the system call."""
    sender, receiver = ends

    def handler(*_: object) -> Any:
        raise error

    sender.sendall(b"x")
    sender._records.seal = receiver._records.open = handler  # type: ignore[method-assign]
    call = partial(sender.send, b"x") if how == "send" else partial(receiver.recv, 1)
    with pytest.raises(type(error), match=r"^ended$"):
        call()
    with pytest.raises(InterruptedStreamError, match=f"interrupted an earlier {how}"):
        call()


def test_a_timeout_of_the_socket_leaves_no_doubt(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    receiver.settimeout(0.01)
    with pytest.raises(TimeoutError, match="timed out"):
        receiver.recv(1)
    sender.sendall(b"x")
    assert receiver.recv(1) == b"x"


# --- servers and their clients ----------------------------------------------------------------------------------------


def last_byte_changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.fixture(params=["plain", *PROTECTED])
def wanted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UNICOLL_CHANNEL", request.param)
    monkeypatch.setenv("UNICOLL_TRANSPORT", "tcp")
    return str(request.param)


def test_a_store_behind_a_relay(wanted: str) -> None:
    """Changes are detected with every protection; with TLS the data cannot be read either."""
    secret = Secret(KEY, "test")
    value = b"a recognizable value"
    large = os.urandom(5 * MAX_DATA + 1)
    with (
        TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, secret=secret) as master,
        on_path(master.port) as path,
        TCPStore("127.0.0.1", path.port, secret=secret) as client,
    ):
        client.set("large", large)
        assert client.get("large") == large
        client.set("k", value)
        assert client.get("k") == value
        assert (value in path.seen["up"]) == (value in path.seen["down"]) == (wanted != "tls")
        path.change["down"] = last_byte_changed
        with pytest.raises(AuthenticationError, match=r"the store server at .* integrity check"):
            client.get("k")
        path.change = {"up": last_byte_changed}
        with pytest.raises(DistNetworkError):
            client.set("k", b"forged")
        path.change.clear()
        assert client.get("k") == value


def control_channel(sock: socket.socket, host: str, port: int, rank: int) -> channel.Connection:
    """A rank's authenticated connection to the relay at this address."""
    where = handshake_address(host, port)
    return authenticate(sock, KEY, b"control", time.monotonic() + 60, rank=rank, address=where)[0]


@contextlib.contextmanager
def relay_of(size: int) -> Iterator[tuple[str, int]]:
    relay = Relay(size, KEY, "127.0.0.1")
    try:
        yield relay.addresses[0]
    finally:
        relay.close()


def test_a_changed_control_message_disconnects_its_rank(wanted: str) -> None:
    """The other ranks get the reason, not that the rank has died."""
    with relay_of(2) as (host, port), on_path(port) as path:
        socks = [socket.create_connection((host, p), 5) for p in (port, path.port)]
        members = [control_channel(sock, host, port, r) for r, sock in enumerate(socks)]
        for rank, member in enumerate(members):
            member.sendall(frame({"t": "hello", "rank": rank, "host": "h", "pid": 1}))
        assert [read_frame(member)["t"] for member in members] == ["ready", "ready"]
        path.change["up"] = last_byte_changed
        members[1].sendall(frame({"t": "bye", "error": "", "how": "forged"}))
        ((rank, why, manner),) = read_frame(members[0])["ranks"]
        for sock in socks:
            sock.close()
    assert (rank, manner) == (1, "died")
    assert "was disconnected: the integrity check of its connection failed" in why


def test_texts_of_a_process_are_printable_where_they_come_in() -> None:
    """Escape sequences in the name of its host, or in its error, reached the terminals of the others."""
    escape = "\x1b]0;owned\x07\nrank 7"
    with relay_of(2) as (host, port):
        socks = [socket.create_connection((host, port), 5) for _ in range(2)]
        members = [control_channel(sock, host, port, r) for r, sock in enumerate(socks)]
        for rank, member in enumerate(members):
            member.sendall(frame({"t": "hello", "rank": rank, "host": escape, "pid": 1}))
        peers = read_frame(members[0])["peers"]
        members[1].sendall(frame({"t": "bye", "error": escape, "how": escape}))
        socks[1].close()
        ((_, why, _),) = read_frame(members[0])["ranks"]
        socks[0].close()
    assert peers[0][0] == "\\x1b]0;owned\\x07\\nrank 7"
    assert why.isprintable()
    departures = Departures(Changes())
    departures.record(1, escape, "died")
    error = unpack_error(pack_error(DistError(escape, op=escape)) | {"type": "DistError"})
    assert all(
        text.isprintable() for text in [departures.departed[1], str(error).replace("\n", ""), str(error.op)]
    )


@pytest.mark.parametrize("hosts", ["one", "two", "unknown"])
def test_equal_addresses_do_not_make_one_host(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker who forwards with equal addresses at both ends had TLS between two hosts replaced by the minimum."""
    monkeypatch.delenv("UNICOLL_TRANSPORT", raising=False)
    monkeypatch.setenv("UNICOLL_CHANNEL", "tls")
    if hosts != "one":
        unknown = bytes(handshake_messages.HOST_ID_SIZE)
        monkeypatch.setattr(
            handshake_messages, "host_id", lambda key: os.urandom(len(unknown)) if hosts == "two" else unknown
        )
    with relay_of(1) as (host, port), socket.create_connection((host, port)) as sock:
        connection = control_channel(sock, host, port, 0)
        assert isinstance(connection, channel.Channel)
        assert isinstance(connection._records, MacRecords if hosts == "one" else TlsRecords)
        connection.sendall(frame({"t": "hello", "rank": 0, "host": "h", "pid": 1}))
        assert read_frame(connection)["t"] == "ready"


def test_different_protection_on_both_sides_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICOLL_TRANSPORT", "tcp")
    monkeypatch.setenv("UNICOLL_CHANNEL", "tls")
    real = channel.wanted_protection

    def wanted(sock: socket.socket, minimum: str = "plain") -> Protection:
        here = threading.current_thread().name == "unicoll-relay"
        return Protection(minimum, "tls") if here else real(sock, minimum)

    with relay_of(1) as (host, port):
        monkeypatch.setenv("UNICOLL_CHANNEL", "mac")
        monkeypatch.setattr(channel, "wanted_protection", wanted)
        with (
            socket.create_connection((host, port)) as sock,
            pytest.raises(AuthenticationError, match="give all processes the same UNICOLL_CHANNEL"),
        ):
            control_channel(sock, host, port, 0)


# --- jobs -------------------------------------------------------------------------------------------------------------


def exchange_messages() -> None:
    p2p_jobs.every_type()
    p2p_jobs.both_send_first(4)
    p2p_jobs.unexpected(20_000)


@pytest.mark.parametrize("wanted", PROTECTED)
def test_messages(wanted: str) -> None:
    """Collectives over protected connections: tests/gloo/test_striping.py."""
    run_ranks(2, exchange_messages, env={"UNICOLL_TRANSPORT": "tcp", "UNICOLL_CHANNEL": wanted})


@pytest.mark.every(n=2)
@pytest.mark.parametrize("wanted", ["plain", *PROTECTED])
@pytest.mark.parametrize("what", ["all_reduce", "send"])
def test_data_changed_between_two_ranks(wanted: str, what: str) -> None:
    """Without protection the result is wrong; with it the ranks get an error with both ends."""
    env = {"UNICOLL_TRANSPORT": "tcp", "UNICOLL_CHANNEL": wanted}
    outcomes = run_ranks(2, jobs.changed_on_the_path, what, env=env)
    if wanted == "plain":
        assert "wrong" in outcomes
    else:
        assert any("AuthenticationError" in outcome and "integrity check" in outcome for outcome in outcomes)
        assert "wrong" not in outcomes


@pytest.mark.parametrize("attack", ["none", "changed", "repeated"])
def test_pickles_changed_between_two_ranks(attack: str, tmp_path: Path) -> None:
    """Who could change bytes between two hosts could run code, without UNICOLL_CHANNEL in a job with a secret."""
    env = {"UNICOLL_TRANSPORT": "tcp"}
    folder = tmp_path / "owned"
    found = run_ranks(2, jobs.pickles_on_the_path, attack, str(folder), env=env)
    assert not folder.exists()
    errors = [error for errors in found for error in errors]
    # all_gather on both ranks, and four that one rank receives; for two sizes, both times or the second time
    assert len(errors) == {"none": 0, "changed": 24, "repeated": 12}[attack], errors
    assert all(
        "AuthenticationError" in error and "the MAC of an object is wrong" in error for error in errors
    )
