"""A group of torch.distributed in the job of :mod:`unicoll.torch_plugin.watcher`: its calls are torch's."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from unicoll.backend import operation_errors
from unicoll.backend.call import Call
from unicoll.backend.contract import Caps, Context
from unicoll.backend.observed_backend import ObservedBackend
from unicoll.backend.operation_errors import Report
from unicoll.backend.ops import OPS
from unicoll.backend.thread_frames import ThreadFrames
from unicoll.errors import BackendUnavailableError, DistError, RankLostError
from unicoll.group.backend_choice import BackendChoice
from unicoll.net import logs
from unicoll.torch_plugin import torch_calls
from unicoll.torch_plugin.torch_calls import TorchCall, TorchGroup, UnrecordedCall

if TYPE_CHECKING:
    from unicoll.backend.work import Completion

log = logs.logger("watch")

_NOTICE_S = 0.5
"""How long the notice of a rank's end may take to arrive after torch has raised an error."""
_TICK_S = 0.02


class _Logged:
    """The failures that this process has logged in a job."""

    def __init__(self) -> None:
        self._lost: set[int | None] = set()
        self._texts: set[str] = set()

    def contains(self, error: DistError) -> bool:
        """True for an error that was logged: several groups fail because of one deadlock or one lost rank."""
        if isinstance(error, RankLostError) and error.rank in self._lost:
            return True
        if str(error) in self._texts:
            return True
        if isinstance(error, RankLostError):
            self._lost.add(error.rank)
        self._texts.add(str(error))
        return False

    def close(self) -> None:
        """There is nothing to release."""


class WatchedBackend(ObservedBackend):
    """Observes the calls that torch makes. A failure of the group is logged; it does not end torch's calls."""

    name: ClassVar[str] = "torch"
    caps: ClassVar[Caps] = Caps(frozenset({"cpu"}), frozenset(OPS))
    compares: ClassVar[bool] = True
    called_from_torch = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._group: TorchGroup | None = None

    def observe(self, group: TorchGroup) -> None:
        """Observe the calls of a recorded group."""
        group.job_number = self.context.job.number
        group.on_error = self._torch_raised
        self._group = group
        self.watch()

    @property
    def sequence(self) -> int:
        return self._group.sequence if self._group is not None else 0

    def update(self) -> None:
        group, state = self._group, self.state
        if group is None:
            return
        torch_calls.end_completed()
        collectives = [call for call in torch_calls.pending_calls(group) if not call.is_message]
        last = group.last
        if collectives:
            state.call = collectives[0].watched_call
            return
        if last is not None:
            state.last = last.seq, last.kind
        newest = group.newest.seq if group.newest is not None else 0
        state.call = self._unrecorded(group) if group.is_numbered and self.sequence > newest else None

    def _unrecorded(self, group: TorchGroup) -> Call | None:
        """The last collective, which torch has started in C++, if the main thread is in torch; else None."""
        with ThreadFrames() as frames:
            top = frames.get(threading.main_thread().ident or 0)
            in_torch = top is not None and top.f_globals.get("__name__", "").partition(".")[0] == "torch"
            site = operation_errors.line_of_user(top) if in_torch else ""
            del top, frames
        if not in_torch:
            return None
        call = self.state.call
        if not isinstance(call, UnrecordedCall) or (call.seq, call.site) != (self.sequence, site):
            call = UnrecordedCall(group, self.sequence, site)
        return call

    def _report(self) -> Report:
        report = super()._report()
        report["seq"] = self.sequence  # torch may have several calls in progress
        return report

    @property
    def has_message_callbacks(self) -> bool:
        group = self._group
        return group is not None and any(call.has_callbacks for call in torch_calls.pending_calls(group))

    def awaited_in(self, frame: FrameType) -> Call | None:
        call = torch_calls.awaited_in(frame)
        return call.watched_call if call is not None and call.group is self._group else None

    def _torch_raised(self, call: TorchCall, error: BaseException) -> None:
        """torch has raised an error in the wait for a call: find out whether a rank has ended."""
        if isinstance(error, RuntimeError):
            lost = self._lost_error(call.watched_call)
            if lost is not None:
                self.state.announce(lost)
            if self.state.error is not None:
                add_note = getattr(error, "add_note", lambda text: None)  # from Python 3.11 on
                add_note(f"unicoll: {self.state.error}")

    def _lost_error(self, call: Call) -> RankLostError | None:
        """The error of a call because a member has ended, after waiting for the notice of that; None if none has."""
        context, control = self.context, self.context.job.control
        deadline = time.monotonic() + _NOTICE_S
        while control is not None and self.state.error is None:
            lost = operation_errors.first_dead_member(context)
            if lost is None:
                lost = operation_errors.first_member_that_left(context)
            if lost is not None:
                member = context.ranks.index(lost)
                return operation_errors.rank_lost_error(context, call, member, control.departed[lost])
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
                self._log(self.state.error)
        elif self._group is not None and _is_of_collective(cause):
            # torch's C++ code may have made it
            self._log(self._lost_error(UnrecordedCall(self._group, self.sequence, "")))

    def _log(self, error: DistError | None) -> None:
        job = self.context.job
        logged = job.shared("logged failures of torch's groups", _Logged)
        if error is not None and not logged.contains(error):
            log.error("rank %d: %s", job.rank, error)

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        raise BackendUnavailableError(
            f"group {self.context.name!r} is torch's; unicoll watches its calls only"
        )

    def describe(self) -> str:
        return f"torch's {self.name}"

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._group is not None:
            self._group.on_error = None
        if self.context.job.control is not None:
            self.context.job.control.unwatch(self.context.name, self.context.backend)
        self.state.close()


def _is_of_collective(error: BaseException | None) -> bool:
    """True for an error that torch has raised in torch.distributed, or in a backward pass."""
    traceback, module = error.__traceback__ if isinstance(error, RuntimeError) else None, ""
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    return module.startswith(("torch.distributed", "torch.autograd", "torch.nn.parallel"))


@cache
def choices(backend: str) -> tuple[BackendChoice, ...]:
    """The choice of the backend of groups whose backend torch calls ``backend``."""
    cls = type("WatchedBackend", (WatchedBackend,), {"name": backend})
    return (BackendChoice("cpu", backend, cls, "torch's"),)
