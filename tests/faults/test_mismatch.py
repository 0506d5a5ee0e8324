"""Different calls on different ranks raise the same error on all; bad arguments are refused where they are given."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults import mismatch_jobs as jobs
from tests.support import selection
from tests.support.calls import COALESCED, COLLECTIVES, REDUCING, ROOTED, row_name
from tests.support.outcomes import CallOutcome
from tests.support.ranks import Pool, ProcessJob, end_cleanly
from tests.support.worker import enter
from unicoll import ReduceOp
from unicoll.arrays.types import DTYPES
from unicoll.backend.call import Call
from unicoll.backend.operation_errors import only_different
from unicoll.backend.ops import OPS
from unicoll.backend.validation import sign

PREMUL_SUM = ReduceOp.PREMUL_SUM


# --- different calls on different ranks ---------------------------------------------------------------------


def differences(name: str) -> list[tuple[str, dict[str, Any], str, dict[str, Any], int]]:
    """Ways in which one rank's call of ``name`` can differ from the others'."""
    found: list[tuple[str, dict[str, Any], str, dict[str, Any], int]] = []
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


@pytest.mark.every(3)
@pytest.mark.sampled("name", "at_once", 1)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", [*COLLECTIVES, *COALESCED])
def test_ranks_that_call_differently_raise_the_same_error(
    name: str, at_once: bool, pool: Callable[[int], Pool]
) -> None:
    cases = differences(name)
    outcomes = pool(3).run(jobs.differ, cases, at_once, timeout=300)
    wrong = []
    for case, each in zip(cases, zip(*outcomes, strict=True), strict=True):
        failures = [failure for failure, _ in each]
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
        assert {failure.fields.get("rank") for failure, _ in each} == {odd}, text
        assert "fault_jobs.py" in text or "calls.py" in text or "all_to_all" in text, text
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


def test_a_rank_that_is_about_to_leave_the_call_before_is_awaited(pool: Callable[[int], Pool]) -> None:
    errors = pool(3).run(jobs.one_leaves_the_call_before_late)
    assert len(set(errors)) == 1
    calls = [line.rpartition(" at ")[0].strip() for line in errors[0].splitlines()[1:]]
    assert calls == [f"rank {rank}: all_reduce(float64[{4 + (rank == 1)}], SUM) #2" for rank in range(3)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [4, 100_000])
@pytest.mark.parametrize("name", ROOTED)
def test_every_rank_has_another_root(name: str, count: int, size: int, pool: Callable[[int], Pool]) -> None:
    outcomes = pool(size).run(jobs.everyone_another_root, name, count)
    same_mismatch(outcomes)


@pytest.mark.parametrize("first", COLLECTIVES)
def test_two_calls_in_another_order(first: str, pool: Callable[[int], Pool]) -> None:
    second = COLLECTIVES[(COLLECTIVES.index(first) + 5) % len(COLLECTIVES)]
    for names in ((first, second), (second, first)):
        text = same_mismatch(pool(3).run(jobs.another_order, *names))
        assert first in text
        assert second in text


def test_factors_that_differ(pool: Callable[[int], Pool]) -> None:
    cases: list[tuple[str, dict[str, Any], str, dict[str, Any], int]] = [
        ("all_reduce", {"reduce": PREMUL_SUM(first)}, "all_reduce", {"reduce": PREMUL_SUM(second)}, 1)
        for first, second in ((-1.0, -2.0), (0.0, -0.0), (0.5, 0.25))
    ]
    for case, outcomes in zip(cases, zip(*pool(2).run(jobs.differ, cases, False), strict=True), strict=True):
        text = same_mismatch(outcomes)
        for options in (case[1], case[3]):
            assert str(options["reduce"]) in text


@pytest.mark.parametrize("count", [1, 50_000])
def test_split_sizes_that_do_not_fit_each_other(count: int, pool: Callable[[int], Pool]) -> None:
    text = same_mismatch(pool(3).run(jobs.splits_differ, count))
    for word in ("rank 0", "rank 1", f"{count} elements", f"room for {count + 1}"):
        assert word in text


@pytest.mark.parametrize("counts", [[4, 4, 4], [2, 0, 5], [70_000, 9, 300_000], [300_000, 300_000, 300_000]])
@pytest.mark.parametrize("odd", [1, 2])
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_a_list_that_does_not_fit_the_others_arrays(
    name: str, odd: int, counts: list[int], pool: Callable[[int], Pool]
) -> None:
    answers = pool(3).run(jobs.list_differs, name, counts, odd)
    text = same_mismatch([outcome for outcome, _ in answers])
    assert all(untouched for _, untouched in answers)
    n = counts[odd]
    for word in (
        f"sends {n + 1 if name == 'gather' else n}",
        f"room for {n if name == 'gather' else n + 1}",
        "rank 0",
    ):
        assert word in text


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_arrays_of_one_size_have_one_shape(name: str, pool: Callable[[int], Pool]) -> None:
    assert "different shapes" in same_mismatch(pool(3).run(jobs.shapes_differ, name))


def same_mismatch(outcomes: Sequence[CallOutcome]) -> str:
    """All ranks raised CollectiveMismatchError with one text, long before their timeout; the text."""
    texts = {failure.message if failure else "no error" for failure, _ in outcomes}
    assert len(texts) == 1, texts
    assert {f.type if f else "" for f, _ in outcomes} == {"CollectiveMismatchError"}, texts
    return texts.pop()


# --- bad arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
def test_bad_arguments_are_refused_and_the_group_stays_usable(who: int) -> None:
    with ProcessJob(2) as job:
        job.call(enter)
        job.results()
        job.call(jobs.refuse_each, who)
        refused = job.results()[who]
        end_cleanly(job)
    job_calls = list(refused)
    assert len(job_calls) > 30
    wrong = []
    for name, failure in refused.items():
        kind, word = EXPECTED[name]
        if failure is None:
            wrong.append(f"{name}: accepted")
        elif failure.type != kind or word not in failure.message:
            wrong.append(f"{name}: expected {kind} with {word!r}: {failure.type}: {failure.message}")
    assert not wrong, f"{len(wrong)} of {len(refused)}:\n" + "\n".join(wrong)


def _expected() -> dict[str, tuple[str, str]]:
    """Type and word of each bad call; the calls themselves need a job."""
    from unittest import mock

    with mock.patch.multiple("unicoll", get_world_size=lambda: 2, get_rank=lambda: 1):
        return {name: (kind, word) for name, (_, kind, word) in jobs.bad_calls().items()}


EXPECTED = _expected()


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
