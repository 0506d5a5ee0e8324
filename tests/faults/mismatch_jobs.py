"""What ranks do in the tests of calls that differ between ranks, and of arguments that are wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from tests.faults.refusal_jobs import Unreadable
from tests.support.calls import invoke
from tests.support.outcomes import CallOutcome, outcome_of
from tests.support.worker import Failure
from unicoll.backend import Call

# --- different calls ----------------------------------------------------------------------------------------


def differ(
    cases: list[tuple[str, dict[str, Any], str, dict[str, Any], int]], at_once: bool
) -> list[CallOutcome]:
    """Each case on a group of its own: one rank makes another call than the others.

    Args:
        at_once: True if it is the group's first call, in which the ranks select the transport.
        cases: name and options of the call of most ranks, those of the odd one's, and which rank that is.
    """
    outcomes = []
    for name, options, odd_name, odd_options, odd in cases:
        group = dist.new_group()
        if not at_once:
            dist.barrier(group)
        mine, more = (odd_name, odd_options) if dist.get_rank() == odd else (name, options)
        outcomes.append(outcome_of(lambda m=mine, o=more, g=group: invoke(m, g, timeout=60, **o)))  # type: ignore[misc]
        dist.destroy_process_group(group)
    return outcomes


def everyone_another_root(name: str, count: int) -> CallOutcome:
    """Each rank takes the next one for the root."""
    group = dist.new_group()
    root = (dist.get_rank() + 1) % dist.get_world_size()
    outcome = outcome_of(lambda: invoke(name, group, root=root, count=count, timeout=60))
    dist.destroy_process_group(group)
    return outcome


def another_order(first: str, second: str) -> CallOutcome:
    """The last rank makes two calls in the wrong order."""
    group = dist.new_group()
    names = [first, second] if dist.get_rank() < dist.get_world_size() - 1 else [second, first]

    def both() -> None:
        for name in names:
            invoke(name, group, timeout=60)

    outcome = outcome_of(both)
    dist.destroy_process_group(group)
    return outcome


def one_leaves_the_call_before_late() -> str:
    """Ranks 0 and 1 make different calls while rank 2 is at the end of the call before; returns the error."""
    group = dist.new_group()
    if dist.get_rank() == 2:
        write_back = Call.write_back

        def late(call: Call) -> None:
            Call.write_back = write_back  # type: ignore[method-assign]
            time.sleep(0.4)

        Call.write_back = late  # type: ignore[method-assign]
    dist.all_reduce(np.ones(2), group=group, timeout=60)
    try:
        dist.all_reduce(np.ones(4 + (dist.get_rank() == 1)), group=group, timeout=60)
    except dist.CollectiveMismatchError as e:
        return str(e)
    finally:
        dist.destroy_process_group(group)
    return ""


def splits_differ(count: int) -> CallOutcome:
    """In an all_to_all_single rank 1 expects more of rank 0 than it sends."""
    group = dist.new_group()
    n, me = dist.get_world_size(), dist.get_rank()
    give, take = [count] * n, [count] * n
    if me == 1:
        take[0] += 1
    given, room = np.ones(sum(give)), np.zeros(sum(take))
    outcome = outcome_of(lambda: dist.all_to_all_single(room, given, take, give, group=group, timeout=60))
    dist.destroy_process_group(group)
    return outcome


def list_differs(name: str, counts: list[int], odd: int) -> tuple[CallOutcome, bool]:
    """A gather or scatter whose root expects ``counts``, while rank ``odd`` has an element more.

    Returns how it ended, and whether nothing was written.
    """
    group = dist.new_group()
    n, me, root = dist.get_world_size(), dist.get_rank(), 0
    own, entries = np.zeros(counts[me] + (me == odd)), [np.zeros(count) for count in counts]
    given, taken = ([own], entries) if name == "gather" else (entries, [own])
    for x in given:
        x[:] = 1

    def call() -> None:
        several = entries if me == root else None
        getattr(dist, name)(own, several, root, group=group, timeout=60)

    outcome = outcome_of(call)
    dist.destroy_process_group(group)
    assert n == len(counts)
    return outcome, not any(x.any() for x in taken)


def shapes_differ(name: str) -> CallOutcome:
    """In a gather or scatter rank 1 has an array of the others' size, but of another shape."""
    group = dist.new_group()
    n, me = dist.get_world_size(), dist.get_rank()
    own = np.zeros((3, 2) if me == 1 else (2, 3))
    several = [np.zeros(6) for _ in range(n)] if me == 0 else None
    outcome = outcome_of(lambda: getattr(dist, name)(own, several, 0, group=group, timeout=60))
    dist.destroy_process_group(group)
    return outcome


# --- bad arguments ------------------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple[Callable[[], Any], str, str]]:
    """Calls that one rank alone refuses or cannot begin: the call, the error's type, and a word of its message."""
    n = dist.get_world_size()
    x, y = np.ones(4, np.float32), np.ones(3, np.float32)
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False
    many = [np.ones(4, np.float32) for _ in range(n)]
    d: Any = dist
    op = dist.ReduceOp
    return {
        "a list": (lambda: d.all_reduce([1.0, 2.0]), "DistTypeError", "np.array"),
        "nothing": (lambda: d.broadcast(None, 0), "DistTypeError", "broadcast"),
        "a number": (lambda: d.reduce(3.0, 0), "DistTypeError", "reduce"),
        "an object array": (lambda: d.all_reduce(np.array([None])), "DistTypeError", "broadcast_object_list"),
        "strings": (lambda: d.broadcast(np.array(["x"]), 0), "DistTypeError", ".view('uint8')"),
        "dates": (lambda: d.broadcast(np.array(["2024"], "M8[D]"), 0), "DistTypeError", ".view('int64')"),
        "other byte order": (lambda: d.all_reduce(np.ones(4, ">f4")), "DistTypeError", "byte order"),
        "a masked array": (lambda: d.all_reduce(np.ma.masked_array([1.0])), "DistTypeError", "mask"),
        "a group's rank for its ranks": (lambda: d.new_group(1), "DistTypeError", "expected a list of ranks"),
        "read-only": (lambda: d.all_reduce(frozen), "DistArgumentError", "read-only"),
        "read-only output": (
            lambda: d.broadcast(frozen, (dist.get_rank() + 1) % n),
            "DistArgumentError",
            "read-only",
        ),
        "root too large": (lambda: d.broadcast(x, n), "DistArgumentError", "src"),
        "root negative": (lambda: d.reduce(x, -1), "DistArgumentError", "dst"),
        "root is no number": (lambda: d.gather(x, None, "0"), "DistTypeError", "dst"),
        "no root": (lambda: d.broadcast(x), "DistArgumentError", "src"),
        "two roots": (lambda: d.broadcast(x, 0, group_src=0), "DistArgumentError", "src"),
        "no operation": (lambda: d.all_reduce(x, op="AVERAGE"), "DistTypeError", "SUM, AVG,"),
        "premul without factor": (lambda: d.all_reduce(x, op=op.PREMUL_SUM), "DistTypeError", "PREMUL_SUM"),
        "bits of floats": (lambda: d.all_reduce(x, op=op.BAND), "DistTypeError", "BAND"),
        "least of complex": (lambda: d.all_reduce(np.ones(2, "c8"), op=op.MIN), "DistTypeError", "MIN"),
        "average of bools": (lambda: d.all_reduce(np.ones(2, "?"), op=op.AVG), "DistTypeError", "AVG"),
        "half of integers": (
            lambda: d.all_reduce(np.ones(2, "i4"), op=op.PREMUL_SUM(0.5)),
            "DistTypeError",
            "factor",
        ),
        "list too short": (lambda: d.all_gather(many[:-1], x), "DistArgumentError", "all_gather"),
        "no list": (lambda: d.all_gather(None, x), "DistTypeError", "tensor_list"),
        "pieces too small": (lambda: d.all_gather([y] * n, x), "DistArgumentError", "output"),
        "output too small": (lambda: d.all_gather_into_tensor(y, x), "DistArgumentError", "output"),
        "other dtype": (
            lambda: d.all_gather_into_tensor(np.ones(4 * n), x),
            "DistTypeError",
            "all_gather_into_tensor",
        ),
        "input too small": (lambda: d.reduce_scatter_tensor(x, y), "DistArgumentError", "input"),
        "inputs too few": (lambda: d.reduce_scatter(x, many[1:]), "DistArgumentError", "reduce_scatter"),
        "gather list not on root": (
            lambda: d.gather(x, many, (dist.get_rank() + 1) % n),
            "DistArgumentError",
            "gather",
        ),
        "scatter list not on root": (
            lambda: d.scatter(x, many, (dist.get_rank() + 1) % n),
            "DistArgumentError",
            "scatter",
        ),
        "root's own array": (
            lambda: d.gather(Unreadable(), many, dist.get_rank()),
            "RuntimeError",
            "any more",
        ),
        "root's frozen output": (
            lambda: d.scatter(frozen, many, dist.get_rank()),
            "DistArgumentError",
            "read-only",
        ),
        "unreadable": (lambda: d.all_reduce(Unreadable()), "RuntimeError", "any more"),
        "one unreadable": (lambda: d.all_gather([*many[1:], Unreadable()], x), "RuntimeError", "any more"),
        "one of several unreadable": (
            lambda: d.all_reduce_coalesced([x, Unreadable()]),
            "RuntimeError",
            "any more",
        ),
        "unreadable message": (
            lambda: d.send(Unreadable(), (dist.get_rank() + 1) % n),
            "RuntimeError",
            "any more",
        ),
        "one unreadable message": (
            lambda: d.batch_isend_irecv(
                [d.P2POp(d.isend, a, (dist.get_rank() + 1) % n) for a in (x, Unreadable())]
            ),
            "RuntimeError",
            "any more",
        ),
        "uneven rows": (
            lambda: d.all_to_all_single(np.ones(n + 1), np.ones(n + 1)),
            "DistArgumentError",
            "split",
        ),
        "wrong splits": (
            lambda: d.all_to_all_single(np.ones(n), np.ones(n), [1] * n, [2] * n),
            "DistArgumentError",
            "input_split_sizes",
        ),
        "negative splits": (
            lambda: d.all_to_all_single(np.ones(n), np.ones(n), [-1] + [1] * (n - 2) + [2], [1] * n),
            "DistArgumentError",
            "output_split_sizes",
        ),
        "time is up": (lambda: d.all_reduce(x, timeout=-1), "DistArgumentError", "timeout"),
        "no time": (lambda: d.barrier(timeout=0), "DistArgumentError", "timeout"),
        "no number": (lambda: d.barrier(timeout=float("nan")), "DistArgumentError", "timeout"),
        "time of no kind": (lambda: d.barrier(timeout="long"), "DistTypeError", "timeout"),
        "no arrays": (lambda: d.all_reduce_coalesced([]), "DistArgumentError", "all_reduce"),
        "send to nobody": (lambda: d.send(x, n), "DistArgumentError", "dst"),
        "tag of no kind": (
            lambda: d.send(x, (dist.get_rank() + 1) % n, tag="x"),
            "DistTypeError",
            "tag",
        ),
        "no P2POp": (lambda: d.batch_isend_irecv([x]), "DistTypeError", "P2POp"),
        "no group": (lambda: d.all_reduce(x, group="world"), "DistTypeError", "group"),
    }


def refuse_each(who: int) -> dict[str, Failure | None]:
    """Rank ``who`` makes all bad calls; after each, all ranks make good ones."""
    outcomes: dict[str, Failure | None] = {}
    for name, (call, _, _) in bad_calls().items():
        if dist.get_rank() == who:
            outcomes[name] = outcome_of(call)[0]
        x = np.ones(3)
        dist.all_reduce(x, timeout=20)
        assert (x == dist.get_world_size()).all(), name
    return outcomes
