"""Ranks on this machine's GPU, or on the simulated device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tests.gpu.check import rank_jobs
from tests.gpu.check.forked import ForkedJob
from tests.gpu.check.record import Skip, description_of, headline
from tests.mpi.mpi_ranks import MpiJob, unavailable_reason
from tests.nccl.device_ranks import DeviceJob, DeviceMpiJob
from tests.simulated_nccl import ranks as simulated_ranks
from tests.simulated_nccl.ranks import Settings, SimulatedJob
from unicoll.backend import Backend
from unicoll.group import registry
from unicoll.testing import worker
from unicoll.testing.ranks import Pool, ProcessJob, RanksFailed

__all__ = [
    "GPU",
    "HOST_BACKENDS",
    "PROGRAM_S",
    "Place",
    "Ranks",
    "Simulation",
    "called",
    "host_backend",
    "joined",
    "leave",
    "start",
]

PROGRAM_S = 10.0
"""Seconds that ranks have for a call."""
_START_S = 60.0
"""Seconds for imports and the first kernels of array libraries, whose files may be on a slow disk."""

HOST_BACKENDS = ("gloo", "mpi")
"""Backends of host arrays, which take device arrays through the host's memory."""


def host_backend(name: str) -> type[Backend]:
    """One of :data:`HOST_BACKENDS`.

    Raises:
        Skip: it cannot be used here.
    """
    if name == "mpi" and unavailable_reason():
        raise Skip(unavailable_reason())
    return registry.load(name)


class Place(ABC):
    """A kind of device.

    Attributes:
        kits: names of the available array libraries, see :mod:`tests.gpu.check.kits`.
        families: their names in :mod:`unicoll.testing.families`.
        simulated: True if times are meaningless.
        patience: seconds that ranks have for a call.
        sharing: see :data:`device_ranks.SHARING`.
        devices: number of devices of this machine.
    """

    families: tuple[str, ...] = ()
    simulated = False
    devices = 1

    def __init__(self, kits: Sequence[str], patience: float = PROGRAM_S, sharing: str = "auto") -> None:
        self.kits = tuple(kits)
        self.patience = patience
        self.sharing = sharing

    @abstractmethod
    def job(
        self,
        size: int,
        backend: str,
        kits: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
        fresh: bool = True,
    ) -> ProcessJob:
        """Ranks that share one device, before they join; they import the libraries of these kits, by default of all.

        With ``fresh=False`` they need no interpreter of their own.
        """


class GPU(Place):
    """This machine's first GPU; ``kits`` are the array libraries that work."""

    def __init__(self, kits: Sequence[str], patience: float = PROGRAM_S, sharing: str = "auto") -> None:
        super().__init__(sorted(kits), patience, sharing)
        self.families = tuple({"cupy": "cupy", "torch": "torch_cuda"}[name] for name in self.kits)

    def job(
        self,
        size: int,
        backend: str,
        kits: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
        fresh: bool = True,
    ) -> ProcessJob:
        needed = self.kits if kits is None else kits
        first = tuple(sorted(needed, reverse=True))  # torch brings an NCCL
        if "mpi" in backend:
            return DeviceMpiJob(size, env=env, backend=backend, libraries=first)
        return DeviceJob(size, env=env, backend=backend, libraries=first, sharing=self.sharing)


class Simulation(Place):
    """A simulated device and NCCL."""

    families = ("simulated",)
    simulated = True
    devices = 2

    def __init__(self, kits: Sequence[str] = (), patience: float = PROGRAM_S, sharing: str = "auto") -> None:
        super().__init__(["simulated"], patience, sharing)

    def job(
        self,
        size: int,
        backend: str,
        kits: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
        fresh: bool = True,
    ) -> ProcessJob:
        env = {"UNICOLL_NCCL_SHARE_DEVICE": "1"} | (env or {})
        if "mpi" in backend:
            settings = Settings(policy="random", seed=5, backend=backend)
            return MpiJob(
                size, backend=backend, env=env, warm_up=True, prepare=(simulated_ranks.prepare, settings)
            )
        kind = SimulatedJob if fresh else ForkedJob
        return kind(size, env=env, backend=backend, devices="shared", policy="random", seed=5)


def start(
    place: Place,
    size: int,
    kits: Sequence[str] | None = None,
    *,
    backend: str = "cpu:gloo,cuda:nccl",
    timeout: float = 60.0,
    counting: bool = False,
    device: int | None = None,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    modules: Sequence[str] = (),
    enter: tuple[Any, ...] | None = None,
) -> ProcessJob:
    """Ranks that have joined a job of their own.

    Args:
        place: kind of device.
        size: number of ranks.
        kits: libraries that they import; None for all.
        backend: backend of the default group.
        timeout: of their groups, seconds.
        counting: whether CUDA calls are counted.
        device: the device that they are bound to.
        env: more environment variables.
        fresh: whether each has to have an interpreter of its own.
        modules: that they import before they join.
        enter: a function by which they join in place of the usual one, and its arguments.
    """
    job = place.job(size, backend, kits, env, fresh)
    try:
        if counting:
            called(place, job, rank_jobs.count_cuda_calls)
        libraries = place.kits if kits is None else tuple(kits)
        called(place, job, rank_jobs.ready, libraries, tuple(modules), timeout=_START_S)
        called(place, job, *(enter or (rank_jobs.enter, timeout, device)))
    except BaseException:
        job.close()
        raise
    return job


@contextmanager
def joined(
    place: Place, size: int, kits: Sequence[str] | None = None, **options: Any
) -> Iterator[ProcessJob]:
    """As :func:`start`, for a block; ranks that have not left at its end are killed."""
    with start(place, size, kits, **options) as job:
        yield job


def called(
    place: Place, job: ProcessJob, function: Callable[..., Any], *args: Any, timeout: float | None = None
) -> list[Any]:
    """Call a function on the ranks; the results.

    Args:
        place: kind of device.
        job: the ranks.
        function, args: the call.
        timeout: seconds for it; None is the place's patience.

    Raises:
        RanksFailed: one failed, died or hung; the first line names the first of them and its error.
    """
    job.call(function, *args)
    try:
        outcomes = job.collect(place.patience if timeout is None else timeout, fail_fast=True)
        report = ""
    except RanksFailed as error:
        outcomes, report = job.outcomes, str(error)
    for outcome in sorted(outcomes, key=lambda o: o.at):
        if outcome.failure is not None:
            why = f"rank {outcome.rank}: {outcome.failure.type}: {outcome.failure.message}"
            raise RanksFailed(f"{why}\n{report or job.report()}")
        if outcome.returncode is not None:
            raise RanksFailed(
                f"rank {outcome.rank} ended with {outcome.returncode}\n{report or job.report()}"
            )
    if report:
        raise RanksFailed(report)
    return [outcome.value for outcome in outcomes]


def leave(
    place: Place,
    job: ProcessJob,
    ranks: Sequence[int] | None = None,
    function: Callable[[], list[str]] | None = None,
) -> None:
    """Leave the job on all ranks or some, by a function or as usual, and wait for their ends.

    Raises:
        RanksFailed: a rank failed, or left threads or device memory behind.
    """
    thorough = place.simulated and ranks is None  # only the simulation can list leftovers
    job.call(function or (worker.leave if thorough else rank_jobs.leave), ranks=ranks)
    outcomes = job.collect(place.patience, ranks=ranks)
    left = [outcome.value for outcome in outcomes]
    if any(outcome.failure is not None for outcome in outcomes):
        raise RanksFailed(job.report())
    job.call(worker.end, ranks=ranks)
    codes = job.wait_for_exit(
        place.patience, *([] if ranks is None else [ranks])
    )  # under mpirun all end together
    if any(left) or any(codes):
        raise RanksFailed(f"left over: {left}; exit codes {codes}\n{job.report()}")


class Ranks(Pool):
    """Ranks that have joined: started at the first call, and again after a call in which a rank hung or died.

    Args:
        place: kind of device.
        size: number of ranks.
        kits: libraries that they import; None for all.
        first: calls after joining, each a function and its arguments.
        leave: how they leave, where that is not by :func:`leave`; gives what is left over.
        options: of :func:`start`.
    """

    def __init__(
        self,
        place: Place,
        size: int,
        kits: Sequence[str] | None = None,
        first: Sequence[tuple[Any, ...]] = (),
        leave: Callable[[], list[str]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(size)
        self.place = place
        self._start = partial(start, place, size, kits, **options)
        self._first = first
        self._leave = leave
        self._useless = ""

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Each rank's result; RanksFailed if any failed or hung, Skip if ranks could not be started."""
        if self._useless:
            raise Skip(f"ranks could not be started: {self._useless}")
        if self._job is None:
            try:
                self._job = self._start()
                for call in self._first:
                    called(self.place, self._job, *call)
            except BaseException as error:
                self._useless = headline(description_of(error))
                self._drop()
                raise
        try:
            return called(self.place, self._job, function, *args, timeout=timeout)
        except BaseException:
            if any(o.returncode is not None or not o.finished for o in self._job.outcomes):
                self._drop()
            raise

    @property
    def running(self) -> bool:
        """True if there are usable ranks."""
        return self._job is not None

    def _drop(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()

    def depart(self) -> None:
        """As :meth:`close` if there are ranks, else Skip."""
        if not self.running:
            raise Skip("there are no ranks any more")
        self.close()

    def close(self) -> None:
        """Leave the job, in order."""
        job, self._job = self._job, None
        if job is not None:
            with job:
                leave(self.place, job, function=self._leave)
