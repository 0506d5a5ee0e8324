"""Deterministic reductions: the same bits for every size, transport and order of arrival."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import unicoll as dist
from tests.gloo import deterministic_jobs as jobs
from tests.support.ranks import ProcessJob, run_ranks
from tests.support.worker import enter
from unicoll.backend.options import as_options

TRANSPORTS = (
    {"UNICOLL_TRANSPORT": "shm"},
    {"UNICOLL_TRANSPORT": "tcp"},
    {"UNICOLL_TRANSPORT": "hierarchical"},
)


@pytest.mark.every(2)
@pytest.mark.parametrize("size", [2, 5])
def test_every_transport_gives_the_same_bits(size: int) -> None:
    found = [run_ranks(size, jobs.digests, True, env=env) for env in TRANSPORTS]
    found.append(run_ranks(size, jobs.digests, None, env={**TRANSPORTS[1], "UNICOLL_DETERMINISTIC": "1"}))
    found.append(run_ranks(size, jobs.digests, True, 0.02, env=TRANSPORTS[1]))
    first = found[0][0]
    assert len(first) == 2 + len(jobs.DTYPES)
    for run in found:
        for rank, digests in enumerate(run):
            assert digests == first, f"rank {rank}"


def test_data_depends_on_the_reduction_order() -> None:
    parts = [jobs.contribution(r, max(jobs.COUNTS), "float32") for r in range(4)]
    assert (
        (parts[0] + parts[1]) + (parts[2] + parts[3]) != ((parts[0] + parts[1]) + parts[2]) + parts[3]
    ).any()


def test_result_is_the_reduction_in_rank_order() -> None:
    digests = run_ranks(3, jobs.digests, True, env=TRANSPORTS[1])[0]
    parts = [jobs.contribution(r, max(jobs.COUNTS), "float64") for r in range(3)]
    assert digests["float64 SUM"] == hashlib.sha256(((parts[0] + parts[1]) + parts[2]).tobytes()).hexdigest()


def test_explain_reports_deterministic() -> None:
    assert all(", deterministic " in words for words in run_ranks(2, jobs.explained))


def test_different_options_raise_mismatch() -> None:
    with ProcessJob(3) as job:
        job.call(enter)
        job.results()
        job.call(jobs.options_differ)
        for outcome in job.collect():
            assert outcome.failure is not None
            assert outcome.failure.type == "CollectiveMismatchError"
            assert "deterministic on ranks 1 only" in outcome.failure.message


def test_unknown_options_raise() -> None:
    with ProcessJob(2) as job:
        job.call(enter)
        job.results()
        job.call(jobs.unknown_option)
        for outcome in job.collect():
            assert outcome.failure is not None
            assert outcome.failure.type == "DistArgumentError"
            assert "unknown 'determinstic'; known are " in outcome.failure.message
            assert ", deterministic," in outcome.failure.message
    with pytest.raises(dist.DistTypeError, match="must be a bool"):
        as_options({"deterministic": "yes"})


def test_option_objects_of_other_libraries_are_ignored() -> None:
    assert as_options(object()).deterministic is None
    assert as_options(None).deterministic is None
    assert as_options(np.float32(1)).deterministic is None
