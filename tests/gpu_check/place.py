"""Where ranks run: on this machine's GPU, or on the simulated device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import simulated_ranks
from device_ranks import DeviceJob, DeviceMpiJob
from mpi_ranks import MpiJob, why_not
from simulated_ranks import Settings, SimulatedJob

from unicoll import registry
from unicoll.backend import Backend
from unicoll.testing import worker
from unicoll.testing.ranks import Job, RanksFailed, end_well

from . import rank_jobs
from .record import Skip

__all__ = ["GPU", "HOST_BACKENDS", "Place", "Simulation", "host_backend", "joined", "leave"]

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
    """

    kits: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    simulated = False

    @abstractmethod
    def job(
        self, size: int, backend: str, kits: Sequence[str] | None = None, env: dict[str, str] | None = None
    ) -> Job:
        """Ranks that share one device, not joined yet; they import the libraries of these kits, else of all."""


class GPU(Place):
    """This machine's first GPU.

    Args:
        kits: the array libraries that work.
        sharing: see :data:`device_ranks.SHARING`.
    """

    def __init__(self, kits: Sequence[str], sharing: str = "auto") -> None:
        self._sharing = sharing
        self.kits = tuple(sorted(kits))
        self.families = tuple({"cupy": "cupy", "torch": "torch_cuda"}[name] for name in self.kits)

    def job(
        self, size: int, backend: str, kits: Sequence[str] | None = None, env: dict[str, str] | None = None
    ) -> Job:
        needed = self.kits if kits is None else kits
        first = tuple(sorted(needed, reverse=True))  # torch brings an NCCL
        if "mpi" in backend:
            return DeviceMpiJob(size, env=env, backend=backend, libraries=first)
        return DeviceJob(size, env=env, backend=backend, libraries=first, sharing=self._sharing)


class Simulation(Place):
    """A simulated device and NCCL."""

    kits = families = ("simulated",)
    simulated = True

    def job(
        self, size: int, backend: str, kits: Sequence[str] | None = None, env: dict[str, str] | None = None
    ) -> Job:
        env = {"UNICOLL_NCCL_SHARE_DEVICE": "1"} | (env or {})
        if "mpi" in backend:
            settings = Settings(policy="random", seed=5, backend=backend)
            return MpiJob(
                size, backend=backend, env=env, rehearse=True, prepare=(simulated_ranks.prepare, settings)
            )
        return SimulatedJob(size, env=env, backend=backend, devices="shared", policy="random", seed=5)


@contextmanager
def joined(
    place: Place,
    size: int,
    kits: Sequence[str] | None = None,
    *,
    backend: str = "cpu:gloo,cuda:nccl",
    timeout: float = 60.0,
    asking: bool = False,
    device: int | None = None,
    end: bool = True,
    env: dict[str, str] | None = None,
) -> Iterator[Job]:
    """Ranks that have joined a job of their own.

    Args:
        place: where.
        size: how many.
        kits: whose libraries they import; None is all that are here.
        backend: with which they join.
        timeout: of their groups, seconds.
        asking: whether what is asked of CUDA is counted.
        device: that they are bound to when they join.
        end: whether they leave in order at the end; else they are killed.
        env: more environment variables.
    """
    with place.job(size, backend, kits, env) as job:
        if asking:
            job.call(rank_jobs.count_what_is_asked)
            job.results()
        job.call(rank_jobs.enter, timeout, device)
        job.results(max(timeout, 120.0))
        yield job
        if end:
            leave(place, job)


def leave(place: Place, job: Job, ranks: Sequence[int] | None = None) -> None:
    """Leave the job on all ranks or some, and see them end well.

    Raises:
        RanksFailed: one did not, or left a thread of ours behind.
    """
    if place.simulated and ranks is None:
        end_well(job)
        return
    job.call(rank_jobs.leave, ranks=ranks)
    outcomes = job.collect(60.0, ranks=ranks)
    left = [outcome.value for outcome in outcomes]
    if any(outcome.failure is not None for outcome in outcomes):
        raise RanksFailed(job.report())
    job.call(worker.end, ranks=ranks)
    codes = job.wait_for_exit() if ranks is None else job.wait_for_exit(ranks=ranks)
    if any(left) or any(codes):
        raise RanksFailed(f"threads left over: {left}; exit codes {codes}\n{job.report()}")
