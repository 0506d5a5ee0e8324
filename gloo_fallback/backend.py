"""The CPU backend of one group: a lane for collectives, a mailroom for point-to-point."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from unicoll.backend import Backend, Call, Caps, Context, Job
from unicoll.composites import merge_all_reduces
from unicoll.errors import CollectiveMismatchError, DistArgumentError, DistError, GroupAbortedError
from unicoll.exchanged import exchange_sizes
from unicoll.kernels import quiet_runner
from unicoll.lane import Lane
from unicoll.observe import inquest
from unicoll.ops import OPS
from unicoll.options import as_options
from unicoll.work import Completion, HostCompletion

from .algorithms import alone
from .endpoint import Endpoint
from .messages import Mailroom
from .nodes import wish
from .team import Team
from .ways import Way, find_way

__all__ = ["GlooBackend"]

_SPINS = 50
_DRAIN_S = 5.0
_MESSAGES = frozenset(("send", "recv"))


class GlooBackend(Backend):
    """Collectives between processes, through shared memory within a host and TCP between hosts."""

    name = "gloo"
    caps = Caps(frozenset(("cpu",)), frozenset(OPS), lambda dtype, _: not dtype.name.startswith("float8"))
    compares = True
    stages = True

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lane = Lane(f"unicoll-{context.name}", self._execute)
        self._team: Team | None = None
        self._mail: Mailroom | None = None
        self._error: DistError | None = None
        self._quietly = quiet_runner()
        self._way: Way | None = None  # found by the first collective
        self._spins = 0
        in_order = as_options(context.options).in_order
        if context.size > 1:
            job = context.job
            endpoint: Endpoint = job.shared("gloo", lambda: Endpoint(job))
            endpoint.read_directory()
            self._spins = 0 if _crowded(context) else _SPINS
            wish()  # refuse a word that is none before anybody waits
            self._team = Team(context, endpoint, self._spins)
            self._team.deterministic = in_order
            self._mail = Mailroom(context, endpoint, self._spins)
            if job.control is not None:
                job.control.watch(context.name, self.abort, self._team.report)

    @classmethod
    def prepare(cls, job: Job) -> None:
        if job.size > 1:
            job.shared("gloo", lambda: Endpoint(job))

    @classmethod
    def create(cls, context: Context) -> GlooBackend:
        return cls(context)

    @property
    def sequence(self) -> int:
        return self._lane.sequence

    @property
    def staging(self) -> int:
        return self._way.staging if self._way is not None else 0

    def run(self, call: Call) -> None:
        if call.op.name not in _MESSAGES:
            self._lane.run(call)
        else:
            self._mailroom(call).run(call)

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        first = calls[0]
        if first.op.name not in _MESSAGES:
            return self._lane.post(merge_all_reduces(calls))
        parts = [self._mailroom(call).post(call) for call in calls]
        return parts[0] if len(parts) == 1 else _All(tuple(calls), parts)

    def _mailroom(self, call: Call) -> Mailroom:
        if self._mail is None:
            raise DistArgumentError(f"{call.op.name}: a group of one has nobody to talk to", op=call.op.name)
        return self._mail

    def _execute(self, call: Call) -> None:
        team = self._team
        if team is None:
            if self._error is not None:
                raise self._error
            self._quietly(alone, call)
            call.write_back()
            return
        if team.error is not None:
            raise team.error.with_traceback(None)
        team.call, team.deadline = call, 0.0  # the deadline is set when something has to be waited for
        withdrawn = False
        try:
            way = self._way or self._find_way(team)
            if way.board is not None:
                way.board.patient = self._lane.in_background
            if call.reduce is not None:
                self._quietly(way.table[call.op.name], way.where, call)  # overflow and NaN are results, as on a GPU
            else:
                done = way.table[call.op.name](way.where, call)
                if done is False:
                    way.table[call.op.name](way.where, call, self._sizes(team, way, call))
            call.write_back()
        except BaseException as e:
            withdrawn = team.error is None and not self._begun(team, call) and self._lane.withdraw(call)
            if not withdrawn and not isinstance(e, DistError):  # whatever it is, the others must not wait for us
                self._give_up(team, call, e)
            raise
        finally:
            if not withdrawn:
                team.last = call
            team.call = None

    def _begun(self, team: Team, call: Call) -> bool:
        """Whether other ranks may have heard of a call."""
        board = self._way.board if self._way is not None else None
        return team.begun(call) or (board is not None and board.begun(call))

    def _sizes(self, team: Team, way: Way, call: Call) -> list[int]:
        """All ranks' sizes in a gather or scatter where they differ."""

        def aside(small: Call) -> None:
            team.call = small
            try:
                way.table[small.op.name](way.where, small)
            finally:
                team.call = call

        context = self._context
        try:
            return exchange_sizes(call, context.rank, context.ranks, context.name, aside)
        except CollectiveMismatchError as e:
            team.fail(team.error or inquest.mismatch(context, call, -1, 0, str(e)))

    def _find_way(self, team: Team) -> Way:
        self._way = way = find_way(team, self._spins)
        return way

    def _give_up(self, team: Team, call: Call, cause: BaseException) -> None:
        try:
            team.fail(inquest.failed(self._context, call, cause))
        except DistError:
            pass  # it is the others' error; here the cause itself is raised

    def describe(self) -> str:
        if self._team is None:
            return "gloo, alone"
        if self._way is None:
            return "gloo, shared memory or sockets as its first collective will find out"
        in_order = ", deterministic" if self._team.deterministic else ""
        return f"gloo{in_order} {self._way.words}"

    def abort(self, error: Exception) -> None:
        cause = inquest.aborted(self._context, error)
        self._error = self._error or cause
        if self._team is not None:
            self._team.abort(cause)
        if self._mail is not None:
            self._mail.abort(cause)

    def close(self) -> None:
        context = self._context
        if not self._lane.close(_DRAIN_S):
            self.abort(GroupAbortedError(f"group {context.name!r} was destroyed", group=context.name))
            self._lane.close(1.0)
        if context.job.control is not None:
            context.job.control.unwatch(context.name)
        closed = GroupAbortedError(f"group {context.name!r} has been destroyed", group=context.name)
        if self._mail is not None:
            self._mail.close(_DRAIN_S)
        self.abort(closed)
        if self._team is not None:
            self._team.close()
        if self._way is not None and self._lane.idle(1.0):  # else it goes when the last operation has
            self._way.close()


def _crowded(context: Context) -> bool:
    """Whether this host runs more ranks of the group than it has cores for them: then waiting must not spin."""
    control = context.job.control
    neighbours = context.size
    if control is not None and control.peers:
        mine = control.peers[context.job.rank].host
        neighbours = sum(control.peers[r].host == mine for r in context.ranks)
    return neighbours > len(os.sched_getaffinity(0))


class _All(HostCompletion):
    """Several completions as one; its error is the first of theirs."""

    __slots__ = ("_left",)

    def __init__(self, calls: tuple[Call, ...], parts: Sequence[HostCompletion]) -> None:
        super().__init__(calls)
        self._left = len(parts)
        for part in parts:
            part.add_done_callback(lambda part=part: self._one(part))  # type: ignore[misc]

    def _one(self, part: HostCompletion) -> None:
        self._left -= 1
        if part.exception() is not None or self._left == 0:
            self.finish(part.exception())
