"""The MPI backend of one group: a lane for collectives, a mailroom for point-to-point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unicoll.backend import Backend, Call, Caps, Context, Job
from unicoll.composites import merge_all_reduces
from unicoll.errors import (
    CollectiveMismatchError,
    DistArgumentError,
    DistBackendError,
    DistError,
    GroupAbortedError,
    OperationTimeoutError,
)
from unicoll.exchanged import alike, exchange_sizes
from unicoll.kernels import Quiet
from unicoll.lane import Lane
from unicoll.observe import inquest
from unicoll.ops import OPS
from unicoll.streams import CudaError
from unicoll.work import Completion, HostCompletion

from . import library, watch
from .collectives import COLLECTIVES, SIZED, UNLIKE, alone
from .flats import device_memory
from .matching import BOX
from .members import Members, members_of, publish
from .messages import Mailroom
from .reductions import REDUCTIONS, agreed_way, native
from .runtime import runtime
from .team import Team

__all__ = ["MPIBackend"]

_DRAIN_S = 5.0
_MESSAGES = frozenset(("send", "recv"))
_LONG = 1 << 25
"""Bytes from which a blocking call waits for the lane's thread, so that it can be given up at its deadline."""


class MPIBackend(Backend):
    """Collectives of an MPI library, through mpi4py."""

    name = "mpi"
    caps = Caps(frozenset(("cpu",)), frozenset(OPS), lambda dtype, _: not dtype.name.startswith("float8"))
    compares = True
    stages = True

    def __init__(self, context: Context) -> None:
        self.context = context
        self.mpi = runtime()
        self.lane = Lane(f"unicoll-{context.name}", self._execute)
        self.team: Team | None = None
        self.cuda = self.mpi.cuda
        self._owned = self.mpi.owner is not None
        self._members: Members | None = None
        self._mail: Mailroom | None = None
        self._error: DistError | None = None
        self._moving = False  # whether the call that was executed last has come to moving data
        self.closed = False
        if context.size > 1:
            self._members = members = members_of(context.job)
            self.team = Team(context, members)
            self.cuda, self._owned = members.cuda(context), members.owned
            self._mail = Mailroom(context, self.team)
            self.mpi.groups.add(self)
            watch.over(self)

    @classmethod
    def availability(cls) -> str | None:
        return library.reason_against()

    @classmethod
    def prepare(cls, job: Job) -> None:
        publish(job)

    @classmethod
    def create(cls, context: Context) -> MPIBackend:
        return cls(context)

    @property
    def sequence(self) -> int:
        return self.lane.sequence

    def run(self, call: Call) -> None:
        if call.op.name in _MESSAGES:
            self._mailroom(call).run(call)
        elif call.inputs and call.inputs[0].nbytes >= _LONG and self.team is not None and not self.mpi.polls:
            self.lane.post((call,)).wait(None)
        else:
            self.lane.run(call)

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        if calls[0].op.name not in _MESSAGES:
            return self.lane.post(merge_all_reduces(calls))
        parts = [self._mailroom(call).post(call) for call in calls]
        return parts[0] if len(parts) == 1 else _All(tuple(calls), parts)

    @property
    def direct(self) -> bool:
        return self.team is not None and self.cuda.direct

    def takes_device(self, call: Call) -> bool:
        team = self.team
        if team is None or not self.cuda.direct:
            return False
        if call.op.name in _MESSAGES:
            return (call.inputs or call.outputs)[0].nbytes > BOX  # what travels with its header is the host's
        if self._owned and not self.mpi.posts_addresses:
            return False  # none of MPI's calls may block
        return call.reduce is None or native(team, call)

    def keeps(self, call: Call) -> bool:
        return self._moving or call.op.name in _MESSAGES

    def _mailroom(self, call: Call) -> Mailroom:
        if self._mail is None:
            raise DistArgumentError(f"{call.op.name}: a group of one has nobody to talk to", op=call.op.name)
        return self._mail

    def _execute(self, call: Call) -> None:
        team = self.team
        if team is None:
            if self._error is not None:
                raise self._error
            Quiet()(alone, call)  # overflow and NaN are results, as on a GPU
            call.write_back()
            return
        self._moving = withdrawn = False
        team.begin(call, self.lane.in_background)
        try:
            if self.cuda.direct:
                self._prepare_for(team, call)
            self._perform(team, call)
            for buffer in call.outputs:
                if buffer.unpack is not None:
                    buffer.unpack()
        except (CudaError, OperationTimeoutError) as e:
            if team.error is None:  # the device of this rank, of which the others know nothing
                self._give_up(team, call, e)
            raise
        except DistError:
            raise
        except self.mpi.MPI.Exception as e:
            raise self._blame(team, call, e) from e
        except BaseException as e:
            withdrawn = team.error is None and not team.begun(call) and self.lane.withdraw(call)
            if not withdrawn:  # whatever it is, the others must not wait for us
                self._give_up(team, call, e)
            raise
        finally:
            if not withdrawn:
                team.last = call
            team.call = None

    def _perform(self, team: Team, call: Call) -> None:
        """Agree on a call, then do it."""
        name = call.op.name
        if (reduction := REDUCTIONS.get(name)) is not None:
            way = agreed_way(team, call)
            self._moving = True
            reduction(team, call, way)
        elif (collective := COLLECTIVES.get(name)) is not None:
            team.agree(call)
            self._moving = True
            collective(team, call)
        elif name in UNLIKE:
            number, unlike = UNLIKE[name]
            even = team.agree(call, number(call))
            self._moving = True
            unlike(team, call, even)
        else:
            counts = None if team.agree(call, alike(call)) else self._sizes(team, call)
            self._moving = True
            SIZED[name](team, call, counts)

    def _sizes(self, team: Team, call: Call) -> list[int]:
        """All ranks' sizes in a gather or scatter where they differ."""
        context = self.context
        try:
            return exchange_sizes(call, context.rank, context.ranks, context.name, lambda c: self._perform(team, c))
        except CollectiveMismatchError as e:
            team.mismatch(call, -1, 0, str(e))
        finally:
            self._moving = False

    def _prepare_for(self, team: Team, call: Call) -> None:
        """See to what MPI needs where it is given addresses of a GPU's memory, and to nothing where it is not."""
        memory = device_memory(call)
        team.must_block = memory is not None and not self.mpi.posts_addresses
        owner = self.mpi.owner
        if memory is not None and owner is not None:
            owner.call(memory.bind)

    def _blame(self, team: Team, call: Call, error: Exception) -> DistError:
        """What all ranks are told of an error of MPI."""
        peer = team.await_the_news()
        if peer is None:
            cause: DistError = DistBackendError(
                f"{call.describe()} #{call.seq} on group {self.context.name!r}: MPI failed: {error}",
                group=self.context.name,
                op=call.op.name,
                seq=call.seq,
            )
            self._give_up(team, call, cause)
            return cause
        try:
            team.fail(team.lost(peer))
        except DistError as agreed:
            return agreed

    def _give_up(self, team: Team, call: Call, cause: BaseException) -> None:
        try:
            team.fail(inquest.failed(self.context, call, cause))
        except DistError:
            pass  # it is the others' error; here the cause itself is raised

    def describe(self) -> str:
        if self.team is None:
            return f"mpi, alone: {self.mpi.describe()}"
        crowded = "; more ranks than cores, so waiting yields" if self.team.crowded else ""
        return (
            f"mpi: {self.mpi.describe()}; every call is compared across ranks{crowded};"
            f" cuda arrays that come to it are {self.cuda}"
        )

    def abort(self, error: Exception) -> None:
        cause = inquest.aborted(self.context, error)
        self._error = self._error or cause
        if self.team is not None:
            self.team.abort(cause)
        if self._mail is not None:
            self._mail.abort(cause)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        context, control = self.context, self.context.job.control
        stuck = self.team is not None and self.team.given_up != 0
        ended = self.lane.close(_DRAIN_S if not stuck else 0.0)
        if not ended:
            self.abort(GroupAbortedError(f"group {context.name!r} was destroyed", group=context.name))
            ended = self.lane.close(1.0 if not stuck else 0.0)
        if control is not None:
            control.unwatch(context.name)
        clean = self._mail.close(_DRAIN_S) if self._mail is not None else True
        if self._members is not None:
            self._members.note_the_dead()
        self._error = self._error or GroupAbortedError(
            f"group {context.name!r} has been destroyed", group=context.name
        )
        if self.team is not None:
            self.team.close(not (ended and clean and self.lane.idle(0.0 if stuck else 1.0)))
            self.team.abort(self._error)
        self.mpi.groups.discard(self)


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
