"""Malformed input for what reads from peers: the short form of scripts/fuzz.py, and what its long form has found."""

from __future__ import annotations

import importlib.util
import json
import logging
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from unicoll.channel import authenticate
from unicoll.errors import DistError, DistStoreError, RankLostError
from unicoll.frames import frame, published, read_frame
from unicoll.observe.control import _unpack
from unicoll.observe.relay import Relay
from unicoll.stores import HashStore
from unicoll.stores.wire import Status, pack_reply
from unicoll.testing.ranks import ROOT, drawn_seed

_spec = importlib.util.spec_from_file_location("fuzz", ROOT / "scripts" / "fuzz.py")
assert _spec is not None
assert _spec.loader is not None
fuzz: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fuzz)

KEY = b"k" * 32
GET, NUM_KEYS, APPEND, MULTI_GET = 1, 8, 10, 11  # places in the calls of fuzz.Store


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One of the script's targets, by name."""
    logging.disable(logging.CRITICAL)
    made = fuzz.TARGETS[request.param]()
    with fuzz.watched():
        yield made
    made.close()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", fuzz.TARGETS, indirect=True)
def test_malformed_input(target: Any) -> None:
    taken = [fuzz.check(target, data) for data in target.valid]
    assert any(taken)

    @seed(drawn_seed())
    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.randoms().map(lambda rng: fuzz.generate(rng, target)) | st.binary(max_size=300))
    def check(data: bytes) -> None:
        fuzz.check(target, data)

    check()


def test_findings_are_found() -> None:
    """The script's own checks: an exception, an unpickling, a handshake without its proof, and a hang."""

    class Bad(fuzz.Codec):  # type: ignore[misc,name-defined]
        def run(self, data: bytes) -> bool:
            if data == b"unpickle":
                fuzz.codec.loads(b"\2N.", True)
            elif data == b"compile":
                eval("1")
            elif data == b"hang":
                time.sleep(10)
            raise KeyError(data)

    fuzz.HANG_SECONDS, before = 0.05, fuzz.HANG_SECONDS
    with fuzz.watched():
        for data, kind in ((b"unpickle", DistError), (b"x", KeyError), (b"compile", KeyError), (b"hang", fuzz.Hung)):
            with pytest.raises(kind):
                fuzz.check(Bad(), data)
            assert bool(fuzz._executed) == (data in (b"unpickle", b"compile"))
    fuzz.HANG_SECONDS = before


# --- what was found -------------------------------------------------------------------------------------------------


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
        (NUM_KEYS, pack_reply(Status.OK, [b"9" * 5000])),
    ],
)
def test_a_reply_that_is_none(target: Any, call: int, reply: bytes) -> None:
    """A store's client took memory for whatever length a server claimed, and raised IndexError and ValueError."""
    assert not fuzz.check(target, bytes([call]) + reply)


@pytest.mark.parametrize("target", ["store"], indirect=True)
def test_values_arrive_whole(target: Any) -> None:
    values = [b"a" * 150_000, b"b"]
    assert fuzz.check(target, bytes([MULTI_GET]) + pack_reply(Status.OK, values))


def test_a_value_of_many_digits_is_no_number() -> None:
    """Python refuses to write numbers of more than 4300 digits, with a ValueError that came out of ``add``."""
    store = HashStore()
    store.set("k", "9" * 4300)
    with pytest.raises(DistStoreError, match="no number"):
        store.add("k", 1)


@pytest.mark.parametrize("target", ["frames"], indirect=True)
@pytest.mark.parametrize("message", [{"t": "bye"}, {"t": "bye", "error": "why"}, {"t": "bye", "error": 5, "how": [1]}])
def test_no_goodbye_ends_the_relay(target: Any, message: dict[str, Any]) -> None:
    """A goodbye without its fields, and then no frame, ended the relay's thread, which all ranks depend on."""
    hello = frame({"t": "hello", "rank": 1, "host": "h", "pid": 5})
    fuzz.check(target, b"\0" + hello + frame(message) + bytes(4))


@pytest.mark.parametrize("target", ["frames"], indirect=True)
@pytest.mark.parametrize(
    "message",
    [
        {"t": "tell", "to": [0]},
        {"t": "ask", "to": [0], "group": []},
        {"t": "fail", "group": "g", "members": [0], "error": {}},
        {"t": "fail", "group": "g", "members": [0], "error": 5},
    ],
)
def test_no_message_of_a_rank_ends_the_control_plane_of_another(target: Any, message: dict[str, Any]) -> None:
    """It ended the thread that hears of losses and failures."""
    hello = frame({"t": "hello", "rank": 1, "host": "h", "pid": 5})
    fuzz.check(target, b"\0" + hello + frame(message))


@pytest.mark.parametrize("target", ["frames"], indirect=True)
@pytest.mark.parametrize("body", [b"[" * 5000, b"[1]", b"5", b"\x22\x00\x00\x00a\x00\x00\x00\x22\x00\x00\x00"])
def test_a_frame_that_is_none(target: Any, body: bytes) -> None:
    """Deep nesting was a RecursionError; other JSON than an object, and UTF-32, were taken."""
    for way in range(4):
        fuzz.check(target, bytes([way]) + struct.pack("<I", len(body)) + body)


def test_an_error_from_another_rank_is_one_of_ours() -> None:
    """Anything by that name in the module was called."""
    packed = {"message": "gone", "fields": {"rank": 3}}
    assert type(_unpack(packed | {"type": "RankLostError"})) is RankLostError
    assert type(_unpack(packed | {"type": "Sequence"})) is DistError


def test_a_message_that_grows_reaches_nobody() -> None:
    """In ASCII it was longer than a frame may be: who got it gave up the relay, and held rank 0 to be dead."""
    relay = Relay(2, KEY, "127.0.0.1")
    host, port = relay.addresses[0]
    socks = []
    try:
        for rank in range(2):
            until, where = time.monotonic() + 20, published(host, port)
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
