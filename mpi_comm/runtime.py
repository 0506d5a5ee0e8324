"""MPI in this process: initialised once, owned by whom it must be, finalised only if it is ours.

:func:`runtime` starts MPI at the first call, or takes it as others have started it. Thread level MULTIPLE is asked
for (``UNICOLL_MPI_THREAD_LEVEL`` asks for less); with less than that every call of MPI is made by one thread, the
:class:`~mpi_comm.owner.Owner`. Where other code has initialised MPI with less, that code must not use MPI while
operations of this library are in flight.

An uncaught exception ends the whole job by MPI_Abort, after the traceback (``UNICOLL_MPI_ABORT=0`` switches that off):
the other processes would wait for this one for ever. A process that ends well waits for the others before it
finalises MPI, because they cannot finish what they do without it.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from unicoll import forks, settings
from unicoll.errors import BackendUnavailableError, DistError, OperationTimeoutError
from unicoll.types import default_pg_timeout

from .aware import find_out, override
from .library import initialize, reason_against
from .owner import Owner

if TYPE_CHECKING:
    from unicoll.backend import Backend, Job

    from .members import Members

__all__ = ["Runtime", "runtime", "started"]

log = logging.getLogger("unicoll")

_START_S = 300.0
_FINALIZE_S = 15.0
"""How long MPI_Finalize may take once all processes have come to it."""
_NAP_S = 0.002
_LAST_WORDS_S = 0.2
"""mpirun ends everybody at once; what was written is to come through first."""
_LEVELS = ("single", "funneled", "serialized", "multiple")
_NATIVE = {
    "bool": "UINT8_T", "uint8": "UINT8_T", "int8": "INT8_T", "uint16": "UINT16_T", "int16": "INT16_T",
    "uint32": "UINT32_T", "int32": "INT32_T", "uint64": "UINT64_T", "int64": "INT64_T", "float16": "UINT16_T",
    "bfloat16": "UINT16_T", "float32": "FLOAT", "float64": "DOUBLE", "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX", "float8_e4m3fn": "UINT8_T", "float8_e5m2": "UINT8_T",
}  # fmt: skip
"""What elements travel as; MPI adds only those that it can, see :mod:`mpi_comm.reductions`."""


class Runtime:
    """MPI, initialised.

    Attributes:
        MPI: mpi4py's module.
        rank, size: of this process in MPI's world.
        level: the thread level, as text.
        ours: whether this library initialised MPI, and so finalises it.
        owner: the thread that makes all calls of MPI; None where any thread may.
        types: MPI's datatype for each element type's name.
        largest_tag: the largest tag that the library takes.
        largest_count: most elements that one call of MPI takes; more go in several.
        polls: whether nonblocking collectives are to be used: where they are as good as the blocking ones (Open
            MPI's are several times slower), since they can be given up, or where one thread makes all calls.
        posts_addresses: whether nonblocking collectives take pointers to a GPU's memory where the blocking ones do.
            Open MPI's do not: reductions among them read the memory on the host (its issues 9845 and 12045), and of
            the others its documentation says so for some transports.
        cuda: whether MPI takes pointers to a GPU's memory in this process, and how that is known.
        left_behind: requests that were given up; they keep their arrays alive, for MPI may still use them.
    """

    def __init__(self, patience: float) -> None:
        self.owner: Owner | None = None
        override()  # whether it is a word that we know
        self.MPI, self.ours = self._initialize(patience)
        mpi = self.MPI
        world = mpi.COMM_WORLD
        self.rank: int = self.call(world.Get_rank)
        self.size: int = self.call(world.Get_size)
        self.level = _LEVELS[self._levels().index(self.call(mpi.Query_thread))]
        self.types: dict[str, Any] = {name: getattr(mpi, kind) for name, kind in _NATIVE.items()}
        self.largest_tag: int = self.call(world.Get_attr, mpi.TAG_UB) or 32767
        self.largest_count = (1 << 62) if mpi.VERSION >= 4 else (1 << 31) - 1
        self.library = _short(self.call(mpi.Get_library_version))
        self.polls = self.owner is not None or any(
            name in self.library.lower() for name in ("mpich", "intel")
        )
        self.posts_addresses = "mpich" in self.library.lower()
        self.cuda = self.call(find_out, mpi, self.library)
        log.info("mpi: %s; arrays on a GPU that come to it are %s", self.describe(), self.cuda)
        self.left_behind: list[Any] = []
        self.before_end: list[Callable[[], None]] = []  # what ends the threads that use MPI
        self.lost: dict[int, str] = {}  # processes of MPI's world that have died, with what is known of it
        self.patience = default_pg_timeout.total_seconds()
        self.jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self.groups: weakref.WeakSet[Backend] = weakref.WeakSet()
        self.members: weakref.WeakSet[Members] = weakref.WeakSet()
        self.making = threading.Lock()
        """Held while a communicator is made: all processes make theirs in the same order."""
        self._parent: Any = None
        self._uncaught: BaseException | None = None
        self._pid = os.getpid()
        self._watch_the_exit()

    # --- starting -------------------------------------------------------------------------------------------------

    def _initialize(self, patience: float) -> tuple[Any, bool]:
        wanted = _wanted_level()
        ours = False
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
            ours = self._start(lambda: initialize(_LEVELS.index(wanted)), wanted, patience)
        with _no_warnings():
            from mpi4py import MPI
        self.MPI = MPI
        if MPI.Is_finalized():
            raise BackendUnavailableError(
                "backend 'mpi': MPI has been finalised in this process and cannot be started anew"
            )
        if not MPI.Is_initialized():
            level = self._levels()[_LEVELS.index(wanted)]
            ours = self._start(lambda: MPI.Init_thread(level) is not None, wanted, patience)
        given = MPI.Query_thread()
        if given < MPI.THREAD_MULTIPLE and self.owner is None:
            if ours and given < MPI.THREAD_SERIALIZED:
                raise BackendUnavailableError(
                    f"backend 'mpi': this MPI library has thread level {_LEVELS[self._levels().index(given)]} only:"
                    " set UNICOLL_MPI_THREAD_LEVEL=funneled, so that one thread starts it and makes all its calls"
                )
            self.owner = Owner()
        return MPI, ours

    def _start(self, start: Callable[[], bool], wanted: str, patience: float) -> bool:
        if wanted != "multiple" and self.owner is None:
            self.owner = Owner()  # MPI counts the thread that starts it as its main one
        with _no_warnings(), _limit(patience, "MPI_Init_thread: not all processes have called it"):
            return bool(self.call(start))

    def _levels(self) -> list[int]:
        mpi = self.MPI
        return [mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE]

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)``, which uses MPI, on a thread that may."""
        return fn(*args) if self.owner is None else self.owner.call(fn, *args)

    def describe(self) -> str:
        """Library and thread level."""
        ours = "" if self.ours else ", initialised by other code"
        owned = ""
        if self.owner is not None:
            owned = ", all calls by one thread" + (
                "" if self.ours else " (use MPI yourself only when it is idle)"
            )
        return f"{self.library}, thread level {self.level}{owned}{ours}"

    @property
    def serves(self) -> bool:
        """Whether MPI may be used at any time: where others initialised it for one thread, they use it, too."""
        return self.ours or self.owner is None

    # --- communicators ----------------------------------------------------------------------------------------------

    def parent(self, deadline: float) -> Any:
        """A copy of MPI's world for this library alone; the first call is collective over all of MPI's processes.

        Raises:
            OperationTimeoutError: not all of them have called by ``deadline``.
        """
        with self.making:
            if self._parent is None:
                self._parent = self._copy_world(deadline)
            return self._parent

    def _copy_world(self, deadline: float) -> Any:
        world = self.MPI.COMM_WORLD
        comm, request = self.call(world.Idup)
        started = time.monotonic()
        while not self.call(request.Test):
            if time.monotonic() >= deadline:
                self.left_behind.append(request)
                raise OperationTimeoutError(
                    f"init_process_group: after {time.monotonic() - started:.0f} s not all {self.size} processes that"
                    f" MPI started have called it (this is rank {self.rank})",
                    op="init_process_group",
                )
            if time.monotonic() - started > 0.05:
                time.sleep(_NAP_S)
        self.call(comm.Set_errhandler, self.MPI.ERRORS_RETURN)
        return comm

    @property
    def has_parent(self) -> bool:
        """Whether :meth:`parent` has been made."""
        return self._parent is not None

    # --- ends -----------------------------------------------------------------------------------------------------

    def _watch_the_exit(self) -> None:
        before = sys.excepthook

        def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            before(kind, value, trace)
            if os.getpid() == self._pid:
                self._uncaught = value
                if _aborts():
                    self.abort(value, " (UNICOLL_MPI_ABORT=0 leaves that to mpirun)")

        sys.excepthook = hook
        forks.in_child(_forget)
        if self.ours:
            atexit.register(self._leave)

    def abort(self, error: BaseException, hint: str = "") -> None:
        """End the whole job, telling the other processes why first."""
        for job in list(self.jobs):
            if job.control is not None:
                job.control.close(error)
        sys.stdout.flush()
        first_line = str(error).partition("\n")[0]  # the traceback has the rest
        sys.stderr.write(
            f"unicoll: rank {self.rank} ends the MPI job{hint}: {type(error).__name__}: {first_line}\n"
        )
        sys.stderr.flush()
        time.sleep(_LAST_WORDS_S)
        self.MPI.COMM_WORLD.Abort(130 if isinstance(error, KeyboardInterrupt) else 1)

    def _leave(self) -> None:
        """At exit: finalise MPI, once all processes have come to this point."""
        if os.getpid() != self._pid or self.MPI.Is_finalized():
            return
        if self._uncaught is not None:  # mpirun sees the exit code and ends the others
            return
        for group in list(self.groups):  # those that were made before MPI's own end was registered
            group.close()
        for members in list(self.members):
            members.note_the_dead()
        if self.lost:
            log.warning(
                "MPI is left as it is, for it cannot be finalised without all processes: %s", self.lost
            )
            return
        self._await_others()
        for end in self.before_end:
            end()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with _limit(_FINALIZE_S, "MPI_Finalize"):
            self.call(self.MPI.Finalize)
        if self.owner is not None:
            self.owner.close()

    def _await_others(self) -> None:
        """Return when all processes of MPI's world have come to their exit."""
        if self.size == 1:
            return
        request = self.call(self.MPI.COMM_WORLD.Ibarrier)
        deadline = time.monotonic() + self.patience
        nap = 0.0002
        while not self.call(request.Test):
            if time.monotonic() >= deadline:
                self.abort(
                    DistError(
                        f"rank {self.rank} waited {self.patience:g} s at exit for processes that do not end"
                    )
                )
            time.sleep(nap)
            nap = min(2 * nap, 0.02)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """mpi4py warns of another library's mpirun; we say so ourselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@contextmanager
def _limit(seconds: float, what: str) -> Iterator[None]:
    """A time limit for calls of MPI that nothing can interrupt: the process ends."""
    timer = threading.Timer(seconds, _end, (f"{what}, after {seconds:g} s",))
    timer.daemon = True
    cancel = timer.cancel
    try:
        timer.start()
    except RuntimeError:  # from Python 3.12 on an ending interpreter starts no threads; this one is C's
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        cancel = faulthandler.cancel_dump_traceback_later
    try:
        yield
    finally:
        cancel()


def _end(what: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"unicoll: process {os.getpid()} ends: OperationTimeoutError: {what}\n")
    sys.stderr.flush()
    time.sleep(_LAST_WORDS_S)
    os._exit(1)


def _aborts() -> bool:
    """Whether an uncaught exception ends the job: not in an interactive interpreter, and not if switched off."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return False
    return bool(settings.flag("UNICOLL_MPI_ABORT"))


def _wanted_level() -> str:
    return settings.choice("UNICOLL_MPI_THREAD_LEVEL")


def _short(version: str) -> str:
    """``Open MPI 5.0.11``, ``MPICH 5.0.2`` from a library's long text."""
    lines = [line.strip() for line in version.replace("\0", "").splitlines() if line.strip()]
    head = lines[0].partition(",")[0] if lines else "an unknown MPI library"
    if head.lower().startswith("mpich version"):
        return f"MPICH {head.partition(':')[2].strip()}"
    return head.replace("MPI v", "MPI ")


_runtime: Runtime | None = None
_starting = threading.Lock()


def runtime(patience: float = _START_S) -> Runtime:
    """MPI in this process; starts it at the first call, which ends the process if it takes ``patience`` seconds.

    Raises:
        BackendUnavailableError: it cannot be used here.
    """
    global _runtime
    with _starting:
        if _runtime is None:
            reason = reason_against()
            if reason is not None:
                raise BackendUnavailableError(f"backend 'mpi': {reason}")
            _runtime = Runtime(patience)
        return _runtime


def started() -> bool:
    """Whether this library uses MPI in this process."""
    return _runtime is not None


def _forget() -> None:
    """A forked child must not touch its parent's MPI."""
    global _runtime
    _runtime = None
