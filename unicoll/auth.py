"""The job's secret, and the handshake that every connection starts with.

Both sides prove that they hold the secret before either reads anything else. All frames have fixed sizes:

    both, at once:  HELLO = magic (12) | flags (1) | purpose, zero-padded (16) | rank (4) | nonce (32)
    client, then:   PROOF = HMAC-SHA256(key, "client" | server's HELLO | client's HELLO | address)
    server, then:   VERDICT (1), and if that is ACCEPTED its own PROOF, with "server" for "client"

The nonces are fresh, so that no recorded exchange is of use again; direction, purpose, flags and ranks are under the
MAC, so that no proof serves in another place. So is the address that the server has published and the client has
dialed, where there is one: whoever rewrites addresses in a store cannot pass the handshake on to the rank meant. The
verdict makes a wrong secret an explained error at the client in place of a closed connection. An empty key runs the
same exchange and proves nothing.

The magic ends like an HTTP request, which makes servers of other protocols answer or close at once.

The flags also say how the connection is to be protected from then on (:mod:`unicoll.channel`), with a key that is
derived from what the proofs cover:

    channel key = HMAC-SHA256(key, "channel" | server's HELLO | client's HELLO | address)
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

from .errors import AuthenticationError, DistArgumentError, DistNetworkError

__all__ = [
    "HANDSHAKE_SECONDS",
    "Key",
    "NoAnswerError",
    "Proved",
    "Secret",
    "ServerHandshake",
    "client_handshake",
    "find_secret",
    "new_key",
    "server_handshake",
]

MAGIC = b"unicoll1\r\n\r\n"
PURPOSE_SIZE = 16
NONCE_SIZE = 32
PROOF_SIZE = 32
RANK_SIZE = 4
HELLO_SIZE = len(MAGIC) + 1 + PURPOSE_SIZE + RANK_SIZE + NONCE_SIZE
NO_RANK = (1 << 32) - 1
KEYED, PRIVATE = 1, 2
CHANNELS = {"plain": 0, "mac": 4, "tls": 8}

ACCEPTED = 1
WRONG_SECRET = 2
CLIENT_HAS_NONE = 3
SERVER_HAS_NONE = 4
WRONG_PURPOSE = 5
OTHER_USER = 6
OTHER_CHANNEL = 7

HANDSHAKE_SECONDS = 10.0
"""How long a server lets a client take over the handshake before it closes the connection."""

SILENCE_SECONDS = 30.0
"""How long a client waits for a server's greeting, which comes first thing, before it calls it foreign."""

WHERE_SECRETS_COME_FROM = (
    "a secret comes from UNICOLL_SECRET, from UNICOLL_SECRET_FILE, or from the launcher, which makes one per "
    "job; every process of the job needs the same one"
)
SHORT_SECRET = 16

log = logging.getLogger("unicoll")


class NoAnswerError(AuthenticationError):
    """The peer closed without a word: it serves another protocol, or was shutting down."""


class Key(bytes):
    """Secret bytes that no ``repr`` shows, so neither a traceback with local variables nor a log does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} secret bytes>"

    __str__ = __repr__


class Secret(NamedTuple):
    """The job's secret.

    Attributes:
        key: the bytes under which handshakes are proved; ``b""`` means that the job is open to everybody.
        source: where it came from: ``"UNICOLL_SECRET"``, ``"UNICOLL_SECRET_FILE=<path>"``, ``"launcher"`` or
            ``"none"``.
    """

    key: bytes
    source: str

    def __repr__(self) -> str:
        return f"Secret(key={Key(self.key)!r}, source={self.source!r})"


def new_key() -> Key:
    """32 random bytes, fit to be a job's secret."""
    return Key(secrets.token_bytes(32))


def find_secret(environ: Mapping[str, str] = os.environ) -> Secret:
    """The secret that the environment names, surrounding white space removed.

    ``UNICOLL_SECRET`` holds the secret itself and goes before ``UNICOLL_SECRET_FILE``, the path of a file
    that nobody but its owner may access. With neither, the secret is empty and its source ``"none"``.

    Raises:
        DistArgumentError: the variable or file is empty, the file cannot be read, or others can access it.
    """
    if "UNICOLL_SECRET" in environ:
        source = "UNICOLL_SECRET"
        key = Key(environ["UNICOLL_SECRET"].strip().encode("utf-8", "surrogateescape"))
    elif "UNICOLL_SECRET_FILE" in environ:
        path = environ["UNICOLL_SECRET_FILE"]
        source = f"UNICOLL_SECRET_FILE={path}"
        key = Key(_read_private(path).strip())
    else:
        return Secret(b"", "none")
    if not key:
        raise DistArgumentError(
            f"{source} is empty: put a secret there, or unset the variable to run without one"
        )
    if len(key) < SHORT_SECRET:
        log.warning(
            "the secret from %s has only %d bytes and can be guessed: use %d or more", source, len(key), 32
        )
    return Secret(key, source)


def _read_private(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            # Asked of the open file, so that nobody can swap it between the question and the reading.
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise DistArgumentError(
                    f"UNICOLL_SECRET_FILE={path} can be accessed by others than its owner (mode {mode:04o}): "
                    f"run  chmod 600 {path}"
                )
            return file.read(1 << 16)
    except OSError as error:
        raise DistArgumentError(
            f"UNICOLL_SECRET_FILE={path} cannot be read: {error.strerror or error}"
        ) from error


def _hello(key: bytes, purpose: bytes, flags: int = 0, rank: int | None = None) -> bytes:
    if not 0 < len(purpose) <= PURPOSE_SIZE or b"\0" in purpose:
        raise ValueError(f"a purpose has 1 to {PURPOSE_SIZE} bytes and no zero byte, not {purpose!r}")
    flags |= KEYED if key else 0
    who = (NO_RANK if rank is None else rank).to_bytes(RANK_SIZE, "little")
    return MAGIC + bytes([flags]) + purpose.ljust(PURPOSE_SIZE, b"\0") + who + secrets.token_bytes(NONCE_SIZE)


def _flags(hello: bytes) -> int:
    return hello[len(MAGIC)]


def _channel(hello: bytes) -> int:
    return _flags(hello) & sum(CHANNELS.values())


def _purpose(hello: bytes) -> bytes:
    start = len(MAGIC) + 1
    return hello[start : start + PURPOSE_SIZE].rstrip(b"\0")


def _rank(hello: bytes) -> int | None:
    start = len(MAGIC) + 1 + PURPOSE_SIZE
    rank = int.from_bytes(hello[start : start + RANK_SIZE], "little")
    return None if rank == NO_RANK else rank


def _proof(key: bytes, direction: bytes, server_hello: bytes, client_hello: bytes, address: str = "") -> bytes:
    return hmac.digest(key, direction + server_hello + client_hello + address.encode(), "sha256")


_REASONS = {
    WRONG_SECRET: f"the two sides have different secrets; {WHERE_SECRETS_COME_FROM}",
    CLIENT_HAS_NONE: f"the server requires a secret and the client has none; {WHERE_SECRETS_COME_FROM}",
    SERVER_HAS_NONE: f"the client has a secret and the server has none; {WHERE_SECRETS_COME_FROM}",
    OTHER_USER: "there is no secret, and without one the server takes processes of its own user on its own host only; "
    + WHERE_SECRETS_COME_FROM,
    WRONG_PURPOSE: "the server is unicoll's, but not for this kind of connection; check the address and port",
    OTHER_CHANNEL: "the two sides want different protection of the connection; give all processes the same "
    "UNICOLL_CHANNEL",
}


def _disagreement(server_hello: bytes, client_hello: bytes) -> int | None:
    """The verdict when the hellos alone show that the two cannot agree."""
    if _purpose(server_hello) != _purpose(client_hello):
        return WRONG_PURPOSE
    if (_flags(server_hello) ^ _flags(client_hello)) & KEYED:
        return CLIENT_HAS_NONE if _flags(server_hello) & KEYED else SERVER_HAS_NONE
    if _channel(server_hello) != _channel(client_hello):
        return OTHER_CHANNEL
    return None


class ServerHandshake:
    """The server's side of the handshake, without a socket: one thread can serve any number of joiners.

    The driver sends what :meth:`outgoing` returns (first before anything arrives, then after every feed, and
    once more after an error, for that is the verdict), feeds what it receives until ``done``, and closes
    connections that take longer than it likes (:data:`HANDSHAKE_SECONDS`).

    Args:
        key: the secret, ``b""`` for an open job.
        purpose: what the connection is for.
        same_user: tells whether the client runs as this process's user; where it is given, others are refused, and
            the verdict says so.
        rank: this process's, where the connection is between ranks.
        address: under which clients were told to find this server, where they were told by a store.
        private: whether to say that only clients on this host that are of this user, or hold the secret, are taken.
        channel: how the connection is to be protected afterwards.

    Attributes:
        channel: the same.
        channel_key: for that; this connection's alone, once it is done.
        done: whether the client has proved that it holds the key.
        leftover: bytes that arrived after the handshake's end; they belong to the protocol that follows.
        peer: the client's rank, once that is proved; None if it has none.
    """

    def __init__(
        self,
        key: bytes,
        purpose: bytes,
        same_user: Callable[[], bool] | None = None,
        rank: int | None = None,
        address: str = "",
        private: bool = False,
        channel: str = "plain",
    ) -> None:
        self._key = key
        self._same_user = same_user
        self._address = address
        self._hello = _hello(key, purpose, CHANNELS[channel] | (PRIVATE if private else 0), rank)
        self.channel = channel
        self.channel_key = Key()
        self.peer: int | None = None
        self._out = self._hello
        self._received = b""
        self.done = False
        self.leftover = b""

    def outgoing(self) -> bytes:
        """The bytes to send now; each is returned once."""
        out, self._out = self._out, b""
        return out

    def feed(self, data: bytes) -> None:
        """Takes received bytes.

        Raises:
            AuthenticationError: the client does not speak this protocol or does not hold the key. Send
                :meth:`outgoing`, then close the connection.
        """
        if self.done:
            self.leftover += data
            return
        self._received += data
        head = self._received[: len(MAGIC)]
        if not MAGIC.startswith(head):
            raise AuthenticationError(f"the client does not speak unicoll's protocol: it began with {head!r}")
        if len(self._received) < HELLO_SIZE:
            return
        hello = self._received[:HELLO_SIZE]
        verdict = _disagreement(self._hello, hello)
        if verdict is not None:
            self._refuse(verdict)
        if len(self._received) >= HELLO_SIZE + PROOF_SIZE:
            self._verify(hello, self._received[HELLO_SIZE : HELLO_SIZE + PROOF_SIZE])

    def _refuse(self, verdict: int) -> NoReturn:
        self._out += bytes([verdict])
        raise AuthenticationError(f"refused a client: {_REASONS[verdict]}")

    def _verify(self, hello: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(proof, _proof(self._key, b"client", self._hello, hello, self._address)):
            self._refuse(WRONG_SECRET)
        if self._same_user is not None and not self._same_user():
            self._refuse(OTHER_USER)
        self._out += bytes([ACCEPTED]) + _proof(self._key, b"server", self._hello, hello, self._address)
        self.leftover = self._received[HELLO_SIZE + PROOF_SIZE :]
        self._received = b""
        self.peer = _rank(hello)
        self.channel_key = Key(_proof(self._key, b"channel", self._hello, hello, self._address))
        self.done = True


class Proved(NamedTuple):
    """What a client knows after the handshake.

    Attributes:
        private: whether the server says that only clients on its host that are of its user, or hold the secret, are
            taken. Without a key that is no more than a claim, and worth something if the server is known to be this
            user's.
        channel_key: for the protection of this connection.
    """

    private: bool
    channel_key: Key


def client_handshake(
    sock: socket.socket,
    key: bytes,
    purpose: bytes,
    deadline: float,
    *,
    rank: int | None = None,
    server: int | None = None,
    address: str = "",
    channel: str = "plain",
) -> Proved:
    """Proves to the server on ``sock`` that this side holds ``key``, and has it prove the same.

    The socket must be connected; its timeout is as before afterwards. The socket stays the caller's to close.

    Args:
        key: the secret, ``b""`` for an open job.
        purpose: what the connection is for, 1 to 16 bytes, equal on both sides (such as ``b"store"``).
        deadline: ``time.monotonic()`` value after which to give up.
        rank: this process's, where the connection is between ranks.
        server: the rank that the server must be, if any.
        address: where the server has published that it is, if it has.
        channel: how the connection is to be protected afterwards.

    Raises:
        AuthenticationError: the secrets differ, one side has none, the two sides want different protection of the
            connection, or the server is not unicoll's (known only at the deadline, or after :data:`SILENCE_SECONDS`,
            if it is silent; :class:`NoAnswerError` if it closed without a word).
        DistNetworkError: the connection broke within the handshake.
    """
    where = _peer(sock)
    before = sock.gettimeout()
    try:
        mine = _hello(key, purpose, CHANNELS[channel], rank)
        _send(sock, mine, deadline, where)
        # Some servers of other protocols (torch's store) stay silent on what they do not understand.
        theirs = _receive_hello(sock, min(deadline, time.monotonic() + SILENCE_SECONDS), where)
        disagreement = _disagreement(theirs, mine)
        if disagreement is not None:
            raise AuthenticationError(
                f"handshake with {where}: {_explain(disagreement, purpose, _purpose(theirs))}"
            )
        _send(sock, _proof(key, b"client", theirs, mine, address), deadline, where)
        verdict = _receive(sock, 1, deadline, where)[0]
        if verdict != ACCEPTED:
            reason = _REASONS.get(verdict, f"refused with the unknown code {verdict}")
            if verdict == WRONG_SECRET and address:
                reason += f"; or the address {address} is not the server's own: a value in the store was forged"
            raise AuthenticationError(f"handshake with {where}: {reason}")
        proof = _receive(sock, PROOF_SIZE, deadline, where)
        if not hmac.compare_digest(proof, _proof(key, b"server", theirs, mine, address)):
            raise AuthenticationError(
                f"{where} accepted us but cannot prove that it holds the job's secret itself"
            )
        if server is not None and _rank(theirs) != server:
            raise AuthenticationError(
                f"{where} is rank {_rank(theirs)}, not rank {server}: a value in the store was forged"
            )
        return Proved(
            bool(_flags(theirs) & PRIVATE), Key(_proof(key, b"channel", theirs, mine, address))
        )
    finally:
        sock.settimeout(before)


def server_handshake(sock: socket.socket, key: bytes, purpose: bytes, deadline: float) -> None:
    """The blocking form of :class:`ServerHandshake`, with :func:`client_handshake`'s arguments.

    It reads no byte past the handshake's end.

    Raises:
        AuthenticationError: the client does not hold the key, does not speak this protocol or was silent.
        DistNetworkError: the connection broke within the handshake.
    """
    where = _peer(sock)
    before = sock.gettimeout()
    machine = ServerHandshake(key, purpose)
    missing = HELLO_SIZE + PROOF_SIZE
    try:
        _send(sock, machine.outgoing(), deadline, where)
        while not machine.done:
            data = _recv_some(sock, missing, deadline, where)
            if not data:
                raise DistNetworkError(f"{where} left within the handshake")
            missing -= len(data)
            machine.feed(data)
            _send(sock, machine.outgoing(), deadline, where)
    except AuthenticationError as error:
        _send(sock, machine.outgoing(), deadline, where)
        raise AuthenticationError(f"handshake with {where}: {error}") from error
    finally:
        sock.settimeout(before)


def _explain(verdict: int, purpose: bytes, theirs: bytes) -> str:
    if verdict != WRONG_PURPOSE:
        return _REASONS[verdict]
    return f"that port serves {theirs.decode('latin-1')!r} connections, not {purpose.decode('latin-1')!r}"


def _receive_hello(sock: socket.socket, deadline: float, where: str) -> bytes:
    """The server's hello; whatever else the peer says is refused at its first wrong byte."""
    got = b""
    foreign = f"{where} does not speak unicoll's protocol"
    while len(got) < HELLO_SIZE:
        try:
            data = _recv_some(sock, HELLO_SIZE - len(got), deadline, where)
        except DistNetworkError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise AuthenticationError(
                    f"{foreign}, or is stuck: it accepted the connection and then said nothing"
                ) from error
            data = b""
        if not data:
            raise NoAnswerError(
                f"{foreign}, or was shutting down: it closed the connection where a greeting was due. "
                "Is another program listening on that port?"
            )
        got += data
        if not MAGIC.startswith(got[: len(MAGIC)]):
            raise AuthenticationError(
                f"{foreign}: it answered {got[:32]!r}. Is another program listening on that port?"
            )
    return got


def _receive(sock: socket.socket, size: int, deadline: float, where: str) -> bytes:
    got = b""
    while len(got) < size:
        data = _recv_some(sock, size - len(got), deadline, where)
        if not data:
            raise DistNetworkError(f"{where} closed the connection within the handshake")
        got += data
    return got


def _recv_some(sock: socket.socket, size: int, deadline: float, where: str) -> bytes:
    try:
        _arm(sock, deadline)
        return sock.recv(size)
    except OSError as error:
        raise DistNetworkError(f"handshake with {where}: {error}") from error


def _send(sock: socket.socket, data: bytes, deadline: float, where: str) -> None:
    if not data:
        return
    try:
        _arm(sock, deadline)
        sock.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        # The peer has closed; what it said before (a verdict, another protocol's answer) can still be read.
        pass
    except OSError as error:
        raise DistNetworkError(f"handshake with {where}: {error}") from error


def _arm(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline passed")
    sock.settimeout(left)


def _peer(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:
        return "the peer"
    if not isinstance(name, tuple):
        return f"the peer at {name!r}" if name else "the peer"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
