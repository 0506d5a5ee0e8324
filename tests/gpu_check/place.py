"""Where ranks run: on this machine's GPU, or on the simulated device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import simulated_ranks
from device_ranks import DeviceJob, DeviceMpiJob
from mpi_ranks import MpiJob, why_not
from simulated_ranks import Settings, SimulatedJob

from unicoll import registry
from unicoll.backend import Backend
from unicoll.testing import worker
from unicoll.testing.ranks import Job, Pool, RanksFailed

from . import rank_jobs
from .forked import ForkedJob
from .record import Skip, headline, story

__all__ = [
    "GPU", "HOST_BACKENDS", "PROGRAM_S", "Place", "Ranks", "Simulation", "called", "host_backend", "joined", "leave",
    "start",
]  # fmt: skip

PROGRAM_S = 10.0
"""Seconds in which ranks must have done what they are called to; a hang costs no more."""
_START_S = 60.0
"""The same for imports and the first kernels of array libraries, whose files may be on a slow disk."""

HOST_BACKENDS = ("gloo", "mpi")
"""Backends of host arrays, which serve those of a device through the host's memory."""


def host_backend(name: str) -> type[Backend]:
    """One of :data:`HOST_BACKENDS`.

    Raises:
        Skip: it cannot be used here.
    """
    if name == "mpi" and why_not():
        raise Skip(why_not())
    return registry.load(name)


class Place(ABC):
    """A kind of device.

    Attributes:
        kits: names of the array libraries that are there, see :mod:`gpu_check.kits`.
        families: the same in the terms of tests/families.py.
        simulated: whether times mean nothing.
        patience: seconds in which ranks must have done what they are called to.
        sharing: see :data:`device_ranks.SHARING`.
    """

    families: tuple[str, ...] = ()
    simulated = False

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
    ) -> Job:
        """Ranks that share one device, not joined yet; they import the libraries of these kits, else of all.

        Those that are not ``fresh`` need not have an interpreter of their own.
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
    ) -> Job:
        needed = self.kits if kits is None else kits
        first = tuple(sorted(needed, reverse=True))  # torch brings an NCCL
        if "mpi" in backend:
            return DeviceMpiJob(size, env=env, backend=backend, libraries=first)
        return DeviceJob(size, env=env, backend=backend, libraries=first, sharing=self.sharing)


class Simulation(Place):
    """A simulated device and NCCL."""

    families = ("simulated",)
    simulated = True

    def __init__(self, kits: Sequence[str] = (), patience: float = PROGRAM_S, sharing: str = "auto") -> None:
        super().__init__(["simulated"], patience, sharing)

    def job(
        self,
        size: int,
        backend: str,
        kits: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
        fresh: bool = True,
    ) -> Job:
        env = {"UNICOLL_NCCL_SHARE_DEVICE": "1"} | (env or {})
        if "mpi" in backend:
            settings = Settings(policy="random", seed=5, backend=backend)
            return MpiJob(
                size, backend=backend, env=env, rehearse=True, prepare=(simulated_ranks.prepare, settings)
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
    asking: bool = False,
    device: int | None = None,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    modules: Sequence[str] = (),
    enter: tuple[Any, ...] | None = None,
) -> Job:
    """Ranks that have joined a job of their own.

    Args:
        place: where.
        size: how many.
        kits: whose libraries they import; None is all that are here.
        backend: with which they join.
        timeout: of their groups, seconds.
        asking: whether what is asked of CUDA is counted.
        device: that they are bound to when they join.
        env: more environment variables.
        fresh: whether each has to have an interpreter of its own.
        modules: that they import before they join.
        enter: a function by which they join in place of the usual one, and its arguments.
    """
    job = place.job(size, backend, kits, env, fresh)
    try:
        if asking:
            called(place, job, rank_jobs.count_what_is_asked)
        libraries = place.kits if kits is None else tuple(kits)
        called(place, job, rank_jobs.ready, libraries, tuple(modules), timeout=_START_S)
        called(place, job, *(enter or (rank_jobs.enter, timeout, device)))
    except BaseException:
        job.close()
        raise
    return job


@contextmanager
def joined(place: Place, size: int, kits: Sequence[str] | None = None, **options: Any) -> Iterator[Job]:
    """As :func:`start`, for a block; whoever has not left by then is killed."""
    with start(place, size, kits, **options) as job:
        yield job


def called(
    place: Place, job: Job, function: Callable[..., Any], *args: Any, timeout: float | None = None
) -> list[Any]:
    """What each rank makes of a call.

    Args:
        place: where they are.
        job: the ranks.
        function, args: what they do.
        timeout: seconds that they have for it; None is the place's patience.

    Raises:
        RanksFailed: one failed, died or hung; the first line says how the first of them did.
    """
    job.call(function, *args)
    try:
        outcomes = job.collect(place.patience if timeout is None else timeout, hurry=True)
        report = ""
    except RanksFailed as error:
        outcomes, report = job.outcomes, str(error)
    for outcome in sorted(outcomes, key=lambda o: o.at):
        if outcome.failure is not None:
            why = f"rank {outcome.rank}: {outcome.failure.type}: {outcome.failure.message}"
            raise RanksFailed(f"{why}\n{report or job.report()}")
        if outcome.returncode is not None:
            raise RanksFailed(f"rank {outcome.rank} ended with {outcome.returncode}\n{report or job.report()}")
    if report:
        raise RanksFailed(report)
    return [outcome.value for outcome in outcomes]


def leave(
    place: Place,
    job: Job,
    ranks: Sequence[int] | None = None,
    function: Callable[[], list[str]] | None = None,
) -> None:
    """Leave the job on all ranks or some, by a function or as usual, and see them end well.

    Raises:
        RanksFailed: one did not, or left something of ours behind.
    """
    thorough = place.simulated and ranks is None  # there it is known what has to be given back
    job.call(function or (worker.leave if thorough else rank_jobs.leave), ranks=ranks)
    outcomes = job.collect(place.patience, ranks=ranks)
    left = [outcome.value for outcome in outcomes]
    if any(outcome.failure is not None for outcome in outcomes):
        raise RanksFailed(job.report())
    job.call(worker.end, ranks=ranks)
    codes = job.wait_for_exit(place.patience, *([] if ranks is None else [ranks]))  # under mpirun all end together
    if any(left) or any(codes):
        raise RanksFailed(f"left over: {left}; exit codes {codes}\n{job.report()}")


class Ranks(Pool):
    """Ranks that have joined: started at the first call, and anew after one in which a rank hung or died.

    Args:
        place: where.
        size: how many.
        kits: whose libraries they import; None is all that are here.
        first: what they do once they have joined, each a function and its arguments.
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
        """Each rank's value; RanksFailed where any failed or hung, Skip once ranks could not be started."""
        if self._useless:
            raise Skip(f"ranks could not be started: {self._useless}")
        if self._job is None:
            try:
                self._job = self._start()
                for call in self._first:
                    called(self.place, self._job, *call)
            except BaseException as error:
                self._useless = headline(story(error))
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
        """Whether there are ranks that can go on."""
        return self._job is not None

    def _drop(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()

    def depart(self) -> None:
        """As :meth:`close`, where there are ranks, else Skip."""
        if not self.running:
            raise Skip("there are no ranks any more")
        self.close()

    def close(self) -> None:
        """Leave the job, in order."""
        job, self._job = self._job, None
        if job is not None:
            with job:
                leave(self.place, job, function=self._leave)
