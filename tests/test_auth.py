"""The handshake and the job's secret."""

from __future__ import annotations

import http.server
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from unicoll import auth
from unicoll.auth import (
    NoAnswerError,
    Secret,
    ServerHandshake,
    client_handshake,
    find_secret,
    server_handshake,
)
from unicoll.errors import AuthenticationError, DistArgumentError, DistNetworkError

KEY = b"k" * 32


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def outcome(future: Future[None]) -> BaseException | None:
    return future.exception(timeout=30)


def meet(
    pair: tuple[socket.socket, socket.socket],
    pool: ThreadPoolExecutor,
    client: tuple[bytes, bytes] = (KEY, b"store"),
    server: tuple[bytes, bytes] = (KEY, b"store"),
) -> tuple[BaseException | None, BaseException | None]:
    """What the client's and the server's handshake raise."""

    def serve() -> None:
        try:
            server_handshake(pair[1], *server, soon())
        except BaseException:
            pair[1].close()
            raise

    serving = pool.submit(serve)
    failure: BaseException | None = None
    try:
        client_handshake(pair[0], *client, soon())
    except DistNetworkError as error:
        failure = error
        pair[0].close()
    return failure, outcome(serving)


@pytest.mark.parametrize("key", [KEY, b"", b"x", b"long" * 100])
def test_equal_keys_meet_and_the_sockets_go_on(pair, pool, key):
    pair[0].settimeout(7.0)
    assert meet(pair, pool, (key, b"data"), (key, b"data")) == (None, None)
    assert pair[0].gettimeout() == 7.0
    assert pair[1].gettimeout() is None
    pair[0].sendall(b"after")
    assert pair[1].recv(16) == b"after"


def test_different_secrets(pair, pool):
    client, server = meet(pair, pool, client=(b"other", b"store"))
    assert isinstance(client, AuthenticationError)
    assert "different secrets" in str(client)
    for source in ("UNICOLL_SECRET", "UNICOLL_SECRET_FILE", "launcher", "127.0.0.1"):
        assert source in str(client)
    assert isinstance(server, AuthenticationError)


@pytest.mark.parametrize(
    ("client_key", "server_key", "words"),
    [(b"", KEY, "the client has none"), (KEY, b"", "the server has none")],
)
def test_one_side_open(pair, pool, client_key, server_key, words):
    client, server = meet(pair, pool, (client_key, b"store"), (server_key, b"store"))
    for error in (client, server):
        assert isinstance(error, AuthenticationError)
        assert words in str(error)


def test_another_purpose(pair, pool):
    client, server = meet(pair, pool, client=(KEY, b"data"))
    assert isinstance(client, AuthenticationError)
    assert "'store'" in str(client)
    assert "'data'" in str(client)
    assert isinstance(server, AuthenticationError)


def test_a_purpose_must_fit_its_field():
    for purpose in (b"", b"x" * 17, b"a\0b"):
        with pytest.raises(ValueError):
            ServerHandshake(KEY, purpose)


def talk_raw(machine: ServerHandshake, key: bytes, purpose: bytes = b"store") -> bytes:
    """A correct client's whole speech to the machine."""
    theirs = machine.outgoing()
    mine = auth._hello(key, purpose)
    return mine + auth._proof(key, b"client", theirs, mine)


def test_the_machine_takes_any_fragmentation_and_keeps_what_follows():
    machine = ServerHandshake(KEY, b"store")
    speech = talk_raw(machine, KEY)
    for i in range(len(speech)):
        assert not machine.done
        machine.feed(speech[i : i + 1])
    assert machine.done
    assert machine.outgoing()[0] == auth.ACCEPTED
    machine.feed(b"later")
    assert machine.leftover == b"later"

    machine = ServerHandshake(KEY, b"store")
    machine.feed(talk_raw(machine, KEY) + b"at once")
    assert (machine.done, machine.leftover) == (True, b"at once")


def test_nothing_recorded_or_reflected_is_accepted():
    first = ServerHandshake(KEY, b"store")
    speech = talk_raw(first, KEY)
    first.feed(speech)
    second = ServerHandshake(KEY, b"store")
    with pytest.raises(AuthenticationError, match="different secrets"):
        second.feed(speech)

    # A client without the key echoes the server's hello and would use the server's proof as its own.
    third = ServerHandshake(KEY, b"store")
    hello = third.outgoing()
    with pytest.raises(AuthenticationError):
        third.feed(hello + auth._proof(KEY, b"server", hello, hello))


def test_every_flipped_bit_is_refused():
    for position in range(auth.HELLO_SIZE + auth.PROOF_SIZE):
        machine = ServerHandshake(KEY, b"store")
        speech = bytearray(talk_raw(machine, KEY))
        speech[position] ^= 1
        with pytest.raises(AuthenticationError):
            machine.feed(bytes(speech))
        assert not machine.done


def test_garbage_is_refused_at_its_first_byte():
    machine = ServerHandshake(KEY, b"store")
    with pytest.raises(AuthenticationError, match="does not speak"):
        machine.feed(b"G")


def test_a_server_that_cannot_prove_itself(pair, pool):
    def impostor() -> None:
        pair[1].sendall(auth._hello(KEY, b"store"))
        auth._receive(pair[1], auth.HELLO_SIZE + auth.PROOF_SIZE, soon(), "client")
        pair[1].sendall(bytes([auth.ACCEPTED]) + b"p" * auth.PROOF_SIZE)

    serving = pool.submit(impostor)
    with pytest.raises(AuthenticationError, match="cannot prove"):
        client_handshake(pair[0], KEY, b"store", soon())
    assert outcome(serving) is None


def foreign(
    pair: tuple[socket.socket, socket.socket], pool: ThreadPoolExecutor, act: Callable[[], None]
) -> None:
    serving = pool.submit(act)
    try:
        client_handshake(pair[0], KEY, b"store", soon())
    finally:
        assert outcome(serving) is None


def test_a_server_that_closes_without_a_word(pair, pool):
    with pytest.raises(NoAnswerError, match="does not speak unicoll's protocol"):
        foreign(pair, pool, pair[1].close)


def test_a_server_that_says_something_else(pair, pool):
    with pytest.raises(AuthenticationError, match=r"does not speak unicoll's protocol.*SSH-2"):
        foreign(pair, pool, lambda: pair[1].sendall(b"SSH-2.0-OpenSSH\r\n"))


def test_a_silent_server_costs_the_deadline_only(pair):
    with pytest.raises(AuthenticationError, match="does not speak unicoll's protocol, or is stuck"):
        client_handshake(pair[0], KEY, b"store", soon(0.2))


def test_a_silent_client_costs_the_deadline_only(pair):
    with pytest.raises(DistNetworkError, match=r"deadline|timed out"):
        server_handshake(pair[1], KEY, b"store", soon(0.2))


def test_an_http_server_is_recognised():
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            with (
                socket.create_connection(server.server_address) as sock,
                pytest.raises(AuthenticationError, match="does not speak unicoll's protocol"),
            ):
                client_handshake(sock, KEY, b"store", soon())
        finally:
            server.shutdown()
            thread.join()


TORCHS_STORE = """
import sys
import torch.distributed
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.torch
def test_torchs_store_is_recognised():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    # In a process of its own, for it keeps descriptors to the end.
    with subprocess.Popen(
        [sys.executable, "-c", TORCHS_STORE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with (
                socket.create_connection(("127.0.0.1", port)) as sock,
                pytest.raises(AuthenticationError, match="does not speak unicoll's protocol"),
            ):
                client_handshake(sock, KEY, b"store", soon(1.0))
        finally:
            process.kill()


def test_new_keys_differ():
    assert len(auth.new_key()) == 32
    assert auth.new_key() != auth.new_key()


def test_no_secret_is_an_open_job():
    assert find_secret({}) == Secret(b"", "none")


def test_the_secret_of_the_variable_goes_first(tmp_path: Path):
    environ = {"UNICOLL_SECRET": " " + "s" * 32 + "\n", "UNICOLL_SECRET_FILE": str(tmp_path / "absent")}
    assert find_secret(environ) == Secret(b"s" * 32, "UNICOLL_SECRET")


def test_a_secret_never_shows_in_its_repr():
    assert "hunter" not in repr(Secret(b"hunter2", "UNICOLL_SECRET"))


def test_a_short_secret_is_warned_about(caplog):
    assert find_secret({"UNICOLL_SECRET": "hunter2"}).key == b"hunter2"
    assert "can be guessed" in caplog.text
    assert "hunter2" not in caplog.text


def secret_file(path: Path, content: bytes, mode: int = 0o600) -> dict[str, str]:
    path.write_bytes(content)
    path.chmod(mode)
    return {"UNICOLL_SECRET_FILE": str(path)}


def test_the_secret_of_a_file(tmp_path: Path):
    environ = secret_file(tmp_path / "secret", b"f" * 32 + b"\n")
    assert find_secret(environ) == Secret(b"f" * 32, f"UNICOLL_SECRET_FILE={tmp_path / 'secret'}")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_that_others_can_access(tmp_path: Path, mode: int):
    with pytest.raises(DistArgumentError, match=f"chmod 600 {tmp_path / 'secret'}"):
        find_secret(secret_file(tmp_path / "secret", b"f" * 32, mode))


def test_empty_secrets(tmp_path: Path):
    for environ in (
        {"UNICOLL_SECRET": ""},
        {"UNICOLL_SECRET": " \n"},
        secret_file(tmp_path / "secret", b"\n"),
    ):
        with pytest.raises(DistArgumentError, match="is empty"):
            find_secret(environ)


def test_a_file_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(DistArgumentError, match=os.strerror(2)):
        find_secret({"UNICOLL_SECRET_FILE": str(tmp_path / "absent")})
