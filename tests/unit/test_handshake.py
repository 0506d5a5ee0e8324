"""The handshake and the job's secret."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.order import deadline_in
from unicoll.errors import AuthenticationError, DistArgumentError, DistNetworkError
from unicoll.net.wire import handshake, handshake_messages
from unicoll.net.wire.handshake import NoAnswerError, ServerHandshake, client_handshake
from unicoll.net.wire.secret import Secret, find_secret, new_key

KEY = b"k" * 32


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


def serve_handshake(sock: socket.socket, key: bytes, purpose: bytes) -> None:
    """The server's side on a blocking socket."""
    sock.settimeout(20.0)
    handshake = ServerHandshake(key, purpose)
    try:
        sock.sendall(handshake.outgoing())
        while not handshake.done:
            if not (data := sock.recv(4096)):
                raise DistNetworkError("the client closed the connection during the handshake")
            handshake.feed(data)
            sock.sendall(handshake.outgoing())
    except AuthenticationError:
        sock.sendall(handshake.outgoing())
        raise
    except OSError as error:
        raise DistNetworkError(str(error)) from error
    finally:
        sock.settimeout(None)


def run_handshake(
    pair: tuple[socket.socket, socket.socket],
    pool: ThreadPoolExecutor,
    client: tuple[bytes, bytes] = (KEY, b"store"),
    server: tuple[bytes, bytes] = (KEY, b"store"),
) -> tuple[BaseException | None, BaseException | None]:
    """The errors of the client's and the server's handshake."""

    def serve() -> None:
        try:
            serve_handshake(pair[1], *server)
        except BaseException:
            pair[1].close()
            raise

    serving = pool.submit(serve)
    failure: BaseException | None = None
    try:
        client_handshake(pair[0], *client, deadline_in())
    except DistNetworkError as error:
        failure = error
        pair[0].close()
    return failure, outcome(serving)


@pytest.mark.parametrize("key", [KEY, b"", b"x", b"long" * 100])
def test_equal_keys_and_usable_sockets_afterwards(pair, pool, key):
    pair[0].settimeout(7.0)
    assert run_handshake(pair, pool, (key, b"data"), (key, b"data")) == (None, None)
    assert pair[0].gettimeout() == 7.0
    assert pair[1].gettimeout() is None
    pair[0].sendall(b"after")
    assert pair[1].recv(16) == b"after"


@pytest.mark.parametrize(
    ("client", "server", "texts"),
    [
        (
            (b"other", b"store"),
            (KEY, b"store"),
            ("different secrets", "UNICOLL_SECRET", "UNICOLL_SECRET_FILE"),
        ),
        ((b"other", b"store"), (KEY, b"store"), ("launcher", "127.0.0.1")),
        ((b"", b"store"), (KEY, b"store"), ("the client has none",)),
        ((KEY, b"store"), (b"", b"store"), ("the server has none",)),
        ((KEY, b"data"), (KEY, b"store"), ("'store'", "'data'")),
    ],
)
def test_different_keys_and_purposes(pair, pool, client, server, texts):
    errors = run_handshake(pair, pool, client, server)
    assert all(isinstance(error, AuthenticationError) for error in errors)
    assert all(text in str(errors[0]) for text in texts)


def test_a_purpose_must_fit_its_field():
    for purpose in (b"", b"x" * 17, b"a\0b"):
        with pytest.raises(ValueError):
            ServerHandshake(KEY, purpose)


def client_bytes(handshake: ServerHandshake, key: bytes, purpose: bytes = b"store") -> bytes:
    """A correct client's bytes, sent to the handshake."""
    theirs = handshake.outgoing()
    mine = handshake_messages.make_hello(key, purpose)
    return mine + handshake_messages.make_proof(key, b"client", theirs, mine)


def test_a_hello_tells_nothing_of_the_secret(monkeypatch: pytest.MonkeyPatch):
    """Its text of the host was keyed with the secret: a user of the host could test guesses of it."""
    monkeypatch.setattr(handshake_messages.secrets, "token_bytes", bytes)
    assert ServerHandshake(KEY, b"store").outgoing() == ServerHandshake(b"other", b"store").outgoing()
    assert handshake_messages.make_hello(KEY, b"store") == handshake_messages.make_hello(b"other", b"store")


def test_the_server_accepts_any_fragmentation_and_keeps_later_bytes():
    handshake = ServerHandshake(KEY, b"store")
    sent = client_bytes(handshake, KEY)
    for i in range(len(sent)):
        assert not handshake.done
        handshake.feed(sent[i : i + 1])
    assert handshake.done
    assert handshake.outgoing()[0] == handshake_messages.ACCEPTED
    handshake.feed(b"later")
    assert handshake.leftover == b"later"

    handshake = ServerHandshake(KEY, b"store")
    handshake.feed(client_bytes(handshake, KEY) + b"at once")
    assert (handshake.done, handshake.leftover) == (True, b"at once")


def test_replayed_and_reflected_proofs_are_refused():
    first = ServerHandshake(KEY, b"store")
    sent = client_bytes(first, KEY)
    first.feed(sent)
    second = ServerHandshake(KEY, b"store")
    with pytest.raises(AuthenticationError, match="different secrets"):
        second.feed(sent)

    # A client without the key echoes the server's hello and would use the server's proof as its own.
    third = ServerHandshake(KEY, b"store")
    hello = third.outgoing()
    with pytest.raises(AuthenticationError):
        third.feed(hello + handshake_messages.make_proof(KEY, b"server", hello, hello))


def test_every_flipped_bit_is_refused():
    for position in range(handshake_messages.HELLO_SIZE + handshake_messages.PROOF_SIZE):
        handshake = ServerHandshake(KEY, b"store")
        sent = bytearray(client_bytes(handshake, KEY))
        sent[position] ^= 1
        with pytest.raises(AuthenticationError):
            handshake.feed(bytes(sent))
        assert not handshake.done


def test_garbage_is_refused_at_its_first_byte():
    handshake = ServerHandshake(KEY, b"store")
    with pytest.raises(AuthenticationError, match="does not speak"):
        handshake.feed(b"G")
    with pytest.raises(AuthenticationError, match="has another version of unicoll"):
        ServerHandshake(KEY, b"store").feed(b"unicoll1")


def test_a_server_that_cannot_prove_itself(pair, pool):
    def serve_without_the_key() -> None:
        pair[1].sendall(handshake_messages.make_hello(KEY, b"store"))
        handshake._receive(
            pair[1], handshake_messages.HELLO_SIZE + handshake_messages.PROOF_SIZE, deadline_in(), "client"
        )
        pair[1].sendall(bytes([handshake_messages.ACCEPTED]) + b"p" * handshake_messages.PROOF_SIZE)

    serving = pool.submit(serve_without_the_key)
    with pytest.raises(AuthenticationError, match="cannot prove"):
        client_handshake(pair[0], KEY, b"store", deadline_in())
    assert outcome(serving) is None


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"", NoAnswerError, "does not speak unicoll's protocol"),
        (b"SSH-2.0-OpenSSH\r\n", AuthenticationError, r"does not speak unicoll's protocol.*SSH-2"),
        (b"HTTP/1.0 400 Bad request\r\n\r\n", AuthenticationError, "does not speak unicoll's protocol"),
        (b"unicoll1\r\n\r\n", AuthenticationError, "has another version of unicoll"),
        (None, AuthenticationError, "does not speak unicoll's protocol, or does not respond"),
    ],
)
def test_a_server_of_another_protocol(pair, answer, error, message):
    if answer is not None:
        pair[1].sendall(answer)
        pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(error, match=message):
        client_handshake(pair[0], KEY, b"store", deadline_in(20.0 if answer is not None else 0.2))


def test_new_keys_differ():
    assert len(new_key()) == 32
    assert new_key() != new_key()


def test_where_the_secret_comes_from(tmp_path: Path):
    file = secret_file(tmp_path / "secret", b"f" * 32 + b"\n")
    for environ, secret in (
        ({}, Secret(b"", "none")),
        ({"UNICOLL_SECRET": " " + "s" * 32 + "\n"}, Secret(b"s" * 32, "UNICOLL_SECRET")),
        (file, Secret(b"f" * 32, f"UNICOLL_SECRET_FILE={tmp_path / 'secret'}")),
        ({"UNICOLL_SECRET": "s" * 32, **file}, Secret(b"s" * 32, "UNICOLL_SECRET")),
    ):
        assert find_secret(environ) == secret


def test_repr_hides_the_secret():
    assert "hunter" not in repr(Secret(b"hunter2", "UNICOLL_SECRET"))


def test_a_short_secret_causes_a_warning(caplog):
    assert find_secret({"UNICOLL_SECRET": "hunter2"}).key == b"hunter2"
    assert "can be guessed" in caplog.text
    assert "hunter2" not in caplog.text


def secret_file(path: Path, content: bytes, mode: int = 0o600) -> dict[str, str]:
    path.write_bytes(content)
    path.chmod(mode)
    return {"UNICOLL_SECRET_FILE": str(path)}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_that_others_can_access(tmp_path: Path, mode: int):
    with pytest.raises(DistArgumentError, match=f"chmod 600 {tmp_path / 'secret'}"):
        find_secret(secret_file(tmp_path / "secret", b"f" * 32, mode))


def test_unusable_secrets(tmp_path: Path):
    for environ, message in (
        ({"UNICOLL_SECRET": ""}, "is empty"),
        ({"UNICOLL_SECRET": " \n"}, "is empty"),
        (secret_file(tmp_path / "secret", b"\n"), "is empty"),
        ({"UNICOLL_SECRET_FILE": str(tmp_path / "absent")}, os.strerror(2)),
    ):
        with pytest.raises(DistArgumentError, match=message):
            find_secret(environ)
