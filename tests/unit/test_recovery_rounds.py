"""The rounds in which the ranks of a recovery meet, on threads over one store; and which rank sends its state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from unicoll.bootstrap.recovery_rounds import Member, Round, form_round
from unicoll.bootstrap.rendezvous import meet
from unicoll.bootstrap.resolve import JoinRequest, Resolved, resolve
from unicoll.errors import DistError, DistStoreError, GroupAbortedError, OperationTimeoutError
from unicoll.net.stores import HashStore, Store
from unicoll.parallel.recovery import _senders

LONG_S = 60.0


def member(rank: int, **changed: Any) -> Member:
    return replace(Member(rank, True, False, 0, "", f"exit/{rank}"), **changed)


def members_of(rank: int, size: int, store: Store) -> Resolved:
    return resolve(JoinRequest("gloo", rank=rank, world_size=size, store=store), environ={})


def form(
    store: Store, own: Member, size: int, last: int = 0, seconds: float = LONG_S, least: Any = None
) -> Round:
    found = members_of(own.rank, size, store)
    return form_round(found, store, own, last, time.monotonic() + seconds, least)


class Thread(threading.Thread):
    """A thread that has the result of a function, or its error."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._found: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._found = self._function()
        except DistError as error:
            self._found = error

    def result(self) -> Any:
        self.join(LONG_S)
        assert not self.is_alive()
        return self._found


def waits(store: Store, key: str) -> None:
    store.wait([f"unicoll/recovery/{key}"], LONG_S)


def test_all_ranks_form_rounds_one_after_another() -> None:
    store = HashStore()
    own = [member(rank) for rank in range(3)]
    for number in (1, 2):
        threads = [Thread(partial(form, store, each, 3, number - 1)) for each in own]
        for thread in threads:
            assert thread.result()[:2] == (number, own)


def test_a_process_in_place_of_one_that_died_waiting() -> None:
    store = HashStore()
    died, new, other = member(1), member(1, is_member=False), member(0)
    first = Thread(lambda: form(store, died, 2))
    waits(store, "1/rank/1")
    second = Thread(lambda: form(store, new, 2))
    while store.get("unicoll/recovery/1/rank/1").find(new.token.encode()) < 0:
        time.sleep(0.01)
    assert form(store, other, 2).members == [other, new]
    assert second.result().members == [other, new]
    assert form(store, other, 2, 1).number == first.result().number == 2  # it is alive here, and goes on


def test_a_member_that_died_is_told_to_those_who_wait_for_it() -> None:
    store = HashStore()
    died, other = member(0), member(1)
    thread = Thread(lambda: form(store, died, 2))
    waits(store, "1/rank/0")
    formed = form(store, other, 2)
    assert thread.result()[:2] == formed[:2]
    found = formed.apply_to(members_of(1, 2, store))
    assert (found.rank, found.world_size, found.exit_keys) == (1, 2, ["exit/0", "exit/1"])
    with formed.watched(found.location):
        joining = Thread(lambda: meet(found, JoinRequest(), time.monotonic() + LONG_S))
        new = Thread(
            lambda: form(store, member(0), 2)
        )  # it goes on to round 2, and finds itself replaced in round 1
        error = joining.result()
        assert isinstance(error, GroupAbortedError), error
        assert "a rank ended, or gave up, while it joined" in str(error)
    assert form(store, other, 2, formed.number).number == 2
    assert new.result().number == 2


def test_fewer_members() -> None:
    store = HashStore()
    own = [member(rank) for rank in range(4)]
    waiting = Thread(lambda: form(store, own[3], 4, least=2))
    waits(store, "1/rank/3")
    formed = form(store, own[1], 4, seconds=0.01, least=2)
    assert waiting.result()[:2] == formed[:2]
    assert formed.members == [own[1], own[3]]
    found = formed.apply_to(members_of(3, 4, store))
    assert (found.rank, found.world_size) == (1, 2)
    late = Thread(lambda: form(store, own[2], 4))  # it waits for the next round
    waits(store, "2/rank/2")
    others = [Thread(partial(form, store, own[rank], 4, 1)) for rank in (0, 1, 3)]
    assert {thread.result().number for thread in [late, *others]} == {2}


@pytest.mark.parametrize(
    ("least", "text"), [(None, "3 ranks are needed"), (2, "at least 2 of 3 ranks are needed")]
)
def test_too_few_ranks(least: int | None, text: str) -> None:
    store = HashStore()
    with pytest.raises(
        OperationTimeoutError, match=f"recover: {text}, and ranks 0, 2 did not take part in time"
    ) as e:
        form(store, member(1), 3, seconds=0.01, least=least)
    assert e.value.missing == [0, 2]
    assert not store.check(["unicoll/recovery/1/rank/1"])


def test_a_store_that_replaces_a_lost_one() -> None:
    """Rank 0 has opened a new store, whose numbers begin anew; rank 1 has been in seven rounds."""
    store = HashStore()
    new = Thread(lambda: form(store, member(0), 2))
    waits(store, "1/rank/0")
    assert form(store, member(1), 2, last=7).number == 8
    assert new.result().number == 8


def test_values_of_another_program() -> None:
    store = HashStore()
    store.set("unicoll/recovery/last", "many")
    with pytest.raises(DistStoreError, match="the last recovery is of another program or version"):
        form(store, member(0), 1)


OLD, NEW = {"is_member": True}, {"is_member": False}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([OLD, OLD, NEW], {2: 0}),
        ([NEW, OLD, OLD, NEW, NEW, OLD], {0: 1, 3: 2, 4: 5}),
        ([OLD | {"step": 4}, OLD | {"step": 5}, NEW | {"step": 9}], {0: 1, 2: 1}),
        ([OLD, OLD | {"is_damaged": True}], {1: 0}),
        ([NEW, NEW], {}),
        ([NEW, NEW | {"digest": "x"}, NEW], {1: 0}),
        ([NEW, NEW | {"step": 3}, NEW | {"step": 3, "digest": "x"}], {0: 1, 2: 1}),
        ([NEW | {"is_damaged": True}, NEW | {"digest": "x"}], {0: 1}),
        ([OLD | {"is_damaged": True}, NEW], {0: 1}),
    ],
)
def test_senders(states: list[dict[str, Any]], expected: dict[int, int]) -> None:
    assert _senders([member(rank, **state) for rank, state in enumerate(states)]) == expected


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([OLD, OLD | {"digest": "x"}, OLD], "the states of ranks 0, 2 and rank 1 differ after 0 steps"),
        ([OLD | {"is_damaged": True}, NEW | {"is_damaged": True}], "no rank has a complete state"),
    ],
)
def test_no_sender(states: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(DistError, match=text):
        _senders([member(rank, **state) for rank, state in enumerate(states)])
