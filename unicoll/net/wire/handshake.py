"""The handshake that begins every connection: both sides prove that they hold the job's secret.

No other bytes are interpreted before both proofs are verified. All frames have fixed sizes:

    both, at once:  HELLO = magic (12) | flags (1) | purpose, zero-padded (16) | rank (4) | host (16) | nonce (32)
    client, then:   PROOF = HMAC-SHA256(key, "client" | server's HELLO | client's HELLO | address)
    server, then:   VERDICT (1), and after ACCEPTED its own PROOF, with "server" for "client"
    (a server without descriptors for a client sends its HELLO, a VERDICT, its limit of open files (4), and closes)

The nonces are fresh, so a recorded exchange cannot be replayed. Direction, purpose, flags, ranks
and hosts are under the MAC, so a proof is not valid for another connection. So is the address that
the server has published and the client has connected to, if there is one: an attacker who changes
addresses in a store cannot forward the handshake to the intended rank. The verdict gives the client
an error with a reason instead of a closed connection. With an empty key the exchange is the same
and proves nothing.

The magic ends like an HTTP request, so servers of other protocols answer or close at once.

The hellos also state the protection that a side wants for the connection after the handshake
(:mod:`unicoll.net.wire.channel`), and its host (:func:`unicoll.process.host_identity.host_id` of
its nonce): an attacker who makes the addresses of two hosts equal does not make them one host. The
key is derived from what the proofs cover:

    channel key = HMAC-SHA256(key, "channel" | server's HELLO | client's HELLO | address)
"""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from unicoll.errors import AuthenticationError, DistNetworkError
from unicoll.net.wire import interfaces
from unicoll.net.wire.handshake_messages import (
    ACCEPTED,
    HELLO_SIZE,
    LIMIT,
    MAGIC,
    NAME,
    NO_DESCRIPTORS,
    OTHER_USER,
    PLAIN,
    PRIVATE,
    PROOF_SIZE,
    REASONS,
    WRONG_PURPOSE,
    WRONG_SECRET,
    Hello,
    Protection,
    check_hellos,
    make_hello,
    make_proof,
    parse_hello,
    within_a_host,
)
from unicoll.net.wire.secret import Key
from unicoll.process.interrupts import raised_by_handler

HANDSHAKE_SECONDS = 10.0
"""Seconds after which a server closes a connection whose handshake is not done."""

SILENCE_SECONDS = 30.0
"""Seconds that a client waits for the server's hello before it reports a foreign server."""


class NoAnswerError(AuthenticationError):
    """The peer closed the connection before its hello: it serves another protocol, or was shutting
    down."""


class ServerHandshake:
    """The server's side of the handshake, without a socket, so that one thread can serve any number
    of clients.

    The caller sends the result of :meth:`outgoing` (before anything is received, after every
    :meth:`feed`, and after an error, when it holds the verdict), feeds received bytes until
    ``done``, and closes connections that exceed its time limit (:data:`HANDSHAKE_SECONDS`).

    Args:
        key: the secret, ``b""`` for a job without one.
        purpose: what the connection is for.
        same_user: returns True if the client runs as this process's user; where given, other
            clients are refused with a verdict that gives this reason.
        rank: this process's rank, if the connection is between ranks.
        address: the address of this server that a store gives to clients; ``""`` if no store does.
        private: True to declare that the server accepts only clients of this host that are of this
            user or hold the secret.
        protection: that this side wants for the connection after the handshake.

    Attributes:
        protection: of the connection, once ``done``.
        channel_key: key of this connection's protection, once ``done``.
        done: True once the client has proved that it holds the key.
        leftover: bytes received after the end of the handshake, of the protocol that follows.
        peer: the client's rank, once ``done``; None if it has none.
    """

    def __init__(
        self,
        key: bytes,
        purpose: bytes,
        same_user: Callable[[], bool] | None = None,
        rank: int | None = None,
        address: str = "",
        private: bool = False,
        protection: Protection = PLAIN,
    ) -> None:
        self._key = key
        self._same_user = same_user
        self._address = address
        self._hello = make_hello(key, purpose, protection, rank, private)
        self._wanted = protection
        self.protection = ""
        self.channel_key = Key()
        self.peer: int | None = None
        self._out = self._hello
        self._received = b""
        self.done = False
        self.leftover = b""

    def outgoing(self) -> bytes:
        """The bytes to send now; every byte is returned once."""
        out, self._out = self._out, b""
        return out

    def feed(self, data: bytes) -> None:
        """Takes received bytes.

        Raises:
            AuthenticationError: the client does not speak this protocol or does not hold the key.
                Send :meth:`outgoing`, then close the connection.
        """
        if self.done:
            self.leftover += data
            return
        self._received += data
        head = self._received[: len(MAGIC)]
        # A client of another protocol is refused at its first wrong byte: it may never send as many
        # bytes as a hello has.
        if not MAGIC.startswith(head):
            what = (
                "has another version of unicoll"
                if head.startswith(NAME)
                else "does not speak unicoll's protocol"
            )
            raise AuthenticationError(f"the client {what}: its first bytes are {head!r}")
        if len(self._received) < HELLO_SIZE:
            return
        hello = self._received[:HELLO_SIZE]
        if (verdict := check_hellos(parse_hello(self._hello), parse_hello(hello))) is not None:
            self._refuse(verdict)
        if len(self._received) >= HELLO_SIZE + PROOF_SIZE:
            self._verify(hello, self._received[HELLO_SIZE : HELLO_SIZE + PROOF_SIZE])

    def refuse_for_descriptors(self, limit: int) -> bytes:
        """The bytes to send to a client before its connection is closed: this process can open no
        more files."""
        return self.outgoing() + bytes([NO_DESCRIPTORS]) + LIMIT.pack(min(limit, 2**32 - 1))

    def _refuse(self, verdict: int) -> NoReturn:
        self._out += bytes([verdict])
        raise AuthenticationError(f"refused a client: {REASONS[verdict]}")

    def _verify(self, hello: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(
            proof, make_proof(self._key, b"client", self._hello, hello, self._address)
        ):
            self._refuse(WRONG_SECRET)
        if self._same_user is not None and not self._same_user():
            self._refuse(OTHER_USER)
        # Only a client that has proved the key gets a proof. Otherwise anybody who connects could
        # test guesses of the secret with it.
        self._out += bytes([ACCEPTED]) + make_proof(
            self._key, b"server", self._hello, hello, self._address
        )
        self.leftover = self._received[HELLO_SIZE + PROOF_SIZE :]
        self._received = b""
        theirs = parse_hello(hello)
        self.peer = theirs.rank
        self.protection = _protection(self._wanted, parse_hello(self._hello), theirs)
        self.channel_key = Key(make_proof(self._key, b"channel", self._hello, hello, self._address))
        self.done = True


class HandshakeResult(NamedTuple):
    """The result of a client's handshake.

    Attributes:
        private: True if the server declares that it accepts only clients of its host that are of
            its user or hold the secret. Without a key this is an unproved claim; it counts if the
            server is known to run as this user.
        channel_key: key of this connection's protection.
        protection: of the connection.
    """

    private: bool
    channel_key: Key
    protection: str


def client_handshake(
    sock: socket.socket,
    key: bytes,
    purpose: bytes,
    deadline: float,
    *,
    rank: int | None = None,
    server: int | None = None,
    address: str = "",
    protection: Protection = PLAIN,
) -> HandshakeResult:
    """Prove to the server on ``sock`` that this side holds ``key``, and verify the server's proof.

    The socket must be connected. Its timeout is restored at the end; closing it is left to the
    caller.

    Args:
        key: the secret, ``b""`` for a job without one.
        purpose: what the connection is for, 1 to 16 bytes, equal on both sides (such as
            ``b"store"``).
        deadline: ``time.monotonic()`` value after which to give up.
        rank: this process's rank, if the connection is between ranks.
        server: the rank that the server must have, if any.
        address: the address that the server has published, if it has.
        protection: that this side wants for the connection after the handshake.

    Raises:
        AuthenticationError: the secrets differ, one side has none, the two sides use different
            protection of the connection, or the server is not unicoll's (a silent server is
            reported at the deadline or after :data:`SILENCE_SECONDS`; :class:`NoAnswerError` if it
            closed before its hello).
        DistNetworkError: the connection broke during the handshake.
    """
    peer = _peer_address(sock)
    timeout_before = sock.gettimeout()
    try:
        mine = make_hello(key, purpose, protection, rank)
        _send(sock, mine, deadline, peer)
        # Servers of some other protocols (torch's store) stay silent on bytes that they do not
        # understand.
        theirs = _receive_hello(sock, min(deadline, time.monotonic() + SILENCE_SECONDS), peer)
        hello, client = parse_hello(theirs), parse_hello(mine)
        if (verdict := check_hellos(hello, client)) is not None:
            raise AuthenticationError(
                f"handshake with {peer}: {_explain(verdict, purpose, hello.purpose)}"
            )
        _send(sock, make_proof(key, b"client", theirs, mine, address), deadline, peer)
        verdict = _receive(sock, 1, deadline, peer)[0]
        if verdict == NO_DESCRIPTORS:
            (limit,) = LIMIT.unpack(_receive(sock, LIMIT.size, deadline, peer))
            raise DistNetworkError(
                f"its process can open no more files: the limit is {limit} (ulimit -n), and every"
                " group needs connections to each member; raise the limit, or destroy groups"
            )
        if verdict != ACCEPTED:
            reason = REASONS.get(verdict, f"refused with the unknown code {verdict}")
            if verdict == WRONG_SECRET and address:
                reason += (
                    f"; or the address {address} is not the server's own: a value in the store was"
                    " forged"
                )
            raise AuthenticationError(f"handshake with {peer}: {reason}")
        proof = _receive(sock, PROOF_SIZE, deadline, peer)
        if not hmac.compare_digest(proof, make_proof(key, b"server", theirs, mine, address)):
            raise AuthenticationError(
                f"{peer} accepted this client but cannot prove that it holds the job's secret"
                " itself"
            )
        if server is not None and hello.rank != server:
            raise AuthenticationError(
                f"{peer} is rank {hello.rank}, not rank {server}: a value in the store was forged"
            )
        return HandshakeResult(
            bool(hello.flags & PRIVATE),
            Key(make_proof(key, b"channel", theirs, mine, address)),
            _protection(protection, hello, client),
        )
    finally:
        sock.settimeout(timeout_before)


def _protection(wanted: Protection, server: Hello, client: Hello) -> str:
    return wanted.within_a_host if within_a_host(server, client) else wanted.between_hosts


def _explain(verdict: int, purpose: bytes, theirs: bytes) -> str:
    if verdict != WRONG_PURPOSE:
        return REASONS[verdict]
    return (
        f"that port serves {theirs.decode('latin-1')!r} connections, not"
        f" {purpose.decode('latin-1')!r}"
    )


def _receive_hello(sock: socket.socket, deadline: float, peer: str) -> bytes:
    """The server's hello; bytes of another protocol are refused at the first wrong byte."""
    got = b""
    foreign = f"{peer} does not speak unicoll's protocol"
    while len(got) < HELLO_SIZE:
        try:
            data = _recv_some(sock, HELLO_SIZE - len(got), deadline, peer)
        except DistNetworkError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise AuthenticationError(
                    f"{foreign}, or does not respond: it accepted the connection and then sent"
                    " nothing"
                ) from error
            # A server that closes with unread bytes resets the connection, which is its end, too.
            data = b""
        if not data:
            raise NoAnswerError(
                f"{foreign}, or was shutting down: it closed the connection before its hello. "
                "Is another program listening on that port?"
            )
        got += data
        if not MAGIC.startswith(got[: len(MAGIC)]):
            if got.startswith(NAME):
                raise AuthenticationError(
                    f"{peer} has another version of unicoll: it answered {got[:32]!r}"
                )
            raise AuthenticationError(
                f"{foreign}: it answered {got[:32]!r}. Is another program listening on that port?"
            )
    return got


def _receive(sock: socket.socket, size: int, deadline: float, peer: str) -> bytes:
    got = b""
    while len(got) < size:
        data = _recv_some(sock, size - len(got), deadline, peer)
        if not data:
            raise DistNetworkError(f"{peer} closed the connection during the handshake")
        got += data
    return got


def _recv_some(sock: socket.socket, size: int, deadline: float, peer: str) -> bytes:
    try:
        _set_timeout(sock, deadline)
        return sock.recv(size)
    except OSError as error:
        if raised_by_handler(error):
            raise
        raise DistNetworkError(f"handshake with {peer}: {error}") from error


def _send(sock: socket.socket, data: bytes, deadline: float, peer: str) -> None:
    if not data:
        return
    try:
        _set_timeout(sock, deadline)
        sock.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        # The peer has closed; bytes that it sent before (a verdict, another protocol's answer) can
        # still be read.
        pass
    except OSError as error:
        if raised_by_handler(error):
            raise
        raise DistNetworkError(f"handshake with {peer}: {error}") from error


def _set_timeout(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        # A timeout of 0 would make the socket non-blocking.
        raise TimeoutError("the deadline passed")
    sock.settimeout(left)


def _peer_address(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:
        return "the peer"
    if not isinstance(name, tuple):
        return f"the peer at {name!r}" if name else "the peer"
    return interfaces.join_hostport(*name[:2])
