"""Random programs over streams, arrays and groups give right results on the simulated device, without races.

A program is correct as users of CuPy understand it: whoever makes another stream the current one lets it wait for the
one before; an array that an operation works on is not touched until its ``wait()``; references may be dropped at any
time. Everything is put in place while the device is held, and runs afterwards. The operations are those that differ in
what they do with memory and streams; the conformance suite has all.

A program with a failure runs while it is put in place, in a group of its own: a rank does not make a call, aborts the
group, or gets an error of NCCL. Every call ends on every rank, and the next group works. If the last operation fails,
which no call follows, ``check()`` or destroy raises its error. A kernel that traps ends the context of its process, so
such a program has ranks of its own.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.nccl.mutation_jobs import MUTATIONS, mutated
from tests.nccl.nccl_jobs import backend_of, connect, error_of
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.communicators import Result
from tests.simulated_nccl.ranks import SimulatedJob
from tests.simulated_nccl.ranks import run as simulated_run
from tests.support.order import await_true
from tests.support.ranks import joined
from unicoll.device_collectives.communicators import communicator

_PROGRAMS, _STEPS = 40, 60
_STREAMS = 3
_LIVE = 8
_FAILS_S = 1.0
"""Timeout of the calls of a program with a failure."""
_LAST_S = 0.3
"""Timeout of a last operation that fails."""
_TRAPS = 10
"""Number of programs in which a kernel traps."""


@dataclass(eq=False)
class _Held:
    """An array of this rank, and the expected elements of each rank once the device has run."""

    array: Any
    values: list[Any]


class Program:
    """A random program, the same on all ranks with the same seed.

    Args:
        seed: of everything random in it.
        group: of all ranks, in the order of the world.
    """

    def __init__(self, seed: int, group: Any) -> None:
        self.rng = random.Random(seed)
        self.groups = [None, group]
        self.me, self.world = dist.get_rank(), dist.get_world_size()
        self.streams = [arrays.Stream(handle=0), *(arrays.Stream() for _ in range(_STREAMS - 1))]
        self.current = self.streams[0]
        self.held: list[_Held] = []
        self.pending: list[tuple[Any, list[_Held]]] = []
        self.done: list[str] = []
        self.graphs: list[Any] = []

    @property
    def actions(self) -> list[Callable[[], str]]:
        """What a step may be."""
        often = [self.make, self.change, self.all_reduce, self.wait] * 2
        once = [self.all_gather, self.reduce_scatter, self.exchange, self.lists, self.rooted]
        return [*often, *once, self.graph, self.coalesced, self.switch, self.drop]

    def step(self) -> None:
        """Do one step."""
        with self.current:
            self.done.append(self.rng.choice(self.actions)())

    def run(self, steps: int) -> list[str]:
        """Do a number of steps; the errors at the end."""
        with ranks.simulation().hold():
            for _ in range(steps):
                self.step()
            while self.pending:
                with self.current:
                    self.wait()
        with self.current:
            return [text for i, held in enumerate(self.held) if (text := self.complaint(i, held))]

    def end(self) -> None:
        """Wait for what is pending in a group that may have failed, and destroy the graphs."""
        for work, _ in self.pending:
            with suppress(dist.DistError):
                work.synchronize()
        for graph in self.graphs:
            graph.destroy()

    def complaint(self, i: int, held: _Held) -> str | None:
        """The error of an array, or None."""
        got, wanted = held.array.numpy(), held.values[self.me]
        if np.array_equal(got, wanted):
            return None
        return f"array {i} is {got.ravel()[:4]}, expected {wanted.ravel()[:4]}, after: {'; '.join(self.done)}"

    # --- arrays ---

    def free(self) -> list[_Held]:
        """Arrays that no operation uses."""
        busy = {held for _, theirs in self.pending for held in theirs}
        return [held for held in self.held if held not in busy]

    def new(self, count: int) -> _Held:
        first = self.rng.randrange(100)
        values = [np.arange(count, dtype=np.float64) + first + 7 * rank for rank in range(self.world)]
        held = _Held(arrays.array(values[self.me]), values)
        self.held.append(held)
        return held

    def make(self) -> str:
        """A new array; an old one is dropped if there are many."""
        if len(self.held) >= _LIVE:
            self.drop()
        self.new(self.rng.choice([1, 6, 64]))
        return "make"

    def drop(self) -> str:
        """Drop an array, which an operation may still use."""
        if self.held:
            self.held.pop(self.rng.randrange(len(self.held)))
        return "drop"

    def pick(self, count: int = 0) -> _Held:
        """An array that is not busy, or a new one."""
        found = [h for h in self.free() if not count or h.array.shape == (count,)]
        return self.rng.choice(found) if found else self.new(count or 6)

    def change(self) -> str:
        """A kernel of the array library."""
        held, number = self.pick(), self.rng.randrange(1, 9)
        held.array += number
        held.values = [v + number for v in held.values]
        return f"add {number}"

    def switch(self) -> str:
        """Make another stream current, ordered after the one before."""
        before, self.current = self.current, self.rng.choice(self.streams)
        if before is not self.current:
            self.current.wait_for(before)
        return f"stream {self.streams.index(self.current)}"

    # --- operations ---

    def call(self, function: Callable[..., Any], *args: Any, held: list[_Held], **more: Any) -> str:
        """An operation, waited for later or on the current stream."""
        asynchronous = self.rng.random() < 0.6
        group = self.rng.choice(self.groups)
        work = function(*args, group=group, async_op=asynchronous, **more)
        if asynchronous:
            self.pending.append((work, held))
        return f"{function.__name__}{'' if group is None else ' in the other group'}{' async' * asynchronous}"

    def all_reduce(self) -> str:
        """Of a whole array, or of every other element."""
        held, which = self.pick(), slice(None, None, self.rng.choice([1, 1, 2]))
        result = np.max([v[which] for v in held.values], axis=0)
        held.values = [v.copy() for v in held.values]
        for v in held.values:
            v[which] = result
        return self.call(dist.all_reduce, held.array[which], dist.ReduceOp.MAX, held=[held])

    def all_gather(self) -> str:
        held = self.pick(6)
        out = self.new(6 * self.world)
        out.values = [np.concatenate(held.values)] * self.world
        return self.call(dist.all_gather_into_tensor, out.array, held.array, held=[out, held])

    def reduce_scatter(self) -> str:
        given, out = self.new(6 * self.world), self.pick(6)
        total = sum(given.values)
        out.values = [total[6 * r : 6 * r + 6] for r in range(self.world)]
        return self.call(dist.reduce_scatter_tensor, out.array, given.array, held=[out, given])

    def lists(self) -> str:
        """An operation between an array and a list of arrays."""
        many, one = [self.new(6) for _ in range(self.world)], self.new(6)
        arrays_of = [held.array for held in many]
        name = self.rng.choice(["all_gather", "reduce_scatter", "all_to_all"])
        if name == "all_gather":
            for rank, held in enumerate(many):
                held.values = [one.values[rank]] * self.world
            return self.call(dist.all_gather, arrays_of, one.array, held=[*many, one])
        if name == "reduce_scatter":
            one.values = [sum(held.values) for held in many]
            return self.call(dist.reduce_scatter, one.array, arrays_of, held=[*many, one])
        outs = [self.new(6) for _ in range(self.world)]
        for rank, out in enumerate(outs):
            out.values = [held.values[rank] for held in many]
        return self.call(dist.all_to_all, [out.array for out in outs], arrays_of, held=[*many, *outs])

    def rooted(self) -> str:
        """A gather or a scatter, whose list only the root has."""
        many, one = [self.new(6) for _ in range(self.world)], self.new(6)
        root = self.rng.randrange(self.world)
        arrays_of = [held.array for held in many] if self.me == root else None
        if self.rng.random() < 0.5:
            for rank, held in enumerate(many):
                held.values[root] = one.values[rank]
            return self.call(dist.gather, one.array, arrays_of, root, held=[*many, one])
        one.values = [held.values[root] for held in many]
        return self.call(dist.scatter, one.array, arrays_of, root, held=[*many, one])

    def graph(self) -> str:
        """A graph with an operation, launched twice on the current stream."""
        held, stream = self.new(6), self.streams[-1]
        stream.wait_for(self.current)
        with stream, ranks.simulation().capture(stream.ptr) as made:
            dist.all_reduce(held.array, group=self.rng.choice(self.groups))
        self.graphs += made
        for _ in range(2):
            ranks.simulation().launch(made[0], self.current.ptr)
            held.values = [sum(held.values)] * self.world
        return "graph"

    def coalesced(self) -> str:
        one, two = self.new(6), self.new(64)
        for held in (one, two):
            held.values = [sum(held.values)] * self.world
        return self.call(dist.all_reduce_coalesced, [one.array, two.array], held=[one, two])

    def exchange(self) -> str:
        """Every rank sends its array to the next rank."""
        given, out = self.pick(6), self.new(6)
        out.values = [given.values[r - 1] for r in range(self.world)]
        after, before = (self.me + 1) % self.world, (self.me - 1) % self.world
        group = self.rng.choice(self.groups)
        ops = [
            dist.P2POp(dist.isend, given.array, after, group),
            dist.P2POp(dist.irecv, out.array, before, group),
        ]
        self.pending += [(work, [given, out]) for work in dist.batch_isend_irecv(ops)]
        return "exchange"

    def wait(self) -> str:
        """Make the current stream wait for one of the operations, not necessarily the oldest."""
        if not self.pending:
            return "nothing to wait for"
        work, _ = self.pending.pop(self.rng.randrange(len(self.pending)))
        work.wait()
        return "wait"


_others: list[Any] = []


def run(seeds: list[int]) -> list[str]:
    """Run random programs; the errors."""
    simulation = ranks.simulation()
    simulation.pool.strict = False
    if not _others:
        _others.append(dist.new_group(list(range(dist.get_world_size()))))
        connect()
        dist.all_reduce(arrays.full(1, 1.0), group=_others[0])
        simulation.synchronize()
    return [f"program {seed}: {text}" for seed in seeds for text in _run(seed)]


def _run(seed: int) -> list[str]:
    program = Program(seed, _others[0])
    wrong = program.run(_STEPS)
    for graph in program.graphs:
        graph.destroy()
    del program
    return wrong + _faults()


def _faults() -> list[str]:
    """The faults since the last call, once the device is done."""
    simulation = ranks.simulation()
    simulation.synchronize()
    found, simulation.faults[:] = list(simulation.faults), []
    return found


def run_with_failures(seeds: list[int]) -> list[str]:
    """Run random programs with a failure each, each in a group of its own; the faults, and the calls without an end."""
    communicator._DEATH_NOTICE_S = 0.05  # no rank dies
    ranks.simulation().pool.strict = False
    wrong = [f"program {seed}: {text}" for seed in seeds for text in _fail(seed, _STEPS // 2) + _faults()]
    gc.collect()  # errors refer to frames that have them
    return wrong


def _fail(seed: int, steps: int) -> list[str]:
    """One program, in which something fails on one rank."""
    me, n = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(timeout=60)
    program = Program(seed, group)
    program.groups = [group.using(timeout=_FAILS_S)]
    rng = program.rng
    kind = rng.choice(["absent", "silent", *["abort", "error"] * 4])
    victim, at = rng.randrange(n), rng.randrange(steps)
    x = arrays.full(3, 1.0)
    dist.all_reduce(x, group=group)
    found = [] if (x.numpy() == n).all() else [f"the first all_reduce gives {x.numpy()}"]
    dist.barrier()
    with suppress(dist.DistError):
        for step in range(steps):
            if step == at and me == victim and kind != "silent":
                if kind == "absent":
                    break
                _break(group, kind)
            program.step()
        if kind == "silent":
            found += _lose_last(program, group, victim)
        elif kind != "absent" or me != victim:
            last = program.groups[0].all_reduce(x, async_op=True)
            last.synchronize()  # ends a program that has noticed nothing
            found.append(f"no error after {kind} on rank {victim} at step {at}: {'; '.join(program.done)}")
    program.end()
    with suppress(dist.DistError):
        dist.destroy_process_group(group)
    return found


def _lose_last(program: Program, group: Any, victim: int) -> list[str]:
    """An operation that the victim does not make, and that no call follows; the complaint if nothing raises its error.

    A graph's operation has no deadline: the victim, which does not launch its graph, aborts the group.
    """
    for work, _ in program.pending:
        work.synchronize()
    program.pending.clear()
    rng, simulation, me = program.rng, ranks.simulation(), program.me
    way = rng.choice(["blocking", "asynchronous", "another stream", "synchronized before", "graph"])
    stream, by_check = program.streams[-1], rng.random() < 0.5
    with program.current:
        x = arrays.full(6, 1.0)
    if way == "graph":
        stream.wait_for(program.current)
        with stream, simulation.capture(stream.ptr) as made:
            dist.all_reduce(x, group=group)
        program.graphs += made
        simulation.synchronize()
        dist.barrier()
        if me == victim:
            group.abort()
    if me == victim:
        return []
    if way == "graph":
        simulation.launch(made[0], program.current.ptr)
        await_true(lambda: backend_of(group).failure)
    elif way == "another stream":
        stream.wait_for(program.current)
        with stream:
            dist.all_reduce(x, group=group, timeout=_LAST_S)
    else:
        if way == "synchronized before":
            program.current.synchronize()
        with program.current:
            dist.all_reduce(x, group=group, timeout=_LAST_S, async_op=way == "asynchronous")
    if by_check:
        # What has failed is stopped behind the error, so nothing is undefined without one.
        simulation.synchronize()
    missed = error_of(group.check if by_check else lambda: dist.destroy_process_group(group)) == "nothing"
    by = "check()" if by_check else "destroy"
    return [f"{by} raises nothing after a last operation, {way}, that failed"] if missed else []


def _break(group: Any, kind: str) -> None:
    """Abort the group, or have NCCL report an asynchronous error."""
    if kind == "abort":
        group.abort()
        return
    with ranks.simulation().scheduler.lock:
        ranks.nccl()._comms[backend_of(group).resources.comm.handle].error = Result.REMOTE_ERROR


def run_with_a_trap(seed: int) -> list[str]:
    """Run one random program in which a kernel of one rank traps; the calls without an end or an error."""
    communicator._DEATH_NOTICE_S = 0.05
    ranks.simulation().pool.strict = False
    connect()
    wrong = _trap(seed)
    gc.collect()  # errors refer to frames that have arrays and streams
    return wrong


def _trap(seed: int) -> list[str]:
    program = Program(seed, dist.group.WORLD)
    rng, group = program.rng, dist.group.WORLD.using(timeout=_FAILS_S)  # type: ignore[union-attr]
    program.groups = [group]
    victim, at = rng.randrange(program.world), rng.randrange(_STEPS // 2)
    where = rng.choice(program.streams).ptr
    errors = []
    try:
        for step in range(_STEPS // 2):
            if step == at and program.me == victim:
                ranks.simulation().trap(where)
            program.step()
        # The trap may be on a stream that nothing waits for.
        ranks.simulation().synchronize()
        group.all_reduce(arrays.full(1, 1.0), async_op=True).synchronize()  # type: ignore[union-attr]
    except dist.DistError as e:
        errors.append(f"{e}")
    program.end()
    errors.append(error_of(dist.destroy_process_group))
    return [] if errors[0] != "nothing" else [f"program {seed} has raised nothing"]


def _run_on_ranks(job: Callable[..., Any], size: int, policy: str, seed: int) -> None:
    rng = random.Random(f"{seed} {policy} {size}")
    seeds = [rng.randrange(1 << 30) for _ in range(_PROGRAMS)]
    assert simulated_run(size, job, seeds, policy=policy, seed=seed, quiet=job is run) == [[]] * size


@pytest.mark.every(n=6)
@pytest.mark.parametrize("policy", ["oldest", "newest", "random"])
@pytest.mark.parametrize("size", [2, 3])
def test_random_programs(policy: str, size: int, seed: int) -> None:
    _run_on_ranks(run, size, policy, seed)


@pytest.mark.every(n=3)
@pytest.mark.parametrize("policy", ["oldest", "newest", "random"])
def test_every_call_ends_where_a_rank_fails(policy: str, seed: int) -> None:
    """Without a race, and the next group works."""
    _run_on_ranks(run_with_failures, 3, policy, seed)


@pytest.mark.every(n=3)
@pytest.mark.parametrize("number", range(_TRAPS))
def test_every_call_ends_where_a_kernel_traps(number: int, seed: int) -> None:
    """Nothing is left behind: the ranks leave in order."""
    policy = ("oldest", "newest", "random")[number % 3]
    program = random.Random(f"{seed} {number}").randrange(1 << 30)
    assert simulated_run(3, run_with_a_trap, program, policy=policy, seed=seed, quiet=False) == [[]] * 3


def run_without(safeguard: str, seeds: list[int]) -> list[str]:
    """Run random programs without a safeguard of the backend; the errors."""
    with mutated(safeguard):
        return run(seeds)


@pytest.mark.every(n=3)
@pytest.mark.parametrize("safeguard", MUTATIONS)
def test_random_programs_find_that_a_safeguard_is_missing(safeguard: str) -> None:
    with joined(2, SimulatedJob, policy="newest", quiet=False) as job:
        job.call(run_without, safeguard, list(range(_PROGRAMS)))
        for outcome in job.collect(300):
            wrong = outcome.value or [outcome.failure]
            assert any("race" in str(each) or "use after free" in str(each) for each in wrong), outcome
