"""The state of a group: the first error wins, and what waits is woken once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from unicoll.backend import Call, Context, group_state
from unicoll.backend.group_state import GroupState
from unicoll.calls.ops import OPS
from unicoll.errors import DistError, GroupAbortedError, RankLostError
from unicoll.net.control.departures import Departures
from unicoll.process.interrupts import Changes


def state_of(control: Any = None) -> GroupState:
    """Rank 0 of a group of three, in a call."""
    job: Any = SimpleNamespace(rank=0, size=3, control=control, cause_of_death=lambda rank: "")
    state = GroupState(Context(job, "g", (0, 1, 2), 60.0))
    state.call = Call(OPS["barrier"], (), (), 60.0)
    return state


def test_the_first_error_is_the_groups() -> None:
    state, seen = state_of(), []
    state.add_listener(seen.append)
    threads = [threading.Thread(target=state.abort, args=(DistError(f"error {i}"),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [state.error]
    with pytest.raises(DistError) as raised:
        state.fail(DistError("late"))
    assert raised.value is state.error
    late: list[DistError] = []
    state.add_listener(late.append)
    assert late == [state.error]


def test_each_listener_is_called_though_another_one_raises() -> None:
    state, seen = state_of(), []

    def fail(error: DistError) -> None:
        seen.append("first")
        raise OSError("enough")

    state.add_listener(fail)
    state.add_listener(lambda error: seen.append("second"))
    removed = state_of().check
    state.add_listener(removed)  # type: ignore[arg-type]
    state.remove_listener(removed)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="enough"):
        state.abort(DistError("ended"))
    assert seen == ["first", "second"]


def test_the_cause_of_the_error_is_raised_with_it() -> None:
    state, error = state_of(), DistError("ended")
    error.__cause__ = ValueError("why")
    state.abort(error)
    for _ in range(2):
        with pytest.raises(DistError) as raised:
            state.check()
        assert repr(raised.value.__cause__) == "ValueError('why')"


def test_a_group_that_is_closed_has_not_failed() -> None:
    state, seen = state_of(), []
    state.add_listener(seen.append)
    assert state.close() is None
    with pytest.raises(GroupAbortedError, match="'g' has been destroyed"):
        state.check()
    state.abort(DistError("late"))
    state.add_listener(seen.append)
    assert not seen
    failed = state_of()
    failed.abort(DistError("ended"))
    assert str(failed.close()) == "ended"


class Control:
    """The control plane: announcements are echoed, and rank 2 may have ended."""

    def __init__(self, *, died: bool = False, failure: DistError | None = None) -> None:
        departures = Departures(Changes())
        if died:
            departures.record(2, "rank 2 died", "died")
        self.departed, self.left, self.died = departures.departed, departures.left, departures.died
        self.peers: list[Any] = []
        self.find_lost_rank = departures.find_lost_rank
        self.failure = failure
        self.announced: list[DistError] = []

    def group_failure(self, group: str) -> DistError | None:
        return self.failure

    def relay_settled(self) -> bool:
        return True

    def announce_failure(self, group: str, members: Any, error: DistError) -> DistError:
        self.announced.append(error)
        return error


def test_a_connection_that_ends_raises_what_is_known() -> None:
    """The group's error if there is one; else the member that has ended, though it is not the peer."""
    elsewhere = DistError("on another rank")
    with pytest.raises(DistError) as raised:
        state_of(Control(failure=elsewhere)).fail_peer(1, "rank 1 closed its connection")
    assert raised.value is elsewhere
    control = Control(died=True)
    with pytest.raises(RankLostError, match=r"barrier.*: rank 2 died") as lost:
        state_of(control).fail_peer(1, "rank 1 closed its connection")
    assert lost.value.rank == 2
    control = Control()
    with pytest.raises(RankLostError, match=r"barrier.*: rank 1 closed its connection") as lost:
        state_of(control).fail_peer(1, "rank 1 closed its connection")
    assert control.announced == [lost.value]


def test_a_notice_may_come_from_the_next_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to wait for the notice begins when this process is connected to the relay that replaces another one."""
    monkeypatch.setattr(group_state, "_NOTICE_S", 0.0)
    control, died = Control(), Control(died=True)
    settled = iter([False, False, False])

    def relay_settled() -> bool:
        if next(settled, True):
            control.departed, control.find_lost_rank = died.departed, died.find_lost_rank
        return False

    monkeypatch.setattr(control, "relay_settled", relay_settled)
    with pytest.raises(RankLostError, match=r"barrier.*: rank 2 died"):
        state_of(control).fail_peer(1, "rank 1 closed its connection")
