"""MPI in this process: initialisation, thread level, abort and finalisation.

:func:`runtime` initialises MPI at the first call, unless other code has initialised it. It requests
MPI_THREAD_MULTIPLE (``UNICOLL_MPI_THREAD_LEVEL`` requests a lower level); with a lower level one
thread makes all MPI calls, the :class:`~mpi_comm.runtime.mpi_thread.MPIThread`. If other code has
initialised MPI with a lower level, that code must not call MPI while operations of this library are
in flight.

An uncaught exception ends the whole job by MPI_Abort, after the traceback (``UNICOLL_MPI_ABORT=0``
disables that): the other processes would wait for this one for ever. Not if MPI's world has one
process, as under ``srun --mpi=none``. A process that exits normally waits for the others before it
finalises MPI, because their pending operations need it. MPI is finalised only if this library
initialised it.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpi_comm.runtime.cuda_aware import detect, user_setting
from mpi_comm.runtime.library import initialize, reason_against
from mpi_comm.runtime.mpi_thread import MPIThread
from unicoll.arrays.types import MOVED, default_pg_timeout
from unicoll.errors import BackendUnavailableError, DistError, OperationTimeoutError
from unicoll.process import environment, excepthook, fork_safety, logs
from unicoll.process.timeouts import backoff

if TYPE_CHECKING:
    from mpi_comm.backend import MPIBackend
    from mpi_comm.runtime.communicators import WorldRanks
    from unicoll.backend import Job

log = logs.logger("mpi")

_START_S = 300.0
_FINALIZE_S = 15.0
"""Time limit of MPI_Finalize once all processes have reached it."""
_POLL_S = 0.002
_FLUSH_S = 0.2
"""Delay before MPI_Abort: mpirun ends all processes at once and must forward their output first."""
_LEVELS = ("single", "funneled", "serialized", "multiple")
_MPI_TYPES = {
    "bool": "UINT8_T",
    "uint8": "UINT8_T",
    "int8": "INT8_T",
    "uint16": "UINT16_T",
    "int16": "INT16_T",
    "uint32": "UINT32_T",
    "int32": "INT32_T",
    "uint64": "UINT64_T",
    "int64": "INT64_T",
    "float16": "UINT16_T",
    "bfloat16": "UINT16_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
    "float8_e4m3fn": "UINT8_T",
    "float8_e5m2": "UINT8_T",
}
"""MPI's datatype by element type; types that MPI cannot reduce are moved as integers
(:mod:`mpi_comm.reductions`)."""


class Runtime:
    """MPI, initialised.

    Attributes:
        MPI: mpi4py's module.
        rank, size: of this process in MPI_COMM_WORLD.
        level: the thread level, as text.
        must_finalize: True if this library initialised MPI.
        mpi_thread: the thread that makes all MPI calls; None if any thread may call MPI.
        any_thread_calls: True if any thread may call MPI; the watchdog calls it between operations
            then.
        types: MPI's datatype by the element type's name.
        largest_tag: MPI_TAG_UB.
        largest_count: most elements of one MPI call; larger arrays need several calls.
        prefers_nonblocking: True if nonblocking collectives are used: if they are as fast as the
            blocking ones (Open MPI's are several times slower), since waiting for them can time
            out, or if one thread makes all MPI calls.
        nonblocking_takes_device: True if nonblocking collectives take device pointers if the
            blocking ones do. Open MPI's do not: its nonblocking reductions read the memory on the
            host (its issues 9845 and 12045), and its documentation excludes the others for some
            transports.
        blocking_excludes_threads: True if no other thread can call MPI while one waits in a
            blocking collective, so that those of two groups can deadlock: Intel MPI 2021.18 holds
            its lock in those over shared memory.
        gathers_in_small_parts: True if the nonblocking allgatherv moves parts as small as the
            smallest contribution, each in a call of MPI_Test of its own. With Intel MPI 2021.18,
            two ranks on one host with 2 busy cores, and MPI's shared memory, 10 and 70,000 elements
            take 5 s.
        cuda: CUDA-awareness of MPI in this process.
        abandoned: requests given up, with their arrays, kept alive because MPI may still use them.
        before_end: functions that stop the threads that use MPI, called before MPI is finalised.
        lost: why each process that has died did, by its rank in MPI_COMM_WORLD.
        exit_timeout: seconds that this process waits for the others at exit.
        creation_lock: held while a communicator is created: all processes create theirs in the same
            order.
        interrupted_creation: the group whose communicator may have been created by some processes
            only, or "".
    """

    def __init__(self, timeout: float) -> None:
        # These two are first: the MPI thread, which _initialize() may start, reads the groups if it
        # fails.
        self.mpi_thread: MPIThread | None = None
        self.groups: weakref.WeakSet[MPIBackend] = weakref.WeakSet()
        # This raises on an invalid value before MPI is initialised.
        user_setting()
        self.MPI, self.must_finalize = self._initialize(timeout)
        mpi = self.MPI
        world = mpi.COMM_WORLD
        self.rank: int = self.call(world.Get_rank)
        self.size: int = self.call(world.Get_size)
        self.level = _LEVELS[self._levels().index(self.call(mpi.Query_thread))]
        types = {d.name: f"UINT{8 * d.itemsize}_T" for d in MOVED} | _MPI_TYPES
        self.types: dict[str, Any] = {name: getattr(mpi, kind) for name, kind in types.items()}
        self.largest_tag: int = self.call(world.Get_attr, mpi.TAG_UB) or 32767
        self.largest_count = (1 << 62) if mpi.VERSION >= 4 else (1 << 31) - 1
        version = self.call(mpi.Get_library_version)
        self.library = _short_version(version)
        self.any_thread_calls = self.mpi_thread is None
        self.prefers_nonblocking = self.mpi_thread is not None or any(
            name in self.library.lower() for name in ("mpich", "intel")
        )
        is_intel = "intel" in self.library.lower()
        self.nonblocking_takes_device = is_intel or "mpich" in self.library.lower()
        self.blocking_excludes_threads = self.gathers_in_small_parts = is_intel
        self.cuda = self.call(detect, mpi, self.library)
        log.info("mpi: %s; CUDA arrays are %s", self.describe(), self.cuda)
        self.abandoned: list[Any] = []
        self.before_end: list[Callable[[], None]] = []
        self.lost: dict[int, str] = {}
        self.exit_timeout = default_pg_timeout.total_seconds()
        self.jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self.world_ranks: weakref.WeakSet[WorldRanks] = weakref.WeakSet()
        self.creation_lock = threading.Lock()
        self.interrupted_creation = ""
        self._parent: Any = None
        self._uncaught: BaseException | None = None
        self._pid = os.getpid()
        self._install_exit_hooks()

    # --- starting ---------------------------------------------------------------------------------

    def _initialize(self, timeout: float) -> tuple[Any, bool]:
        wanted = _wanted_level()
        initialized = False
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            # The import of mpi4py.MPI would initialise MPI, with the GIL held until all processes
            # have called it.
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
            initialized = self._start(lambda: initialize(_LEVELS.index(wanted)), wanted, timeout)
        with _no_warnings():
            from mpi4py import MPI
        # The functions below, which use _levels(), need it before the constructor has it.
        self.MPI = MPI
        if MPI.Is_finalized():
            raise BackendUnavailableError(
                "backend 'mpi': MPI has been finalised in this process and cannot be initialised"
                " again"
            )
        if not MPI.Is_initialized():
            # Other code has imported mpi4py without initialising MPI, or initialize() found no
            # library to call.
            level = self._levels()[_LEVELS.index(wanted)]
            initialized = self._start(lambda: MPI.Init_thread(level) is not None, wanted, timeout)
        provided = MPI.Query_thread()
        if provided < MPI.THREAD_MULTIPLE and self.mpi_thread is None:
            if initialized and provided < MPI.THREAD_SERIALIZED:
                # Below MPI_THREAD_SERIALIZED only the thread that has initialised MPI may call it.
                # That was this one, which belongs to the program.
                raise BackendUnavailableError(
                    "backend 'mpi': this MPI library has thread level"
                    f" {_LEVELS[self._levels().index(provided)]} only: set"
                    " UNICOLL_MPI_THREAD_LEVEL=funneled, so that one thread starts it and makes"
                    " all its calls"
                )
            self.mpi_thread = MPIThread(self._mpi_thread_failed)
        return MPI, initialized

    def _start(self, start: Callable[[], bool], wanted: str, timeout: float) -> bool:
        if wanted != "multiple" and self.mpi_thread is None:
            # The thread that initialises MPI is its main thread, which below MPI_THREAD_SERIALIZED is
            # the only one that may call it.
            self.mpi_thread = MPIThread(self._mpi_thread_failed)
        with (
            _no_warnings(),
            _exit_after(timeout, "MPI_Init_thread: not all processes have called it"),
        ):
            return bool(self.call(start))

    def _levels(self) -> list[int]:
        mpi = self.MPI
        return [mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE]

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)``, which calls MPI, on a thread that may call it."""
        return fn(*args) if self.mpi_thread is None else self.mpi_thread.call(fn, *args)

    @property
    def callable(self) -> bool:
        """False if the thread that makes all MPI calls has failed."""
        return self.mpi_thread is None or not self.mpi_thread.failed

    def _mpi_thread_failed(self, cause: BaseException) -> None:
        for group in list(self.groups):
            group.thread_failed(cause)

    def describe(self) -> str:
        """Library and thread level."""
        initialized = "" if self.must_finalize else ", initialised by other code"
        one_thread = ""
        if self.mpi_thread is not None:
            one_thread = ", all calls by one thread" + (
                ""
                if self.must_finalize
                else " (the program must not call MPI while operations of unicoll are in flight)"
            )
        return f"{self.library}, thread level {self.level}{one_thread}{initialized}"

    @property
    def usable_concurrently(self) -> bool:
        """True if MPI may be called at any time: not if other code initialised it below
        MPI_THREAD_MULTIPLE."""
        return self.must_finalize or self.mpi_thread is None

    def make_progress(self) -> None:
        """Call MPI, which moves messages only then; any thread, with MPI_THREAD_MULTIPLE."""
        # The watchdog, which calls this, does not end before MPI is finalised.
        if not self.MPI.Is_finalized():
            self.MPI.COMM_WORLD.Iprobe()

    # --- communicators ----------------------------------------------------------------------------

    def parent(self, deadline: float) -> Any:
        """This library's duplicate of MPI_COMM_WORLD; the first call is collective over all its
        processes.

        Raises:
            OperationTimeoutError: not all processes have called this by ``deadline``.
        """
        with self.creation_lock:
            if self._parent is None:
                self._parent = self._copy_world(deadline)
            return self._parent

    def _copy_world(self, deadline: float) -> Any:
        world = self.MPI.COMM_WORLD
        # The duplication is nonblocking, so that the wait for processes that do not call it has a
        # deadline.
        comm, request = self.call(world.Idup)
        started = time.monotonic()
        while not self.call(request.Test):
            if time.monotonic() >= deadline:
                self.abandoned.append(request)
                raise OperationTimeoutError(
                    f"init_process_group: after {time.monotonic() - started:.0f} s not all"
                    f" {self.size} processes that MPI started have called it (this is rank"
                    f" {self.rank})",
                    op="init_process_group",
                )
            if time.monotonic() - started > 0.05:
                time.sleep(_POLL_S)
        self.call(comm.Set_errhandler, self.MPI.ERRORS_RETURN)
        return comm

    # --- exit -------------------------------------------------------------------------------------

    def _install_exit_hooks(self) -> None:
        excepthook.install(after=self._handle_uncaught)
        fork_safety.in_child(_reset_in_child)
        if self.must_finalize:
            atexit.register(self._finalize_at_exit)

    def _handle_uncaught(self, error: BaseException) -> None:
        # A forked child has inherited the hook, and must not end its parent's job.
        if os.getpid() == self._pid:
            self._uncaught = error
            if self.size > 1 and _abort_enabled():
                self.abort(error, " (UNICOLL_MPI_ABORT=0 leaves that to the launcher)")

    def abort(self, error: BaseException, hint: str = "") -> None:
        """End the whole job by MPI_Abort, after notifying the other ranks of the reason."""
        for job in list(self.jobs):
            if job.control is not None:
                job.control.close(error)
        sys.stdout.flush()
        # The rest of a long error is in the traceback, if there is one.
        first_line = str(error).partition("\n")[0]
        sys.stderr.write(
            f"unicoll: rank {self.rank} ends the MPI job{hint}: {type(error).__name__}:"
            f" {first_line}\n"
        )
        sys.stderr.flush()
        time.sleep(_FLUSH_S)
        self.MPI.COMM_WORLD.Abort(130 if isinstance(error, KeyboardInterrupt) else 1)

    def _finalize_at_exit(self) -> None:
        """At exit: finalise MPI, once all processes have reached their exit."""
        if os.getpid() != self._pid or self.MPI.Is_finalized():
            return
        # Mpirun sees the exit code and ends the other processes. MPI_Finalize is not called, since
        # it would wait for them. A process alone in its world does finalise MPI, since MPICH would
        # leave its shared memory in /dev/shm.
        if self._uncaught is not None and self.size > 1:
            return
        # Groups that the program has not destroyed have threads and operations that call MPI.
        for group in list(self.groups):
            group.close()
        for world_ranks in list(self.world_ranks):
            world_ranks.record_departed()
        if not self.callable:
            log.warning("MPI is not finalised, because the thread that calls it has failed")
            return
        if self.lost:
            lost = "; ".join(
                f"rank {rank} of MPI ({cause})" for rank, cause in sorted(self.lost.items())
            )
            log.warning("MPI is not finalised, because processes have died: %s", lost)
            return
        self._exit_barrier()
        # This is behind the barrier: until then other processes may need the store on rank 0.
        for end in self.before_end:
            end()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with _exit_after(_FINALIZE_S, "MPI_Finalize"):
            self.call(self.MPI.Finalize)
        if self.mpi_thread is not None:
            self.mpi_thread.close()

    def _exit_barrier(self) -> None:
        """Return when all processes of MPI_COMM_WORLD have reached their exit."""
        if self.size == 1:
            return
        # MPI_Finalize may wait for all processes, too, but has no deadline.
        request = self.call(self.MPI.COMM_WORLD.Ibarrier)
        deadline = time.monotonic() + self.exit_timeout
        pauses = backoff(0.0002, 0.02)
        while not self.call(request.Test):
            if time.monotonic() >= deadline:
                self.abort(
                    DistError(
                        f"rank {self.rank} waited {self.exit_timeout:g} s at exit for processes"
                        " that do not exit"
                    )
                )
            time.sleep(next(pauses))


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Suppress mpi4py's warning about another library's mpirun: the bootstrap raises an error
    instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@contextmanager
def _exit_after(seconds: float, what: str) -> Iterator[None]:
    """A time limit for MPI calls that cannot be interrupted: the process exits."""
    timer = threading.Timer(seconds, _exit_on_timeout, (f"{what}, after {seconds:g} s",))
    timer.daemon = True
    cancel = timer.cancel
    try:
        timer.start()
    except RuntimeError:
        # Python 3.12 starts no threads at exit; faulthandler's is a C thread.
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        cancel = faulthandler.cancel_dump_traceback_later
    try:
        yield
    finally:
        cancel()


def _exit_on_timeout(what: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"unicoll: process {os.getpid()} ends: OperationTimeoutError: {what}\n")
    sys.stderr.flush()
    time.sleep(_FLUSH_S)
    # This is the timer's thread, and the main thread is inside MPI: nothing else ends the process.
    os._exit(1)


def _abort_enabled() -> bool:
    """True if an uncaught exception ends the job: not in an interactive interpreter, and not if
    disabled."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return False
    return bool(environment.flag("UNICOLL_MPI_ABORT"))


def _wanted_level() -> str:
    return environment.choice("UNICOLL_MPI_THREAD_LEVEL")


def _short_version(version: str) -> str:
    """``Open MPI 5.0.11``, ``MPICH 5.0.2`` or ``Intel MPI 2021.18.1``, from the text of
    MPI_Get_library_version."""
    lines = [line.strip() for line in version.replace("\0", "").splitlines() if line.strip()]
    head = lines[0].partition(",")[0] if lines else "an unknown MPI library"
    if head.lower().startswith("mpich version"):
        return f"MPICH {head.partition(':')[2].strip()}"
    return (
        head.partition(" for ")[0]
        .replace("MPI v", "MPI ")
        .replace("Intel(R) MPI Library", "Intel MPI")
    )


_runtime: Runtime | None = None
_starting = threading.Lock()


def runtime(timeout: float = _START_S) -> Runtime:
    """MPI in this process; the first call initialises it, and exits the process if that takes
    ``timeout`` seconds.

    Raises:
        BackendUnavailableError: MPI cannot be used in this process.
    """
    global _runtime
    with _starting:
        if _runtime is None:
            reason = reason_against()
            if reason is not None:
                raise BackendUnavailableError(f"backend 'mpi': {reason}")
            _runtime = Runtime(timeout)
        return _runtime


def _reset_in_child() -> None:
    """A forked child must not use its parent's MPI."""
    global _runtime
    _runtime = None
