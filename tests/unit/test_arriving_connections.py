"""Connections that arrive while a group ends, or whose other end has gone."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

from gloo_fallback.p2p.engine import P2PEngine
from gloo_fallback.transport.endpoint import _Listener
from unicoll.errors import GroupAbortedError


def test_a_message_connection_that_arrives_while_the_group_ends_is_not_used() -> None:
    context = SimpleNamespace(name="g", rank=0, size=2, ranks=(0, 1), job=SimpleNamespace(control=None))
    endpoint = SimpleNamespace(listen=lambda *_: None, forget=lambda key: None)
    engine = P2PEngine(cast(Any, context), cast(Any, endpoint), 0, lambda cause: None)
    here, there = socket.socketpair()
    report = engine.report_completed

    def arrives() -> None:  # once the connections have ended
        report()
        engine._add_connection(1, here)

    cast(Any, engine).report_completed = arrives
    with here, there:
        assert engine.close(0.0)
        engine.abort(GroupAbortedError("destroyed"))
    assert not engine._open


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
