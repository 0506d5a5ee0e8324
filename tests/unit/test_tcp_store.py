"""TCPStore: authentication, malformed requests, addresses, failures, and forks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.support.forks import exit_code, fork
from tests.support.order import await_true
from tests.support.ports import has_ipv6
from unicoll.errors import (
    AuthenticationError,
    DistArgumentError,
    DistNetworkError,
    DistStoreError,
    DistTypeError,
    StoreTimeoutError,
)
from unicoll.net.stores import TCPStore, connections, listener, protocol, tcp, tcp_server
from unicoll.net.wire import admission, channel, handshake_messages, interfaces
from unicoll.net.wire.secret import Secret
from unicoll.process import timeouts

# Some of these tests fork.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SECRET = Secret(b"s" * 32, "test")
OTHER = Secret(b"o" * 32, "test")
OPEN = Secret(b"", "none")


def serve(host: str = "127.0.0.1", port: int = 0, secret: Secret = SECRET, **options: object) -> TCPStore:
    return TCPStore(host, port, is_master=True, timeout=20.0, secret=secret, **options)  # type: ignore[arg-type]


def join(
    master: TCPStore, host: str = "127.0.0.1", secret: Secret = SECRET, timeout: float = 20.0
) -> TCPStore:
    return TCPStore(host, master.port, timeout=timeout, secret=secret)


@pytest.fixture
def master() -> Iterator[TCPStore]:
    with serve() as store:
        yield store


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def raw(master: TCPStore) -> socket.socket:
    return socket.create_connection(("127.0.0.1", master.port), timeout=20)


@contextlib.contextmanager
def authenticated(master: TCPStore) -> Iterator[channel.Connection]:
    """An authenticated connection."""
    with raw(master) as sock:
        yield channel.authenticate(sock, SECRET.key, tcp_server.PURPOSE, time.monotonic() + 20)[0]


def waiting_requests() -> int:
    """How many requests wait for a key in the only server of this process."""
    (server,) = listener._servers.values()
    return sum(map(len, list(server._waiters.values())))


def ends(sock: channel.Connection) -> bool:
    """True once the server has closed the connection."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass
    return True


# --- authentication -------------------------------------------------------------------------------------------------


def test_a_wrong_secret_is_reported_immediately(master: TCPStore):
    """The reasons: tests/unit/test_handshake.py."""
    with pytest.raises(AuthenticationError, match="different secrets") as caught:
        join(master, secret=OTHER, timeout=100.0)
    assert "UNICOLL_SECRET" in str(caught.value)
    assert str(master.port) in str(caught.value)
    master.set("k", "v")


@pytest.mark.parametrize("ended", [False, True])
def test_a_client_that_has_ended_is_not_refused(
    ended: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Without a secret the server looks for the user of a client, whom it does not find if the client has ended."""

    def is_same_user(sock: socket.socket) -> bool:
        if ended:  # connect() to no address disconnects
            ctypes.CDLL(None).connect(sock.fileno(), bytes(16), 16)
        return False

    def said() -> bool:
        return any("closed a connection from" in record.getMessage() for record in caplog.records)

    caplog.set_level(logging.INFO, "unicoll")
    with serve(secret=OPEN) as master:
        monkeypatch.setattr("unicoll.net.wire.peer_credentials.is_same_user", is_same_user)
        with pytest.raises((AuthenticationError, DistNetworkError)):
            join(master, secret=OPEN, timeout=2.0)
        if not ended:
            await_true(said)
    assert said() != ended


def test_unauthenticated_clients_do_not_disturb(
    master: TCPStore, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
):
    monkeypatch.setattr(admission, "HANDSHAKE_SECONDS", 2.0)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(join(master))
        waiting = pool.submit(client.get, "late")
        clients = [stack.enter_context(raw(master)) for _ in range(6)]
        silent, trickling, garbage, http, recorded, gone = clients
        trickling.sendall(handshake_messages.MAGIC[:3])
        garbage.sendall(os.urandom(100_000))
        http.sendall(b"GET / HTTP/1.1\r\n\r\n")
        recorded.sendall(
            handshake_messages.make_hello(SECRET.key, b"store", handshake_messages.Protection("mac", "mac"))
            + b"p" * 32
        )
        gone.close()
        client.set("during", "v")
        assert client.get("during") == b"v"
        for other in (silent, trickling, garbage, http, recorded):
            assert ends(other)
        master.set("late", "v")
        assert waiting.result(timeout=20) == b"v"


HUGE = protocol.REQUEST.pack(1 << 62, protocol.StoreOp.SET, 0.0)
MALFORMED = {
    "unknown operation": protocol.REQUEST.pack(0, 99, 0.0),
    "oversized": HUGE,
    "cut length": protocol.REQUEST.pack(2, protocol.StoreOp.GET, 0.0) + b"ab",
    "field beyond the end": protocol.REQUEST.pack(5, protocol.StoreOp.GET, 0.0)
    + struct.pack("<I", 100)
    + b"x",
    "too few fields": protocol.pack_request(protocol.StoreOp.SET, (b"k",)),
    "too many fields": protocol.pack_request(protocol.StoreOp.GET, (b"k", b"k")),
    "odd pairs": protocol.pack_request(protocol.StoreOp.MULTI_SET, (b"k", b"v", b"k")),
    "no number": protocol.pack_request(protocol.StoreOp.ADD, (b"k", b"1e3")),
    "long key": protocol.pack_request(protocol.StoreOp.SET, (b"k" * (protocol.MAX_KEY + 1), b"v")),
    "endless wait": protocol.pack_request(protocol.StoreOp.GET, (b"absent",), float("inf")),
    "no time": protocol.pack_request(protocol.StoreOp.GET, (b"absent",), float("nan")),
    "two at once": protocol.pack_request(protocol.StoreOp.NUM_KEYS, ()) * 2,
    "bytes after a waiting request": protocol.pack_request(protocol.StoreOp.GET, (b"absent",), 60.0) + b"x",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_closes_its_connection_only(master: TCPStore, name: str):
    with authenticated(master) as sock, join(master) as client:
        sock.sendall(MALFORMED[name])
        assert ends(sock)
        client.set("k", "v")
        assert client.num_keys() == 1


def test_a_second_request_while_one_waits_closes_the_connection(master: TCPStore):
    with authenticated(master) as sock:
        sock.sendall(protocol.pack_request(protocol.StoreOp.GET, (b"absent",), 60.0))
        await_true(waiting_requests)
        sock.sendall(protocol.pack_request(protocol.StoreOp.NUM_KEYS, ()))
        assert ends(sock)


# --- addresses ------------------------------------------------------------------------------------------------------


def test_localhost_serves_both_families():
    with serve("localhost") as master:
        for host in ["127.0.0.1", "localhost"] + (["::1", "[::1]"] if has_ipv6() else []):
            with join(master, host) as client:
                client.add("n", 1)
        assert master.add("n", 0) >= 2


@pytest.mark.parametrize(
    ("host", "bind", "served"),
    [
        ("127.0.0.1", None, ["127.0.0.1"]),
        ("0.0.0.0", None, ["127.0.0.1", "127.0.0.2", "127.0.0.3"]),
        ("example.invalid", "127.0.0.2,127.0.0.3", ["127.0.0.2", "127.0.0.3"]),
    ],
)
def test_the_addresses_that_are_served(
    host: str, bind: str | None, served: list[str], caplog: pytest.LogCaptureFixture
):
    with serve(host, bind=bind) as master:
        for address in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            if address in served:
                join(master, address).close()
            else:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((address, master.port), timeout=5)
    assert "OPEN" not in caplog.text


def test_addresses_that_cannot_be_served(master: TCPStore):
    with pytest.raises(DistNetworkError, match=f"127.0.0.1:{master.port} is in use"):
        serve(port=master.port)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DistNetworkError, match=f"127.0.0.1:{port} is in use"):
            serve(port=port)
    with pytest.raises(DistNetworkError, match=r"192\.0\.2\.1"):
        serve(bind="192.0.2.1")


def test_an_inherited_listener():
    def listener() -> tuple[int, int]:
        sock = socket.create_server(("127.0.0.1", 0))
        return sock.getsockname()[1], sock.detach()

    port, fd = listener()
    with serve(port=port, master_listen_fd=fd) as master, join(master) as client:
        assert master.port == port
        client.set("k", "v")
    with open(os.devnull) as null, pytest.raises(DistArgumentError, match="not a socket"):
        serve(master_listen_fd=null.fileno())
    port, fd = listener()
    with pytest.raises(DistArgumentError, match=f"bound to port {port}"):
        serve(port=port % 60000 + 1, master_listen_fd=fd)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((1, 2), DistTypeError),
        (("", 2), DistArgumentError),
        (("h", "2"), DistTypeError),
        (("h", 0), DistArgumentError),
        (("h", 65536), DistArgumentError),
        (("h", 1, None, False, "soon"), DistTypeError),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], error: type[Exception]):
    with pytest.raises(error):
        TCPStore(*arguments, secret=SECRET)  # type: ignore[arg-type]


# --- startup --------------------------------------------------------------------------------------------------------


def test_the_deadline_of_a_client_is_the_callers(monkeypatch: pytest.MonkeyPatch, port: int):
    """The pauses between attempts grow to a second; the last attempt is at the deadline all the same."""
    now = 1000.0
    attempts: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        attempts.append(now)
        now += seconds

    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(timeouts, "time", SimpleNamespace(monotonic=lambda: now))
    pool = connections.ConnectionPool(["127.0.0.1"], port, SECRET, "the store")
    with pytest.raises(DistNetworkError, match=r"the store within 1 s: .*refused"):
        pool.connect(now + 1.0)
    assert now == pytest.approx(1001.0)
    assert len(attempts) > 3


def test_a_server_that_is_known_to_run_is_not_awaited(port: int):
    """Else this call would last an hour."""
    with pytest.raises(DistNetworkError, match=r"no store could be reached at 127\.0\.0\.1"):
        TCPStore("127.0.0.1", port, timeout=3600.0, wait_for_workers=False, retry=False)


def test_waiting_for_workers(pool: ThreadPoolExecutor, port: int):
    options = {"timeout": 30.0, "secret": SECRET}
    others = [pool.submit(TCPStore, "127.0.0.1", port, 3, False, **options) for _ in range(2)]
    with TCPStore("127.0.0.1", port, 3, True, **options) as master:
        for other in others:
            other.result(timeout=30).close()
        assert (master.num_keys(), master.list_keys()) == (1, [])
    with pytest.raises(StoreTimeoutError, match="1 of 3 processes have joined"):
        TCPStore("127.0.0.1", 0, 3, True, 0.2, secret=SECRET)
    with TCPStore("127.0.0.1", 0, 3, True, 0.2, wait_for_workers=False, secret=SECRET) as master:
        assert master.num_keys() == 0


def test_multi_tenant_masters_share_a_server():
    with serve(multi_tenant=True) as first:
        first.set("k", "v")
        with serve(port=first.port, multi_tenant=True) as second:
            assert second.get("k") == b"v"
            with pytest.raises(DistArgumentError, match="another secret"):
                serve(port=first.port, multi_tenant=True, secret=OTHER)
            with pytest.raises(DistNetworkError, match="in use"):
                serve(port=first.port)
            first.close()
            assert second.get("k") == b"v"


def test_lingering_until_the_last_client_has_disconnected():
    master = serve()
    client = join(master)
    master.close(linger=True)
    client.set("k", "v")
    with serve(port=master.port) as successor:
        assert successor.get("k") == b"v"
        client.close()
        assert successor.get("k") == b"v"
    with serve(port=master.port) as fresh:
        assert fresh.try_get("k") is None
        fresh.close(linger=True)


def test_a_garbage_collected_master_stops_serving():
    master = serve()
    port = master.port
    del master
    gc.collect()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


# --- failures -------------------------------------------------------------------------------------------------------


SERVER = """
import sys
from unicoll.net.wire.secret import Secret
from unicoll.net.stores import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, secret=Secret(b"s" * 32, "test"))
print(store.port, flush=True)
{then}
"""


@contextlib.contextmanager
def server_process(then: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER.format(then=then)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


UNTIL_TWO_WAIT = """
from tests.support.order import await_true
from tests.unit.test_tcp_store import waiting_requests
await_true(lambda: waiting_requests() == 2)
print("two wait", flush=True)
sys.stdin.read()
"""


def test_a_killed_server_is_detected_immediately(pool: ThreadPoolExecutor):
    with (
        server_process(UNTIL_TWO_WAIT) as (process, port),
        TCPStore("127.0.0.1", port, timeout=300.0, secret=SECRET) as client,
    ):
        waits = [pool.submit(client.get, "never"), pool.submit(client.queue_pop, "never")]
        assert process.stdout is not None
        assert process.stdout.readline() == "two wait\n"
        process.kill()
        for wait in waits:
            with pytest.raises(
                DistNetworkError, match=f"(get|pop): lost the store server at 127.0.0.1:{port}"
            ):
                wait.result(timeout=20)


def test_a_stopped_server_does_not_hang_its_clients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tcp, "_ANSWER_SECONDS", 0.3)
    with (
        server_process("sys.stdin.read()") as (process, port),
        TCPStore("127.0.0.1", port, timeout=30.0, secret=SECRET) as client,
    ):
        client.set_timeout(0.2)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(DistNetworkError, match=r"has not answered for \d+\.\d+ s"):
            client.get("k")
        process.send_signal(signal.SIGCONT)
        client.set_timeout(20.0)
        client.set("k", "v")
        assert client.get("k") == b"v"


@pytest.mark.every(n=2)
@pytest.mark.parametrize("then", ["", "store.close(linger=True)", "raise SystemExit(0)"])
def test_exiting_without_closing_does_not_hang(then: str):
    with server_process("twin = store.clone(); twin.set('k', 'v')\n" + then) as (process, _):
        assert process.wait(timeout=30) == 0


def test_a_client_killed_while_waiting_leaves_no_waiter(master: TCPStore):
    with join(master) as client:
        pid = fork(lambda: client.queue_pop("q"))
        await_true(waiting_requests)
        os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL
        await_true(lambda: not waiting_requests())
        client.queue_push("q", "kept")
        assert client.queue_pop("q") == b"kept"


# --- forks, descriptors, large values ---------------------------------------------------------------------------


def test_a_forked_child_has_its_own_connections(master: TCPStore):
    with join(master) as client:
        client.set("k", "v")

        def use() -> None:
            assert client.get("k") == b"v"
            assert master.get("k") == b"v"
            client.set("from child", str(os.getpid()))
            client.close()
            master.close()

        pid = fork(use)
        assert exit_code(pid) == 0
        assert client.get("from child") == str(pid).encode()
        master.set("still", "serving")
        assert client.get("still") == b"serving"


def test_a_server_without_descriptors_retries_later(master: TCPStore, monkeypatch: pytest.MonkeyPatch):
    real = socket.socket.accept
    failures = iter([OSError(24, "Too many open files")] * 3)

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        for failure in failures:
            raise failure
        return real(self)

    monkeypatch.setattr(interfaces, "raise_descriptor_limit", lambda: False)
    monkeypatch.setattr(socket.socket, "accept", accept)
    with join(master) as client:
        client.set("k", "v")


def test_a_slow_reader_receives_all_of_a_large_value(master: TCPStore):
    value = os.urandom(8 << 20)
    master.set("large", value)
    with authenticated(master) as sock:
        sock.sendall(protocol.pack_request(protocol.StoreOp.GET, (b"large",), 1.0))
        time.sleep(0.1)
        master.set("meanwhile", "served")
        code, fields = tcp._receive(sock)
    assert (code, fields) == (protocol.Status.OK, [value])


def test_errors_have_the_operation(master: TCPStore, monkeypatch: pytest.MonkeyPatch):
    master.set("text", "abc")
    with pytest.raises(DistStoreError, match="add: key 'text' holds") as caught:
        master.add("text", 1)
    assert caught.value.op == "add"
    monkeypatch.setattr(master, "_max_value", 1000)
    with pytest.raises(DistArgumentError, match="multi_set"):
        master.multi_set([str(i) for i in range(200)], [b"x" * 1000] * 200)
    master.set("k", "v")


def test_many_short_waits_leave_no_timers(master: TCPStore, pool: ThreadPoolExecutor):
    (server,) = listener._servers.values()
    with join(master, timeout=300.0) as client:

        def echo() -> None:
            for _ in range(1500):
                client.queue_push("back", client.queue_pop("there"))

        echoing = pool.submit(echo)
        for _ in range(1500):
            master.queue_push("there", "x")
            master.queue_pop("back")
        echoing.result(timeout=300)
        assert len(server._timers) < 1200
