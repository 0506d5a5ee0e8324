"""Ranks with a simulated GPU each: :class:`ranks.Job` with a simulated CUDA device and NCCL in every process.

    with SimulatedJob(2, policy="newest") as job: ...
    pools(partial(SimulatedJob, policy="random", seed=3))

Within a rank :func:`here` is its simulation and :func:`nccl` its NCCL. A rank that leaves with faults on record
(races, memory freed too early, communicators not given back) fails its test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import simulated_arrays
import simulated_family  # noqa: F401 - the conformance suite finds the family there
from simulated_cuda import Simulation
from simulated_nccl import SimulatedNccl

import unicoll.streams
from unicoll.testing import cases, worker
from unicoll.testing.ranks import Job, joined

__all__ = ["Settings", "SimulatedJob", "here", "install", "nccl", "run", "uninstall"]


@dataclass(frozen=True)
class Settings:
    """How the simulation is to be.

    Attributes:
        policy, seed, patience: of the streams, see :class:`simulated_streams.Scheduler`; every rank adds its own
            number to the seed.
        version: of NCCL.
        prompt: see :class:`simulated_nccl.SimulatedNccl`.
        devices: "own": all ranks see the same devices, and rank r works on device r. "one": each rank sees one device,
            another one for each. "shared": all ranks see the same one device.
        own_stream: whether the current stream of a rank is one of its own, which the legacy one does not wait for.
        backend: with which the ranks join.
        using: options with which cases of the conformance suite do their calls, as (name, value) pairs.
        bound: whether they give their device as ``device_id`` when they join.
        strict_threads: whether threads that NCCL does not allow at the same time are a fault.
        dwell: seconds that calls of NCCL take at least.
    """

    policy: str = "oldest"
    seed: int = 0
    patience: float = 0.005
    version: int = 23007
    prompt: bool = False
    devices: str = "own"
    own_stream: bool = False
    backend: str | None = "cpu:gloo,cuda:nccl"
    using: tuple[tuple[str, Any], ...] = ()
    bound: bool = False
    strict_threads: bool = True
    dwell: float = 0.0


_installed: tuple[Simulation, SimulatedNccl] | None = None
_kept: list[simulated_arrays.Stream] = []
_own: list[str] = []
"""What the simulation's user has made for itself, and need not give back."""


def here() -> Simulation:
    """This rank's simulation."""
    assert _installed is not None
    return _installed[0]


def nccl() -> SimulatedNccl:
    """This rank's NCCL."""
    assert _installed is not None
    return _installed[1]


def install(settings: Settings, rank: int, size: int) -> None:
    """Put the simulation in the place of CUDA and NCCL in this process."""
    global _installed
    from nccl_comm import library

    uninstall()
    count = size if settings.devices == "own" else 1
    name = str(rank) if settings.devices == "one" else "0"
    simulation = Simulation(count, name, settings.policy, settings.seed + rank, settings.patience)
    if settings.devices == "own":
        simulation.cuda.set_device(rank)
    made = SimulatedNccl(simulation, settings.version, settings.prompt)
    made.visits.strict = settings.strict_threads
    if settings.dwell:
        made.visits.pause = partial(time.sleep, settings.dwell)
    unicoll.streams.install(simulation.cuda)
    library.install(made)
    simulated_arrays.use(simulation)
    if settings.own_stream:
        _kept.append(simulated_arrays.Stream().__enter__())
    _installed = simulation, made
    _own[:] = simulation.leftovers()


def uninstall() -> None:
    """Take the simulation away; idempotent."""
    global _installed
    if _installed is None:
        return
    from nccl_comm import library

    simulation, made = _installed
    _installed = None
    _kept.clear()
    simulated_arrays.use(None)
    library.install(None)
    unicoll.streams.install(None)
    made.close()
    simulation.close()


def prepare(settings: Settings) -> None:
    """What a rank does before it joins."""
    rank, size = worker.place()
    install(settings, rank, size)
    worker.BACKEND = settings.backend
    cases.USING = dict(settings.using)
    if settings.bound:
        worker.DEVICE = rank
    worker.start_here(complaints)


def complaints() -> list[str]:
    """What is wrong when the rank has left the job."""
    found = [f"fault: {fault}" for fault in here().faults]
    found += [f"mismatch: {text}" for text in nccl().machine.mismatches]
    found += [f"communicator {comm.key} of rank {comm.rank}" for comm in nccl().communicators]
    return found + [what for what in here().leftovers() if what not in _own]


class SimulatedJob(Job):
    """``size`` ranks with a simulated device each; keywords of :class:`Settings`, and those of :class:`ranks.Job`."""

    def __init__(
        self,
        size: int,
        *,
        join: str = "file",
        env: dict[str, str] | None = None,
        quiet: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(size, join=join, env=env, quiet=quiet, prepare=(prepare, Settings(**settings)))


def run(size: int, job: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
    """What a job of its own gives, which leaves nothing behind; ``options`` are of :class:`SimulatedJob`."""
    with joined(size, SimulatedJob, **options) as ranks:
        ranks.call(job, *args)
        values = ranks.results()
        ranks.call(worker.leave)
        assert ranks.results() == [[]] * size
        return values
