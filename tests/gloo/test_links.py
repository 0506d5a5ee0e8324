"""Links between hosts that are slow, down or lost: deadlines, choice of addresses, and what errors name."""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_network
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from gloo_fallback.backend import GlooBackend
from gloo_fallback.transport.connections import GroupConnections
from unicoll.backend import Call, Context, operation_errors
from unicoll.backend.connections.endpoint import Endpoint, _Addresses
from unicoll.backend.group_state import GroupState
from unicoll.calls.ops import OPS
from unicoll.errors import OperationTimeoutError, RankLostError
from unicoll.net.control.reports import Reports
from unicoll.net.wire.channel import Channel, Connection, records_for
from unicoll.net.wire.links import Address, links, unacknowledged
from unicoll.process.interrupts import Changes

LAN0, LAN1, LAN2 = "10.77.0", "10.78.0", "10.79.0"
TIMEOUT = 0.4
PIECES = 500
"""Parts that a slow peer sends or reads, one every 20 ms, before it closes the connection: long after the timeout."""


def connections_of(*lanes: Connection, spins: int = 0) -> GroupConnections:
    """The connections of rank 0 of a group of two, in a call whose deadline is TIMEOUT seconds after its first wait."""
    made = {f"c{lane or ''}": sock for lane, sock in enumerate(lanes)}
    endpoint = SimpleNamespace(
        connect=lambda key, check: made[key[1]],
        connections_to=lambda peer, check: len(made),
        describe=lambda peer, sock: f"here to rank {peer}",
        unanswered=lambda group: [],
    )
    job: Any = SimpleNamespace(rank=0, size=2, control=None, ended={})
    state = GroupState(Context(job, "g", (0, 1), 60.0))
    connections = GroupConnections(state, cast(Any, endpoint), spins)
    state.call = Call(OPS["barrier"], (), (), TIMEOUT)
    return connections


@contextmanager
def slow_peer(sock: socket.socket, move: Callable[[], Any]) -> Iterator[None]:
    """A thread calls ``move`` every 20 ms, and closes the connection after PIECES calls."""
    stop = threading.Event()

    def run() -> None:
        with suppress(OSError):
            for _ in range(PIECES):
                move()
                if stop.wait(0.02):
                    break
        sock.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


@pytest.mark.every(n=2)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("operation", ["send", "receive", "duplex"])
def test_a_transfer_that_trickles_ends_at_its_deadline(operation: str, lanes: int) -> None:
    """It ended when all bytes had arrived, however long that took."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(lanes)]
        for sock in chain.from_iterable(pairs):
            stack.enter_context(sock)
        connections = connections_of(*(ours for ours, _ in pairs))
        data, room = memoryview(bytearray(1 << 24)), memoryview(bytearray(1 << 24))
        transfer: Callable[[], object] = {
            "send": lambda: connections.send(1, data),
            "receive": lambda: connections.receive(1, data, len(data)),
            "duplex": lambda: connections.duplex(1, data, 1, room),
        }[operation]

        def move() -> None:
            for _, theirs in pairs:
                if operation == "send":
                    theirs.recv(1 << 16)
                else:
                    theirs.send(b"x")

        with slow_peer(pairs[0][1], move):
            with pytest.raises(OperationTimeoutError, match=f"timed out after {TIMEOUT} s"):
                transfer()
            stack.close()


@pytest.mark.parametrize("protection", ["mac", "tls"])
def test_a_record_that_trickles_ends_at_the_deadline(protection: str) -> None:
    """The whole record was awaited without a look at the deadline."""
    ours, theirs = socket.socketpair()
    far, near = (cast(Any, records_for(protection, cast(Any, b"k" * 32), server=s)) for s in (True, False))
    while not (near.ready and far.ready):
        far.open(near.outgoing())
        near.open(far.outgoing())
    record = iter(far.seal(bytes(1 << 14))[:PIECES])
    connections = connections_of(Channel(ours, near))
    data = memoryview(bytearray(1 << 14))
    with (
        slow_peer(theirs, lambda: theirs.send(bytes([next(record)]))),
        ours,
        pytest.raises(OperationTimeoutError),
    ):
        connections.receive(1, data, len(data))


# --- the choice of addresses ----------------------------------------------------------------------------------------


def endpoints(listening: list[list[str]], bits: int = 24, connections: int = 1) -> list[Any]:
    """An endpoint for each rank, which listens in these networks as host rank + 1; only its addresses are set."""
    directory = {
        rank: _Addresses(
            [
                Address(
                    f"{lan}.{rank + 1}", 5000, f"on {lan}", f"{lan}.{0 if bits < 32 else rank + 1}/{bits}"
                )
                for lan in lans
            ],
            connections,
        )
        for rank, lans in enumerate(listening)
    }
    made = []
    for rank in directory:
        endpoint: Any = Endpoint.__new__(Endpoint)
        endpoint._job, endpoint._own, endpoint._directory = (
            SimpleNamespace(rank=rank),
            directory[rank],
            directory,
        )
        made.append(endpoint)
    return made


def dialed(endpoint: Any, peer: int, group: str = "g") -> list[str]:
    """The hosts to which a rank would make each of its connections to a peer."""
    count = endpoint.connections_to(peer, lambda: None)
    return [endpoint._address(peer, group, lane, lambda: None).host for lane in range(count)]


@pytest.mark.parametrize(
    ("lower", "higher", "expected"),
    [
        (["10.77.0.1", "172.17.0.1"], ["172.17.0.1", "10.77.0.2"], [("10.77.0.1", "10.77.0.2")]),
        (["172.17.0.1", "10.77.0.1"], ["172.17.0.1", "10.78.0.2"], [("10.77.0.1", "10.78.0.2")]),
        (["172.17.0.1"], ["172.17.0.1", "10.78.0.2"], [("172.17.0.1", "10.78.0.2")]),
        (["10.77.0.1", "172.17.0.1"], ["10.77.0.1", "172.17.0.1"], [("10.77.0.1",) * 2, ("172.17.0.1",) * 2]),
        (["fe80::1%lan0"], ["fe80::2%eth1"], [("fe80::1%lan0", "fe80::2%eth1")]),
    ],
    ids=["two hosts", "routers between", "one chose others", "one host", "link-local"],
)
def test_an_address_of_both_is_no_common_network(
    lower: list[str], higher: list[str], expected: list[tuple[str, str]]
) -> None:
    """Docker's and libvirt's bridges have the same address on every host."""
    bits = {"fe80": 64, "172.": 16}
    low, high = (
        [
            Address(host, 1, "", str(ip_network(f"{host.partition('%')[0]}/{bits.get(host[:4], 24)}", False)))
            for host in hosts
        ]
        for hosts in (lower, higher)
    )
    assert [(mine.host, theirs.host) for mine, theirs in links(low, high)] == expected


@pytest.mark.parametrize(
    ("lower", "higher", "common"),
    [
        ([LAN0, LAN1], [LAN0, LAN1], {LAN0, LAN1}),
        ([LAN0, LAN1], [LAN1, LAN0], {LAN0, LAN1}),
        ([LAN0, LAN1], [LAN1], {LAN1}),
        ([LAN0, LAN2], [LAN1, LAN2, LAN0], {LAN0, LAN2}),
        ([LAN0, LAN1], [LAN2, LAN1], {LAN1}),
    ],
    ids=["same order", "another order", "one is down", "three", "different ones are down"],
)
@pytest.mark.parametrize("connections", [1, 4])
def test_connections_are_within_networks_that_both_ranks_are_in(
    lower: list[str], higher: list[str], common: set[str], connections: int
) -> None:
    """The n-th address of one rank was that for the n-th connection, whatever the other one's n-th was."""
    low, high = endpoints([lower, higher], connections=connections)
    to_high, to_low = dialed(low, 1), dialed(high, 0)
    assert len(to_high) == max(len(common), connections)
    assert {host.rpartition(".")[0] for host in to_high} == common
    assert [host.rpartition(".")[0] for host in to_low] == [host.rpartition(".")[0] for host in to_high]


def test_addresses_without_a_common_network_are_used_in_their_order() -> None:
    """Hosts in networks of their own, with routers between them."""
    low, high = endpoints([[LAN0, LAN1], [LAN0, LAN1]], bits=32)
    pairs = {*zip(dialed(low, 1), dialed(high, 0), strict=True)}
    assert pairs == {(f"{lan}.2", f"{lan}.1") for lan in (LAN0, LAN1)}


def test_pairs_and_groups_alternate_between_interfaces() -> None:
    """Neighbours in a ring all used the same interface for small messages: the sum of their ranks is odd."""
    ranks = endpoints([[LAN0, LAN1]] * 8)
    neighbours = [dialed(ranks[r], r + 1) for r in range(7)]
    groups = [dialed(ranks[0], 1, f"group_{i}") for i in range(8)]
    for found in (neighbours, groups):
        assert {hosts[0].rpartition(".")[0] for hosts in found} == {LAN0, LAN1}


# --- what errors name -----------------------------------------------------------------------------------------------


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def tcp_info(retransmits: int, packets: int, since: int) -> bytes:
    """The kernel's struct tcp_info, to tcpi_last_ack_recv."""
    words = [0] * 13
    words[4], words[12] = packets, since
    return struct.pack("=8B13I", 1, 0, retransmits, 0, 0, 0, 0, 0, *words)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ((0, 0, 5000), ""),
        ((0, 40, 3), ""),
        ((1, 40, 300), ""),
        ((4, 91, 4012), "91 packets sent and 4 times retransmitted, no acknowledgement for 4.0 s"),
    ],
    ids=["idle", "sending", "slow", "lost"],
)
def test_a_connection_whose_packets_are_sent_again_and_again_is_not_acknowledged(
    found: tuple[int, int, int], says: str
) -> None:
    sock: Any = SimpleNamespace(
        setsockopt=lambda *_: None, getsockopt=lambda level, option, size: tcp_info(*found)[:size]
    )
    assert unacknowledged(sock) == says
    connections = connections_of(sock)
    assert reported(connections) == ""
    connections._connect(1)
    assert reported(connections) == (says and f"here to rank 1: {says}")
    connections._endpoint.unanswered = lambda group: [f"no answer in {group}"]  # type: ignore[method-assign]
    assert reported(connections).endswith("no answer in g")


def reported(connections: GroupConnections) -> str:
    """The links in the report of a group with these connections."""
    backend: Any = GlooBackend.__new__(GlooBackend)
    backend._connections = connections
    connections.state.links = backend.links
    return cast(str, connections.state.report()["links"])


def test_a_healthy_connection_is_acknowledged() -> None:
    """So it is if the peer does not read; a socket that is closed or not TCP says nothing."""
    ours, theirs = connected()
    records = records_for("mac", cast(Any, b"k" * 32), server=False)
    assert records is not None
    with ours, theirs:
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 16), socket.MSG_DONTWAIT)
        assert len(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)) == len(tcp_info(0, 0, 0))
        assert unacknowledged(ours) == unacknowledged(Channel(ours, records)) == ""
    here, there = socket.socketpair()
    with here, there:
        assert unacknowledged(here) == unacknowledged(ours) == ""


def test_errors_and_warnings_have_the_links_of_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    states = {
        rank: operation_errors.report(None, None, links) for rank, links in ((1, ""), (2, "a to rank 0"))
    }
    states[3] = {"unknown": True}
    states[4] = {**operation_errors.report(None, None), "links": 5}
    reports = Reports(0, (), Changes(), lambda message: None, lambda: False)
    reports.request_reports = lambda group, backend, ranks: states  # type: ignore[method-assign]
    control = SimpleNamespace(
        collect_reports=reports.collect_reports,
        departed={},
        describe=lambda rank: f"rank {rank}",
    )
    job: Any = SimpleNamespace(rank=0, size=5, control=control)
    context = Context(job, "g", (0, 1, 2, 3, 4), 60.0)
    call = Call(OPS["barrier"], (), (), TIMEOUT)
    error = operation_errors.timeout_error(context, call, lambda: "b to rank 1")
    end = "; connections without an answer: rank 0: b to rank 1; rank 2: a to rank 0"
    assert str(error).endswith(end)
    assert "rank 4: sends no report" in str(error)
    operation_errors.log_stall(context, call, 30.0, "b to rank 1")
    assert caplog.messages[-1].endswith(end)


def test_connections_are_named_by_both_addresses_and_interfaces() -> None:
    endpoint: Any = endpoints([[LAN0], [LAN1]])[0]
    ends: Any = SimpleNamespace(
        getsockname=lambda: (f"{LAN0}.1", 4000), getpeername=lambda: (f"{LAN1}.2", 5000)
    )
    name = endpoint.describe(1, ends)
    assert name == f"{LAN0}.1:4000 (on {LAN0}) to rank 1 at {LAN1}.2:5000 (on {LAN1})"
    ours, theirs = connected()
    with theirs:
        ours.close()
    assert endpoint.describe(1, ours) == "to rank 1"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.EHOSTUNREACH, "rank 1 does not acknowledge what was sent from here to rank 1: [Errno 113]"),
        (errno.ECONNRESET, "rank 1 closed its connection: [Errno 104]"),
    ],
)
def test_a_connection_that_the_kernel_gave_up_is_named(code: int, says: str) -> None:
    """The error said that the peer had closed it."""

    def failing(*_: Any) -> Any:
        raise OSError(code, "ended")

    sock: Any = SimpleNamespace(
        setsockopt=lambda *_: None, send=failing, getpeername=failing, shutdown=lambda how: None
    )
    connections = connections_of(sock)
    with pytest.raises(RankLostError) as raised:
        connections.send(1, memoryview(b"x"))
    assert says in str(raised.value)


def unconnected() -> Any:
    """An endpoint without connections, beside another one of the same network."""
    endpoint = endpoints([[LAN0], [LAN0]])[0]
    vars(endpoint).update(
        _job=SimpleNamespace(rank=0, key=b"k" * 32, control=None),
        _changed=Changes(),
        _open={},
        _arriving=set(),
        _unanswered={},
        _dialing=set(),
        _closed_groups=set(),
        _message_engines={},
    )
    return endpoint


def too_late(endpoint: Any, seq: int | None = None) -> Callable[[], None]:
    """A check that raises once an address has not answered."""

    def check() -> None:
        if endpoint._unanswered:
            raise OperationTimeoutError("too late", seq=seq)

    return check


@pytest.mark.every(n=2)
@pytest.mark.parametrize("kind", ["c", "m"])
def test_an_address_that_does_not_answer_is_in_the_error_or_report(kind: str) -> None:
    """A listener whose queue is full: the kernel ignores further attempts."""
    endpoint, seq = unconnected(), 5 if kind == "c" else None
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for queued in (first, second):
            queued.setblocking(False)
            queued.connect_ex(listener.getsockname())
        port = listener.getsockname()[1]
        endpoint._directory[1] = _Addresses([Address("127.0.0.1", port, "lo")], 1)
        with pytest.raises(OperationTimeoutError) as raised:
            endpoint.connect(("g", kind, 1), too_late(endpoint, seq))
    silent = (
        f"no answer from rank 1 at 127.0.0.1:{port} (lo) (behind a firewall: UNICOLL_PORT_RANGE=first-last gives all "
        "listeners ports of that range)"
    )
    assert str(raised.value) == ("too late" if seq else f"too late; {silent}")
    assert endpoint.unanswered("g") == [silent]
    assert endpoint.unanswered("other") == []
    endpoint.close_group("other")
    assert endpoint.unanswered("g") == [silent]
    endpoint.close_group("g")
    assert not endpoint._unanswered


def test_addresses_that_do_not_answer_change_while_no_report_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A report of the control thread failed if another thread added an address meanwhile."""
    endpoint, held = unconnected(), []

    class Addresses(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            held.append(endpoint._changed.lock._is_owned())
            super().__setitem__(key, value)

    endpoint._unanswered = Addresses()
    monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=TimeoutError))
    with pytest.raises(OperationTimeoutError, match="no answer from rank 1"):
        endpoint.connect(("g", "c", 1), too_late(endpoint))
    assert held == [True]
