"""Random programs of collectives: what they are, and how a rank runs one and compares with the reference."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.testing.cases import Case, Trial
from unicoll.testing.reference import reduction_of


@dataclass(frozen=True)
class Step:
    """A call on one of the program's groups; ``wait_after`` tells after how many steps an async one is awaited."""

    group: int
    case: Case
    wait_after: int


@dataclass(frozen=True)
class Program:
    """Groups as lists of global ranks, and steps, the same on all ranks; one thread per group, or one for all."""

    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    threaded: bool


def run_programs(programs: Sequence[Program]) -> list[str]:
    """Run programs; what went wrong."""
    wrong: list[str] = []
    for program in programs:
        groups = [dist.new_group(list(members), sort_ranks=False) for members in program.groups]
        mine = [g for g, members in enumerate(program.groups) if dist.get_rank() in members]
        if program.threaded:
            threads = [
                threading.Thread(target=_run, args=(program, groups, {g}, wrong), name=f"test-{g}")
                for g in mine
            ]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        else:
            _run(program, groups, set(mine), wrong)
        for g in mine:
            dist.destroy_process_group(groups[g])
        if wrong:
            break
    return wrong


def _run(program: Program, groups: Sequence[Any], mine: set[int], wrong: list[str]) -> None:
    pending: list[tuple[int, Trial]] = []
    try:
        for i, step in enumerate(program.steps):
            if step.group not in mine:
                continue
            trial = Trial(step.case, program.groups[step.group], groups[step.group])
            trial.start()
            pending.append((i + step.wait_after if step.case.async_op else i, trial))
            for due, earlier in [p for p in pending if p[0] <= i]:
                pending.remove((due, earlier))
                _finish(earlier, wrong)
        for _, trial in reversed(pending):
            _finish(trial, wrong)
    except Exception as e:
        wrong.append(f"rank {dist.get_rank()}: {type(e).__name__}: {e} in {program}")


def _finish(trial: Trial, wrong: list[str]) -> None:
    verdict, _ = trial.finish()
    if verdict:
        wrong.append(f"rank {dist.get_rank()}: {verdict} in {trial.case}")


def reduce_twice(case: Case) -> tuple[bytes, bytes]:
    """The same all_reduce alone and in the middle of others."""
    rng = np.random.default_rng([case.seed, dist.get_rank()])
    given = rng.standard_normal(case.count).astype(case.dtype)
    alone, among = given.copy(), given.copy()
    dist.all_reduce(alone, op=reduction_of(str(case.reduce), case.dtype))
    works = [dist.all_reduce(np.ones(7 * k), async_op=True) for k in range(3)]
    works.append(dist.all_reduce(among, op=reduction_of(str(case.reduce), case.dtype), async_op=True))
    for w in works:
        assert w is not None
        w.wait()
    return alone.tobytes(), among.tobytes()
