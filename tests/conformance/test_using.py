"""Options of single calls: views of a group that is the same group, and what NCCL is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import pytest

import unicoll as dist
from tests.conformance import using_jobs as jobs
from tests.nccl import staged
from tests.simulated_nccl.ranks import Settings, SimulatedJob
from tests.support.ranks import Pool, ProcessJob, pools
from unicoll.backend.options import as_call_options

Pools = Callable[[int], Pool]


@pytest.fixture(scope="module")
def newest() -> Iterator[Pools]:
    with pools(partial(SimulatedJob, version=23203)) as made:
        yield made


# --- what may be said ---------------------------------------------------------------------------------------------


def test_options_are_given_by_name_or_as_one_and_names_win() -> None:
    one = dist.CallOptions(max_ctas=8, algorithm="ring")
    assert as_call_options(None, one, {}) == one
    assert as_call_options(None, {"max_ctas": 8, "algorithm": "ring"}, {}) == one
    assert as_call_options(None, one, {"max_ctas": 4}) == dist.CallOptions(max_ctas=4, algorithm="ring")
    assert as_call_options(one, None, {"min_ctas": 2}) == dist.CallOptions(2, 8, algorithm="ring")
    assert as_call_options(one, dist.CallOptions(max_ctas=1), {}) == dist.CallOptions(
        max_ctas=1, algorithm="ring"
    )
    assert as_call_options(one, None, {"max_ctas": None, "algorithm": None}) is None
    assert as_call_options(None, None, {}) is None
    assert str(one) == "max_ctas=8, algorithm='ring'"
    assert hash(one) == hash(dist.CallOptions(max_ctas=8, algorithm="ring"))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            {"max_ctaz": 4},
            dist.DistArgumentError,
            r"unknown 'max_ctaz'; known are timeout, min_ctas, max_ctas",
        ),
        ({"max_ctas": "4"}, dist.DistTypeError, "max_ctas must be an int, got '4'"),
        ({"max_ctas": True}, dist.DistTypeError, "max_ctas must be an int, got True"),
        ({"force_algorithm": 1}, dist.DistTypeError, "force_algorithm must be a bool"),
        ({"algorithm": 3}, dist.DistTypeError, "algorithm must be a str"),
        ({"max_ctas": 0}, dist.DistArgumentError, "max_ctas=0 is too small"),
        ({"min_ctas": 5, "max_ctas": 4}, dist.DistArgumentError, "min_ctas=5 is more than max_ctas=4"),
        (
            {"cta_policy": "lazy"},
            dist.DistArgumentError,
            "cta_policy='lazy' is none of default, efficiency, zero",
        ),
        ({"profiler_tag": 1 << 63}, dist.DistArgumentError, "is not from 0 to 2"),
        ({"profiler_tag": -1}, dist.DistArgumentError, "is not from 0 to 2"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], error: type[Exception], words: str) -> None:
    for options, named in ((given, {}), (None, given)):
        with pytest.raises(error, match=words):
            as_call_options(None, options, named)


def test_options_are_no_other_thing() -> None:
    with pytest.raises(dist.DistTypeError, match="expected CallOptions or a dict"):
        as_call_options(None, dist.Options(max_ctas=4), {})


def test_every_option_is_described() -> None:
    text = dist.CallOptions.__doc__ or ""
    assert [f.name for f in fields(dist.CallOptions) if f.name not in text] == []


# --- the same group -----------------------------------------------------------------------------------------------


def test_a_view_is_its_group(pool: Pools) -> None:
    for found in pool(2).run(jobs.same_group):
        for name, (view, whole) in found["facts"].items():
            assert view == whole, name
        assert found["facts"]["base"] == (True, True)
        assert found["view"] == found["whole"][:-1] + ", using max_ctas=4>"
        assert found["more"] == found["whole"][:-1] + ", using min_ctas=2, max_ctas=4, timeout=7>"


def test_every_function_takes_a_view(pool: Pools) -> None:
    assert pool(2).run(jobs.every_function) == [["1"]] * 2


def test_a_view_for_one_call_is_gone_after_it(pool: Pools) -> None:
    assert pool(2).run(jobs.for_one_call) == [True, True]


def test_a_view_lives_as_long_as_its_group(pool: Pools) -> None:
    for found in pool(2).run(jobs.ends):
        assert "GroupAbortedError" in found["after the group"]
        assert "has been destroyed" in found["after the group"]
        size, first, second = found["split"]
        assert size == 1
        assert first != second
        view, whole, left = found["after the view"]
        assert "has been destroyed" in view
        assert "has been destroyed" in whole
        assert left == found["groups"] - 1


def test_a_view_may_have_a_timeout_of_its_own(pool: Pools) -> None:
    quiet, late = pool(2).run(jobs.timeouts)
    assert quiet == ""
    assert "timed out after 0.2 s" in late


def test_who_is_not_in_a_group_is_not_in_its_views(pool: Pools) -> None:
    assert pool(2).run(jobs.outside) == [[0, 1], [-1, -1]]


# --- what NCCL is told --------------------------------------------------------------------------------------------

_MESSAGES = ("all_to_all", "uneven", "gather", "scatter")


def test_each_collective_of_a_view_is_told_its_options(newest: Pools) -> None:
    said = "max_ctas=2, profiler_tag=7"
    for found in newest(2).run(jobs.told):
        for name, (view, plain) in found.items():
            assert view.keys() == plain.keys(), name
            for function, options in view.items():
                assert options == [said] * len(plain[function]), (name, function)
                assert plain[function] == [None] * len(options), (name, function)
            assert bool(view) == (name not in _MESSAGES), name
        assert found["all_gather"][0] == {"broadcast": [said] * 2}
        assert found["coalesced"][0] == {"all_reduce": [said] * 2}


def test_an_algorithm_that_cannot_be_had_is_refused_and_the_group_goes_on(newest: Pools) -> None:
    for found in newest(2).run(jobs.algorithms):
        assert found["ring"] == found["unforced"] == found["unforced native"] == "done"
        assert found["nvls"].startswith("DistArgumentError: all_reduce")
        assert "algSelection 'NVLS'" in found["nvls"]
        assert found["native"].startswith("DistArgumentError: all_to_all_single")
        for name in ("messages", "uneven"):
            assert "consists of sends and receives, to which algorithm='ring' does not apply" in found[name]
        assert found["after"] == "[2.0, 2.0]"


def test_an_older_nccl_says_which_it_would_have_to_be() -> None:
    with pools(partial(SimulatedJob, version=23007)) as old:
        for said, x in old(2).run(jobs.too_old):
            assert said == "using(max_ctas=4): options of single calls need NCCL 2.31.0; this is 2.30.7"
            assert x == [2.0, 2.0]


# --- compression --------------------------------------------------------------------------------------------------

_THIRD = pytest.approx(1 / 3, rel=1e-6)
_ROUNDED = 0.333984375
"""The average of 1/3 and 1/3 rounded to bfloat16, rounded to bfloat16."""


def test_gloo_compresses_and_nccl_does_not() -> None:
    start = partial(SimulatedJob, version=23203, env={"UNICOLL_TRANSPORT": "tcp"})
    with pools(start) as made:
        for found in made(2).run(jobs.compression_with_nccl):
            assert found["group"] == [_ROUNDED, _THIRD]
            assert found["call"] == _ROUNDED
            assert found["none"] == [_THIRD, _THIRD]
            refusals = [found[f"refused {what}"] for what in ("call", "group", "view")]
            assert [refusal.type for refusal in refusals] == ["DistArgumentError"] * 3
            call, group, view = (refusal.message for refusal in refusals)
            assert call.startswith("all_reduce(float32[100000] on cuda:")
            assert call.endswith("compression='bfloat16': backend nccl does not support compression")
            words = ": compression='int8': backend nccl does not support compression; backend gloo does"
            assert group == f"pg_options{words}"
            assert view == f"using{words}"
            assert found["after"] == _THIRD


def test_device_arrays_over_gloo_are_compressed() -> None:
    settings = Settings(backend="gloo")
    start = partial(ProcessJob, env={"UNICOLL_TRANSPORT": "tcp"}, prepare=(staged.prepare, settings, 1 << 18))
    with pools(start) as made:
        assert made(2).run(jobs.compression_of_staged_arrays) == [[_ROUNDED, _THIRD]] * 2
