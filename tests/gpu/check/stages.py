"""The table of stages in their order, the cheapest and most informative ones first, and the process that runs them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from tests.gpu.check.place import Place, Process
from tests.gpu.check.record import Reporter
from tests.support import worker
from tests.support.ranks import ProcessJob, RanksFailed


class Stage(NamedTuple):
    """A row of the table.

    Attributes:
        name: name on the command line.
        title: title in the output.
        where: module and function.
        share: weight of its share of the time.
        size: number of ranks, where the function takes it.
    """

    name: str
    title: str
    where: str
    share: float
    size: int | None = None


_ROWS = (
    Stage("machine", "machine, versions, array libraries", "machine:look", 150),
    Stage("one-rank", "driver and NCCL, one rank, without array libraries", "machine:one_rank", 20),
    Stage("pair", "two ranks on the one GPU, their first operation", "machine:pair", 25),
    Stage("several", "ranks with a GPU each", "several:each_its_own", 30),
    Stage("streams", "streams, lifetimes, graphs: 1 rank", "programs:streams", 50, 1),
    Stage("deadline", "a missing rank, and a smaller group after it", "faults:deadline", 25),
    Stage("exit", "programs that end without leaving", "faults:ending", 40),
    Stage("plugin", "torch.distributed over unicoll, 2 ranks", "programs:plugin", 50),
    Stage("streams-2", "streams and lifetimes, 2 ranks", "programs:streams", 35, 2),
    Stage("memory", "registered memory, puts, a growing group: 2 and 3 ranks", "programs:memory", 30),
    Stage("conformance-1", "conformance, 1 rank", "conformity:conformance", 20, 1),
    Stage("conformance-2", "conformance, 2 ranks on the one GPU", "conformity:conformance", 35, 2),
    Stage("conformance-4", "conformance, 4 ranks on the one GPU", "conformity:conformance", 40, 4),
    Stage("mixed", "arrays of host and device in one group, 2 ranks", "conformity:mixed", 15),
    Stage("staged", "device arrays over backends of the host, 2 ranks", "conformity:staged", 25),
    Stage("cost", "host time to enqueue", "costs:enqueue", 50),
    Stage("device-time", "device time", "costs:device_time", 30),
    Stage("training", "data-parallel training, 2 ranks", "training:both", 35),
    Stage("copies", "copies between host and device", "copies:measure", 20),
    Stage("faults", "deaths, abort, shrink, refusals", "faults:others", 60),
)
STAGES: dict[str, Stage] = {row.name: row for row in _ROWS}


def execute(name: str, seconds: float, place: Place) -> None:
    """Run a stage; its report is sent as notes. A function of the runner's process."""
    os.dup2(2, 1)  # what libraries print is kept with the errors
    stage = STAGES[name]
    module, _, function = stage.where.partition(":")
    run: Callable[..., None] = getattr(import_module(f"tests.gpu.check.{module}"), function)
    run(Reporter(worker.send_note, seconds), place, *([] if stage.size is None else [stage.size]))


class Runner:
    """A process that runs the stages one after another; after one that was cut off or crashed a new process starts."""

    def __init__(self) -> None:
        self._job: ProcessJob | None = None

    def do(
        self, name: str, seconds: float, place: Place, limit: float, take: Callable[[dict[str, Any]], object]
    ) -> tuple[str, str]:
        """Run a stage.

        Args:
            name, seconds, place: of :func:`execute`.
            limit: seconds after which the process is killed, with all processes that it has started.
            take: called with every line of the report.

        Returns:
            "done", "cut off" or "crashed", and a description of the last two.
        """
        deadline = time.monotonic() + limit
        try:
            if self._job is None:
                self._job = Process(1, env=dict(os.environ), quiet=False, fresh=True)
            self._job.call(execute, name, seconds, place)
            while True:
                take(self._job.await_note(0, deadline - time.monotonic()))
        except RanksFailed as error:  # there are no more notes
            end = self._job.outcomes[0] if self._job is not None else None
            if end is not None and end.finished and end.failure is None and end.returncode is None:
                return "done", ""
            self.close()
            if end is None or not end.finished:
                return "cut off", str(error)
            failure = end.failure
            return "crashed", f"{failure.type}: {failure.message}\n{failure.traceback}" if failure else str(
                error
            )
        except BrokenPipeError:
            self.close()
            return "crashed", "the process has ended"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the process and its ranks; idempotent."""
        job, self._job = self._job, None
        if job is not None:
            job.close()
