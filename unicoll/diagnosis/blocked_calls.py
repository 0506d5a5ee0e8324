"""The calls in which this process's threads are blocked.

What a thread is in shows which call it waits for (:mod:`unicoll.calls.thread_activity`), its stack
whether it waits: its innermost frame is unicoll's. A thread that joins another one waits as long as
that, and a thread that waits for a future as long as all threads that could complete it. Threads of
unicoll count only while they run a callback of the user, but a call whose end runs callbacks counts
as one that a thread waits for. Idle threads of a pool do not count, and neither do daemon threads
whose frames belong to modules without unicoll. If torch leads to calls, these modules have to be
without torch, too, and of an installed package, such as that of a progress bar.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from itertools import islice, takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from unicoll.backend.group_state import GroupState
from unicoll.backend.host import HostBackend
from unicoll.backend.observed_backend import ObservedBackend
from unicoll.backend.operation_errors import mismatch_error, timeout_error
from unicoll.calls.call import Call, ProxyCall
from unicoll.calls.call_site import LIBRARY_PACKAGES, line_of_user
from unicoll.calls.thread_activity import NotBlocked, activities
from unicoll.calls.work import Completion, HostCompletion
from unicoll.process.excepthook import PACKAGES
from unicoll.process.thread_frames import ThreadFrames, outwards

_OURS = set(PACKAGES)
_LIBRARIES = LIBRARY_PACKAGES | _OURS | {"numpy", "cupy"}
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""
_IDLE = {("threading", "_shutdown"), ("concurrent.futures.thread", "_worker")}
"""Innermost functions, with their modules, of threads that only another thread can wake."""
_FAILURES = (
    GroupState.announce.__code__,
    HostBackend.fail.__code__,
    mismatch_error.__code__,
    timeout_error.__code__,
)
_FAILURE_MODULES = ("unicoll.net.control.group_failures", "unicoll.net.control.departures")
"""What a thread is in, for a second or two at most, while a failed call ends; other ranks may have
ended it before."""
_MOST_SENDERS = 128
"""Members of a group up to which a receive from any of them is examined: all their connections
are."""
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
"""Timers that interrupt the main thread: the signal's handler may end its call."""
_MAX_FRAMES = 60
"""Frames of a stack that are searched for the end of a failed call."""


class BlockedCall(NamedTuple):
    """A call that a thread waits for, or that has to end before a callback runs.

    Attributes:
        backend: of its group.
        call: the last one of the batch.
        where: ``file:line`` of the user's code that waits; "" for a callback.
        ends_alone: True if the call may end without a call of another rank: a message for which
            ``needs_peer`` is False or that may come from very many ranks, messages that have
            neither numbers (:meth:`~ObservedBackend.operation`) nor
            :attr:`~ObservedBackend.message_queues`, and calls with a shorter timeout than their
            group's, after which the program may go on.
    """

    backend: ObservedBackend
    call: Call
    where: str
    ends_alone: bool


def find_blocked_calls(backends: Sequence[ObservedBackend]) -> tuple[list[BlockedCall], bool]:
    """The calls in which threads are blocked, and True if no other thread of this process could
    call unicoll."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    found: list[BlockedCall] = []
    blocked: set[int | None] = set()
    joining: list[threading.Thread] = []
    of_future = ignored = False
    through_torch = any(backend.called_from_torch for backend in backends)
    all_blocked = not any(signal.getitimer(timer)[0] for timer in _TIMERS)
    with ThreadFrames() as frames:
        # A reference to this thread's own frame would keep everything here alive.
        del frames[threading.get_ident()]
        for ident, frame in frames.items():
            if _handles_failure(frame):
                all_blocked = False
            thread = threads.get(ident)
            ours = thread is not None and thread.name.startswith("unicoll")
            if ours and not _runs_callback(ident, frame):
                continue
            call = _blocked_call(ident, frame, backends)
            if call is not None:
                found.append(call)
                blocked.add(ident)
            elif (joined := _joins(frame)) is not None:
                joining.append(joined)
                blocked.add(ident)
            elif _waits_for_future(frame):
                of_future = True
                blocked.add(ident)
            elif _is_idle(frame):
                continue
            elif _cannot_call(thread, frame, through_torch):
                ignored = True
            else:
                all_blocked = False
    # The thread that is joined may be running. A future may be completed by a thread that was left
    # out because it seems not to call unicoll.
    if any(thread.ident not in blocked for thread in joining) or (of_future and ignored):
        all_blocked = False
    for backend in backends:
        for completion in backend.in_background():
            if completion._callbacks:
                last = completion.calls[-1]
                found.append(BlockedCall(backend, last, "", _ends_alone(backend, last)))
        if backend.has_unseen_wakers:
            all_blocked = False
    return found, all_blocked


def has_callbacks(backend: ObservedBackend) -> bool:
    """True if a call of a backend runs callbacks when it ends."""
    return backend.has_unseen_wakers or any(
        bool(each._callbacks) for each in backend.in_background()
    )


def _blocked_call(
    thread: int, top: FrameType, backends: Sequence[ObservedBackend]
) -> BlockedCall | None:
    """The innermost call of the user in which a thread is blocked; None if it runs or waits for a
    limited time."""
    if _package(top) not in _OURS:
        return None
    for backend in backends:
        if (awaited := backend.awaited_in(top)) is not None:
            return BlockedCall(backend, awaited, line_of_user(top), _ends_alone(backend, awaited))
    user = next((frame for frame in outwards(top) if _package(frame) not in LIBRARY_PACKAGES), None)
    for activity in activities(thread):
        found: tuple[ObservedBackend, Call] | None = None
        if isinstance(activity.what, NotBlocked):
            # The innermost activity is a function of the user, or a wait that ends by itself.
            return None
        if isinstance(activity.what, Call):
            caller = activity.frame
            if caller not in (None, user) and _package(caller) not in LIBRARY_PACKAGES:
                # Other code of the user runs during the call, for example a signal's handler.
                return None
            executing = activity.backend.executing_backend if activity.backend is not None else None
            host = next((backend for backend in backends if backend is executing), None)
            # A collective without a number has not been accepted by its queue yet.
            numbered = activity.what.op.message or activity.what.seq
            found = (host, activity.what) if host is not None and numbered else None
        else:
            found = _owner(activity.what, backends)
        if found is not None:
            backend, call = found
            return BlockedCall(backend, call, line_of_user(top), _ends_alone(backend, call))
    return None


def _owner(
    completion: Completion, backends: Sequence[ObservedBackend]
) -> tuple[ObservedBackend, Call] | None:
    """The backend that a completion belongs to, and the last call of its batch."""
    for backend in backends:
        if (found := backend.waited_for(completion)) is not None:
            return found
    if not isinstance(completion, HostCompletion) or completion.done():
        return None
    call = completion.calls[-1]
    if isinstance(call, ProxyCall):
        return None
    for backend in backends:
        if any(completion is waiting for waiting in backend.in_background()):
            return backend, call
        engine = backend.message_queues
        if len(completion.calls) == 1 and engine is not None and engine.needs_peer(call):
            return backend, call
    return None


def _ends_alone(backend: ObservedBackend, call: Call) -> bool:
    engine = backend.message_queues
    if call.timeout < backend.context.timeout:
        return True
    if backend.operation(call) is not None:
        return False
    if call.peer < 0 and backend.context.size > _MOST_SENDERS:
        return True
    return engine is None or not engine.needs_peer(call)


def _joins(top: FrameType) -> threading.Thread | None:
    """The thread that a thread joins without a timeout."""
    for frame in takewhile(lambda frame: _package(frame) == "threading", outwards(top)):
        if frame.f_code is threading.Thread.join.__code__:
            return frame.f_locals["self"] if frame.f_locals["timeout"] is None else None
    return None


def _waits_for_future(top: FrameType) -> bool:
    """True for a thread that waits without a timeout for a future, which another thread has to
    complete."""
    for frame in takewhile(
        lambda frame: _package(frame) in ("threading", "concurrent"), outwards(top)
    ):
        if (
            frame.f_globals["__name__"] == "concurrent.futures._base"
            and frame.f_code.co_name == "result"
        ):
            return frame.f_locals["timeout"] is None
    return False


def _is_idle(top: FrameType) -> bool:
    return (top.f_globals.get("__name__"), top.f_code.co_name) in _IDLE


def _cannot_call(thread: threading.Thread | None, top: FrameType, through_torch: bool) -> bool:
    """True for a thread that does not call unicoll, or torch if that leads to calls, as far as its
    stack shows."""
    if thread is not None and not thread.daemon:
        return False
    for frame in outwards(top):
        may_use = _OURS
        if through_torch and _package(frame) not in LIBRARY_PACKAGES:
            if not _INSTALLED.intersection(Path(frame.f_code.co_filename).parts):
                # Most modules of a program with torch can call torch.distributed.
                return False
            may_use = _OURS | {"torch"}
        names = frame.f_globals
        # unicoll.process.excepthook may have replaced this hook, which a thread calls when it has
        # failed.
        # The values are copied: other threads may change the module's names meanwhile.
        values = (x for x in [*names.values()] if x is not threading.excepthook)
        if names.get("__name__") == "__main__" or any(_origin(x) in may_use for x in values):
            return False
    return True


def _origin(value: Any) -> str:
    """The package that a value of a module's namespace is, or is defined in."""
    name = (
        getattr(value, "__name__", "")
        if type(value) is type(sys)
        else getattr(value, "__module__", "")
    )
    return name.partition(".")[0] if isinstance(name, str) else ""


def _runs_callback(thread: int, top: FrameType) -> bool:
    """True for a thread of unicoll that runs a callback."""
    return any(isinstance(activity.what, NotBlocked) for activity in activities(thread)) or any(
        _package(frame) not in _LIBRARIES for frame in outwards(top)
    )


def _handles_failure(top: FrameType) -> bool:
    """True for a thread in which a call ends with an error, which the threads that wait for the
    call then get."""
    for frame in islice(outwards(top), _MAX_FRAMES):
        if _package(frame) not in _LIBRARIES:
            return False
        if frame.f_code in _FAILURES or frame.f_globals.get("__name__") in _FAILURE_MODULES:
            return True
    return False


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]
