"""Different calls on different ranks raise the same error on all; bad arguments are refused where they are given."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unicoll as dist
from tests.faults.refusal_jobs import Unreadable
from tests.support import selection
from tests.support.calls import COALESCED, COLLECTIVES, REDUCING, ROOTED, invoke, row_name
from tests.support.on_ranks import on_ranks
from tests.support.outcomes import failure_of
from tests.support.ranks import Pool
from tests.support.worker import Failure
from unicoll import ReduceOp
from unicoll.arrays.types import DTYPES
from unicoll.backend.operation_errors import only_different
from unicoll.calls.call import Call
from unicoll.calls.ops import OPS
from unicoll.calls.validation import sign

PREMUL_SUM = ReduceOp.PREMUL_SUM


# --- different calls on different ranks ---------------------------------------------------------------------


Case = tuple[str, dict[str, Any], str, dict[str, Any], int]


def differences(name: str) -> list[Case]:
    """Ways in which one rank's call of ``name`` can differ from the others'."""
    found: list[Case] = []
    plain: dict[str, Any] = {}
    for odd in (len(name) % 3,) if selection.is_short() else (0, 1, 2):
        if name != "barrier":
            found.append((name, plain, name, {"count": 5}, odd))
            found.append((name, plain, name, {"count": 0}, odd))
            found.append((name, plain, name, {"count": 100_000}, odd))
            found.append((name, {"count": 100_000}, name, {"count": 100_001}, odd))
            found.append((name, plain, name, {"dtype": "int32"}, odd))
            found.append((name, plain, name, {"dtype": "float64"}, odd))
        if name in REDUCING:
            found.append((name, plain, name, {"reduce": "MAX"}, odd))
            found.append((name, {"count": 100_000}, name, {"count": 100_000, "reduce": "MAX"}, odd))
        if name in ROOTED:
            found.append((name, plain, name, {"root": 1}, odd))
            found.append((name, {"root": 2}, name, {"root": 0}, odd))
            found.append((name, {"count": 100_000}, name, {"count": 100_000, "root": 2}, odd))
        for other in COLLECTIVES:
            if other != row_name(name):  # a batch of several may be done one after another
                found.append((name, plain, other, plain, odd))
    return found


def differ(cases: list[Case], at_once: bool) -> list[Failure | None]:
    """Each case on a group of its own: one rank makes another call than the others.

    Args:
        at_once: True if it is the group's first call, in which the ranks select the transport.
        cases: name and options of the call of most ranks, those of the odd one's, and which rank that is.
    """
    failures = []
    for name, options, odd_name, odd_options, odd in cases:
        group = dist.new_group()
        if not at_once:
            dist.barrier(group)
        mine, more = (odd_name, odd_options) if dist.get_rank() == odd else (name, options)
        failures.append(failure_of(partial(invoke, mine, group, timeout=60, **more)))
        dist.destroy_process_group(group)
    return failures


@pytest.mark.every(n=6)
@pytest.mark.sampled("name", "at_once", 1)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", [*COLLECTIVES, *COALESCED])
def test_ranks_that_call_differently_raise_the_same_error(
    name: str, at_once: bool, pool: Callable[[int], Pool]
) -> None:
    cases = differences(name)
    outcomes = pool(3).run(differ, cases, at_once, timeout=300)
    wrong = []
    for case, failures in zip(cases, zip(*outcomes, strict=True), strict=True):
        texts = {f.message if f else "no error" for f in failures}
        kinds = {f.type if f else "none" for f in failures}
        if len(texts) != 1 or kinds != {"CollectiveMismatchError"}:
            wrong.append(f"{case}: {texts}")
            continue
        text = texts.pop()
        assert row_name(name) in text
        assert row_name(case[2]) in text
        assert all(f"rank {r}" in text for r in range(3)) or "all_to_all" in text
        calls = re.findall(r"rank \d: \w+\(.*\) #\d", text)  # a rank that comes late is not in a call
        odd = case[-1] if "in different collectives" in text and len(calls) == 3 else None
        assert {failure.fields.get("rank") for failure in failures} == {odd}, text
        assert "calls.py" in text or "all_to_all" in text, text
    assert not wrong, f"{len(wrong)} of {len(cases)} wrong:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize(
    ("calls", "rank"),
    [
        (["f() #1", "g() #1", "f() #1"], 1),
        (["f() #1", "f() #1", "f() #2"], 2),
        (["f() #1"], None),
        (["f() #1", "f() #1", "f() #1"], None),
        (["f() #1", "g() #1"], None),
        (["f() #1", "g() #1", "h() #1"], None),
        (["f() #1", "g() #1", "f() #1", "g() #1"], None),
    ],
)
def test_the_only_rank_whose_call_differs(calls: list[str], rank: int | None) -> None:
    assert only_different(dict(enumerate(calls))) == rank


def mismatch(call: Callable[..., object]) -> str:
    """All ranks raise CollectiveMismatchError with one text, long before their timeout; the text.

    The call has a group of its own, with which the error ends.
    """
    group = dist.new_group()
    with pytest.raises(dist.CollectiveMismatchError) as raised:
        call(group=group, timeout=60)
    dist.destroy_process_group(group)
    text = str(raised.value)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert set(texts) == {text}
    return text


@on_ranks(3)
def test_a_rank_that_is_about_to_leave_the_call_before_is_awaited() -> None:
    """Ranks 0 and 1 make different calls while rank 2 is at the end of the call before."""
    write_back = Call.write_back

    def late(call: Call) -> None:
        Call.write_back = write_back  # type: ignore[method-assign]
        time.sleep(0.4)

    def two_calls(**options: Any) -> None:
        if dist.get_rank() == 2:
            Call.write_back = late  # type: ignore[method-assign]
        dist.all_reduce(np.ones(2), **options)
        dist.all_reduce(np.ones(4 + (dist.get_rank() == 1)), **options)

    calls = [line.rpartition(" at ")[0].strip() for line in mismatch(two_calls).splitlines()[1:]]
    assert calls == [f"rank {rank}: all_reduce(float64[{4 + (rank == 1)}], SUM) #2" for rank in range(3)]


@pytest.mark.every(n=4)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [4, 100_000])
@pytest.mark.parametrize("name", ROOTED)
@on_ranks()
def test_every_rank_has_another_root(name: str, count: int, size: int) -> None:
    mismatch(partial(invoke, name, root=(dist.get_rank() + 1) % size, count=count))


@pytest.mark.every(n=2)
@pytest.mark.parametrize("first", COLLECTIVES)
@on_ranks(3)
def test_two_calls_in_another_order(first: str) -> None:
    """On the last rank."""
    second = COLLECTIVES[(COLLECTIVES.index(first) + 5) % len(COLLECTIVES)]
    for names in ([first, second], [second, first]):
        mine = names if dist.get_rank() < 2 else names[::-1]
        text = mismatch(lambda mine=mine, **options: [invoke(name, **options) for name in mine])
        assert first in text
        assert second in text


@pytest.mark.parametrize("factors", [(-1.0, -2.0), (0.0, -0.0), (0.5, 0.25)])
@on_ranks(2)
def test_factors_that_differ(factors: tuple[float, float]) -> None:
    text = mismatch(partial(invoke, "all_reduce", reduce=PREMUL_SUM(factors[dist.get_rank()])))
    assert all(str(PREMUL_SUM(factor)) in text for factor in factors)


@pytest.mark.parametrize("count", [1, 50_000])
@on_ranks(3)
def test_split_sizes_that_do_not_fit_each_other(count: int) -> None:
    """Rank 1 expects more of rank 0 than it sends."""
    give, take = [count] * 3, [count] * 3
    if dist.get_rank() == 1:
        take[0] += 1
    given, room = np.ones(sum(give)), np.zeros(sum(take))
    text = mismatch(partial(dist.all_to_all_single, room, given, take, give))
    for word in ("rank 0", "rank 1", f"{count} elements", f"room for {count + 1}"):
        assert word in text


@on_ranks(2)
def test_the_error_has_the_lines_of_calls_in_threads() -> None:
    """Each rank makes its call in a thread, while the main thread waits for that."""

    def call(**options: Any) -> None:
        dist.all_reduce(np.ones(3 + dist.get_rank()), **options)

    line = f"{__file__}:{call.__code__.co_firstlineno + 1}"
    with ThreadPoolExecutor(1) as threads:
        text = mismatch(lambda **options: threads.submit(call, **options).result())
    assert re.findall(r"rank (\d): all_reduce\(float64\[[34]\], SUM\) #1 at (.*)", text) == [
        ("0", line),
        ("1", line),
    ]


@pytest.mark.every(n=4)
@pytest.mark.parametrize("counts", [[4, 4, 4], [2, 0, 5], [70_000, 9, 300_000], [300_000, 300_000, 300_000]])
@pytest.mark.parametrize("odd", [1, 2])
@pytest.mark.parametrize("name", ["gather", "scatter"])
@on_ranks(3)
def test_a_list_that_does_not_fit_the_others_arrays(name: str, odd: int, counts: list[int]) -> None:
    """The root expects ``counts``, while rank ``odd`` has an element more. Nothing is written."""
    me, n = dist.get_rank(), counts[odd]
    own, entries = np.zeros(counts[me] + (me == odd)), [np.zeros(count) for count in counts]
    given, taken = ([own], entries) if name == "gather" else (entries, [own])
    for x in given:
        x[:] = 1
    text = mismatch(partial(getattr(dist, name), own, entries if me == 0 else None, 0))
    assert not any(x.any() for x in taken)
    sends, room = (n + 1, n) if name == "gather" else (n, n + 1)
    for word in (f"sends {sends}", f"room for {room}", "rank 0"):
        assert word in text


@pytest.mark.parametrize("name", ["gather", "scatter"])
@on_ranks(3)
def test_arrays_of_one_size_have_one_shape(name: str) -> None:
    """Rank 1 has an array of the others' size, but of another shape."""
    own = np.zeros((3, 2) if dist.get_rank() == 1 else (2, 3))
    several = [np.zeros(6) for _ in range(3)] if dist.get_rank() == 0 else None
    assert "different shapes" in mismatch(partial(getattr(dist, name), own, several, 0))


# --- bad arguments ------------------------------------------------------------------------------------------


def bad_calls() -> list[tuple[str, str, Callable[[], Any]]]:
    """Calls that one rank of two alone refuses or cannot begin: the error's type, a word of its message, the call."""
    x, y, z = np.ones(4, np.float32), np.ones(3, np.float32), np.ones(2)
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False
    many = [x.copy(), x.copy()]
    windows = np.lib.stride_tricks.sliding_window_view(x, 2, writeable=True)
    d: Any = dist
    op, me = dist.ReduceOp, dist.get_rank()
    other = 1 - me
    types: list[tuple[str, Callable[[], Any]]] = [
        ("np.array", lambda: d.all_reduce([1.0, 2.0])),
        ("broadcast", lambda: d.broadcast(None, 0)),
        ("reduce", lambda: d.reduce(3.0, 0)),
        ("broadcast_object_list", lambda: d.all_reduce(np.array([None]))),
        (".view('uint8')", lambda: d.broadcast(np.array(["x"]), 0)),
        (".view('int64')", lambda: d.broadcast(np.array(["2024"], "M8[D]"), 0)),
        ("byte order", lambda: d.all_reduce(np.ones(4, ">f4"))),
        ("mask", lambda: d.all_reduce(np.ma.masked_array([1.0]))),
        ("expected a list of ranks", lambda: d.new_group(1)),
        ("dst", lambda: d.gather(x, None, "0")),
        ("SUM, AVG,", lambda: d.all_reduce(x, op="AVERAGE")),
        ("PREMUL_SUM", lambda: d.all_reduce(x, op=op.PREMUL_SUM)),
        ("BAND", lambda: d.all_reduce(x, op=op.BAND)),
        ("MIN", lambda: d.all_reduce(np.ones(2, "c8"), op=op.MIN)),
        ("AVG", lambda: d.all_reduce(np.ones(2, "?"), op=op.AVG)),
        ("factor", lambda: d.all_reduce(np.ones(2, "i4"), op=op.PREMUL_SUM(0.5))),
        ("tensor_list", lambda: d.all_gather(None, x)),
        ("all_gather_into_tensor", lambda: d.all_gather_into_tensor(np.ones(8), x)),
        ("timeout", lambda: d.barrier(timeout="long")),
        ("tag", lambda: d.send(x, other, tag="x")),
        ("P2POp", lambda: d.batch_isend_irecv([x])),
        ("group", lambda: d.all_reduce(x, group="world")),
    ]
    values: list[tuple[str, Callable[[], Any]]] = [
        ("read-only", lambda: d.all_reduce(frozen)),
        ("read-only", lambda: d.broadcast(frozen, other)),
        ("read-only", lambda: d.scatter(frozen, many, me)),
        ("in the same memory", lambda: d.all_reduce(windows)),
        ("outputs 0 and 1 overlap", lambda: d.all_gather([x, x], x.copy())),
        ("src", lambda: d.broadcast(x, 2)),
        ("dst", lambda: d.reduce(x, -1)),
        ("src", lambda: d.broadcast(x)),
        ("src", lambda: d.broadcast(x, 0, group_src=0)),
        ("all_gather", lambda: d.all_gather(many[:-1], x)),
        ("output", lambda: d.all_gather([y, y], x)),
        ("output", lambda: d.all_gather_into_tensor(y, x)),
        ("input", lambda: d.reduce_scatter_tensor(x, y)),
        ("reduce_scatter", lambda: d.reduce_scatter(x, many[1:])),
        ("gather", lambda: d.gather(x, many, other)),
        ("scatter", lambda: d.scatter(x, many, other)),
        ("split", lambda: d.all_to_all_single(np.ones(3), np.ones(3))),
        ("input_split_sizes", lambda: d.all_to_all_single(z, z.copy(), [1, 1], [2, 2])),
        ("output_split_sizes", lambda: d.all_to_all_single(z, z.copy(), [-1, 2], [1, 1])),
        ("timeout", lambda: d.all_reduce(x, timeout=-1)),
        ("timeout", lambda: d.barrier(timeout=0)),
        ("timeout", lambda: d.barrier(timeout=float("nan"))),
        ("all_reduce", lambda: d.all_reduce_coalesced([])),
        ("dst", lambda: d.send(x, 2)),
    ]
    return [
        *(("DistTypeError", word, call) for word, call in types),
        *(("DistArgumentError", word, call) for word, call in values),
    ]


@pytest.mark.parametrize("who", [0, 1])
@on_ranks(2, env={})
def test_bad_arguments_are_refused_and_the_group_stays_usable(who: int) -> None:
    """Rank ``who`` makes all bad calls; after each, all ranks make good ones."""
    for i, (kind, word, call) in enumerate(bad_calls()):
        if dist.get_rank() == who:
            failure = failure_of(call)
            assert failure is not None, (i, kind, word)
            assert failure.type == kind, (i, word, failure)
            assert word in failure.message, (i, failure)
        x = np.ones(3)
        dist.all_reduce(x, timeout=20)
        assert (x == 2).all(), (i, word)


@pytest.mark.parametrize("who", [0, 1])
@on_ranks(2)
def test_an_array_that_raises_fails_the_group(who: int) -> None:
    """The exception is not the library's: it may be one of a signal's handler."""
    x, other = np.ones(3), 1 - dist.get_rank()
    calls: list[Callable[[Any], Any]] = [
        lambda g: g.gather(Unreadable(), [x, x], who),
        lambda g: g.all_reduce(Unreadable()),
        lambda g: dist.all_gather([x, Unreadable()], x, group=g),
        lambda g: g.all_reduce_coalesced([x, Unreadable()]),
        lambda g: dist.send(Unreadable(), other, group=g),
        lambda g: dist.batch_isend_irecv([dist.P2POp(dist.isend, a, other, g) for a in (x, Unreadable())]),
    ]
    for call in calls:
        group: Any = dist.new_group()
        if dist.get_rank() == who:
            with pytest.raises(RuntimeError, match="any more"):
                call(group)
        with pytest.raises(dist.GroupAbortedError, match=rf"rank {who} .*RuntimeError: .*any more"):
            group.all_reduce(x, timeout=20)
        dist.destroy_process_group(group)


# --- signatures -------------------------------------------------------------------------------------------------------

_SIGNED = [
    op
    for op in OPS.values()
    if not (op.uneven or op.scattered) and op.name not in ("send", "recv", "barrier")
]
_FACTORS = (
    st.floats()
    | st.integers(-3, 3)
    | st.integers()
    | st.complex_numbers()
    | st.sampled_from([0.0, -0.0, -1.0, -2.0, -1, -2])
)
_CALLS = st.fixed_dictionaries(
    {
        "op": st.sampled_from(_SIGNED),
        "dtype": st.sampled_from(DTYPES),
        "shape": st.lists(st.integers(0, 3) | st.integers(0, 1 << 40), max_size=4).map(tuple),
        "root": st.integers(-1, 3) | st.integers(0, 1 << 20),
        "reduce": st.sampled_from([None, ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG])
        | st.builds(PREMUL_SUM, _FACTORS),
    }
)


def signature_of(fields: dict[str, Any]) -> int:
    array: Any = SimpleNamespace(shape=fields["shape"], dtype=fields["dtype"])
    return sign(Call(fields["op"], (array,), (array,), 1.0, fields["reduce"], fields["root"]))


def meaning_of(fields: dict[str, Any]) -> Any:
    """What ranks have to agree on; factors by their bits."""
    reduce = fields["reduce"]
    factor = None if reduce is None else reduce.factor
    if isinstance(factor, int) and int(float(factor)) == factor:
        factor = float(factor)
    if not isinstance(factor, (int, type(None))):
        factor = struct.pack("<2d", factor.real, factor.imag)
    return (*(fields[name] for name in ("op", "dtype", "shape", "root")), reduce and reduce.name, factor)


@given(_CALLS, _CALLS, st.sets(st.sampled_from(["op", "dtype", "shape", "root", "reduce"]), max_size=2))
def test_calls_have_equal_signatures_only_if_they_agree(
    one: dict[str, Any], other: dict[str, Any], changed: set[str]
) -> None:
    other = one | {name: other[name] for name in changed} if changed else other
    assert (signature_of(one) == signature_of(other)) == (meaning_of(one) == meaning_of(other))


@settings(max_examples=500)
@given(_FACTORS, _FACTORS)
def test_factors_have_equal_signatures_only_if_their_bits_agree(one: Any, other: Any) -> None:
    call = {"op": OPS["all_reduce"], "dtype": DTYPES[0], "shape": (1,), "root": -1}
    calls = [call | {"reduce": PREMUL_SUM(factor)} for factor in (one, other)]
    assert (signature_of(calls[0]) == signature_of(calls[1])) == (
        meaning_of(calls[0]) == meaning_of(calls[1])
    )
