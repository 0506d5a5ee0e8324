"""Large messages over several connections between two ranks."""

from __future__ import annotations

import pytest

from tests.gloo import striping_jobs as jobs
from tests.support.ranks import ProcessJob, run_ranks
from tests.support.worker import enter


def env(connections: int, channel: str = "plain") -> dict[str, str]:
    return {
        "UNICOLL_TRANSPORT": "tcp",
        "UNICOLL_SOCKET_CONNECTIONS": str(connections),
        "UNICOLL_CHANNEL": channel,
    }


@pytest.mark.every(3)
@pytest.mark.parametrize("channel", ["plain", "mac", "tls"])
@pytest.mark.parametrize(("size", "connections"), [(2, 1), (2, 3), (3, 2)])
def test_results_and_number_of_connections(size: int, connections: int, channel: str) -> None:
    found = run_ranks(size, jobs.large_and_small, env=env(connections, channel))
    assert found == [connections * (size - 1)] * size


def test_ranks_that_want_different_numbers_use_the_smaller_one() -> None:
    with ProcessJob(3, env=env(1)) as job:
        for rank, wanted in enumerate((1, 2, 3)):
            job.call(jobs.want, wanted, ranks=[rank])
        job.results()
        job.call(enter)
        job.results()
        job.call(jobs.large_and_small)
        assert job.results() == [2, 3, 3]
