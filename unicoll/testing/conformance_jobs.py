"""What ranks do in the conformance suite in addition to single cases."""

from __future__ import annotations

import array
import hashlib
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.calls.ops import OPS, Arity
from unicoll.testing import reference
from unicoll.testing.families import GuardedArray, family


def messages(kind: str) -> list[str]:
    """Messages to the next rank and from the one before, blocking, in the background and as a
    batch: what is wrong."""
    size, me = dist.get_world_size(), dist.get_rank()
    after, before = (me + 1) % size, (me - 1) % size
    wrong = []
    for count, layout in (
        (1, "contiguous"),
        (0, "contiguous"),
        (1000, "step"),
        (100_003, "contiguous"),
    ):
        for dtype in ("float32", "int64", "uint8"):
            values = [np.full(count, 3 * rank + 1, dtype) for rank in range(size)]
            mine = family(kind).hold(values[me], layout)
            for how in ("blocking", "background", "batch"):
                got = family(kind).hold(np.zeros(count, dtype), layout)
                _exchange(how, mine.array, got.array, before, after)
                if not np.array_equal(got.read(), values[before]) or not got.intact():
                    wrong.append(
                        f"rank {me}: {how}: {dtype}[{count}], {layout}, from rank {before}"
                    )
    return wrong


def _exchange(how: str, mine: Any, got: Any, before: int, after: int) -> None:
    if how == "batch":
        ops = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, got, before)]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        return
    send, receive = (dist.send, dist.recv) if how == "blocking" else (dist.isend, dist.irecv)
    calls: list[Any] = [partial(send, mine, after), partial(receive, got, before)]
    # Rank 0 begins: NCCL does one operation after another, also in the background.
    if dist.get_rank() != 0:
        calls.reverse()
    for work in [call() for call in calls]:
        if how == "background":
            work.wait()


def bad_arguments(kind: str) -> list[str]:
    """Messages with invalid tags and ranks: those that were accepted, or refused with another
    error."""
    x = family(kind).hold(np.zeros(3, np.float32), "contiguous").array
    other = 1 - dist.get_rank()
    wrong = []
    bad: list[tuple[str, Any, type[Exception]]] = [
        *(("tag", tag, dist.DistArgumentError) for tag in (2**63, -(2**63) - 1, 1 << 100)),
        *((name, value, dist.DistTypeError) for name in ("tag", "peer") for value in (1.0, "1")),
        ("tag", None, dist.DistTypeError),
    ]
    for name, value, error in bad:
        peer, tag = (value, 0) if name == "peer" else (other, value)
        calls: dict[str, Any] = {
            "send": partial(dist.send, x, peer, tag=tag),
            "isend": partial(dist.isend, x, peer, tag=tag),
            "batch": partial(_batch_of_one, x, peer, tag),
        }
        if tag is not None:
            calls["recv"] = partial(dist.recv, x, peer, tag=tag)
            calls["irecv"] = partial(dist.irecv, x, peer, tag=tag)
        for call in calls:
            try:
                calls[call]()
                wrong.append(f"{call}: {name}={value!r} was accepted")
            except error as e:
                expected = ("src", "dst", "peer") if name == "peer" else ("tag",)
                if not any(word in str(e) for word in expected):
                    wrong.append(f"{call}: {name}={value!r}: {e}")
    return wrong


def _batch_of_one(x: Any, peer: Any, tag: Any) -> None:
    dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer, tag=tag)])


def other_integers(kind: str) -> list[Any]:
    """Ranks, tags and sizes that are integers of NumPy's: what came of a message, a broadcast and
    an exchange."""
    me, n = dist.get_rank(), dist.get_world_size()

    def hold(values: Any) -> GuardedArray:
        return family(kind).hold(np.asarray(values, np.float32), "contiguous")

    zero: Any = np.int64(0)
    one: Any = np.int32(1)
    other: Any = np.uint8(1 - me)
    pair = dist.new_group([zero, one])
    mine, got = hold([me + 1.0]), hold([0.0])
    ops = [
        dist.P2POp(dist.isend, mine.array, other, pair, zero),
        dist.P2POp(dist.irecv, got.array, other, pair, zero),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.broadcast(mine.array, one, pair)
    given, taken = hold([10.0 * me, 10.0 * me + 1, 10.0 * me + 2]), hold([0.0] * (4 - 2 * me))
    sizes: Any = np.array([2, 1])
    out_splits: Any = np.full(n, sizes[me])
    dist.all_to_all_single(taken.array, given.array, out_splits, sizes)
    dist.destroy_process_group(pair)
    return [got.read().tolist(), mine.read().tolist(), taken.read().tolist()]


def coalesced(async_op: bool, kind: str) -> None:
    """Every ``*_coalesced`` call on arrays of a family against its single counterpart's result."""
    n, me = dist.get_world_size(), dist.get_rank()
    sizes = (3, 0, 17, 30000)

    def hold(values: Any, layout: str = "contiguous") -> GuardedArray:
        return family(kind).hold(values, layout)

    def full(first: int, step: int = 1) -> list[GuardedArray]:
        return [hold(np.full(s, first + step * k, dtype)) for k, s in enumerate(sizes)]

    def arrays(held: Sequence[GuardedArray]) -> list[Any]:
        return [h.array for h in held]

    def finish(work: Any) -> None:
        assert (work is not None) == async_op
        if async_op:
            work.wait()

    x: list[GuardedArray]
    for dtype in ("float32", "int64", "float16"):
        x = full(me)
        x[2] = hold(np.full(17, me + 2, dtype), "step")
        finish(dist.all_reduce_coalesced(arrays(x), async_op=async_op))
        for k, each in enumerate(x):
            assert (each.read() == sum(r + k for r in range(n))).all(), (dtype, k, each.read())
        x = full(me)
        finish(dist.all_reduce_coalesced(arrays(x), op=dist.ReduceOp.MAX, async_op=async_op))
        assert all((each.read() == n - 1 + k).all() for k, each in enumerate(x))
        x = full(me * 10)
        finish(dist.broadcast_coalesced(arrays(x), src=n - 1, async_op=async_op))
        assert all((each.read() == (n - 1) * 10 + k).all() for k, each in enumerate(x))
        inputs = full(me * 10)
        outs = [full(-1, 0) for _ in range(n)]
        finish(
            dist.all_gather_coalesced([arrays(o) for o in outs], arrays(inputs), async_op=async_op)
        )
        assert all(
            (outs[r][k].read() == r * 10 + k).all() for r in range(n) for k in range(len(sizes))
        )
        flat = [hold(np.zeros((n, s), dtype)) for s in sizes]
        finish(
            dist.all_gather_into_tensor_coalesced(arrays(flat), arrays(inputs), async_op=async_op)
        )
        assert all(
            (flat[k].read()[r] == r * 10 + k).all() for r in range(n) for k in range(len(sizes))
        )
        given = [hold(np.arange(n, dtype=dtype).repeat(s) + np.asarray(me, dtype)) for s in sizes]
        parts = full(-1, 0)
        finish(
            dist.reduce_scatter_tensor_coalesced(arrays(parts), arrays(given), async_op=async_op)
        )
        assert all((p.read() == sum(me + r for r in range(n))).all() for p in parts)
    two = [hold(np.full(4, me, np.float32)), hold(np.full(4, me, np.int32))]
    finish(dist.all_reduce_coalesced(arrays(two), async_op=async_op))
    assert all((t.read() == sum(range(n))).all() for t in two)


def overlapping(kind: str, operations: Sequence[str], async_op: bool) -> list[str]:
    """Calls whose inputs overlap their outputs: what differs from the result for a copy of the
    inputs."""
    n, me = dist.get_world_size(), dist.get_rank()
    wrong = []
    for k, op in product((3, 70_000), operations):
        memory = [(np.arange(n * k + 1) * (rank + 1)).astype(np.int32) for rank in range(n)]
        held = family(kind).hold(memory[me], "contiguous")
        work = _overlapping_call(op, held.array, k, async_op)
        if work is not None:
            work.wait()
        different = np.flatnonzero(held.read() != _memory_afterwards(op, memory, k))
        if different.size:
            wrong.append(
                f"rank {me}: {op} of {k}: {different.size} elements from {different[0]} on"
            )
    return wrong


def _parts(array: Any, k: int, start: int = 0) -> list[Any]:
    """One of ``k`` elements for each rank."""
    return [array[start + i * k : start + (i + 1) * k] for i in range(dist.get_world_size())]


def _overlapping_call(op: str, x: Any, k: int, async_op: bool) -> Any:
    """An operation on parts of the array ``x`` that overlap."""
    n, me = dist.get_world_size(), dist.get_rank()
    part, whole, parts = x[1 : k + 1], x[: n * k], _parts(x, k)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_gather": (parts, part),
        "all_gather_into_tensor": (whole, part),
        "gather": (part, parts if me == 0 else None),
        "scatter": (part, parts if me == 0 else None),
        "reduce_scatter": (part, parts),
        "reduce_scatter_tensor": (part, whole),
        "all_to_all": (_parts(x, k, 1), parts),
        "all_to_all_single": (x[1:], whole),
    }
    if op == "sendrecv":
        dist.sendrecv(x[:-1], (me + 1) % n, x[1:], (me - 1) % n)
        return None
    return getattr(dist, op)(*arguments[op], async_op=async_op)


def _memory_afterwards(op: str, memory: list[Any], k: int) -> Any:
    """The array of this rank after :func:`_overlapping_call`, from those of all ranks before it."""
    n, me = dist.get_world_size(), dist.get_rank()
    found = memory[me].copy()
    if op in ("all_gather", "all_gather_into_tensor") or (op == "gather" and me == 0):
        found[: n * k] = np.concatenate([each[1 : k + 1] for each in memory])
    elif op == "scatter":
        found[1 : k + 1] = _parts(memory[0], k)[me]
    elif op.startswith("reduce_scatter"):
        found[1 : k + 1] = _parts(np.sum(memory, axis=0, dtype=np.int32), k)[me]
    elif op.startswith("all_to_all"):
        found[1:] = np.concatenate([_parts(each, k)[me] for each in memory])
    elif op == "sendrecv":
        found[1:] = memory[(me - 1) % n][:-1]
    return found


def overlapping_outputs(kind: str) -> list[str]:
    """The errors of calls whose outputs overlap each other; the group must work afterwards."""
    n = dist.get_world_size()
    x, y = (family(kind).hold(np.zeros(3 * n, np.float32), "contiguous").array for _ in range(2))
    calls: list[Any] = [
        partial(dist.all_gather, [y[:3]] * n, x[:3]),
        partial(dist.all_to_all, [y[i : i + 3] for i in range(n)], [x[:3]] * n),
        partial(dist.all_reduce_coalesced, [x, x[2:]]),
        partial(dist.all_gather_into_tensor_coalesced, [y, y], [x[:3], x[3:6]]),
    ]
    errors = []
    for call in calls:
        try:
            call()
            errors.append("nothing")
        except dist.DistArgumentError as e:
            errors.append(str(e))
    ones = np.ones(3)
    dist.all_reduce(ones)
    assert (ones == n).all()
    return errors


def barrier_times(call: str) -> tuple[float, float]:
    """When this rank came to a barrier, and when it left; ranks come apart."""
    time.sleep(0.03 * dist.get_rank())
    came = time.monotonic()
    if call == "async barrier":
        work = dist.barrier(async_op=True)
        assert work is not None
        work.wait()
    else:
        getattr(dist, call)()
    return came, time.monotonic()


def refusals(op: str, pairs: Sequence[tuple[str, str]], kind: str) -> list[tuple[str, str]]:
    """The error of a reduction for each (dtype, reduction); the group must work afterwards."""
    n = dist.get_world_size()

    def zeros(count: int, dtype: str) -> Any:
        return family(kind).hold(np.zeros(count, reference.numpy_dtype(dtype)), "contiguous").array

    errors = []
    for dtype, reduce in pairs:
        x, whole, parts = zeros(4, dtype), zeros(4 * n, dtype), [zeros(4, dtype) for _ in range(n)]
        row = OPS[op]
        args = [
            parts if row.inputs is Arity.PER_RANK else whole if row.scattered else x
            for parameter in row.parameters
            if parameter.side == "input"
        ]
        args = [x, *args, *([0] if row.rooted else []), reference.reduction_of(reduce, dtype)]
        try:
            getattr(dist, op)(*args)
            errors.append(("nothing", f"{dtype} {reduce} was accepted"))
        except Exception as e:
            errors.append((type(e).__name__, str(e)))
    x = np.ones(3)
    dist.all_reduce(x)
    assert (x == n).all()
    return errors


def repeated_reductions(kind: str) -> list[list[str]]:
    """Digests of the results of the same all_reduces of a family's arrays, done several times,
    blocking and not."""
    digests = []
    for count in (5, 1000, 100_003):
        for dtype in ("float32", "float16", "complex64"):
            given = np.random.default_rng(dist.get_rank()).standard_normal(count).astype(dtype)
            mine = []
            for _ in range(3):
                x = family(kind).hold(given, "contiguous")
                dist.all_reduce(x.array)
                mine.append(x.read())
                x = family(kind).hold(given, "contiguous")
                work = dist.all_reduce(x.array, async_op=True)
                assert work is not None
                assert work.result()[0] is x.array
                mine.append(x.read())
            digests.append([hashlib.sha256(x.tobytes()).hexdigest() for x in mine])
    return digests


def other_buffers() -> list[int]:
    """Objects that lend their memory take part too."""
    me = dist.get_rank()
    x = array.array("q", [(me + 1) * i for i in (1, 2, 3)])
    dist.all_reduce(x)
    y = bytearray(b"from0" if me == 0 else b".....")
    dist.broadcast(y, src=0)
    assert y == b"from0"
    z = memoryview(bytearray(bytes([me] * 4)))
    dist.all_reduce(z, op=dist.ReduceOp.MAX)
    assert bytes(z) == bytes([dist.get_world_size() - 1] * 4)
    return list(x)
