"""unicoll.integrations.ray on a cluster of two raylets; each test is a driver of its own (ray_jobs.py)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import ROOT, environment

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

FOLDER = ROOT / "tests" / "integrations"
LIMIT_S = 240.0
VARIABLES = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}


@contextmanager
def started(program: str, *arguments: str, limit_s: float = LIMIT_S) -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, str(FOLDER / program), *arguments],
            cwd=ROOT,
            env=environment(VARIABLES),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        limit = threading.Timer(limit_s, process.kill)
        limit.start()
        try:
            yield process
            process.communicate()
            assert process.returncode == 0
        finally:
            limit.cancel()
            limit.join()
            if process.poll() is None:
                process.kill()
            process.communicate()
            errors.seek(0)
            print(errors.read())  # pytest shows it if the test fails


def printed(process: subprocess.Popen[str]) -> Any:
    """The next line of JSON."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else pytest.fail("the program has printed no result")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster with two nodes."""
    # Ray's sockets need a short path; its last processes may write while the folder is removed
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        started("ray_cluster.py", folder, limit_s=10 * LIMIT_S) as process,  # it serves all tests
    ):
        yield printed(process)


def run(program: str, cluster: str, *arguments: str) -> Any:
    with started("ray_jobs.py", program, cluster, *arguments) as process:
        return printed(process)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_operations(cluster: str, transport: str) -> None:
    found = run("operations", cluster, transport)
    assert found == {"wrong": {"numpy": [[], [], []], "torch": [[], [], []]}, "nodes": 2}


def test_an_actor_is_in_several_groups_and_makes_one_again(cluster: str) -> None:
    found = run("groups", cluster)
    assert found["several"] == [[3.0] * 3, [2.0] * 2, [2.0] * 2]
    assert found["left"] == [False] * 3
    assert found["again"] == found["others"] == found["declared"] == found["handle"] == [2.0] * 2
    assert found["alone"] == [1.0]
    for text in found["mismatch"]:  # the lines of the user's code, not Ray's
        assert len(re.findall(r"rank [01]: .*ray_jobs\.py:\d+", text)) == 2, text
    assert found[f"passed {1 << 18}"] == found["passed 2"] == [[2.0]] * 2
    for texts in found["refused"]:
        assert "read-only" in texts[0]
        assert "n_elements=3: the array must be contiguous" in texts[1]
        assert "it has 2" in texts[2]
    assert found["records"] == [False] * 4


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_actor_is_named_and_is_in_the_next_group(cluster: str, victim: int) -> None:
    found = run("killed", cluster, str(victim))
    assert [len(errors) for errors in found["errors"]] == [2, 2]
    for kind, rank, text in (error for errors in found["errors"] for error in errors):
        assert (kind, rank) == ("RankLostError", victim), text
        assert f"rank {victim} (" in text
    assert found["left"] == [False] * 2
    assert found["joined"] == [1 if rank == victim else 2 for rank in range(3)]
    assert found["again"] == [3.0] * 3


def test_an_actor_that_was_killed_while_joining_does_not_block_the_others(cluster: str) -> None:
    found = run("killed_while_joining", cluster)
    kind, rank, text = found["again"]
    assert (kind, rank) == ("DistStoreError", 1)
    assert "rank 1 at" in text
    assert "is taken by a process on" in text
    for kind, _, text in found["others"]:
        assert kind == "RankLostError"
        assert "rank 1 (" in text
        assert "could not join: DistStoreError: rank 1 at" in text
    assert found["joined"] == [1] * 3
    assert found["sums"] == [3.0] * 3


def test_two_actors_with_rank_0(cluster: str) -> None:
    found = run("two_ranks_0", cluster)
    assert [kind for kind, _, _ in found["errors"]] == ["DistStoreError", "RankLostError"]
    for _, rank, text in found["errors"]:
        assert rank == 0
        assert re.search(
            r"two processes have joined as rank 0: one on \S+, pid \d+, one on \S+, pid \d+$", text
        )
    assert not found["left"]
    assert found["sums"] == [2.0] * 2


def test_a_record_is_used_once(cluster: str) -> None:
    assert run("quick_rejoin", cluster) == [2.0] * 2


def test_records_that_are_left_over_are_not_used(cluster: str) -> None:
    found = run("leftovers", cluster)
    assert found["left"]
    assert found["dead"] == found["other"] == [[2.0] * 2, False]
    assert "rank 1 of the group 'alone' waited 1 s" in found["text"]
    assert "secret=<secret text>" in found["text"]
    assert not found["secret"]


def test_drivers_with_one_group_name_do_not_meet(cluster: str) -> None:
    with started("ray_jobs.py", "first_driver", cluster) as first:
        assert printed(first) == "waits"
        assert run("second_driver", cluster) == [2.0] * 2
        assert first.stdin is not None
        first.stdin.write("\n")
        first.stdin.flush()
        assert printed(first) == [20.0] * 2


@pytest.mark.parametrize(
    ("config", "secret"), [("unicoll", "UNICOLL_SECRET"), ("ray", "none was given; rank 0 made")]
)
def test_ray_train(cluster: str, tmp_path: Path, config: str, secret: str) -> None:
    """With unicoll's TorchConfig, and with Ray's."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    if config == "ray" and not importlib.metadata.entry_points(group="torch.backends", name="unicoll"):
        pytest.skip("unicoll is not installed: torch has no entry point for it")
    for backend, total, secrets, source in run("train", cluster, str(tmp_path), config):
        assert (backend, total, secrets) == ("unicoll", [3.0] * 3, 1)
        assert source[0].startswith(f"secret: {secret}")
