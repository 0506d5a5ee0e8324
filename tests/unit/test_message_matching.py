"""Matching of messages with receives and probes, against a model that searches lists."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.interrupts import Interrupt, Points
from unicoll.arrays.conversion import as_buffer
from unicoll.backend.host.message_matcher import MessageMatcher
from unicoll.calls.call import INTERNAL_TAGS, Call
from unicoll.calls.ops import OPS, PROBE

SIZE = 3
INTERNAL = INTERNAL_TAGS[5]


class Message:
    """Counts how often its tag is read."""

    looks = 0

    def __init__(self, peer: int, tag: int) -> None:
        self.peer, self._tag, self.code, self.size = peer, tag, 1, 8

    @property
    def tag(self) -> int:
        Message.looks += 1
        return self._tag


class Pending:
    """Counts how often its call is read."""

    looks = 0

    def __init__(self, peer: int, tag: int | None, probe: bool = False) -> None:
        outputs = () if probe else (as_buffer(np.zeros(1), "recv"),)
        self._call = Call(PROBE if probe else OPS["recv"], (), outputs, 1.0, None, -1, peer, tag)
        self._call.partial = probe

    @property
    def call(self) -> Call:
        Pending.looks += 1
        return self._call


@dataclass
class Model:
    """What the matcher does, with two lists."""

    posted: list[Any] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)

    @staticmethod
    def matches(pending: Any, message: Any) -> bool:
        call = pending.call
        any_tag = call.tag is None and message.tag != INTERNAL
        return call.peer in (-1, message.peer) and (any_tag or call.tag == message.tag)

    def post(self, pending: Any) -> Any:
        found = next((m for m in self.messages if self.matches(pending, m)), None)
        if found is None:
            self.posted.append(pending)
        elif pending.call.op is not PROBE:
            self.messages.remove(found)
        return found

    def arrive(self, message: Any) -> tuple[Any, list[Any]]:
        fitting = [p for p in self.posted if self.matches(p, message)]
        receive = next((p for p in fitting if p.call.op is not PROBE), None)
        if receive is None:
            self.messages.append(message)
        ended = [receive] if receive is not None else fitting
        self.posted = [p for p in self.posted if p not in ended]
        return receive, ended


@pytest.mark.parametrize("seed", range(20))
def test_messages_match_in_order(seed: int) -> None:
    rng = random.Random(seed)
    matcher: MessageMatcher[Any, Any] = MessageMatcher(SIZE)
    model = Model()
    for _ in range(400):
        peer, tag, action = rng.randrange(SIZE), rng.choice([0, 1, 2, INTERNAL]), rng.random()
        if action < 0.5:
            message = Message(peer, tag)
            receive, ended = model.arrive(message)
            awaited = matcher.is_awaited(peer, tag)
            found = matcher.find_receive(peer, tag)
            assert (found, awaited) == (receive, bool(ended))
            if found is not None:
                matcher.match(found, peer, tag, 1, 8)
            else:
                assert matcher.add_unexpected(message) == ended
        elif action < 0.95 or not model.posted:
            source, wanted = rng.choice([peer, peer, -1]), rng.choice([tag, tag, None])
            probe = rng.random() < 0.3
            pending = Pending(source, wanted, probe)
            expected = model.post(pending)
            if probe:
                assert matcher.post_probe(pending) == (expected is not None)
                assert pending.call.envelope == (None if expected is None else (expected.tag, 1, 8))
            else:
                assert matcher.post_receive(pending) is expected
        elif rng.random() < 0.5:
            pending = rng.choice(model.posted)
            model.posted.remove(pending)
            matcher.cancel(pending)
            matcher.cancel(pending)
        elif rng.random() < 0.5 and model.messages:
            message = rng.choice(model.messages)
            model.messages.remove(message)
            matcher.discard(message)
        else:
            cancelled = [p for p in model.posted if p.call.peer == peer]
            model.posted = [p for p in model.posted if p not in cancelled]
            assert matcher.cancel_all(peer) == cancelled
        assert [*matcher.posted] == model.posted
        for each in (*range(SIZE), -1):
            queued = any(each in (-1, m.peer) for m in model.messages)
            assert matcher.empty(each) == (not model.posted and not queued)


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("earlier", [0, 1])
def test_a_message_is_matched_after_an_interrupt(probe: bool, earlier: int) -> None:
    """Of a receive that is posted, and of its cancellation: with the receive before it, or none."""
    seen = None
    for at in (None, *_interrupt(None, probe, earlier)[1]):
        matcher, points = _interrupt(at, probe, earlier)
        seen = seen or len(points)
        assert len([p for p in matcher.posted if p.call.op is not PROBE]) == earlier
        assert matcher.find_receive(1, 5) is (next(iter(matcher.posted)) if earlier else None)
        assert matcher.is_awaited(1, 5) == bool(earlier)
    assert seen


def _interrupt(at: Any, probe: bool, earlier: int) -> tuple[MessageMatcher[Any, Any], list[Any]]:
    matcher: MessageMatcher[Any, Any] = MessageMatcher(2)
    for _ in range(earlier):
        matcher.post_receive(Pending(1, 5))
    pending = Pending(1, 5, probe)
    with Points(at) as points:
        try:
            (matcher.post_probe if probe else matcher.post_receive)(pending)
        except Interrupt:
            matcher.find_receive(1, 5)  # by the thread that makes progress, before the receive is cancelled
        try:
            matcher.cancel(pending)
        except Interrupt:
            matcher.find_receive(1, 5)
            matcher.cancel(pending)
    return matcher, points.seen


def _looks(count: int, expected: bool) -> int:
    """How often messages and receives are looked at to match ``count`` of them in reverse order of their tags."""
    matcher: MessageMatcher[Any, Any] = MessageMatcher(2)
    Message.looks = Pending.looks = 0
    for tag in range(count):
        if expected:
            assert matcher.post_receive(Pending(1, tag)) is None
        else:
            matcher.add_unexpected(Message(1, tag))
    for tag in reversed(range(count)):
        if expected:
            found = matcher.find_receive(1, tag)
            matcher.match(found, 1, tag, 1, 8)
        else:
            assert matcher.post_receive(Pending(1, tag)) is not None
    assert matcher.empty(1)
    return Message.looks + Pending.looks


@pytest.mark.parametrize("expected", [True, False])
def test_a_match_in_reverse_order_costs_the_same_however_many_there_are(expected: bool) -> None:
    assert _looks(2000, expected) == 10 * _looks(200, expected)
