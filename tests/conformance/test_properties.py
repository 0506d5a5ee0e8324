"""Random sequences of operations over several groups, sync and async mixed, from one thread or one per group.

The examples run on ranks that stay joined for all of them. They are drawn anew in every run; the ``UNICOLL_TEST_SEED``
printed at its head, given again, repeats them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import unicoll as dist
from gloo_fallback.backend import GlooBackend
from tests.support.ranks import Pool, sample_seed
from unicoll.arrays.types import BY_NAME, DTYPES, ReduceOp
from unicoll.calls.ops import OPS
from unicoll.calls.reduce_ops import supported_reductions
from unicoll.testing.cases import Case, Trial
from unicoll.testing.conformance import COLLECTIVES, has
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


# --- tests ------------------------------------------------------------------------------------------

Pools = Callable[[int], Pool]
_BOUNDED = settings(
    max_examples=150,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
_TYPES = [d.name for d in DTYPES if has(d.name)]
_REDUCED = [d for d in _TYPES if GlooBackend.caps.reduces(BY_NAME[d], ReduceOp.SUM)]


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    op = draw(st.sampled_from(COLLECTIVES))
    dtype = draw(st.sampled_from(_REDUCED if OPS[op].reduces else _TYPES))
    reductions = [r for r in supported_reductions()[dtype] if r not in OPS[op].refuses]
    reduce = draw(st.sampled_from(reductions)) if OPS[op].reduces else None
    return Case(
        op,
        dtype,
        reduce,
        draw(st.sampled_from([0, 1, 3, 100, 5000])),
        layout=draw(st.sampled_from(["contiguous", "step", "transposed"])),
        async_op=draw(st.booleans()),
        uneven=OPS[op].uneven and draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 30)),
    )


def _programs(size: int) -> st.SearchStrategy[Program]:
    everyone = st.permutations(range(size))
    members = st.tuples(everyone, st.integers(1, size)).map(lambda p: tuple(p[0][: p[1]]))
    groups = st.lists(members, min_size=1, max_size=4).map(tuple)

    @st.composite
    def program(draw: st.DrawFn) -> Program:
        made = draw(groups)
        step = st.builds(Step, st.integers(0, len(made) - 1), _cases(), st.integers(1, 6))
        steps = draw(st.lists(step, min_size=1, max_size=14))
        return Program(made, tuple(steps), draw(st.booleans()))

    return program()


@pytest.mark.every(n=3)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs(size: int, pool: Pools) -> None:
    @seed(sample_seed() + size)
    @_BOUNDED
    @given(program=_programs(size))
    def check(program: Program) -> None:
        wrong = [w for each in pool(size).run(run_programs, [program], timeout=60) for w in each]
        assert not wrong, wrong[0]

    check()


def test_a_reduction_has_the_same_bits_on_every_rank_at_any_time(pool: Pools) -> None:
    @seed(sample_seed())
    @_BOUNDED
    @given(
        count=st.integers(0, 70_000),
        dtype=st.sampled_from(["float32", "float16", "float64", "complex64"]),
        reduce=st.sampled_from(["SUM", "AVG", "PRODUCT"]),
        values=st.integers(0, 1 << 30),
    )
    def check(count: int, dtype: str, reduce: str, values: int) -> None:
        results = pool(3).run(reduce_twice, Case("all_reduce", dtype, reduce, count, seed=values))
        assert len({bits for each in results for bits in each}) == 1

    check()
