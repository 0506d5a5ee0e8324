"""Connections of a group: those that arrive while it ends, or are not made in time; data that are wrong."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from unittest import mock

import numpy as np
import pytest

from gloo_fallback.p2p import connector, progress
from gloo_fallback.p2p.engine import P2PEngine
from gloo_fallback.transport.topology import HostInfo, TransportPreference, _exchange_host_info
from unicoll.arrays.buffer import Buffer
from unicoll.arrays.types import BY_NAME
from unicoll.backend import Call, Context, MemberConnections
from unicoll.backend.connections import endpoint as endpoints
from unicoll.backend.connections.endpoint import Endpoint, _Addresses, _Listener
from unicoll.backend.group_state import GroupState
from unicoll.calls.ops import OPS
from unicoll.errors import (
    AuthenticationError,
    DistError,
    DistNetworkError,
    GroupAbortedError,
    OperationTimeoutError,
)
from unicoll.net.wire.links import Address
from unicoll.net.wire.records import TamperedError
from unicoll.process.interrupts import Changes


def engine_of(size: int = 2) -> P2PEngine:
    ranks = tuple(range(size))
    context = SimpleNamespace(name="g", rank=0, size=size, ranks=ranks, job=SimpleNamespace(control=None))
    endpoint = SimpleNamespace(listen=lambda *_: None, forget=lambda key: None)
    return P2PEngine(GroupState(cast(Any, context)), cast(Any, endpoint), 0, lambda cause: None)


def close(engine: P2PEngine) -> None:
    engine.drain(0.0)
    engine.state.close()
    assert engine.close()


@pytest.mark.parametrize("error", [OperationTimeoutError("too late"), DistNetworkError("it was closed")])
def test_the_error_that_ends_a_connection_attempt_is_raised(error: DistError) -> None:
    """The peer, a stopped process, does not answer: OperationTimeoutError became DistNetworkError."""
    endpoint: Any = Endpoint.__new__(Endpoint)
    endpoint._job = SimpleNamespace(rank=0, key=b"k" * 32, control=None)
    endpoint._changed, endpoint._open, endpoint._arriving = Changes(), {}, set()
    calls = iter((False, True))

    def check() -> None:
        if next(calls):
            raise error

    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint._own = _Addresses([Address("127.0.0.1", 1)], 1)
        endpoint._directory = {1: _Addresses([Address(*server.getsockname())], 1)}
        with pytest.raises(type(error), match=str(error)) as raised:
            endpoint._try_connect(("g", "m", 1), check, lambda: None)
    assert raised.value is error


def test_one_thread_at_a_time_connects_to_a_peer() -> None:
    """When the first of two had ended, the peer's connection was accepted beside theirs, and both were closed."""
    endpoint: Any = Endpoint.__new__(Endpoint)
    endpoint._job = SimpleNamespace(rank=1, control=None)
    endpoint._changed, endpoint._open, endpoint._message_engines = Changes(), {}, {}
    endpoint._arriving, endpoint._dialing, endpoint._closed_groups = set(), set(), set()
    endpoint._unanswered = {}
    dials, second_waits, key = [], threading.Event(), ("g", "m", 0)
    sock = SimpleNamespace(setsockopt=lambda *_: None)

    def dial(*_: Any) -> Any:
        dials.append(threading.get_ident())
        if len(dials) == 1:
            second.start()
            assert second_waits.wait(30)
            assert endpoint._admit(key) == endpoints._BUSY
            return None
        assert endpoint._admit(key) == endpoints._BUSY
        return sock

    endpoint._dial = dial
    found: list[Any] = []
    second = threading.Thread(
        target=lambda: found.append(endpoint.connect(key, second_waits.set, lambda: None))
    )
    found.append(endpoint.connect(key, lambda: None))
    second.join(30)
    assert found == [sock, sock]
    assert len(dials) == 2


def test_an_attempt_is_not_postponed_once_the_peer_may_use_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer lost what it had sent on the connection, or its sends failed as if this rank had ended."""
    endpoint: Any = Endpoint.__new__(Endpoint)
    endpoint._job = SimpleNamespace(rank=0, key=b"k" * 32, control=None)
    endpoint._changed, endpoint._open, endpoint._arriving = Changes(), {}, set()
    told, waits = threading.Event(), threading.Event()

    def handshake(sock: socket.socket, *_: Any, **__: Any) -> tuple[socket.socket, bool]:
        assert sock.recv(1) == b"x"
        return sock, True

    def check() -> None:
        if told.is_set():
            waits.set()

    def postpone() -> None:
        assert not told.is_set()

    def answer(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"x")
            assert sock.recv(4096)
            told.set()
            waits.wait(30)
            sock.sendall(b"A")

    monkeypatch.setattr(endpoints.channel, "authenticate", handshake)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint._own = _Addresses([Address("127.0.0.1", 1)], 1)
        endpoint._directory = {1: _Addresses([Address(*server.getsockname())], 1)}
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        try:
            endpoint._try_connect(("g", "m", 1), check, postpone).close()
        finally:
            thread.join(30)
    assert waits.is_set()


def test_a_send_that_needs_a_connection_wakes_the_thread_that_connects() -> None:
    """It slept until its next look at the deadlines, because a receive was posted."""
    engine = engine_of()
    connects = threading.Event()

    def connect(key: Any, check: Any, postpone: Any) -> Any:
        connects.set()
        raise DistNetworkError("enough")

    cast(Any, engine)._endpoint.connect = connect
    values = np.zeros(1)
    array = (Buffer(values, BY_NAME["float64"], values.shape, values),)
    calls = [Call(OPS["recv"], (), array, 60.0, peer=1), Call(OPS["send"], array, (), 60.0, peer=1)]
    with mock.patch.object(progress, "_TICK_S", 60.0):
        engine.post(calls[0])
        while not engine._progress.owner:
            time.sleep(0.01)
        send = engine.post(calls[1])
        assert connects.wait(60)
        with pytest.raises(DistNetworkError, match="enough"):
            send.wait(60)
        close(engine)


def test_sends_to_other_peers_do_not_wait_for_a_peer_that_does_not_answer() -> None:
    engine = engine_of(3)
    order: list[int] = []
    answers = threading.Event()

    def connect(key: Any, check: Any, postpone: Any) -> Any:
        order.append(key[2])
        while key[2] == 1 and not answers.is_set():
            postpone()
            time.sleep(0.01)
        raise DistNetworkError("enough")

    cast(Any, engine)._endpoint.connect = connect
    values = np.zeros(1)
    array = (Buffer(values, BY_NAME["float64"], values.shape, values),)
    with mock.patch.object(connector, "_ATTEMPT_S", 0.0):
        first, *others = (engine.post(Call(OPS["send"], array, (), 60.0, peer=peer)) for peer in (1, 1, 2))
        with pytest.raises(DistNetworkError, match="enough"):
            others[1].wait(60)
        answers.set()
        for send in (first, others[0]):
            with pytest.raises(DistNetworkError, match="enough"):
                send.wait(60)
    assert order[0] == 1
    assert order[-2:] == [1, 1]
    assert 2 in order
    close(engine)


def test_a_message_connection_that_was_dropped_before_it_is_added_is_not_used() -> None:
    engine = engine_of()
    here, there = socket.socketpair()
    here.close()
    with there:
        engine.add_connection(1, here)
        assert not engine.open
        close(engine)


def test_a_message_connection_that_arrives_while_the_group_ends_is_not_used() -> None:
    engine = engine_of()
    here, there = socket.socketpair()
    report = engine.report_completed

    def arrives() -> None:  # once the connections have ended
        report()
        engine.add_connection(1, here)

    cast(Any, engine).report_completed = arrives
    with here, there:
        close(engine)
        engine.state.abort(GroupAbortedError("destroyed"))
    assert not engine.open


def test_a_connection_whose_other_end_has_gone_is_still_delivered() -> None:
    """Else the connection would be awaited until the deadline."""
    here, there = socket.socketpair()
    there.close()
    key = ("g", "m", 1)
    delivered: list[Any] = []
    listener = SimpleNamespace(
        _admit=lambda key: b"A",
        detach=lambda client: here,
        _deliver=lambda key, sock: delivered.append((key, sock.recv(1))),
    )
    message = {"group": "g", "kind": "m", "rank": 1}
    with here:
        _Listener.handle(cast(Any, listener), cast(Any, SimpleNamespace(rank=1)), message)
    assert delivered == [(key, b"")]


# --- what arrives on connections -----------------------------------------------------------------------------------


def connections_of(preference: int) -> Any:
    """The connections of a group of global ranks 4 and 7; the second sends ``preference``."""

    def fail(error: DistError) -> NoReturn:
        raise error

    mine = np.zeros(5, np.uint64)
    context = SimpleNamespace(name="pair", ranks=(4, 7), who=lambda r: f"rank {(4, 7)[r]} (host b)")
    return SimpleNamespace(
        rank=0,
        size=2,
        deterministic=False,
        context=context,
        plan=lambda sizes, dtype: SimpleNamespace(mine=mine),
        exchange=lambda plan: [plan.mine, np.array([9, preference, 1, 1, 0], np.uint64)],
        state=SimpleNamespace(fail=fail),
    )


def test_the_information_of_each_rank_is_found() -> None:
    infos = _exchange_host_info(connections_of(TransportPreference.SHM))
    assert infos[1] == HostInfo(9, TransportPreference.SHM)


def test_the_error_names_the_rank_whose_information_is_invalid() -> None:
    with pytest.raises(
        DistNetworkError, match=r"^rank 7 \(host b\) sent invalid host information$"
    ) as caught:
        _exchange_host_info(connections_of(99))
    assert (caught.value.group, caught.value.rank) == ("pair", 7)


def test_data_that_were_altered_fail_the_group_and_name_the_sender() -> None:
    """The thread that read them ended, and receives waited until their deadline."""
    job: Any = SimpleNamespace(rank=0, size=3, control=None)
    errors: list[Any] = []
    backend: Any = SimpleNamespace(context=Context(job, "g", (0,), 60.0), abort=errors.append)
    connections = MemberConnections(backend, lambda peer, read: None)
    backend.context = Context(job, "g", (0, 2), 60.0)

    def altered(peer: int, read: Any) -> None:
        raise TamperedError("a record")

    connections._receive = altered
    connections._read(1, SimpleNamespace())  # type: ignore[arg-type]
    (error,) = errors
    assert isinstance(error, AuthenticationError)
    assert error.rank == 2
    assert "rank 2: the integrity check of its connection failed" in str(error)
