"""Malformed input from peers: the short form of scripts/fuzz.py, and the findings of its long form."""

from __future__ import annotations

import importlib
import json
import logging
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from gloo_fallback.p2p.frames import ANSWER, HEADER, MAGIC, MESSAGE, NOTICE, OFFER, SWITCH
from gloo_fallback.shm.ring_buffer import RingReader
from gloo_fallback.shm.segment import create_offer, has_strong_ordering
from tests.support.ranks import ROOT, sample_seed
from unicoll.arrays.types import BY_NAME
from unicoll.errors import DistError, DistStoreError, RankLostError
from unicoll.net.control.group_failures import unpack_error
from unicoll.net.control.relay import Relay
from unicoll.net.stores import HashStore
from unicoll.net.stores.protocol import Status, pack_reply
from unicoll.net.wire.channel import authenticate
from unicoll.net.wire.framed_server import frame, handshake_address, read_frame

sys.path.append(str(ROOT / "scripts"))
fuzz: Any = importlib.import_module("fuzz")
harness: Any = importlib.import_module("fuzzing.harness")
parsers: Any = importlib.import_module("fuzzing.parsers")

KEY = b"k" * 32
U8, F64 = BY_NAME["uint8"].code, BY_NAME["float64"].code
REFUSED = 8  # place of a refused gather in the calls of the target of collectives
GET, NUM_KEYS, APPEND, MULTI_GET = 1, 8, 10, 11  # places in the calls of the store target


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One of the script's targets, by name."""
    logging.disable(logging.CRITICAL)
    made = fuzz.TARGETS[request.param]()
    with fuzz.watched():
        yield made
    made.close()
    logging.disable(logging.NOTSET)


@pytest.mark.every(n=4)
@pytest.mark.parametrize("target", fuzz.TARGETS, indirect=True)
def test_malformed_input(target: Any) -> None:
    taken = [fuzz.check(target, data) for data in target.valid]
    assert any(taken)

    @seed(sample_seed())
    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.randoms().map(lambda rng: fuzz.generate(rng, target)) | st.binary(max_size=300))
    def check(data: bytes) -> None:
        fuzz.check(target, data)

    check()


def test_the_script_detects_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own checks: an exception, an unpickling, a handshake without its proof, and a hang."""

    class Bad(parsers.Codec):  # type: ignore[misc,name-defined]
        def run(self, data: bytes) -> bool:
            if data == b"unpickle":
                parsers.object_codec.loads(b"\2N.", True)
            elif data == b"compile":
                eval("1")
            elif data == b"hang":
                time.sleep(60)
            raise KeyError(data)

    with harness.watched():
        for data, kind in (
            (b"unpickle", DistError),
            (b"x", KeyError),
            (b"compile", KeyError),
            (b"hang", harness.Hung),
        ):
            monkeypatch.setattr(harness, "HANG_SECONDS", 0.05 if kind is harness.Hung else 60.0)
            with pytest.raises(kind):
                harness.check(Bad(), data)
            assert bool(harness._executed) == (data in (b"unpickle", b"compile"))


# --- findings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["store"], indirect=True)
@pytest.mark.parametrize(
    ("call", "reply"),
    [
        (GET, struct.pack("<QB", 205 << 24, 0) + b"x"),
        (APPEND, struct.pack("<QB", 1 << 62, 0)),
        (APPEND, struct.pack("<QB", (1 << 64) - 1, 0)),
        (GET, struct.pack("<QBI", 4, 0, 5)),
        (GET, pack_reply(Status.OK, [])),
        (GET, pack_reply(Status.ERROR, [])),
        (GET, struct.pack("<QB", 0, 9)),
        (NUM_KEYS, pack_reply(Status.OK, [b"many"])),
        (MULTI_GET, pack_reply(Status.OK, [b"one of two"])),
        (MULTI_GET, pack_reply(Status.OK, [b"1", b"2", b"3"])),
        (NUM_KEYS, pack_reply(Status.OK, [b"9" * 5000])),
    ],
)
def test_malformed_replies_of_the_store(target: Any, call: int, reply: bytes) -> None:
    """A store's client allocated any length that a server claimed, and raised IndexError and ValueError.

    ``multi_get`` returned any number of values.
    """
    assert not fuzz.check(target, bytes([call]) + reply)
    values = [b"a" * 150_000, b"b"]
    assert fuzz.check(target, bytes([MULTI_GET]) + pack_reply(Status.OK, values))


def test_a_value_with_too_many_digits_is_not_a_number() -> None:
    """Python does not format numbers of more than 4300 digits; ``add`` raised its ValueError."""
    store = HashStore()
    store.set("k", "9" * 4300)
    with pytest.raises(DistStoreError, match="not a number"):
        store.add("k", 1)


@pytest.mark.parametrize("target", ["frames"], indirect=True)
@pytest.mark.parametrize(
    ("message", "more"),
    [
        ({"t": "bye"}, bytes(4)),
        ({"t": "bye", "error": "why"}, bytes(4)),
        ({"t": "bye", "error": 5, "how": [1]}, bytes(4)),
        ({"t": "tell", "to": [0]}, b""),
        ({"t": "ask", "to": [0], "group": [], "backend": "gloo"}, b""),
        ({"t": "ask", "to": [0], "group": "g"}, b""),
        ({"t": "fail", "group": "g", "members": [0], "error": {}}, b""),
        ({"t": "fail", "group": "g", "members": [0], "error": 5}, b""),
    ],
)
def test_malformed_messages_do_not_end_the_relay_or_the_control_client(
    target: Any, message: dict[str, Any], more: bytes
) -> None:
    """A goodbye without its fields and then an invalid frame ended the relay's thread.

    The others ended the thread that detects losses and failures.
    """
    hello = frame({"t": "hello", "rank": 1, "host": "h", "pid": 5})
    fuzz.check(target, b"\0" + hello + frame(message) + more)


@pytest.mark.parametrize("target", ["frames"], indirect=True)
@pytest.mark.parametrize(
    "body", [b"[" * 5000, b"[1]", b"5", b"\x22\x00\x00\x00a\x00\x00\x00\x22\x00\x00\x00"]
)
def test_malformed_frames(target: Any, body: bytes) -> None:
    """Deep nesting raised a RecursionError; JSON other than an object, and UTF-32, were accepted."""
    for kind in range(4):
        fuzz.check(target, bytes([kind]) + struct.pack("<I", len(body)) + body)


def test_an_error_of_another_rank_has_a_class_of_unicoll() -> None:
    """Any object of that name in the module was called."""
    packed = {"message": "gone", "fields": {"rank": 3}}
    assert type(unpack_error(packed | {"type": "RankLostError"})) is RankLostError
    assert type(unpack_error(packed | {"type": "Sequence"})) is DistError


def test_a_message_that_becomes_too_long_is_not_forwarded() -> None:
    """In ASCII it exceeded the limit of a frame: its receiver closed the connection and considered rank 0 dead."""
    relay = Relay(2, KEY, "127.0.0.1")
    host, port = relay.addresses[0]
    socks = []
    try:
        for rank in range(2):
            until, where = time.monotonic() + 20, handshake_address(host, port)
            bare = socket.create_connection((host, port), 5)
            sock, _ = authenticate(bare, KEY, b"control", until, rank=rank, address=where)
            socks.append(sock)
            sock.sendall(frame({"t": "hello", "rank": rank, "host": "h", "pid": 1}))
        assert [read_frame(sock)["t"] for sock in socks] == ["ready", "ready"]
        body = json.dumps({"t": "tell", "to": [0], "report": "é" * 300_000}, ensure_ascii=False).encode()
        socks[1].sendall(struct.pack("<I", len(body)) + body)
        assert read_frame(socks[0])["t"] == "gone"
        socks[0].sendall(frame({"t": "joined"}))
        assert read_frame(socks[0]) == {"t": "joined", "ranks": [0]}
    finally:
        for sock in socks:
            sock.close()
        relay.close()


def message(kind: int, code: int = 0, tag: int = 0, size: int = 0, part: int = 0) -> bytes:
    """The header of a message, or another frame, on a data connection."""
    return HEADER.pack(MAGIC, kind, code, 0, tag, size, part)


def offer_of(**where: Any) -> bytes:
    """An offer of shared memory."""
    body = json.dumps({"boot": "boot", "token": "t", **where}).encode()
    return message(OFFER, size=len(body)) + body


def in_ring(tag: int, size: int, kind: int = 0x736D6375) -> bytes:
    """The header of a message in a ring."""
    return struct.pack("<IIqQ8x", kind, U8, tag, size)


HALF = in_ring(4, (1 << 16) + 1) + bytes(1 << 14)
SKIP = in_ring(0, 0, 0x706B7375)


@pytest.mark.parametrize("target", ["messages"], indirect=True)
@pytest.mark.parametrize(
    ("way", "sent"),
    [
        (2, HALF),
        (2, HALF[:-7]),
        (2, in_ring(9, 1 << 62)),
        (2, in_ring(9, (1 << 64) - 1) + bytes(64)),
        (2, in_ring(1, 3, kind=7) + bytes(32)),
        (2, SKIP),
        (2, SKIP * 4),
        (2, in_ring(9, 40) + bytes(32)),
        (2, bytes(5)),
        (1, message(SWITCH) + message(MESSAGE, U8, 9)),
        (1, message(SWITCH) + message(SWITCH)),
        (0, message(SWITCH)),
        (0, message(MESSAGE, U8, 9, 1 << 62)),
        (0, message(MESSAGE, U8, 9, (1 << 64) - 1)),
        (0, message(MESSAGE, U8, 4, 1 << 62)),
        (0, message(OFFER) + message(MESSAGE, U8, 9)),
        (0, message(OFFER, size=4000) + b"[" * 4000),
        (0, message(OFFER, size=1) + b"\xff"),
        (0, offer_of(pid=1e400, fd=0, size=5)),
        (0, message(ANSWER, size=1 << 40)),
        (1, message(ANSWER, size=13) + message(OFFER, size=2) + b"{}"),
        (1, message(NOTICE, size=1 << 63, part=1 << 63) + message(SWITCH) + message(NOTICE)),
    ],
)
def test_malformed_frames_of_a_member(target: Any, way: int, sent: bytes) -> None:
    """Those on the socket raised in the thread that ran progress, or left a receive waiting beyond its deadline."""
    assert not fuzz.check(target, bytes([way]) + sent)


def test_the_size_of_a_ring_is_checked() -> None:
    """A smaller ring was accepted, and a part of a message did not fit."""
    made, where = create_offer(4096)
    try:
        with pytest.raises(OSError, match="not a ring"):
            RingReader(json.dumps({**where, "strong": has_strong_ordering()}).encode())
    finally:
        made.close()


@pytest.mark.parametrize("target", ["collectives"], indirect=True)
@pytest.mark.parametrize(
    ("call", "place", "value"),
    [(0, slice(1 + 32 + 8, 1 + 32 + 9), b"\xc8"), (REFUSED, slice(-8, None), (300).to_bytes(8, "little"))],
    ids=["unknown transport", "reason beyond bytes"],
)
def test_values_that_are_out_of_range_are_refused(target: Any, call: int, place: slice, value: bytes) -> None:
    """They raised a ValueError: the root's reason of a refusal is sent as numbers, each of a byte."""
    sent = bytearray(target.valid[call])
    sent[place] = value
    assert not fuzz.check(target, bytes(sent))


@pytest.mark.parametrize("target", ["frames"], indirect=True)
@pytest.mark.parametrize(
    "report",
    [
        5,
        {},
        {"seq": "1"},
        {"seq": 5, "call": None},
        {"seq": 0, "call": [], "where": 1},
        {"seq": 0, "call": None, "last": None, "where": ""},
    ],
)
def test_malformed_reports(target: Any, report: Any) -> None:
    """Reports of members were used in errors without a check, which raised TypeError and KeyError."""
    assert fuzz.check(target, b"\1" + frame({"t": "tell", "to": [0], "from": 1, "id": 1, "report": report}))
