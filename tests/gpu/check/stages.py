"""The table of stages in their order: the cheapest and most informative ones first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from tests.gpu.check.place import Place
from tests.gpu.check.record import Reporter

__all__ = ["STAGES", "Stage"]

Run = Callable[[Reporter, Place], None]


@dataclass(frozen=True)
class Stage:
    """A row of the table.

    Attributes:
        name: name on the command line.
        title: title in the output.
        where: module and function.
        share: weight of its share of the time.
        least: seconds that must be left to begin.
    """

    name: str
    title: str
    where: str
    share: float
    least: float = 2.0

    @property
    def run(self) -> Run:
        """The function of the stage."""
        module, _, function = self.where.partition(":")
        found: Run = getattr(import_module(f"tests.gpu.check.{module}"), function)
        return found


_ROWS = (
    Stage("machine", "machine, versions, array libraries", "machine:look", 150),
    Stage("one-rank", "driver and NCCL, one rank, without array libraries", "machine:one_rank", 20),
    Stage("pair", "two ranks on the one GPU, their first operation", "machine:pair", 25),
    Stage("several", "ranks with a GPU each, under unicoll.run", "several:each_its_own", 30),
    Stage("streams", "streams, lifetimes, graphs: 1 rank", "streaming:one", 50),
    Stage("deadline", "a missing rank, and a smaller group after it", "faults:deadline", 25),
    Stage("exit", "programs that end without leaving", "faults:ending", 20),
    Stage("plugin", "torch.distributed over unicoll, 2 ranks", "plugin:two", 50),
    Stage("streams-2", "streams and lifetimes, 2 ranks", "streaming:two", 35),
    Stage("memory", "registered memory, puts, a growing group: 2 and 3 ranks", "memory:both", 30),
    Stage("conformance-1", "conformance, 1 rank", "conformity:one", 20),
    Stage("conformance-2", "conformance, 2 ranks on the one GPU", "conformity:two", 35),
    Stage("conformance-4", "conformance, 4 ranks on the one GPU", "conformity:four", 40),
    Stage("mixed", "arrays of host and device in one group, 2 ranks", "conformity:mixed", 15),
    Stage("staged", "device arrays over backends of the host, 2 ranks", "conformity:staged", 25),
    Stage("cost", "host time to enqueue", "costs:enqueue", 50),
    Stage("device-time", "device time", "costs:device_time", 30),
    Stage("training", "data-parallel training, 2 ranks", "training:both", 35),
    Stage("copies", "copies between host and device", "copies:measure", 20),
    Stage("faults", "deaths, abort, shrink, refusals", "faults:others", 60),
)
STAGES: dict[str, Stage] = {row.name: row for row in _ROWS}
