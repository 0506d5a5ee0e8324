from __future__ import annotations

import os
import pickle
import time
from typing import Any

import numpy as np

from unicoll.errors import AuthenticationError, DistError, DistNetworkError
from unicoll.group import object_seals
from unicoll.net.objects import object_codec, object_format
from unicoll.net.stores.protocol import StoreOp
from unicoll.net.wire import handshake, handshake_messages, records
from unicoll.net.wire.secret import Key

from .harness import HANG_SECONDS, KEY, Found, Target, chunks, pair, watched

__all__ = ["Codec", "Handshake", "Records", "Seals"]


class Codec(Target):
    """Objects in untrusted jobs. Objects that are read can be written and read again."""

    def __init__(self) -> None:
        shared = ["x" * 100, b"y" * 100, 1 << 600]
        circle: list[Any] = [1]
        circle.append(circle)
        deep: Any = None
        for _ in range(object_format.MAX_DEPTH):
            deep = [deep]
        objects: list[Any] = [
            None,
            True,
            -5,
            1 << 70,
            2.5,
            1j,
            "text",
            "\ud800",
            b"bytes",
            bytearray(b"array"),
            (1, (2, "3")),
            {"a": [1, 2], (1, 2): {3, 4}, frozenset({5, (6, 7)}): None},
            shared * 3,
            circle,
            deep,
            np.arange(6, dtype=">i4").reshape(2, 3),
            np.zeros((0, 4)),
            np.array(3.0),
            np.float16(2),
            np.bool_(True),
            np.array([True, False]),
            np.datetime64("2020-01-01"),
            np.array([1, 2], "m8[25s]"),
            np.complex64(1j),
        ]
        self.valid = [object_codec.dumps(obj, False) for obj in objects]
        self.valid += [b"\2" + pickle.dumps(obj) for obj in (1, {"a": StoreOp.SET}, os.getcwd)]

    def run(self, data: bytes) -> bool:
        try:
            obj = object_codec.loads(data, False)
        except DistError:
            return False
        object_codec.loads(object_codec.dumps(obj, False), False)
        return True


class Handshake(Target):
    """Both sides, by the first byte of an input. Only a proof of the key is accepted."""

    def __init__(self) -> None:
        with watched():
            hello = handshake_messages.make_hello(KEY, b"store", rank=1)
            server_hello = handshake_messages.make_hello(KEY, b"store")
        client = hello + handshake_messages.make_proof(KEY, b"client", server_hello, hello)
        mine = handshake_messages.make_hello(KEY, b"store")
        self._hello = server_hello
        self._client = client
        with watched():
            mine = handshake_messages.make_hello(KEY, b"store")
        self._server = (
            server_hello
            + bytes([handshake_messages.ACCEPTED])
            + handshake_messages.make_proof(KEY, b"server", server_hello, mine)
        )
        refusals = [server_hello + bytes([code]) for code in range(2, 8)]
        others = [
            handshake_messages.make_hello(KEY, b"data"),
            handshake_messages.make_hello(b"", b"store"),
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
        ]
        self.valid = [b"\0" + data for data in (client, client + b"rest", *others)]
        self.valid += [b"\1" + data for data in (self._server, *refusals, *others)]

    def run(self, data: bytes) -> bool:
        side, data = data[0] % 2 if data else 0, data[1:]
        try:
            (self._machine, self._client_side)[side](data)
        except (AuthenticationError, DistNetworkError):
            return False
        if not data.startswith(self._server if side == 1 else self._client):
            raise Found("accepted without a proof")
        return True

    def _machine(self, data: bytes) -> None:
        machine = handshake.ServerHandshake(KEY, b"store")
        for chunk in chunks(data):
            machine.feed(chunk)
            machine.outgoing()
        if not machine.done:
            raise AuthenticationError("not done")

    def _client_side(self, data: bytes) -> None:
        with pair(data) as sock:
            handshake.client_handshake(sock, KEY, b"store", time.monotonic() + HANG_SECONDS)


# --- records --------------------------------------------------------------------------------------


class Records(Target):
    """Received bytes of a connection with a MAC. Only records that the peer has sealed are
    accepted, in their order."""

    def __init__(self) -> None:
        peer = records.MacRecords(Key(KEY), server=False)
        self._sent = [b"first", b"", b"x" * 3000, b"last"]
        sealed = [peer.seal(data) for data in self._sent]
        self.valid = [b"".join(sealed[:count]) for count in range(1, 5)] + [
            sealed[1],
            sealed[0] * 2,
        ]

    def run(self, data: bytes) -> bool:
        side = records.MacRecords(Key(KEY), server=True)
        opened = b""
        try:
            for chunk in chunks(data):
                opened += bytes(side.open(chunk))
        except records.TamperedError:
            return False
        finally:
            if opened not in {b"".join(self._sent[:count]) for count in range(5)}:
                raise Found("accepted data that the peer has not sent")
        return bool(opened)


# --- MACs of objects ------------------------------------------------------------------------------


class Seals(Target):
    """Bodies of objects with a MAC, of a collective or a message by the first byte; only what the
    sender has sealed for this receiver in this call is accepted."""

    def __init__(self) -> None:
        sender = self._seals(0)
        self._data = [b"x" * 5000, b"", b"short"]
        collective = [
            sender.seal(data, 0, receiver) for data in self._data for receiver in (-1, 1, 2)
        ]
        messages = [sender.seal(data, None, receiver) for data in self._data for receiver in (1, 2)]
        other = object_seals.ObjectSeals(0, "other", KEY, True)
        self.valid = [
            bytes([i]) + body
            for i in range(2)
            for body in (*collective, *messages, other.seal(b"x", 0, 1))
        ]
        self._accepted = {(0, body) for body in collective[1::3]} | {
            (1, body) for body in messages[::2]
        }

    def _seals(self, rank: int) -> object_seals.ObjectSeals:
        return object_seals.ObjectSeals(rank, "group", KEY, True)

    def run(self, data: bytes) -> bool:
        kind, body = data[0] % 2 if data else 0, data[1:]
        try:
            opened = self._seals(1).open(memoryview(body), 0, None if kind else 0, 1)
        except AuthenticationError:
            return False
        if (kind, body) not in self._accepted or bytes(opened) not in self._data:
            raise Found("accepted an object that was not sent")
        return True
