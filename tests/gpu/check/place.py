"""Ranks on this machine's GPU, or on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.gpu.check import rank_jobs
from tests.gpu.check.record import Skip, description_of, headline
from tests.mpi.mpi_ranks import MpiJob, unavailable_reason
from tests.nccl.device_ranks import DeviceJob, DeviceMpiJob
from tests.simulated_nccl import ranks as simulated_ranks
from tests.simulated_nccl.ranks import Settings, SimulatedJob
from tests.support import worker
from tests.support.ranks import Pool, ProcessJob, RanksFailed
from unicoll.backend import Backend
from unicoll.group import registry

_START_S = 60.0
"""Seconds for imports and the first kernels of array libraries, whose files may be on a slow disk."""
_FAMILIES = {"cupy": "cupy", "torch": "torch_cuda", "simulated": "simulated"}

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


class Process(ProcessJob):
    """Processes whose warnings are no errors: array libraries emit their own."""

    warnings = DeviceJob.warnings
    prepare_timeout = DeviceJob.prepare_timeout


@dataclass(frozen=True)
class Place:
    """This machine's first GPU, or the simulated device and NCCL.

    Attributes:
        kits: names of the available array libraries, see :mod:`tests.gpu.check.kits`.
        simulated: True if times are meaningless.
        patience: seconds that ranks have for a call.
        sharing: see :data:`device_ranks.SHARING`.
        devices: number of devices of this machine.
        own_devices: True if each rank has the device of its local rank, not all the first one.
    """

    kits: tuple[str, ...] = ()
    simulated: bool = False
    patience: float = 10.0
    sharing: str = "auto"
    devices: int = 1
    own_devices: bool = False

    @property
    def families(self) -> tuple[str, ...]:
        """The names of the libraries in :mod:`unicoll.testing.families`."""
        return tuple(_FAMILIES[name] for name in self.kits)

    def job(
        self,
        size: int,
        backend: str,
        kits: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
    ) -> ProcessJob:
        """Ranks before they join; they import the libraries of these kits, by default of all."""
        if not self.simulated:
            # torch, which brings an NCCL, comes first
            libraries = tuple(sorted(self.kits if kits is None else kits, reverse=True))
            if self.own_devices:
                env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | (env or {})
                return Process(
                    size,
                    join="env",
                    env=env,
                    quiet=False,
                    fresh=True,
                    prepare=(worker.use, backend, libraries),
                )
            if "mpi" in backend:
                return DeviceMpiJob(size, env=env, backend=backend, libraries=libraries)
            return DeviceJob(size, env=env, backend=backend, libraries=libraries, sharing=self.sharing)
        env = {"UNICOLL_NCCL_SHARE_DEVICE": "1"} | (env or {})
        if "mpi" in backend:
            prepare = (simulated_ranks.prepare, Settings(policy="random", seed=5, backend=backend))
            return MpiJob(size, backend=backend, env=env, warm_up=True, prepare=prepare)
        join, devices = ("env", "own") if self.own_devices else ("file", "shared")
        return SimulatedJob(
            size, join=join, env=env, backend=backend, devices=devices, policy="random", seed=5
        )


def joined(
    place: Place,
    size: int,
    kits: Sequence[str] | None = None,
    *,
    backend: str = "cpu:gloo,cuda:nccl",
    timeout: float = 60.0,
    counting: bool = False,
    device: int | None = None,
    env: dict[str, str] | None = None,
    modules: Sequence[str] = (),
    enter: tuple[Any, ...] | None = None,
) -> ProcessJob:
    """Ranks that have joined a job of their own; those that have not left at the end of a block are killed.

    Args:
        place: kind of device.
        size: number of ranks.
        kits: libraries that they import; None for all.
        backend: backend of the default group.
        timeout: of their groups, seconds.
        counting: whether CUDA calls are counted.
        device: the device that they are bound to.
        env: more environment variables.
        modules: that they import before they join.
        enter: a function by which they join in place of the usual one, and its arguments; () if they do not join.
    """
    job = place.job(size, backend, kits, env)
    try:
        if counting:
            called(place, job, rank_jobs.count_cuda_calls)
        libraries = place.kits if kits is None else tuple(kits)
        ready = (rank_jobs.ready, libraries, tuple(modules), place.own_devices)
        called(place, job, *ready, timeout=_START_S)
        if enter != ():
            called(place, job, *(enter or (rank_jobs.enter, timeout, device)))
    except BaseException:
        job.close()
        raise
    return job


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
    report = ""
    try:
        job.collect(place.patience if timeout is None else timeout, fail_fast=True)
    except RanksFailed as error:
        report = str(error)
    for outcome in sorted(job.outcomes, key=lambda o: o.at):
        why = f" ended with {outcome.returncode}" if outcome.returncode is not None else ""
        if outcome.failure is not None:
            why = f": {outcome.failure.type}: {outcome.failure.message}"
        if why:
            raise RanksFailed(f"rank {outcome.rank}{why}\n{report or job.report()}")
    if report:
        raise RanksFailed(report)
    return [outcome.value for outcome in job.outcomes]


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
    # under mpirun all end together
    codes = job.wait_for_exit(place.patience, *([] if ranks is None else [ranks]))
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
        options: of :func:`joined`.
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
        self._start = partial(joined, place, size, kits, **options)
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
                self.kill()
                raise
        try:
            return called(self.place, self._job, function, *args, timeout=timeout)
        except BaseException:
            if any(o.returncode is not None or not o.finished for o in self._job.outcomes):
                self.kill()
            raise

    @property
    def running(self) -> bool:
        """True if there are usable ranks."""
        return self._job is not None

    def kill(self) -> None:
        """End the ranks at once; idempotent."""
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
