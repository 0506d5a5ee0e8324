"""Watches the calls in which this process waits: a thread of each process of a job of several
ranks.

A few times a second it looks at what the threads are in. If all threads of the process are blocked,
it sends their state to the relay, which finds deadlocks
(:mod:`unicoll.net.control.deadlock_detector`). The relay permits one rank of a group to log a
warning for a call that waits for long. A collective that waits though a member has died fails: it
may wait for another member, which is alive and does not call. For libraries that do not compare the
ranks' calls, the thread compares the recorded ones.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from unicoll.backend import operation_errors
from unicoll.backend.compared_backend import ComparedBackend, Comparisons, last_collectives
from unicoll.backend.contract import Job
from unicoll.backend.observed_backend import ObservedBackend
from unicoll.calls.call import Call, ProxyCall
from unicoll.diagnosis.blocked_calls import BlockedCall, find_blocked_calls, has_callbacks
from unicoll.errors import DeadlockError, DistError
from unicoll.net.control.wait_graph import (
    ANY,
    RECEIVE,
    SEND,
    MessageState,
    backend_group_of,
    compress,
)
from unicoll.process import environment, fork_safety

_POLL_S = 0.2
_BLOCKED_S = 0.15
"""How long a rank's calls must have lasted before it reports them."""
_LOST_S = 0.5
"""How long a collective may wait after the death of a member; until then it may end, or find the
death by itself."""

_monitors: list[WaitMonitor] = []
"""Those of all jobs that this process is in."""

log = logging.getLogger("unicoll")

Message = dict[str, Any]


class _TrackedCall:
    """A call that is in an earlier snapshot.

    A reference to the call itself would keep its arrays alive. Its number tells it from a later one
    at its address.
    """

    def __init__(self, call: Call, number: int) -> None:
        self.number = call.watched_as = number
        self.since = time.monotonic()
        # Age of the call when this rank last asked for a warning.
        self.warned_at = 0.0
        # When it was first seen waiting after the death of a member.
        self.lost_since = 0.0


class _Snapshot(NamedTuple):
    """What the process waits for.

    Attributes:
        state: the message of :mod:`unicoll.net.control.wait_graph`; None if a thread is not
            blocked.
        texts: descriptions of the calls in it.
        since: when the youngest of these calls was first seen.
        calls: for each group operation and sequence number of the first of these calls in it.
        stalled: for each call that waits its backend, the call, and since when and where the user
            waits.
    """

    state: Message | None
    texts: list[str]
    since: float
    calls: dict[str, tuple[str, int]]
    stalled: list[tuple[ObservedBackend, Call, _TrackedCall]]


class WaitMonitor:
    """Reports blocked calls to the control plane, and logs warnings about those that wait for long.

    Args:
        job: with its control plane; the thread runs until :meth:`close`.

    Attributes:
        comparisons: compares the recorded calls of the job's groups.
    """

    def __init__(self, job: Job) -> None:
        assert job.control is not None
        self._job = job
        self._control = job.control
        self.comparisons = Comparisons(job)
        self._warn_s = environment.number("UNICOLL_STALL_WARNING")
        # Held while a snapshot is taken and sent. The control thread takes snapshots, too, and the
        # relay has to get the states in their order.
        self._lock = threading.Lock()
        # The calls of the last snapshot, by the id of the call.
        self._seen: dict[int, _TrackedCall] = {}
        self._last_number = 0
        # The rank of the relay, and the state of this rank that it has.
        self._sent: tuple[int, Message] | None = None
        # The calls in the last answer to the relay.
        self._asked: dict[str, tuple[str, int]] = {}
        # Orders of operations of which the relay has asked for the last number.
        self._orders: set[str] = set()
        # Numbers of the calls to warn about, which the control thread adds.
        self._granted: set[int] = set()
        self._closing = threading.Event()
        self._control.handle("confirm", self._confirm)
        self._control.failure_listeners.append(self._name_call)
        self._control.handle("stalled", lambda message: self._granted.add(message["id"]))
        self._thread = threading.Thread(target=self._run, name="unicoll-monitor", daemon=True)
        self._thread.start()
        _monitors.append(self)

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closing.set()
        with suppress(ValueError):
            _monitors.remove(self)
        with suppress(ValueError):
            self._control.failure_listeners.remove(self._name_call)
        if self._thread is not threading.current_thread():
            self._thread.join(3.0)

    def _run(self) -> None:
        while not self._closing.wait(_POLL_S):
            try:
                self._check()
            except Exception:
                # Groups begin and end at any time, also while they are looked at.
                log.debug("the state of the blocked calls is not known", exc_info=True)

    def _check(self) -> None:
        """Take one snapshot. No reference to it, to the calls and their arrays, is kept until the
        next one."""
        with self._lock:
            snapshot = self._take_snapshot()
            self._report(snapshot)
        # This is done without the lock. An announcement and a warning wait for answers of other
        # ranks, which the control thread receives, and that may wait for the lock in _confirm().
        self._compare()
        self._fail_lost(snapshot)
        if self._warn_s:
            self._warn(snapshot)

    # --- snapshots --------------------------------------------------------------------------------

    def _backends(self) -> list[ObservedBackend]:
        found = {
            b
            for group in [*self._job.groups]
            for b in group.backends
            if isinstance(b, ObservedBackend)
        }
        return [backend for backend in found if backend.context.size > 1 and not backend.closed]

    def _take_snapshot(self) -> _Snapshot:
        backends = self._backends()
        for backend in backends:
            backend.update()
        blocked, all_blocked = find_blocked_calls(backends)
        others = [monitor for monitor in [*_monitors] if monitor is not self]
        if any(has_callbacks(backend) for monitor in others for backend in monitor._backends()):
            # A callback of a call of another job may call this one's groups.
            all_blocked = False
        seen: dict[int, _TrackedCall] = {}
        entries = [(one, self._entry(one.call, one.where, seen)) for one in blocked]
        # The collective in progress is in the state of its backend, and is added below.
        stalled = [
            (one.backend, one.call, entry)
            for one, entry in entries
            if one.call.op.message or one.backend.state.call is None
        ]
        for backend in backends:
            call = backend.state.call
            call = call.of if isinstance(call, ProxyCall) else call
            if call is not None:
                stalled.append((backend, call, self._entry(call, "", seen)))
        self._seen = seen
        if not all_blocked or not blocked or any(one.ends_alone for one in blocked):
            return _Snapshot(None, [], 0.0, {}, stalled)
        # Callbacks are last, because an error shows the first call, and no code of the user waits
        # in a callback.
        entries.sort(key=lambda pair: (not pair[0].where, pair[1].number))
        waits = [(*_wait(one), entry.number) for one, entry in entries]
        ended = self._job.ended
        state = {
            "waits": [[order, number, peer, call] for order, number, peer, _, call in waits],
            # This includes the numbers of groups that this rank has destroyed: another member may
            # still be in the last call.
            "posted": (
                {order: ended[order] for order in self._orders if order in ended}
                | {
                    backend_group_of(order, backend.context.name): number
                    for backend in backends
                    for order, number in backend.posted().items()
                }
            ),
            "groups": {
                **{
                    _backend_group(one.backend): compress(one.backend.context.ranks)
                    for one in blocked
                },
                **{order: compress(ranks) for order, _, _, ranks, _ in waits},
            },
        }
        since = max(entry.since for _, entry in entries)
        # In reverse, so that of the calls of a group the first one stays.
        calls = {one.backend.context.name: _name(one) for one, _ in reversed(entries)}
        return _Snapshot(state, [_describe(one) for one, _ in entries], since, calls, stalled)

    def _entry(self, call: Call, where: str, seen: dict[int, _TrackedCall]) -> _TrackedCall:
        entry = seen.get(id(call)) or self._seen.get(id(call))
        if entry is None or entry.number != call.watched_as:
            self._last_number += 1
            entry = _TrackedCall(call, self._last_number)
        call.site = call.site or where
        seen[id(call)] = entry
        return entry

    # --- deadlocks --------------------------------------------------------------------------------

    def _report(self, snapshot: _Snapshot) -> None:
        state = snapshot.state if time.monotonic() - snapshot.since >= _BLOCKED_S else None
        # A relay that has replaced another one does not have the state, so the rank of the relay is
        # compared, too.
        current = None if state is None else (self._control.relay_rank, state)
        if current != self._sent:
            self._sent = current
            self._control.send({"t": "waiting", "state": state})

    def _confirm(self, message: Message) -> None:
        """The relay asks for the present state (on the control thread)."""
        with self._lock:
            backends = {_backend_group(backend): backend for backend in self._backends()}
            links = [
                _message_state(backends.get(backend_group), peer)
                for backend_group, peer in message["links"]
            ]
            # Before the snapshot, which has the numbers of these orders.
            self._orders.update(message["orders"])
            # The snapshot is taken after the links: a thread that has read a message of these since
            # then must not count as blocked.
            snapshot = self._take_snapshot()
            answer = {
                "id": message["id"],
                "state": snapshot.state,
                "texts": snapshot.texts,
                "links": links,
            }
            # The relay takes the answer for the state, so a thread that ran just now must not hide
            # the next report.
            self._sent = (
                None if snapshot.state is None else (self._control.relay_rank, snapshot.state)
            )
            self._asked = snapshot.calls
            self._control.send({"t": "confirmed", **answer})

    def _name_call(self, group: str, error: DistError) -> None:
        """Complete the error of a deadlock, which all members get, by the call that this rank waits
        in."""
        if not isinstance(error, DeadlockError):
            return
        try:
            blocked, _ = find_blocked_calls(self._backends())
        except Exception:
            # Groups begin and end at any time, also while they are looked at.
            log.debug("the blocked calls are not known", exc_info=True)
            return
        # Another rank has the error already, and its end may have ended a message of this one.
        last = self._asked.get(group)
        named = next((_name(one) for one in blocked if one.backend.context.name == group), last)
        if named is not None:
            error.op, error.seq = named[0], named[1] or None

    # --- comparison of the calls ------------------------------------------------------------------

    def _compare(self) -> None:
        # The calls of torch's groups are compared by the thread that records them.
        backends = [
            backend
            for backend in self._backends()
            if isinstance(backend, ComparedBackend) and not backend.called_from_torch
        ]
        if backends:
            self.comparisons.compare(backends, partial(last_collectives, backends))

    # --- lost ranks -------------------------------------------------------------------------------

    def _fail_lost(self, snapshot: _Snapshot) -> None:
        """Fail the groups whose collective has waited for :data:`_LOST_S` after the death of a
        member."""
        for backend, call, entry in snapshot.stalled:
            context = backend.context
            lost = (
                None if call.op.message or backend.error is not None else backend.lost_member(call)
            )
            if lost is None:
                continue
            entry.lost_since = entry.lost_since or time.monotonic()
            if time.monotonic() - entry.lost_since >= _LOST_S:
                why = self._control.departed[lost]
                error = operation_errors.rank_lost_error(
                    context, call, context.ranks.index(lost), why
                )
                backend.state.announce(error)

    # --- warnings ---------------------------------------------------------------------------------

    def _warn(self, snapshot: _Snapshot) -> None:
        now = time.monotonic()
        for backend, call, entry in snapshot.stalled:
            age = now - entry.since
            if entry.number in self._granted:
                self._granted.discard(entry.number)
                if backend.error is None:
                    queues = backend.message_queues if call.op.message and not call.inputs else None
                    others = queues.others(call) if queues is not None else ""
                    operation_errors.log_stall(
                        backend.context,
                        call,
                        entry.warned_at,
                        backend.links(),
                        others,
                        backend.device_state(),
                    )
            elif age >= max(self._warn_s, 2 * entry.warned_at):
                entry.warned_at = age
                name = f"{_backend_group(backend)} {call.op.name}"
                message = {
                    "t": "stalled",
                    "id": entry.number,
                    "call": name,
                    "seq": call.seq,
                    "age": age,
                }
                self._control.send(message)
        self._granted &= {entry.number for _, _, entry in snapshot.stalled}


def monitor_of(job: Job) -> WaitMonitor:
    """The monitor of a job of several ranks."""
    found: WaitMonitor = job.shared("wait monitor", lambda: WaitMonitor(job))
    return found


def _backend_group(backend: ObservedBackend) -> str:
    return backend_group_of(backend.name, backend.context.name)


def _wait(one: BlockedCall) -> tuple[str, int, int, tuple[int, ...]]:
    """The first three attributes of a :class:`unicoll.net.control.wait_graph.Wait`, and the ranks
    of its operation."""
    call, context = one.call, one.backend.context
    operation = one.backend.operation(call)
    if operation is not None:
        return (
            backend_group_of(operation.order, context.name),
            operation.number,
            ANY,
            operation.ranks,
        )
    kind = SEND if call.inputs else RECEIVE
    peer = context.ranks[call.peer] if call.peer >= 0 else ANY
    return _backend_group(one.backend), kind, peer, context.ranks


def _message_state(backend: ObservedBackend | None, peer: int) -> MessageState:
    engine = backend.message_queues if backend is not None else None
    if backend is None or engine is None:
        return MessageState()
    return engine.message_state(backend.context.ranks.index(peer))


def _name(one: BlockedCall) -> tuple[str, int]:
    call = one.call
    return (call.of if isinstance(call, ProxyCall) else call).op.name, call.seq


def _describe(one: BlockedCall) -> str:
    call = one.call
    number = f" #{call.seq}" if call.seq else ""
    text = f"{call.describe()[:200]}{number} on group {one.backend.context.name!r}"
    if call.site:
        text += f" at {call.site}"
    return f"{text}, waited for at {one.where}" if one.where and one.where != call.site else text


fork_safety.in_child(_monitors.clear)
