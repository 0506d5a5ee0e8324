"""The search for deadlocks: the analysis against an exhaustive one, and the relay's part in simulated jobs.

``UNICOLL_TEST_FULL=1`` simulates 1,000 programs with a circle and 10,000 without.
"""

from __future__ import annotations

import random

import pytest

from tests.unit.simulated_programs import Simulation, clean_program, deadlocked_program
from unicoll.net.control.deadlock_detector import DeadlockDetector
from unicoll.net.control.wait_graph import (
    ANY,
    State,
    Wait,
    compress,
    find_cycle,
    find_stuck,
    parse,
)
from unicoll.testing import sampling

CIRCLES, CLEAN, STATES = (1000, 10_000, 20_000) if sampling.wants_full() else (100, 300, 3000)


def random_states(draw: random.Random) -> tuple[dict[int, State], dict[str, tuple[int, ...]]]:
    """States of some ranks of a job; the others run."""
    size = draw.randint(2, 7)
    groups = {f"b:g{i}": tuple(draw.sample(range(size), draw.randint(2, size))) for i in range(4)}
    states = {}
    for rank in range(size):
        mine = [lane for lane, members in groups.items() if rank in members]
        if not mine or draw.random() < 0.2:
            continue
        posted = {lane: draw.randint(0, 2) for lane in mine}
        waits = []
        for call in range(draw.choice((1, 1, 2))):
            lane = draw.choice(mine)
            peer = draw.choice([ANY, *(m for m in groups[lane] if m != rank)])
            if draw.random() < 0.7:
                posted[lane] = max(1, posted[lane])
                waits.append(Wait(lane, draw.randint(1, posted[lane]), ANY, call))
            else:
                waits.append(Wait(lane, 0, peer, call))
        used = {wait.backend_group: compress(groups[wait.backend_group]) for wait in waits}
        states[rank] = State(tuple(waits), posted, used)
    return states, groups


def stuck_by_exhaustion(states: dict[int, State], groups: dict[str, tuple[int, ...]]) -> set[int]:
    """The ranks that stay blocked although every rank with a thread that runs makes every call that can help."""
    running = set(range(7)) - states.keys()

    def ends(rank: int, wait: Wait) -> bool:
        members = groups[wait.backend_group]
        if wait.number:
            return all(
                m in running or states[m].posted.get(wait.backend_group, 0) >= wait.number for m in members
            )
        return any(m in running for m in ([wait.peer] if wait.peer != ANY else members) if m != rank)

    while woken := {
        rank
        for rank, state in states.items()
        if rank not in running and any(ends(rank, wait) for wait in state.waits)
    }:
        running |= woken
    return states.keys() - running


def test_the_analysis_finds_what_exhaustion_finds(seed: int) -> None:
    draw = random.Random(seed)
    found = 0
    for _ in range(STATES):
        states, groups = random_states(draw)
        stuck = find_stuck(states)
        assert stuck == stuck_by_exhaustion(states, groups), states
        if stuck:
            found += 1
            circle = find_cycle(states, stuck)
            assert [edge.blocker for edge in circle] == [e.rank for e in (*circle[1:], circle[0])]
            assert circle[0].rank == min(edge.rank for edge in circle)
            assert {edge.rank for edge in circle} <= stuck
            for edge in circle:
                assert edge.wait in states[edge.rank].waits
                assert edge.blocker in groups[edge.wait.backend_group]
    assert STATES / 20 < found < STATES * 0.9


def test_clean_programs_are_not_reported(seed: int) -> None:
    for i in range(CLEAN):
        draw = random.Random(f"{seed} {i}")
        simulation = Simulation(clean_program(draw), draw)
        assert not simulation.run(), f"program {i}"
        assert not simulation.failures, f"program {i}: {simulation.failures}"


def test_circles_are_named(seed: int) -> None:
    for i in range(CIRCLES):
        draw = random.Random(f"{seed} {i}")
        simulation = Simulation(deadlocked_program(draw), draw)
        stuck = simulation.run()
        assert stuck, f"program {i} has no deadlock"
        reported = set()
        for group, members, error in simulation.failures:
            assert error["type"] == "DeadlockError"
            assert error["fields"]["group"] == group
            reported |= set(members)
            ranks = error["fields"]["ranks"]
            for rank, following in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
                assert simulation.waits_for(rank, following), f"program {i}: {error}"
                assert f"rank {rank}: call " in error["message"]
                assert f" waits for rank {following}" in error["message"]
            assert set(ranks) <= stuck
        assert reported, f"program {i}"


class Relay:
    """A detector with the messages that it sends."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.questions: dict[int, dict[str, object]] = {}
        self.failed: list[str] = []
        self.failed_before: set[str] = set()
        self.detector = DeadlockDetector(
            size,
            self.questions.__setitem__,
            lambda group, members, error: self.failed.append(group),
            str,
            lambda group: group in self.failed_before,
            lambda: self.now,
        )

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.detector.tick()

    def answer(self, rank: int, state: object, links: object = ()) -> None:
        message = {
            "t": "confirmed",
            "id": self.questions[rank]["id"],
            "state": state,
            "texts": ["x"],
            "links": links,
        }
        self.detector.handle(rank, message)


def waiting(lane: str, number: int, call: int = 1) -> dict[str, object]:
    """A state of one of two ranks, in a collective of a group of both."""
    return {"waits": [[lane, number, ANY, call]], "posted": {lane: number}, "groups": {lane: [[0, 2, 1]]}}


def test_a_rank_that_goes_on_before_it_answers_is_not_reported() -> None:
    relay = Relay(2)
    relay.detector.handle(0, {"t": "waiting", "state": waiting("b:x", 1)})
    relay.detector.handle(1, {"t": "waiting", "state": waiting("b:y", 1)})
    relay.advance(1)
    assert relay.questions.keys() == {0, 1}
    relay.answer(0, waiting("b:x", 1))
    relay.answer(1, None)
    relay.advance(1)
    assert not relay.failed
    relay.detector.handle(1, {"t": "waiting", "state": waiting("b:y", 1, call=2)})
    relay.advance(1)
    for _ in range(2):
        relay.answer(0, waiting("b:x", 1))
        relay.answer(1, waiting("b:y", 1, call=2))
    assert sorted(relay.failed) == ["x", "y"]


@pytest.mark.parametrize("answers", [0, 1, 2, 3])
def test_a_call_in_a_group_that_has_failed_is_not_part_of_a_deadlock(answers: int) -> None:
    """It ends, however late its rank notices; the group fails after this number of answers."""
    relay = Relay(2)
    lanes = ["b:x", "b:y"]
    given = 0

    def fail_when_due() -> None:
        if given == answers:
            relay.failed_before.add("x")

    fail_when_due()
    for rank, lane in enumerate(lanes):
        relay.detector.handle(rank, {"t": "waiting", "state": waiting(lane, 1)})
    relay.advance(1)
    while relay.questions and given < 4:
        relay.answer(given % 2, waiting(lanes[given % 2], 1))
        given += 1
        fail_when_due()
    relay.advance(1)
    assert not relay.failed
    assert given == (4 if answers else 0)


@pytest.mark.parametrize("last", [0, 1])
def test_a_rank_that_has_destroyed_a_group_is_asked_for_its_last_call_there(last: int) -> None:
    """Rank 0 is in the first call of a group, which rank 1 has destroyed after that call, or without one."""
    relay = Relay(2)
    relay.detector.handle(0, {"t": "waiting", "state": waiting("b:x", 1)})
    relay.detector.handle(1, {"t": "waiting", "state": waiting("b:y", 1)})
    relay.advance(1)
    assert [relay.questions[rank]["orders"] for rank in (0, 1)] == [["b:x", "b:y"]] * 2
    other = waiting("b:y", 1)
    for _ in range(2):
        relay.answer(0, waiting("b:x", 1))
        relay.answer(1, other | {"posted": {"b:y": 1} | ({"b:x": last} if last else {})})
        relay.advance(1)
    assert sorted(relay.failed) == ([] if last else ["x", "y"])


def test_a_rank_that_ends_is_forgotten() -> None:
    relay = Relay(2)
    relay.detector.handle(0, {"t": "waiting", "state": waiting("b:x", 1)})
    relay.detector.handle(1, {"t": "waiting", "state": waiting("b:y", 1)})
    relay.advance(1)
    relay.detector.forget(1)
    relay.answer(0, waiting("b:x", 1))
    relay.advance(1)
    assert not relay.failed
    assert relay.detector.wait_seconds() is None


def test_a_rank_that_does_not_answer_is_asked_again() -> None:
    relay = Relay(2)
    relay.detector.handle(0, {"t": "waiting", "state": waiting("b:x", 1)})
    relay.detector.handle(1, {"t": "waiting", "state": waiting("b:y", 1)})
    relay.advance(1)
    first = relay.questions[1]["id"]
    relay.answer(0, waiting("b:x", 1))
    relay.advance(3)
    relay.advance(3)
    assert relay.questions[1]["id"] != first
    assert not relay.failed


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [5], [7, 3], [0, 4, 8, 9], [3, 2, 1, 0, 9], [0, 1, 5, 6]])
def test_ranges_hold_the_ranks_of_a_group(ranks: list[int]) -> None:
    state = {"waits": [["b:g", 1, ANY, 1]], "posted": {}, "groups": {"b:g": compress(ranks)}}
    assert list(parse(state, 10).members("b:g")) == ranks


def test_a_world_of_ranks_is_one_range() -> None:
    assert compress(range(4096)) == ((0, 4096, 1),)


@pytest.mark.parametrize(
    "change",
    [
        {"waits": []},
        {"waits": [["b:other", 1, ANY, 1]]},
        {"waits": [["b:g", "x", ANY, 1]]},
        {"groups": {"b:g": [[0, 1 << 40, 1]]}},
        {"posted": {"b:g": None}},
    ],
)
def test_what_is_not_a_state_is_refused(change: dict[str, object]) -> None:
    state = {"waits": [["b:g", 1, ANY, 1]], "posted": {"b:g": 1}, "groups": {"b:g": [[0, 2, 1]]}}
    assert parse(state, 4)
    with pytest.raises((ValueError, TypeError)):
        parse(state | change, 4)
