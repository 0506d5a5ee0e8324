"""THE TABLE of stages, in the order in which they run: what is worth most, and what cannot hang, comes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from .place import Place
from .record import Reporter

__all__ = ["STAGES", "Stage"]

Run = Callable[[Reporter, Place], None]


@dataclass(frozen=True)
class Stage:
    """One row.

    Attributes:
        name: as the command line has it.
        title: what is shown.
        where: module and function.
        share: of the time, in relation to the others'; seconds where nobody says otherwise.
        least: seconds with which it makes sense to begin.
    """

    name: str
    title: str
    where: str
    share: float
    least: float = 8.0

    @property
    def run(self) -> Run:
        """What it does."""
        module, _, function = self.where.partition(":")
        found: Run = getattr(import_module(f"gpu_check.{module}"), function)
        return found


_ROWS = (
    Stage("machine", "machine and versions", "machine:look", 20),
    Stage("one-rank", "driver and NCCL, one rank, without array libraries", "machine:one_rank", 30),
    Stage("conformance-1", "conformance, 1 rank", "conformity:one", 50),
    Stage("streams", "streams, lifetimes, graphs: 1 rank", "streaming:one", 50),
    Stage("cost", "host time to enqueue", "costs:enqueue", 60),
    Stage("device-time", "device time", "costs:device_time", 30),
    Stage("conformance-2", "conformance, 2 ranks on the one GPU", "conformity:two", 55),
    Stage("streams-2", "streams and lifetimes, 2 ranks", "streaming:two", 35),
    Stage("faults", "timeouts, deaths, abort, shrink, exit", "faults:all_kinds", 60),
    Stage("training", "data-parallel training, 2 ranks", "training:both", 40),
    Stage("plugin", "inside torch.distributed, 2 ranks", "plugin:two", 60),
    Stage("conformance-4", "conformance, 4 ranks on the one GPU", "conformity:four", 35),
    Stage("staged", "device arrays over backends of the host, 2 ranks", "conformity:staged", 25),
    Stage("copies", "copies between host and device", "copies:measure", 15),
)
STAGES: dict[str, Stage] = {row.name: row for row in _ROWS}
