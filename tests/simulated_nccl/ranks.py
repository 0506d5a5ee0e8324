"""Ranks with a simulated GPU each: processes with a simulated CUDA device and NCCL, an AMD device and RCCL, or an XPU
and oneCCL.

    with SimulatedJob(2, policy="newest") as job: ...
    pools(partial(SimulatedJob, policy="random", seed=3))

Within a rank :func:`simulation` is its simulation and :func:`nccl` its NCCL. A rank that leaves with recorded faults
(races, memory freed too early, communicators not destroyed) fails its test.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import FrameType, SimpleNamespace
from typing import Any

from tests.simulated_nccl import (
    arrays,
    family,  # noqa: F401 - registers the family for the conformance suite
)
from tests.simulated_nccl.cuda import SimulatedCuda, Simulation
from tests.simulated_nccl.nccl import SimulatedNccl
from tests.simulated_nccl.oneccl import SimulatedOneCCL, SimulatedXpu
from tests.simulated_nccl.rccl import SimulatedHip, SimulatedRccl
from tests.support import worker
from tests.support.ranks import ProcessJob, joined
from unicoll.devices import runtimes
from unicoll.process import thread_frames
from unicoll.testing import cases

__all__ = ["Settings", "SimulatedJob", "install", "nccl", "run", "simulation", "uninstall"]


@dataclass(frozen=True)
class Settings:
    """Settings of the simulation.

    Attributes:
        policy, seed, patience: of the streams, see :class:`tests.simulated_nccl.streams.Scheduler`; every rank adds its
            own number to the seed.
        version: of NCCL.
        capabilities: compute capability of each rank's devices; 9.0 for all by default.
        prompt: see :class:`tests.simulated_nccl.nccl.SimulatedNccl`.
        devices: "own": all ranks see the same devices, and rank r works on device r. "one": each rank sees one device,
            another one for each. "shared": all ranks see the same one device.
        own_stream: whether the current stream of a rank is a non-blocking one.
        backend: backend of the default group.
        using: options of the conformance suite's calls, as (name, value) pairs.
        bound: whether the ranks pass their device as ``device_id`` when they join.
        kind: of the devices and their library: "cuda" (NCCL), "hip" (RCCL) or "xpu" (oneCCL).
    """

    policy: str = "oldest"
    seed: int = 0
    patience: float = 0.005
    version: int = 23007
    capabilities: tuple[tuple[int, int], ...] = ()
    prompt: bool = False
    devices: str = "own"
    own_stream: bool = False
    backend: str | None = "cpu:gloo,cuda:nccl"
    using: tuple[tuple[str, Any], ...] = ()
    bound: bool = False
    kind: str = "cuda"


_KINDS: dict[str, tuple[type[SimulatedCuda], type[SimulatedNccl]]] = {
    "cuda": (SimulatedCuda, SimulatedNccl),
    "hip": (SimulatedHip, SimulatedRccl),
    "xpu": (SimulatedXpu, SimulatedOneCCL),
}
_installed: tuple[Simulation, SimulatedNccl] | None = None
_USER_MODULES = {f"{__package__}.{name}" for name in ("arrays", "family", "ranks", "torch_tensors")}
"""Modules of this package whose functions a real program would have, too."""
_kept: list[arrays.Stream] = []
_own: list[str] = []
"""Streams made by :func:`install`, which need not be destroyed."""


def simulation() -> Simulation:
    """This rank's simulation."""
    assert _installed is not None
    return _installed[0]


def nccl() -> SimulatedNccl:
    """This rank's NCCL."""
    assert _installed is not None
    return _installed[1]


def _locate(simulation: Simulation) -> Any:
    """The module that has the process's library."""
    package = "xccl_comm" if simulation.cuda.device_type == "xpu" else "nccl_comm"
    return import_module(f"{package}.library.locate")


def _frames() -> dict[int, FrameType]:
    """As ``sys._current_frames`` with a real device: what simulates CUDA and NCCL has no frames, and no threads."""
    frames = sys._current_frames()
    # The frame of this function would keep all frames alive.
    del frames[threading.get_ident()]
    found = {thread: _without_simulation(frame) for thread, frame in frames.items()}
    return {thread: frame for thread, frame in found.items() if frame is not None}


def _without_simulation(innermost: FrameType) -> FrameType | None:
    frame: FrameType | None = innermost
    simulates = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        is_simulation = name.startswith(f"{__package__}.") and name not in _USER_MODULES
        if not is_simulation and name != "threading":
            break
        simulates = simulates or is_simulation
        frame = frame.f_back
    return frame if simulates else innermost


def install(settings: Settings, rank: int, size: int) -> None:
    """Replace the devices and their library by the simulation in this process."""
    global _installed
    uninstall()
    count = size if settings.devices == "own" else 1
    name = str(rank) if settings.devices == "one" else "0"
    capability = settings.capabilities[rank] if settings.capabilities else (9, 0)
    runtime, library_class = _KINDS[settings.kind]
    made = Simulation(
        count, name, settings.policy, settings.seed + rank, settings.patience, capability, runtime
    )
    if settings.devices == "own":
        made.cuda.set_device(rank)
    library = library_class(made, settings.version, settings.prompt)
    runtimes.install(made.cuda.device_type, made.cuda)
    _locate(made).install(library)
    arrays.use(made)
    thread_frames.sys = SimpleNamespace(_current_frames=_frames, _getframe=sys._getframe)
    if settings.own_stream:
        _kept.append(arrays.Stream().__enter__())
    _installed = made, library
    _own[:] = made.leftovers()


def stream_of_a_library() -> arrays.Stream:
    """A stream that an array library keeps as long as the process exists."""
    before = simulation().leftovers()
    made = arrays.Stream()
    _kept.append(made)
    _own.extend(what for what in simulation().leftovers() if what not in before)
    return made


def uninstall() -> None:
    """Remove the simulation; idempotent."""
    global _installed
    if _installed is None:
        return
    made, library = _installed
    _installed = None
    _kept.clear()
    arrays.use(None)
    thread_frames.sys = sys
    _locate(made).install(None)
    runtimes.install(made.cuda.device_type, None)
    library.close()
    made.close()


def prepare(settings: Settings) -> None:
    """Prepare a rank before it joins."""
    rank, size = worker.rank_and_size()
    install(settings, rank, size)
    worker.BACKEND = settings.backend
    cases.USING = dict(settings.using)
    if settings.bound:
        worker.DEVICE = rank
    worker.set_baseline(complaints)


def complaints() -> list[str]:
    """Faults and leftovers after the rank has left the job."""
    found = [f"fault: {fault}" for fault in simulation().faults]
    found += [f"mismatch: {text}" for text in nccl().machine.mismatches]
    found += [f"a thread in {call.call}" for call in nccl().active_calls.current]
    found += [f"communicator {comm.key} of rank {comm.rank}" for comm in nccl().communicators]
    return found + [what for what in simulation().leftovers() if what not in _own]


class SimulatedJob(ProcessJob):
    """``size`` ranks with a simulated device each; keywords of :class:`Settings` and of :class:`ProcessJob`."""

    def __init__(
        self,
        size: int,
        *,
        join: str = "file",
        env: dict[str, str] | None = None,
        quiet: bool = True,
        modules: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        made = Settings(**settings)
        super().__init__(
            size,
            join=join,
            env=env,
            quiet=quiet,
            prepare=(prepare, made),
            modules=[__name__, "pytest", *modules],
        )


def run(size: int, job: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
    """The results of a function on the ranks of a new job, which must leave nothing behind.

    ``options`` are those of :class:`SimulatedJob`.
    """
    with joined(size, SimulatedJob, **options) as ranks:
        ranks.call(job, *args)
        values = ranks.results()
        ranks.call(worker.leave)
        left = ranks.results()
        assert left == [[]] * size, left
        return values
