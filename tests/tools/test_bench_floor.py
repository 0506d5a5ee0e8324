"""The contender floor, and the calls that the benchmark reports, compared with the counters of unicoll.metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.ranks import joined
from tests.tools import bench_jobs
from tests.tools.test_bench import QUICK, bench, rows
from unicoll.arrays.types import BY_NAME
from unicoll.bench.arrays import Unsupported
from unicoll.bench.contract import BenchCase
from unicoll.bench.floor import bytes_on_links, bytes_written
from unicoll.bench.operations import OPERATIONS

KB = 1024


def case(name: str, rank: int, size: int, root: int = 0, nbytes: int = 12 * KB) -> BenchCase:
    op = OPERATIONS[name]
    dtype = BY_NAME["float32"]
    return BenchCase(op, op.placements[0], dtype, "sum", root, op.divide(nbytes // 4, size), rank, size)


WRITTEN = {
    "all_reduce": [12, 12, 12],
    "broadcast": [12, 0, 12],
    "reduce": [0, 12, 0],
    "all_gather": [12, 12, 12],
    "reduce_scatter": [4, 4, 4],
    "gather": [0, 12, 0],
    "scatter": [4, 4, 4],
    "sendrecv": [12, 12, 12],
    "latency": [12, 12, 0],
    "barrier": [0, 0, 0],
    "exscan": [12, 12, 12],
}
SENT_TO_NEXT = {
    "all_reduce": [16, 16, 16],
    "all_gather": [8, 8, 8],
    "sendrecv": [12, 12, 12],
    "broadcast": [0, 12, 12],  # from rank 1 by rank 2 to rank 0
    "reduce": [12, 0, 12],
    "scatter": [0, 8, 4],
    "gather": [8, 0, 4],
    "scan": [12, 12, 0],
}


def test_bytes_of_three_ranks() -> None:
    for name, written in WRITTEN.items():
        assert [bytes_written(case(name, r, 3, root=1)) for r in range(3)] == [n * KB for n in written], name
    for name, sent in SENT_TO_NEXT.items():
        links = [bytes_on_links(case(name, rank, 3, root=1)) for rank in range(3)]
        assert [out for out, _ in links] == [n * KB for n in sent], name
        assert [into for _, into in links] == [links[rank - 1][0] for rank in range(3)], name


def test_bytes_on_the_links_of_two_ranks() -> None:
    assert [bytes_on_links(case("all_reduce", rank, 2)) for rank in range(2)] == [(12 * KB, 12 * KB)] * 2
    assert [bytes_on_links(case("broadcast", rank, 2)) for rank in range(2)] == [(12 * KB, 0), (0, 12 * KB)]
    assert bytes_on_links(case("latency", 0, 2)) == (12 * KB, 12 * KB)
    with pytest.raises(Unsupported, match="exactly 2 ranks"):
        bytes_on_links(case("latency", 0, 3))


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("name", "transport"),
    [("all_reduce", "auto"), ("all_reduce", "tcp"), ("latency", "auto"), ("latency", "tcp")],
)
def test_the_floor_beside_gloo(name: str, transport: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = f"{name} --backend gloo --peer floor --sizes 8,128K {QUICK} --json {out}"
    done = bench(command, UNICOLL_TRANSPORT=transport)
    assert done.returncode == 0, done.stderr
    wrong = -3  # the column before contender and ratio
    assert [line[-2] for line in rows(done.stdout)] == ["unicoll", "floor"] * 2
    assert [line[wrong] for line in rows(done.stdout) if line[-2] == "floor"] == ["N/A", "N/A"]
    found = json.loads(out.read_text())
    means = "sendall and recv_into" if transport == "tcp" else "numpy.copyto"
    assert means in found["contenders"]["floor"]["transport"]
    placement = OPERATIONS[name].placements[0]
    for result in found["results"]:
        checked = None if result["contender"] == "floor" else 0.0
        assert result[placement]["nwrong"] == checked
        assert result[placement]["us"]["min"] > 0


@pytest.mark.parametrize("name", ["all_reduce", "scatter"])
def test_the_floor_sends_what_it_says(name: str) -> None:
    """The kernel's count of received bytes after ten calls, for sizes with and without the sending thread."""
    with joined(2, env={"UNICOLL_TRANSPORT": "tcp"}) as job:
        for nbytes in (8 * KB, 256 * KB):
            job.call(bench_jobs.floor_traffic, name, nbytes, 10)
            expected = [bytes_on_links(case(name, rank, 2, nbytes=nbytes))[1] * 10 for rank in range(2)]
            assert job.results() == expected


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("transport", "text"),
    [("auto", "floor: rank 1 has not arrived within 0.3 s"), ("tcp", "floor: the rank before has not sent")],
)
def test_the_floor_does_not_wait_forever(transport: str, text: str) -> None:
    with joined(2, env={"UNICOLL_TRANSPORT": transport}) as job:
        for nbytes in (8, 64 << 20):
            job.call(bench_jobs.floor_waits, nbytes)
            first, second = job.results()
            assert text in first
            assert second == ""


# --- calls ----------------------------------------------------------------------------------------------------------

SENT = {
    "all_reduce": lambda rank, size: {"all_reduce": size},
    "all_gather": lambda rank, size: {"all_gather_into_tensor": size // 2},
    "scatter": lambda rank, size: {"scatter": size if rank == 0 else size // 2},
    "latency": lambda rank, size: {"send": size, "recv": size},
}
"""Bytes that one call counts on a rank, by name in the counters: of its inputs, or of its outputs without inputs."""


@pytest.mark.every(n=0)
@pytest.mark.parametrize("name", SENT)
def test_the_calls_reported_are_those_that_the_counters_have(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = f"{name} --sizes 64,4K {QUICK} -w 3 -m 2 -c 2 --json {out}"
    done = bench(command, UNICOLL_METRICS_FILE=str(tmp_path / "m.{rank}.prom"))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["results"]
    made = []
    for row in results:
        for part in (row[placement] for placement in OPERATIONS[name].placements):
            assert part["calls"] == part["iterations"] + 1 + 3 + 3 + 2
            made.append((row["size"], part["calls"]))
    assert len(made) == 2 * len(OPERATIONS[name].placements)
    for rank in range(2):
        text = (tmp_path / f"m.{rank}.prom").read_text()
        sizes = {
            op: [(SENT[name](rank, size)[op], calls) for size, calls in made] for op in SENT[name](rank, 0)
        }
        for op, counted in sizes.items():
            assert counters(text, "calls", op) == sum(calls for _, calls in counted)
            assert counters(text, "bytes", op) == sum(nbytes * calls for nbytes, calls in counted)
            assert counters(text, "errors", op) == 0


def counters(text: str, field: str, op: str) -> int:
    """The counter of an operation on the group that is measured; the benchmark's own calls are on the group world."""
    found = re.findall(rf'^unicoll_{field}_total\{{op="{op}",group="([^"]+)".*\}} (\d+)$', text, re.MULTILINE)
    (value,) = [int(value) for group, value in found if group != "world"]
    return value
