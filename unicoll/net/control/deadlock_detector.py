"""Finds ranks that wait for each other for ever; part of the control plane's relay.

Every blocked rank sends its state (:mod:`unicoll.net.control.wait_graph`), and again when it
changes. If the calls of some ranks can be completed only by each other, the relay asks each of them
for its present state. Each call has a number of its own. So if all ranks answer with the states
that were analysed, they have been blocked in the same calls since they sent these, and all were
blocked when the relay sent the request.

The relay then sends a second request, because messages may be in flight at the first one. A message
that was posted before all ranks were blocked, and has left the sender's host at the first request,
is in the receiver's process at the second. A rank that answers looks at its connections first, then
at its calls. So no message can match a receive if nothing is unread at the receiver and the receive
still waits afterwards.

A rank that has destroyed a group sends the number of its last collective there only if a request
names the group, since these numbers are many. Its state then differs from the one that was
analysed, and is analysed again.

A send is stuck if no thread of the receiver reads from the connection, and more bytes are unsent
than the buffers of the receiver's host have space for. The second request observes the receive
window that the receiver announced before the first.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from unicoll.net.control.wait_graph import (
    ANY,
    SEND,
    MessageState,
    State,
    find_cycle,
    find_stuck,
    group_of,
    parse,
    stuck_waits,
)

Message = dict[str, Any]
Link = tuple[str, int, int]
"""Backend and group, rank and peer: the connection between two ranks as the first one sees it."""

_INTERVAL_S = 0.01
"""Shortest time between two analyses; longer if they take long."""
_ANSWER_S = 2.0
"""How long the relay waits for the answers to a request."""
_RETRY_S = 0.1
"""Pause after a check that has shown no deadlock although the states have not changed."""
_CHARACTERS = 400
"""Longest description of a call in an error."""
_SHOWN = 32
"""Most ranks that an error lists."""


def _reverse(link: Link) -> Link:
    backend_group, rank, peer = link
    return backend_group, peer, rank


class _Check:
    """A request to the ranks of one possible deadlock, and their answers."""

    def __init__(self, number: int, states: dict[int, State], deadline: float) -> None:
        self.number = number
        self.states = states
        self.deadline = deadline
        # True in the second request.
        self.last = False
        self.answers: dict[int, Message] = {}
        self.links: dict[int, list[Link]] = {rank: [] for rank in states}
        self._receives: set[Link] = set()
        self._sends: set[Link] = set()
        self._orders: dict[int, set[str]] = {rank: set() for rank in states}
        for rank, wait in stuck_waits(states, set(states)):
            members = states[rank].members(wait.backend_group)
            if wait.number > 0:
                # A member that has destroyed the group sends the number of its last collective
                # there only on this request.
                for member in self._orders.keys() & set(members):
                    self._orders[member].add(wait.backend_group)
            else:
                peers = [m for m in members if m != rank] if wait.peer == ANY else [wait.peer]
                links = self._sends if wait.number == SEND else self._receives
                links |= {(wait.backend_group, rank, peer) for peer in peers}
        # Both ends of each connection are asked: what one has sent is compared with what the other
        # has received.
        asked = self._receives | self._sends
        for link in sorted(asked | {_reverse(link) for link in asked}):
            self.links[link[1]].append(link)

    def request(self, rank: int) -> Message:
        """The message to a rank."""
        links = [[backend_group, peer] for backend_group, _, peer in self.links[rank]]
        return {
            "t": "confirm",
            "id": self.number,
            "links": links,
            "orders": sorted(self._orders[rank]),
        }

    def messages_in_flight(self) -> bool:
        """True if the answers leave open whether a message may still reach a receive, or a send
        end."""
        known: dict[Link, MessageState] = {}
        for rank, links in self.links.items():
            for link, answer in zip(links, self.answers[rank]["links"], strict=True):
                known[link] = MessageState(*answer)
        for link in self._receives:
            receiver, sender = known[link], known[_reverse(link)]
            # Nothing is in flight if all sent bytes have arrived and are read, and both ends count
            # the same messages or connections.
            if not (sender.delivered and receiver.read) or sender.outgoing != receiver.incoming:
                return True
        # A space of -1 means that a thread of the receiver reads, so that the send ends.
        return any(
            not 0 <= known[_reverse(link)].receive_space < known[link].unsent
            for link in self._sends
        )


class DeadlockDetector:
    """Keeps the states of the blocked ranks, and finds deadlocks among them.

    Args:
        send: sends a message to a rank.
        fail: ``fail(group, members, error)`` makes the members (global ranks) of a group raise an
            error, given as the name of its type, its message and its fields.
        has_failed: True for a group whose members raise an error, so that calls in it end.
    """

    def __init__(
        self,
        size: int,
        send: Callable[[int, Message], None],
        fail: Callable[[str, tuple[int, ...], Message], None],
        describe: Callable[[int], str],
        has_failed: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size = size
        self._send = send
        self._fail = fail
        self._describe = describe
        self._has_failed = has_failed
        self._clock = clock
        self._states: dict[int, State] = {}
        self._changed = False
        # Time of the next analysis.
        self._next = 0.0
        self._check: _Check | None = None
        self._last_number = 0

    def handle(self, rank: int, message: Message) -> None:
        """A message of a rank: "waiting" with its state, or None if it is not blocked; or an
        answer, "confirmed"."""
        check = self._check
        # An answer is stored as a state, also if it is late: its sender takes it for the last state
        # that it has sent, and sends the next one only if that differs.
        self._store(rank, message["state"])
        # The call of _store() above ends the check if the state differs from the one that was
        # analysed.
        if message["t"] == "waiting" or check is None or self._check is not check:
            return
        if message["id"] != check.number or rank not in check.states:
            return
        texts, links = message["texts"], message["links"]
        if len(texts) != len(check.states[rank].waits) or len(links) != len(check.links[rank]):
            raise ValueError("an answer that does not fit the request")
        check.answers[rank] = message
        if len(check.answers) == len(check.states):
            self._conclude(check)

    def forget(self, rank: int) -> None:
        """A rank has ended."""
        self._store(rank, None)

    def _store(self, rank: int, state: Any) -> None:
        known = self._states.get(rank)
        if state is None:
            self._states.pop(rank, None)
            new = None
        else:
            new = self._states[rank] = parse(state, self._size)
            # A rank that runs again completes no deadlock, so only new states need an analysis.
            self._changed = self._changed or new != known
        # A rank of the check has gone on, so the other answers prove nothing any more.
        if self._check is not None and self._check.states.get(rank, new) != new:
            self._check = None
            self._changed = True

    def wait_seconds(self) -> float | None:
        """Seconds until the next :meth:`tick` is due; None if none is."""
        now = self._clock()
        if self._check is not None:
            return max(0.0, self._check.deadline - now)
        return max(0.0, self._next - now) if self._changed else None

    def tick(self) -> None:
        """Analyse the states if they have changed, and give up requests that are not answered."""
        now = self._clock()
        if self._check is not None:
            if now >= self._check.deadline:
                self._try_again()
            return
        if not self._changed or now < self._next:
            return
        self._changed = False
        # A rank whose call is about to end, since its group has failed, counts as running.
        stuck = find_stuck(
            {rank: state for rank, state in self._states.items() if not self._ends(state)}
        )
        now, started = self._clock(), now
        # The pause is five times as long as the analysis: in a large job, too, the relay's thread
        # has most of its time for messages.
        self._next = now + max(_INTERVAL_S, 5 * (now - started))
        if stuck:
            self._send_requests({rank: self._states[rank] for rank in stuck})

    def _ends(self, state: State) -> bool:
        """True if a call that the rank is blocked in ends, since its group has failed."""
        return any(self._has_failed(group_of(wait.backend_group)) for wait in state.waits)

    def _send_requests(self, states: dict[int, State]) -> None:
        self._last_number += 1
        self._check = check = _Check(self._last_number, states, self._clock() + _ANSWER_S)
        for rank in states:
            self._send(rank, check.request(rank))

    def _try_again(self) -> None:
        self._check = None
        self._changed = True
        self._next = self._clock() + _RETRY_S

    def _conclude(self, check: _Check) -> None:
        # A group may have failed since the request was sent.
        if check.messages_in_flight() or any(map(self._ends, check.states.values())):
            self._try_again()
        elif not check.last:
            self._send_requests(check.states)
            # A send may find that a connection has ended, which ends the check (forget()).
            if self._check is not None:
                self._check.last = True
        else:
            self._check = None
            self._raise(check)

    def _raise(self, check: _Check) -> None:
        states = check.states
        cycle = find_cycle(states, set(states))
        shown = [self._line(check, edge.rank, edge.blocker) for edge in cycle[:_SHOWN]]
        if len(cycle) > _SHOWN:
            shown.append(f"... and {len(cycle) - _SHOWN} more ranks")
        others = sorted(states.keys() - {edge.rank for edge in cycle})
        if others:
            shown.append("other ranks that wait for blocked ranks:")
            shown += [self._line(check, rank) for rank in others[:_SHOWN]]
        if len(others) > _SHOWN:
            shown.append(f"... and {len(others) - _SHOWN} more ranks")
        ranks = [edge.rank for edge in cycle]
        who = (
            f"{len(ranks)} ranks wait for each other in a cycle"
            if len(ranks) > 1
            else "a rank waits for itself"
        )
        text = f"deadlock: {who}:\n  " + "\n  ".join(shown)
        groups: dict[str, set[int]] = defaultdict(set)
        operations: dict[str, int] = {}
        for rank, wait in stuck_waits(states, set(states)):
            group = group_of(wait.backend_group)
            for backend_group in states[rank].groups:
                groups[group_of(backend_group)].update(states[rank].members(backend_group))
            operations.setdefault(group, wait.number)
        for rank in states:
            # These calls end now. States that stayed would be found stuck again before the ranks
            # send new ones.
            self._states.pop(rank, None)
        for group, members in groups.items():
            fields: Message = {"group": group, "rank": ranks[0], "ranks": ranks[:_SHOWN]}
            if operations[group] > 0:
                fields["seq"] = operations[group]
            error = {"type": "DeadlockError", "message": text, "fields": fields}
            self._fail(group, tuple(sorted(members)), error)

    def _line(self, check: _Check, rank: int, blocker: int | None = None) -> str:
        """What a rank is blocked in, for the error."""
        text = f"{self._describe(rank)}: {str(check.answers[rank]['texts'][0])[:_CHARACTERS]}"
        return text if blocker is None else f"{text} waits for rank {blocker}"
