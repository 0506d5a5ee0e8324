"""The monitor of blocked calls: what it says about a call, and which ranks it takes for blocked."""

from __future__ import annotations

import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from unicoll.backend.group_state import GroupState
from unicoll.diagnosis import wait_monitor
from unicoll.diagnosis.blocked_calls import find_blocked_calls
from unicoll.diagnosis.wait_monitor import WaitMonitor, _Snapshot
from unicoll.errors import DistError
from unicoll.net.control.group_failures import GroupFailures
from unicoll.net.control.wait_graph import MessageState
from unicoll.process.interrupts import Changes


def test_a_rank_whose_call_is_failing_is_not_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may already have the error, and wait for this rank in their next call: that is no deadlock."""
    sent: list[Any] = []
    failures = GroupFailures(Changes(), sent.append, bool)
    control = SimpleNamespace(announce_failure=failures.announce_failure)
    context = SimpleNamespace(name="g", ranks=(0, 1), job=SimpleNamespace(control=control))
    group = GroupState(cast(Any, context))
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    queue = threading.Thread(target=group.fail, args=(DistError("differ"),), name="unicoll-g", daemon=True)
    _, before = find_blocked_calls([])
    queue.start()
    while not sent:
        time.sleep(0.001)
    _, meanwhile = find_blocked_calls([])  # it waits for the relay's announcement
    assert queue.is_alive()
    queue.join(30)
    assert (before, meanwhile) == (True, False)
    assert isinstance(group.error, DistError)


@pytest.mark.parametrize(
    ("folder", "names", "is_blocked"),
    [
        ("site-packages", {}, True),
        ("site-packages", {"torch": ModuleType("torch")}, False),
        ("site-packages", {"dist": ModuleType("torch.distributed")}, False),
        ("training", {}, False),
    ],
)
def test_a_daemon_thread_of_an_installed_package_does_not_call_torch(
    folder: str, names: dict[str, Any], is_blocked: bool
) -> None:
    program = compile("def run():\n    started.set(); end.wait()", f"/{folder}/bar/monitor.py", "exec")
    started, end = threading.Event(), threading.Event()
    module = {"__name__": "bar.monitor", "started": started, "end": end, **names}
    exec(program, module)
    backend = SimpleNamespace(
        called_from_torch=True,
        has_unseen_wakers=False,
        awaited_in=lambda frame: None,
        in_background=list,
    )
    thread = threading.Thread(target=module["run"], daemon=True)
    thread.start()
    try:
        assert started.wait(30)
        assert find_blocked_calls([cast(Any, backend)]) == ([], is_blocked)
    finally:
        end.set()
        thread.join()


def test_a_message_that_is_read_during_an_answer_ends_the_wait_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay takes a rank that has read everything and still waits for stuck."""
    sent: list[Any] = []
    handlers: dict[str, Any] = {}
    control = SimpleNamespace(
        handle=handlers.__setitem__, failure_listeners=[], send=sent.append, relay_rank=0
    )
    monitor = WaitMonitor(cast(Any, SimpleNamespace(control=control, groups=[], size=2)))
    read = False

    def message_state(*_: object) -> MessageState:
        nonlocal read
        state, read = MessageState(read=read), True  # the thread reads the message directly afterwards
        return state

    def take_snapshot(_: WaitMonitor) -> _Snapshot:
        nonlocal read
        state, read = None if read else {"waits": []}, True
        return _Snapshot(state, [], 0.0, {}, [])

    monkeypatch.setattr(wait_monitor, "_message_state", message_state)
    monkeypatch.setattr(WaitMonitor, "_take_snapshot", take_snapshot)
    try:
        handlers["confirm"]({"id": 1, "links": [["sim:g", 1]], "orders": []})
    finally:
        monitor.close()
    (answer,) = (message for message in sent if message["t"] == "confirmed")
    assert not answer["links"][0].read or answer["state"] is None
