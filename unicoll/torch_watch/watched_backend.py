"""A group of torch.distributed in the job of :mod:`unicoll.torch_watch.watcher`: its calls are
torch's."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from unicoll.backend import operation_errors
from unicoll.backend.call_comparison import CallInProgress
from unicoll.backend.compared_backend import ComparedBackend
from unicoll.backend.contract import Caps, Context
from unicoll.backend.observed_backend import Operation
from unicoll.calls.call import Call
from unicoll.calls.call_site import line_of_user
from unicoll.calls.flight_recorder import CallKind
from unicoll.calls.ops import OPS
from unicoll.errors import (
    BackendUnavailableError,
    CollectiveMismatchError,
    DistError,
    RankLostError,
)
from unicoll.process import logs
from unicoll.process.thread_frames import ThreadFrames
from unicoll.run import worker_main
from unicoll.torch_watch import replaced_methods, torch_groups
from unicoll.torch_watch.torch_calls import TorchCall, WatchedCall
from unicoll.torch_watch.torch_flight_recorder import TorchRecorder, UnrecordedCall
from unicoll.torch_watch.torch_groups import Channel, TorchGroup

if TYPE_CHECKING:
    from unicoll.calls.work import Completion

log = logs.logger("watch")

_NOTICE_S = 0.5
"""How long the notice of a rank's end may take to arrive after torch has raised an error."""
_LOST_NOTICE_S = 5.0
"""The same after an error of a connection, which a rank that has ended has closed."""
_COMPARED_S = 1.0
"""How long the comparison of the calls may take then."""
_TICK_S = 0.02
_ENDS_S = 0.3
"""How long after SIGTERM the end of another rank may be the cause of that, not its effect."""


class Failures:
    """The failures of a job's groups, for the log and for the action of the program.

    Args:
        rank: of this process.

    Attributes:
        new: errors that were added since the program's action was called last.
        logged: True once there was an error.
    """

    def __init__(self, rank: int) -> None:
        self.new: deque[DistError] = deque()
        self._rank = rank
        self._lost: set[int | None] = set()
        self._texts: set[str] = set()
        self._ends_until = math.inf
        self._lock = threading.Lock()
        self.logged = False

    def ignore_later_ends(self) -> None:
        """This process is about to end, as the others of the job may be: their ends are no
        failures."""
        self._ends_until = min(self._ends_until, time.monotonic() + _ENDS_S)

    def add(self, error: DistError, is_told: bool = False) -> None:
        """Log an error once: several groups fail because of one deadlock or one lost rank.

        ``is_told`` is True if another rank logs it for all.
        """
        # A thread that adds the same error later waits until it is logged, because the process may
        # end once this returns.
        with self._lock:
            if isinstance(error, RankLostError):
                if error.rank in self._lost or time.monotonic() > self._ends_until:
                    return
                self._lost.add(error.rank)
            if str(error) not in self._texts:
                self._texts.add(str(error))
                level = logging.INFO if is_told else logging.ERROR
                log.log(
                    level, "%s rank %d: %s", time.strftime("%Y-%m-%d %H:%M:%S"), self._rank, error
                )
                if isinstance(error, CollectiveMismatchError):
                    # The launcher's report needs this: of several processes that end, this one may
                    # be the cause.
                    worker_main.record(error, final=False)
                self.new.append(error)
                self.logged = True


class WatchedBackend(ComparedBackend):
    """Observes the calls that torch makes. A failure of the group is logged; it does not end
    torch's calls."""

    name: ClassVar[str] = "torch"
    caps: ClassVar[Caps] = Caps(frozenset({"cpu"}), frozenset(OPS))
    compares: ClassVar[bool] = True
    called_from_torch = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._group: TorchGroup | None = None
        self._failures: Failures | None = None
        self._recorder: TorchRecorder | None = None
        # True once torch has raised an error in the wait for a call.
        self._raised = False

    def observe(self, group: TorchGroup, failures: Failures) -> None:
        """Observe the calls of a recorded group."""
        group.job_number = self.context.job.number
        group.on_error = self._torch_raised
        self._group, self._failures, self._recorder = group, failures, TorchRecorder(group)
        self.watch()

    @property
    def is_comparable(self) -> bool:
        """Counted numbers are not equal if some ranks have compiled a call."""
        return self._group is not None and self._group.is_numbered

    def unrecorded(self) -> CallInProgress | None:
        call, group = self.state.call, self._group
        if group is None or not isinstance(call, UnrecordedCall) or not call.is_described:
            return None
        kind = CallKind(call, group.job_number, group.name, group.ranks, group.backend_name)
        return CallInProgress(call.seq, kind, call.site)

    def calls_differ(self, error: DistError, is_told: bool) -> None:
        # Logged before the group fails, because this process may be about to end.
        self._log(error, is_told)

    @property
    def sequence(self) -> int:
        return self._group.sequence if self._group is not None else 0

    def update(self) -> None:
        group, state = self._group, self.state
        if group is None:
            return
        # Before the calls are read: this marks those that torch has completed and that no thread
        # has waited for yet.
        torch_groups.end_completed()
        collectives = [call for call in torch_groups.pending_calls(group) if not call.is_message]
        last = group.last
        if collectives:
            state.call = collectives[0].watched_call
            return
        if last is not None:
            state.last = last.seq, last.kind
        state.call = self._unrecorded(group) if group.is_numbered else None

    def _unrecorded(self, group: TorchGroup) -> Call | None:
        """The oldest collective that torch has not ended, as its flight recorder has it; None if
        there is none.

        On a device's library that may be a recorded one. Without torch's flight recorder it is the
        last one, if it was not recorded and the main thread is in torch.
        """
        number, recorder = self.sequence, self._recorder
        assert recorder is not None
        newest = group.newest.seq if group.newest is not None else 0
        if group.completes and newest >= number:
            return None
        found = recorder.in_progress(number)
        if found is None and recorder.is_available:
            return None
        with ThreadFrames() as frames:
            top = frames.get(threading.main_thread().ident or 0)
            in_torch = (
                top is not None and top.f_globals.get("__name__", "").partition(".")[0] == "torch"
            )
            site = line_of_user(top) if in_torch else ""
            # A frame keeps the arrays of its function alive.
            del top, frames
        if found is not None:
            number -= found.later
        elif not in_torch or newest >= number:
            return None
        call = self.state.call
        # Otherwise the object stays the same, by which the wait monitor knows how long the call has
        # waited.
        if call is None or (call.seq, call.site) != (number, site):
            recorded = torch_groups.last_collectives().get(group, ()) if newest >= number else ()
            call = next((each.watched_call for each in recorded if each.seq == number), None)
            if call is None:
                call = UnrecordedCall(group, number, site, found and found.entry)
        return call

    @property
    def has_unseen_wakers(self) -> bool:
        group = self._group
        return group is not None and (
            not group.is_counted_from_start
            or (group.completes and not group.counts_messages)
            or _uses_rpc()
            or any(call.has_callbacks for call in torch_groups.pending_calls(group))
        )

    def operation(self, call: Call) -> Operation | None:
        group = self._group
        if not call.op.message or group is None:
            return super().operation(call)
        number = call.message if isinstance(call, WatchedCall) else 0
        if not (number and group.counts_messages):
            return None
        ranks = self.context.ranks
        channel = call.op.name, call.peer, call.tag or 0
        members = (ranks[group.rank], ranks[call.peer])
        return Operation(self._order(group, channel), number, members)

    def _order(self, group: TorchGroup, channel: Channel) -> str:
        return f"{self.name} {group.channel_name(channel)}"

    def posted(self) -> Mapping[str, int]:
        posted, group = dict(super().posted()), self._group
        if group is not None and group.counts_messages:
            posted |= {self._order(group, channel): n for channel, n in [*group.channels.items()]}
        return posted

    def awaited_in(self, frame: FrameType) -> Call | None:
        call = replaced_methods.awaited_in(frame)
        return call.watched_call if call is not None and call.group is self._group else None

    def _torch_raised(self, call: TorchCall, error: BaseException) -> None:
        """torch has raised an error in the wait for a call: find out whether a rank has ended."""
        if isinstance(error, RuntimeError):
            # Only the first error waits for its cause. The program may get one from each of many
            # works.
            if not self._raised:
                self._raised = True
                self._await_cause()
                # Gloo says "Connection closed by peer" or "Connection reset by peer".
                seconds = _LOST_NOTICE_S if "onnection" in str(error) else _NOTICE_S
                lost = self._lost_error(call.watched_call, seconds)
                if lost is not None:
                    self.state.announce(lost)
            cause = self.difference or self.state.error
            if cause is not None:
                # The control thread, which has set it, may not have logged it before this error
                # ends the process.
                if not self.closed:
                    self._log(cause)
                error.add_note(f"unicoll: {cause}")

    def _await_cause(self) -> None:
        """Wait until the calls were compared, or the group has failed."""
        deadline = time.monotonic() + _COMPARED_S
        while self.difference is None and self.state.error is None and time.monotonic() < deadline:
            time.sleep(_TICK_S)

    def _lost_error(self, call: Call, seconds: float = _NOTICE_S) -> RankLostError | None:
        """The error of a call because a member has ended, after waiting for the notice of that;
        None if none has."""
        context, control = self.context, self.context.job.control
        deadline = time.monotonic() + seconds
        while control is not None and self.state.error is None:
            lost = operation_errors.first_dead_member(context)
            if lost is None:
                lost = operation_errors.first_member_that_left(context)
            if lost is not None:
                member = context.ranks.index(lost)
                return operation_errors.rank_lost_error(
                    context, call, member, control.departed[lost]
                )
            if time.monotonic() >= deadline:
                break
            time.sleep(_TICK_S)
        return None

    def abort(self, error: Exception) -> None:
        job, cause = self.context.job, self.context.job.error
        if not job.exiting:
            is_first = self.state.error is None
            super().abort(error)
            if is_first and not self.closed:
                # The rank that has compared the calls has logged the difference for all.
                is_told = isinstance(error, CollectiveMismatchError) and self.difference is None
                self._log(self.state.error, is_told)
        elif self._group is not None and _is_of_collective(cause):
            # The program ends because torch has raised an error in a collective, which torch's C++
            # code may have made.
            self._log(self._lost_error(UnrecordedCall(self._group, self.sequence, "")))

    def _log(self, error: DistError | None, is_told: bool = False) -> None:
        if error is not None and self._failures is not None:
            self._failures.add(error, is_told)

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        raise BackendUnavailableError(
            f"group {self.context.name!r} is torch's; unicoll watches its calls only"
        )

    def describe(self) -> str:
        return f"torch's {self.name}"

    def close(self) -> None:
        if self.closed:
            return
        self.keep_posted()
        self.closed = True
        group = self._group
        if group is not None:
            group.on_error = None
            # Sent before this rank leaves, because it cannot be asked later.
            final = self.sequence if group.is_alive and self.is_comparable else None
            calls = torch_groups.last_collectives() if self.is_comparable else {}
            self.comparison.close(calls.get(group, ()), final)
        if self.context.job.control is not None:
            self.context.job.control.unwatch(self.context.name, self.context.backend)
        self.state.close()


def _uses_rpc() -> bool:
    """True if threads of torch's RPC, of which idle ones have no Python frame, may call functions
    of the program."""
    api = sys.modules.get("torch.distributed.rpc.api")
    is_set = getattr(api, "_is_current_rpc_agent_set", None)
    return is_set is not None and bool(is_set())


def _is_of_collective(error: BaseException | None) -> bool:
    """True for an error that torch has raised in torch.distributed, or in a backward pass."""
    traceback, module = error.__traceback__ if isinstance(error, RuntimeError) else None, ""
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    return module.startswith(("torch.distributed", "torch.autograd", "torch.nn.parallel"))
