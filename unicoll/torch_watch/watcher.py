"""Diagnosis of torch.distributed's groups of any backend: :func:`watch`.

The processes of torch's default group join a job of unicoll over torch's store, on a thread. Each
group of torch is a group of that job whose calls are recorded, not made
(:mod:`unicoll.torch_watch.torch_calls`). So the wait monitor, the control plane and the flight
recorder's dumps work for it as for unicoll's own groups.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.distributed import distributed_c10d as c10d

from unicoll.bootstrap.termination import before_sigterm
from unicoll.diagnosis import flight_dump
from unicoll.errors import (
    DistArgumentError,
    DistError,
    DistNetworkError,
    DistStoreError,
    RankLostError,
)
from unicoll.process import environment, fork_safety, logs, signal_thread
from unicoll.torch_plugin.compat import replace
from unicoll.torch_plugin.group import TorchProcessGroup
from unicoll.torch_plugin.stores import TorchStoreLocation
from unicoll.torch_watch import replaced_methods, torch_groups
from unicoll.torch_watch.cpp_terminate import before_terminate
from unicoll.torch_watch.watched_job import WatchedJob

log = logs.logger("watch")

_POLL_S = 0.1
_FAST_POLL_S = 0.02
_TERMINATE_S = 1.5
"""How long a process that C++ code aborts waits for the comparison of its last calls."""
_DUMP_S = 1.0
"""How long either waits for the dump of the failure after that."""
_SIGTERM_S = 0.6
"""How long one that gets SIGTERM does. Its launcher may have sent it because another rank has
ended."""
_END_S = 2.0
"""Seconds for which the end of the program waits for the thread."""
_ACTIONS = ("log", "abort")

Action = Callable[[DistError], object]


def watch(on_hang: str | Action | None = None) -> None:
    """Diagnose hangs and failures of every group of torch.distributed, of any backend, present and
    later.

    Call it on every rank, before the first call of a group; of groups that have made calls before,
    only waits and dead ranks are diagnosed. A second call only replaces ``on_hang``. Nothing is
    sent with torch's groups. Each process then

    * records the last calls of its groups (``UNICOLL_FLIGHT_RECORDER`` of them) with call site and
      times, and writes them on SIGUSR1, if a group fails and ``UNICOLL_TRACE_DIR`` is set, and on
      :func:`unicoll.dump_flight_recorder`, for ``unicoll trace``;
    * logs a warning when a call waits longer than ``UNICOLL_STALL_WARNING`` seconds, with what the
      other ranks do;
    * logs an error when ranks wait for each other in different groups, calls or messages (a
      deadlock), when the ranks' collectives differ, and when a rank of the group has died, or has
      left without a collective that others are in.

    Errors are raised by torch alone. Groups of unicoll's backends do all this themselves.

    Args:
        on_hang: what else is done after an error was logged and the dump written. ``"log"``:
            nothing. ``"abort"``: the process ends by SIGABRT, as after a timeout of NCCL's watchdog
            in torch, so that the launcher restarts the job. A function: it is called with the
            error, on a thread of unicoll. None: what ``UNICOLL_ON_HANG`` says, by default
            ``"log"``.

    Raises:
        DistArgumentError: ``on_hang`` is none of these.
    """
    on_hang = environment.choice("UNICOLL_ON_HANG") if on_hang is None else on_hang
    if not callable(on_hang) and on_hang not in _ACTIONS:
        raise DistArgumentError(
            f"watch: on_hang is {on_hang!r}, not one of {', '.join(_ACTIONS)} or a function"
        )
    _watcher().start(on_hang)


class Watcher:
    """The thread that joins the job and makes its groups."""

    def __init__(self) -> None:
        self._job: WatchedJob | None = None
        self._on_hang: str | Action = "log"
        self._location: TorchStoreLocation | None = None
        # The default group of torch whose job was joined, or was to be joined.
        self._world: weakref.ref[Any] | None = None
        # Reentrant: a signal's handler, on a thread that has the lock, may destroy groups, too.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._undo: Callable[[], None] = lambda: None
        # True if this process is about to end.
        self._ends = False

    def start(self, on_hang: str | Action) -> None:
        """Start recording and the thread, once."""
        self._on_hang = on_hang
        flight_dump.handle_signal()
        signal_thread.use_thread()
        with self._lock:
            if self._thread is not None:
                return
            replaced_methods.record()
            for pg in [*c10d._world.pg_map]:
                torch_groups.find(pg)
            replace("destroy_process_group", self._destroying)
            replace("_new_process_group_helper", self._making)
            before_sigterm(lambda: self._await_cause(_SIGTERM_S))
            self._undo = before_terminate(lambda: self._await_cause(_TERMINATE_S))
            self._thread = threading.Thread(target=self._run, name="unicoll-watch", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def close(self) -> None:
        """End the thread: a thread in C++ must not outlive the interpreter."""
        self._undo()
        # An attempt to join may wait for minutes. It ends when its store is closed.
        self._closing.set()
        self._close_store()
        if self._thread is not None:
            self._thread.join(_END_S)

    def forget(self) -> None:
        """A forked child has neither the thread nor torch's groups."""
        self._thread, self._job, self._location, self._world = None, None, None, None
        # Another thread may have had the lock at the fork.
        self._lock = threading.RLock()
        torch_groups.forget()

    def _destroying(self, torchs: Any) -> Any:
        """torch's function; for the default group leave the job first, while torch's store can be
        used."""

        def destroy_process_group(group: Any = None) -> None:
            if group is None or group is c10d.GroupMember.WORLD:
                try:
                    with self._lock:
                        world = c10d.GroupMember.WORLD
                        # From now on _new_world() takes this group for one that is known, and does
                        # not join its job again.
                        self._world = None if world is None else weakref.ref(world)
                        # This ends an attempt to join, which the thread makes without the lock.
                        self._close_store()
                        self._leave()
                except Exception as error:
                    # The program must not depend on it.
                    self._warn(error)
            torchs(group)

        return destroy_process_group

    def _making(self, torchs: Any) -> Any:
        """torch's function that makes a group, whose calls are recorded from the first one on."""

        def _new_process_group_helper(*args: Any, **options: Any) -> Any:
            with torch_groups.making():
                made = torchs(*args, **options)
                try:
                    # Still in making(): another thread that found the group first would take it for
                    # one that has made calls.
                    torch_groups.add(made[0])
                except Exception as error:
                    # The program must not depend on it.
                    self._warn(error)
            return made

        return _new_process_group_helper

    def _run(self) -> None:
        while not self._closing.wait(_FAST_POLL_S if self._ends else _POLL_S):
            try:
                self._check()
            except Exception as error:
                # The program must not depend on this thread.
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        # The program may be ending, on this rank or on another one, whose store is then gone.
        ends = self._location is None or isinstance(error, RankLostError | DistStoreError)
        of_store = isinstance(error, DistNetworkError) and error.op is not None
        level = logging.INFO if ends or of_store else logging.WARNING
        log.log(
            level,
            "torch's groups are not watched: %s",
            error,
            exc_info=not isinstance(error, DistError),
        )

    def _check(self) -> None:
        with self._lock:
            found = self._new_world()
        if found is not None:
            rank, size, location = found
            # Without the lock, because it waits for the other ranks. The program may destroy the
            # group meanwhile; then the location is another one, or None.
            joined = WatchedJob(rank, size, location)
            with self._lock:
                if self._location is location:
                    self._job = joined
                else:
                    joined.leave()
        with self._lock:
            job = self._job
            if job is not None and not job.is_exiting:
                groups = [torch_groups.find(pg) for pg in [*c10d._world.pg_map]]
                job.update(
                    [
                        part
                        for group in groups
                        if group is not None and group.ranks
                        for part in group.parts
                    ]
                )
                job.compare(at_once=self._ends)
        if job is not None:
            # Without the lock: the function of the program may take long, or wait for a thread that
            # destroys a group.
            while job.failures.new:
                self._act(job.failures.new.popleft())

    def _await_cause(self, seconds: float) -> None:
        """Compare the calls at once, and wait until the cause of a failure is logged; this process
        is about to end."""
        job = self._job
        if job is None or job.is_exiting:
            return
        job.failures.ignore_later_ends()
        self._ends, deadline = True, time.monotonic() + seconds
        while not job.failures.logged and time.monotonic() < deadline:
            time.sleep(_FAST_POLL_S)
        # The thread that has logged it still tells the other ranks, under the lock; if this process
        # ended before that, they would compare the calls again and log it a second time.
        if self._lock.acquire(timeout=_DUMP_S):
            self._lock.release()
        job.await_dumps(_DUMP_S)

    def _act(self, error: DistError) -> None:
        if callable(self._on_hang):
            try:
                self._on_hang(error)
            except BaseException:
                # Here sys.exit() would end this thread only.
                log.exception("the function on_hang of watch() failed")
        elif self._on_hang == "abort":
            os.kill(os.getpid(), signal.SIGABRT)

    def _new_world(self) -> tuple[int, int, TorchStoreLocation] | None:
        """Rank, size and store of torch's default group, if there is another one than before that
        is to be watched."""
        world = c10d.GroupMember.WORLD
        if (
            self._world is None
            if world is None
            else self._world is not None and self._world() is world
        ):
            return None
        self._close_store()
        self._leave()
        self._world = None if world is None else weakref.ref(world)
        if world is None or world.size() < 2 or isinstance(world, TorchProcessGroup):
            return None
        # Only torch keeps its store alive: a default group that is made later must not find the
        # server, and in it the addresses, of this one.
        self._location = TorchStoreLocation(c10d._world.pg_map[world][1], keep=False)
        return world.rank(), world.size(), self._location

    def _close_store(self) -> None:
        location, self._location = self._location, None
        if location is not None:
            location.close()

    def _leave(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.leave()


@cache
def _watcher() -> Watcher:
    watcher = Watcher()
    fork_safety.in_child(watcher.forget)
    return watcher
