"""The benchmark command: its tables, sizes, data and checks, and small runs of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.simulated_nccl.ranks import SimulatedJob
from tests.support.ranks import ROOT, environment, reserved_port
from tests.tools import bench_jobs
from unicoll.arrays.compression import codec_for
from unicoll.arrays.types import BY_NAME, COMPRESSIONS
from unicoll.backend.ops import OPS, Arity
from unicoll.bench import contenders, launch, main, plot, table
from unicoll.bench.args import TYPES, parse
from unicoll.bench.arrays import Unsupported
from unicoll.bench.contract import BenchCase
from unicoll.bench.distributed import Unicoll
from unicoll.bench.measure import Stats, over_ranks
from unicoll.bench.mpi import Mpi4py
from unicoll.bench.operations import IN, OPERATIONS, OUT, REDUCED, CallRank, SourceRange, find_operation
from unicoll.bench.progress import Progress
from unicoll.bench.report import _environment, write
from unicoll.bench.sizes import DEFAULT_SIZES, parse_size
from unicoll.bench.values import PERIOD, REDOPS, Values, decoded, encoded
from unicoll.group import registry

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
QUICK = ("--budget", "0.01", "--turns", "2")


def bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it, from another directory; without the variables of a launcher."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench.py"), *arguments],
        cwd="/",
        env=environment(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """The command as the only rank of a job, in this process."""
    for name in [n for n in os.environ if n not in environment()]:
        monkeypatch.delenv(name)
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "UNICOLL_SECRET": "x" * 32}
    for name, value in job.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> int:
        try:
            return main(arguments)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with reserved_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield run


def rows(output: str) -> list[list[str]]:
    """The fields of the table's rows."""
    return [line.split() for line in output.splitlines() if line and not line.startswith("#")]


# --- numbers and tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (0.0, 7, "   0.00"),
        (0.456, 7, "   0.46"),
        (9999.99, 7, "9999.99"),
        (10000.0, 7, "10000.0"),
        (99999.96, 7, "100000.0"),
        (100000.0, 7, " 100000"),
        (9999999.0, 7, "9999999"),
        (1e7, 7, "1.0e+07"),
        (0.0, 6, "  0.00"),
        (999.99, 6, "999.99"),
        (1000.0, 6, "1000.0"),
        (10000.0, 6, " 10000"),
        (1e6, 6, " 1e+06"),
        (math.nan, 7, "    N/A"),
    ],
)
def test_numbers_are_printed_as_nccl_tests_prints_them(value: float, width: int, text: str) -> None:
    assert table.float_str(value, width) == text


def placement_row(us: float, algbw: float, busbw: float, wrong: int | None) -> table.PlacementRow:
    return table.PlacementRow(us, Stats({}, {"avg": [us - 1, us + 1, math.nan]}, 10), algbw, busbw, wrong)


LINE = table.TableRow(
    1048576,
    262144,
    "float",
    "sum",
    -1,
    {OUT: placement_row(61.22, 17.13, 17.13, 0), IN: placement_row(1e5, 0.01, 0.01, 3)},
    "gloo",
    1.0,
)


def test_the_table_is_that_of_nccl_tests() -> None:
    assert table.header(False) == [
        "#" + " " * 62 + "out-of-place" + " " * 23 + "in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw"
        "  #wrong ",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)"
        "         ",
    ]
    assert table.row(LINE, False) == (
        "     1048576        262144     float     sum      -1    61.22   17.13   17.13       0   100000    0.01    0.01"
        "       3"
    )


def test_placements_that_were_not_measured_are_not_available() -> None:
    unchecked = dataclasses.replace(LINE, results={IN: placement_row(5.0, 1.0, 1.0, None)})
    assert table.row(unchecked, False).split()[5:] == ["N/A"] * 4 + ["5.00", "1.00", "1.00", "N/A"]
    assert len(table.row(unchecked, False)) == len(table.row(LINE, False))


def test_several_contenders_get_two_more_columns() -> None:
    other = dataclasses.replace(LINE, contender="torch-gloo", ratio=12.345)
    without = dataclasses.replace(LINE, contender="mpi4py", ratio=None)
    assert table.row(other, True) == table.row(LINE, False) + "   torch-gloo      12.35"
    assert table.row(without, True).split()[-2:] == ["mpi4py", "N/A"]
    names = table.header(True)[1]
    assert names.split()[-2:] == ["contender", "ratio"]
    assert len(names) == len(table.row(other, True))


def test_timestamps_and_cpu_time_change_the_header() -> None:
    lines = table.header(False, cpu_time=True, timestamps=True)
    assert lines[1].split().count("cputime") == 2
    assert lines[1].endswith(f"#wrong {'timestamp':>19}")
    assert len(table.row(LINE, False, timestamps=True)) == len(table.row(LINE, False)) + 21


def test_the_footer() -> None:
    assert table.footer(0, {"gloo": 3.25}, None, "all_reduce_perf") == [
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 3.25 ",
        "#",
        "# Collective test concluded: all_reduce_perf",
        "#",
    ]
    lines = table.footer(2, {"gloo": 3.25, "mpi4py": 1.0}, 4.0, "p")
    assert lines[0].endswith(": 2 FAILED")
    assert lines[1:3] == ["# Avg bus bandwidth    : 3.25 FAILED gloo", "# Avg bus bandwidth    : 1 mpi4py"]


def test_osus_columns() -> None:
    op = OPERATIONS["all_gather"]
    assert table.osu_header(op, "gloo", "1", "int32", True, False) == [
        "# OSU gloo Allgather Latency Test v1",
        "# Datatype: MPI_INT.",
        "# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations",
    ]
    short = dataclasses.replace(LINE, size=8, results={OUT: placement_row(10.05, 0, 0, 0)})
    assert table.osu_line(op, short, 2, False, False) == "4                      10.05"
    full = table.osu_line(op, short, 2, True, False)
    assert full == "4                      10.05              9.05             11.05          10"
    assert len(full) == len(table.osu_header(op, "gloo", "1", "int32", True, False)[2])
    assert table.osu_header(OPERATIONS["latency"], "mpi4py", "1", "float", False, False)[0] == (
        "# OSU mpi4py Latency Test v1"
    )


# --- operations and sizes -------------------------------------------------------------------------------------------


def test_operations_by_their_other_names() -> None:
    names = {
        "all_reduce": ["allreduce", "all_reduce_perf", "osu_allreduce", "ALL-REDUCE"],
        "all_gather": ["allgather", "all_gather_into_tensor", "osu_allgather", "all_gather_perf"],
        "all_to_all": ["alltoall", "alltoall_perf", "osu_alltoall", "all_to_all_single"],
        "broadcast": ["bcast", "osu_bcast", "broadcast_perf"],
        "reduce_scatter": ["reduce_scatter_tensor", "osu_reduce_scatter"],
        "latency": ["osu_latency", "pingpong"],
        "sendrecv": ["sendrecv_perf"],
    }
    for name, spellings in names.items():
        assert [find_operation(spelling).name for spelling in spellings] == [name] * len(spellings)
    with pytest.raises(ValueError, match="no operation 'all_redue'; the operations are barrier, broadcast"):
        find_operation("all_redue")


def test_bus_bandwidth() -> None:
    """The factors of nccl-tests' doc/PERFORMANCE.md, for 4 ranks; 1 GB/s is 1e9 bytes a second."""
    factors = {
        "all_reduce": 1.5,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "all_to_all": 0.75,
        "gather": 0.75,
        "scatter": 0.75,
        "broadcast": 1,
        "reduce": 1,
        "sendrecv": 1,
        "latency": 1,
        "barrier": 0,
        "scan": 1,
        "exscan": 1,
    }
    for name, factor in factors.items():
        assert table.bandwidths(OPERATIONS[name], 1_000_000, 100.0, 4) == (10.0, 10.0 * factor)


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_rank_has_what_it_gets_before_the_call(name: str) -> None:
    """Else the check of the results would find nothing wrong if nothing was received."""
    op = OPERATIONS[name]
    calls = [CallRank(rank, 4, 0) for rank in range(4)]
    same = [
        call.rank for call in calls if op.expected(call, 9) and op.expected(call, 9) == op.source(call, 9)
    ]
    row = op.collective
    keeps = row is not None and (row.exclusive or row.outputs is Arity.ONE_OFF_ROOT)  # rank 0 keeps its array
    assert same == ([0] if keeps else [])


def test_mpi4py_lacks_what_has_no_counterpart_in_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "scan", dataclasses.replace(OPS["scan"], mpi=""))
    op = OPERATIONS["scan"]
    case = BenchCase(op, IN, BY_NAME["float32"], "sum", 0, op.divide(8, 2), 0, 2)
    with pytest.raises(Unsupported, match="MPI has no scan"):
        Mpi4py("mpi4py").call(case, np.ones(8), np.ones(8))


def test_counts_are_those_of_nccl_tests() -> None:
    counts = {name: OPERATIONS[name].divide(1000, 3) for name in OPERATIONS}
    assert counts["all_reduce"] == (1000, 1000, 1000)
    assert counts["all_gather"] == counts["gather"] == (333, 333, 999)
    assert counts["reduce_scatter"] == counts["scatter"] == (333, 999, 333)
    assert counts["all_to_all"] == (333, 999, 999)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("4K", 4096), ("4k", 4096), ("1.5M", 3 << 19), ("2G", 2 << 30), ("0", 0), (" 64M ", 64 << 20)],
)
def test_sizes_with_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "8T", "-8", "1e3", "8 8"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "sizes", "step"),
    [
        ([], DEFAULT_SIZES, "0(list)"),
        (["-b", "8", "-e", "64", "-f", "2"], (8, 16, 32, 64), "2(factor)"),
        (["-b", "8", "-e", "1K", "-f", "8"], (8, 64, 512), "8(factor)"),
        (["-b", "1K", "-e", "3K", "-i", "1K"], (1024, 2048, 3072), "1024(bytes)"),
        (["-e", "32"], (8, 16, 32), "2(factor)"),
        (["-b", "128M"], (128 << 20,), "2(factor)"),
        (["--sizes", "4K,8,8"], (8, 4096), "0(list)"),
    ],
)
def test_the_sweep(alone: object, arguments: list[str], sizes: Sequence[int], step: str) -> None:
    sweep = parse(["all_reduce", *arguments]).sweep
    assert (sweep.sizes, sweep.step) == (tuple(sizes), step)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["all_redue"], "no operation"),
        (["all_reduce", "-n", "2"], "has started 1 ranks"),
        (["sendrecv"], "needs 2 ranks"),
        (["all_reduce", "-t", "2"], "-t: a rank is a process"),
        (["all_reduce", "-g", "8"], "-g: a rank drives one GPU"),
        (["all_reduce", "-G", "1"], "CUDA graphs"),
        (["all_reduce", "-R", "1"], "not registered"),
        (["all_reduce", "-b", "1M", "-e", "1K"], "invalid sizes"),
        (["all_reduce", "-b", "8", "--sizes", "8"], "exclude each other"),
        (["all_reduce", "-i", "8", "-f", "2"], "exclude each other"),
        (["all_reduce", "--sizes", "9" * 400], "more than memory can be"),
        (["all_reduce", "-f", "1"], "the factor"),
        (["all_reduce", "-d", "quadruple"], "expected one of int8, uint8"),
        (["all_reduce", "-o", "median"], "expected one of sum, prod"),
        (["all_reduce", "-r", "first"], "expected a rank or all"),
        (["all_reduce", "--backend", "smoke"], "no backend 'smoke'"),
        (["all_reduce", "--backend", "torch-gloo"], "use --peer torch-gloo"),
        (["all_reduce", "--peer", "gloo"], "no peer 'gloo'"),
        (["all_reduce", "--iters", "0"], "--iters"),
        (["all_reduce", "--budget", "0"], "--budget"),
        (["all_reduce", "--osu", "--overlap"], "choose one"),
        (["all_reduce", "--overlap", "--plot", "x.png"], "--plot shows"),
        (["barrier", "--overlap"], "no asynchronous form"),
        (["all_reduce", "--json", "/nonexistent/x.json"], "cannot be written"),
        (["all_reduce", "--compression", "int4"], "invalid choice: 'int4'"),
        (["broadcast", "--compression", "int8"], "--compression needs all_reduce"),
        (["all_reduce", "--compression", "int8", "-d", "half"], "-d float or double"),
        (["all_reduce", "--compression", "int8", "-o", "all"], "-o sum or avg"),
        (["all_reduce", "--no-such-flag"], "unrecognized arguments"),
    ],
)
def test_invalid_arguments_are_one_line(
    alone: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        alone(*arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert text in error
    assert error.count("\n") == 1


def test_a_least_bandwidth_that_is_no_number(
    alone: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "much")
    with pytest.raises(SystemExit):
        alone("all_reduce", "--sizes", "8", *QUICK)
    assert "NCCL_TESTS_MIN_BW=much is not a number" in capsys.readouterr().err


def test_accepted_values_of_nccl_tests_flags(alone: object) -> None:
    flags = "-t 1 -g 1 -p 0 -G 0 -R 0 -D 0 -V 16 -M 0 -w 3 -m 4 -c 2 -a 3 -z 1"
    options = parse(["all_reduce", *flags.split()])
    assert (options.pace.warmup, options.pace.aggregate, options.checks, options.average) == (3, 4, 2, 3)
    assert options.pace.sync
    assert parse(["all_reduce", "-d", "all", "-o", "all"]).redops == REDOPS
    assert parse(["all_reduce", "-d", "float32"]).types == ("float",)


def test_over_the_ranks() -> None:
    values = np.array([4.0, 1.0, math.nan, 7.0])
    assert [over_ranks(values, a) for a in (0, 1, 2, 3)] == [4.0, 4.0, 1.0, 7.0]


# --- data and checks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_missing_in_numpy(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = BY_NAME[name]
    codes = np.arange(1 << (8 * dtype.itemsize)).astype(dtype.storage)
    with np.errstate(invalid="ignore"):
        expected = codes.view(getattr(ml_dtypes, name)).astype(np.float64)
    np.testing.assert_array_equal(decoded(codes, dtype), expected)
    numbers = np.linspace(-20, 20, 997)
    np.testing.assert_array_equal(
        encoded(numbers, dtype),
        numbers.astype(np.float32).astype(getattr(ml_dtypes, name)).view(dtype.storage),
    )


def fold(redop: str, contributions: list[Any]) -> Any:
    """An independent reduction in float64."""
    stacked = np.stack(contributions)
    return {
        "sum": lambda: stacked.sum(0),
        "prod": lambda: stacked.prod(0),
        "max": lambda: stacked.max(0),
        "min": lambda: stacked.min(0),
        "avg": lambda: stacked.sum(0) / len(stacked),
        "mulsum": lambda: 2 * stacked.sum(0),
    }[redop]()


@pytest.mark.every(2)
@pytest.mark.parametrize("redop", REDOPS)
@pytest.mark.parametrize("type_name", TYPES)
def test_wrong_elements_are_counted(type_name: str, redop: str) -> None:
    dtype = BY_NAME[TYPES[type_name]]
    for ranks in (2, 3):
        values = Values(dtype, redop, ranks)
        count = PERIOD + 500
        sources = [values.elements([SourceRange(r, 0, count)], 1) for r in range(ranks)]
        result = fold(redop, [decoded(s, dtype) if dtype.kind == "f" else s.astype(float) for s in sources])
        got = encoded(result if dtype.kind == "f" else np.trunc(result), dtype)
        expected = [SourceRange(REDUCED, 0, count)]
        assert values.wrong(got, expected, 1) == 0
        assert values.wrong(got, expected, 2) > count // 5, "a result of another iteration"
        assert values.wrong(np.roll(got, 1024), expected, 1) > count // 5, "in the wrong place"
        assert values.wrong(sources[0], expected, 1) > count // 5, "not reduced"
        assert values.wrong(values.poison(count), expected, 1) > count * 9 // 10, "not written"
        assert values.wrong(got[:-7], expected, 1) == 7, "too short"
        got[[0, PERIOD - 1, PERIOD, count - 1]] = values.poison(4)
        assert values.wrong(got, expected, 1) == 4


def test_misplaced_elements_are_detected() -> None:
    values = Values(BY_NAME["float32"], None, 4)
    segments = OPERATIONS["all_to_all"].expected(CallRank(2, 4, 0), 1000)
    sent = [values.elements([SourceRange(r, 0, 4000)], 1) for r in range(4)]
    right = np.concatenate([s[2000:3000] for s in sent])
    assert values.wrong(right, segments, 1) == 0
    assert values.wrong(np.concatenate([right[1000:], right[:1000]]), segments, 1) > 3000
    assert values.wrong(np.concatenate([s[1000:2000] for s in sent]), segments, 1) > 3000


def test_many_ranks_use_a_tolerance() -> None:
    values = Values(BY_NAME["bfloat16"], "sum", 1000)
    assert values.tolerance > 0
    assert Values(BY_NAME["float32"], "sum", 1000).tolerance == 0
    assert Values(BY_NAME["int8"], "sum", 1000).tolerance == 0


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("redop", ["sum", "avg"])
def test_compressed_results_have_the_documented_error(redop: str, compression: str) -> None:
    dtype, count, ranks = BY_NAME["float32"], 5000, 3
    values = Values(dtype, redop, ranks, compression)
    codec = codec_for(compression, dtype.storage)

    def compressed(x: Any) -> Any:
        data, result = np.empty(codec.nbytes(count), np.uint8), np.empty(count, np.float32)
        codec.encode(x, data)
        codec.decode(data, result)
        return result

    sent = [values.elements([SourceRange(r, 0, count)], 1) for r in range(ranks)]
    divisor = np.float32(ranks if redop == "avg" else 1)
    result = compressed(np.add.reduce([compressed(x) for x in sent]) / divisor)
    segments = [SourceRange(REDUCED, 0, count)]
    assert values.wrong(result, segments, 1) == 0
    assert Values(dtype, redop, ranks).wrong(result, segments, 1) > count / 10
    assert values.wrong(compressed((sent[0] + sent[1]) / divisor), segments, 1) > count / 2


class Broken(Unicoll):
    """gloo with 1 added to element 7 of every result."""

    def __init__(self, name: str) -> None:
        super().__init__("gloo")
        self.name = name

    def reason(self) -> str | None:
        return None

    def open(self, job: Any) -> None:
        self.group = dist.new_group(backend="cpu:gloo")

    def call(self, case: BenchCase, send: Any, recv: Any) -> Callable[[], Any]:
        inner = super().call(case, send, recv)

        def call() -> None:
            inner()
            recv[7] += 1

        return call


def test_a_wrong_result_is_reported(
    alone: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(contenders.TABLE, "broken", contenders.ContenderRow(Broken, "--backend"))
    out = tmp_path / "out.json"
    arguments = ("all_reduce", "--backend", "gloo,broken", "--sizes", "256,4K", *QUICK, "--json", str(out))
    assert alone(*arguments, "-c", "3") == 1
    printed = capsys.readouterr().out
    assert [(r[12], r[13]) for r in rows(printed)] == [("0", "gloo"), ("3", "broken")] * 2
    assert "Out of bounds values : 6 FAILED" in printed
    found = json.loads(out.read_text())
    assert [r["in_place"]["nwrong"] for r in found["results"]] == [0.0, 3.0, 0.0, 3.0]
    assert found["out_of_bounds"] == {"count": 6, "okay": "false"}
    assert alone(*arguments, "-c", "0") == 0
    assert [r[12] for r in rows(capsys.readouterr().out)] == ["N/A"] * 4


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [op.name for op in OPERATIONS.values() if op.min_ranks == 1])
def test_every_operation_alone(
    alone: Callable[..., int], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert alone(name, "--sizes", "64,1K", *QUICK, "-d", "int32", "-o", "max") == 0
    lines = rows(capsys.readouterr().out)
    assert [line[0] for line in lines] == (["0"] if name == "barrier" else ["64", "1024"])
    columns = {OUT: 5, IN: 9}
    for line in lines:
        for placement, at in columns.items():
            measured = placement in OPERATIONS[name].placements
            assert (line[at] != "N/A", line[at + 3]) == (measured, "0" if measured else "N/A")


def test_types_and_reductions_in_a_loop(
    alone: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ml_dtypes")
    assert alone("all_reduce", "--sizes", "64", *QUICK, "-d", "all", "-o", "all", "-u", "1") == 0
    lines = rows(capsys.readouterr().out)
    measured = {(line[2], line[3]) for line in lines}
    assert {(t, o) for t in ("int8", "half", "double", "bfloat16") for o in REDOPS} <= measured
    assert {line[12] for line in lines} == {"0"}


@pytest.mark.parametrize("reason", [None, "mpi4py is not installed (pip install mpi4py)"])
def test_contenders_that_are_missing_are_named(
    reason: str | None,
    alone: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry.load("mpi"), "availability", lambda: reason)
    assert alone("all_reduce", "--backend", "gloo", "--peer", "mpi4py", "--sizes", "64", *QUICK) == 0
    seen = capsys.readouterr()
    assert f"mpi4py is not measured: {reason or 'the ranks were not started by mpirun'}" in seen.err
    assert len(rows(seen.out)) == 1
    assert alone("all_reduce", "--peer", "mpi4py", "--sizes", "64", *QUICK) == 1
    assert rows(capsys.readouterr().out) == []


def test_sizes_too_small_for_all_ranks_are_skipped(
    alone: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert alone("all_gather", "--sizes", "2", *QUICK) == 1
    assert "nothing was measured" in capsys.readouterr().out


def test_a_size_that_does_not_fit_the_memory_does_not_end_the_run(
    alone: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    assert alone("all_reduce", "--sizes", "8,1000000G", *QUICK, "--json", str(out)) == 0
    assert [row[0] for row in rows(capsys.readouterr().out)] == ["8"]
    data = json.loads(out.read_text())
    assert [entry["size"] for entry in data["results"]] == [8]
    assert "Unable to allocate" in data["errors"][0]


def test_results_that_cannot_be_written_fail(
    alone: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert alone("all_reduce", "--sizes", "8", *QUICK, "--json", "/dev/full") == 1
    seen = capsys.readouterr()
    assert len(rows(seen.out)) == 1
    assert seen.err.startswith("unicoll.bench: the results cannot be written: ")
    assert "No space left on device" in seen.err


def test_a_low_bandwidth_fails(
    alone: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "1e9")
    assert alone("broadcast", "--sizes", "64", *QUICK) == 1
    assert "FAILED" in capsys.readouterr().out


def test_overlap(alone: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert alone("all_reduce", "--overlap", "--sizes", "64K", "--iters", "3", "--json", str(out)) == 0
    (line,) = rows(capsys.readouterr().out)
    assert [line[0], line[1], line[2], line[-2], line[-1]] == ["65536", "float", "sum", "0", "gloo"]
    (entry,) = json.loads(out.read_text())["results"]
    assert entry["speedup"] == pytest.approx(entry["serial_us"] / entry["overlapped_us"], rel=1e-2)


@pytest.mark.parametrize("overlap", [(), ("--overlap",)])
@pytest.mark.parametrize(
    ("op", "place", "text"), [("all_reduce", "out", "out of place"), ("all_to_all", "in", "in place")]
)
def test_a_placement_that_an_operation_does_not_have(
    alone: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    op: str,
    place: str,
    text: str,
    overlap: tuple[str, ...],
) -> None:
    assert alone(op, "--place", place, "--sizes", "64,1K", "--iters", "3", *overlap) == 1
    out = capsys.readouterr().out
    assert out.count(f"# gloo does not support {op} {text}") == 1
    assert "# nothing was measured" in out


PLACEMENT_KEYS = {"time", "alg_bw", "bus_bw", "nwrong", "iterations", "calls", "us", "us_by_rank"}
RESULT_KEYS = {
    "size",
    "count",
    "type",
    "redop",
    "root",
    "out_of_place",
    "in_place",
    "actual_iterations",
    "experiment_name",
    "contender",
    "ratio",
}
NCCL_TESTS_KEYS = {
    "version",
    "start_time",
    "args",
    "env",
    "nccl_version",
    "config",
    "devices",
    "results",
    "out_of_bounds",
    "average_bus_bandwidth",
    "errors",
    "end_time",
}


def check_json(data: dict[str, Any], names: list[str], sizes: list[int], ranks: int) -> None:
    assert set(data) >= NCCL_TESTS_KEYS | {"machine", "contenders", "staging", "explain"}
    assert [(d["rank"], d["group"], d["device"]) for d in data["devices"]] == [
        (r, 0, -1) for r in range(ranks)
    ]
    assert data["config"]["sizes"] == sizes
    assert set(data["machine"]) >= {"cpu", "cores", "kernel", "python", "numpy"}
    assert list(data["contenders"]) == names
    assert not any("SECRET" in variable for variable in data["env"])
    assert [(r["size"], r["contender"]) for r in data["results"]] == [(s, n) for s in sizes for n in names]
    for result in data["results"]:
        assert set(result) == RESULT_KEYS
        measured = [result[name] for name in (OUT, IN) if result[name] is not None]
        assert measured
        for result_part in measured:
            assert set(result_part) == PLACEMENT_KEYS
            assert result_part["nwrong"] == 0.0
            assert (
                0
                < result_part["us"]["min"]
                <= result_part["us"]["p50"]
                <= result_part["us"]["p99"]
                <= result_part["us"]["max"]
            )
            assert result_part["time"] == result_part["us"]["p50"]
            assert len(result_part["us_by_rank"]["p50"]) == ranks
        assert result["actual_iterations"] >= 4
        first = next(r for r in data["results"] if r["size"] == result["size"])
        placement = OPERATIONS[data["operation"]].placements[0]
        assert result["ratio"] == pytest.approx(
            result[placement]["time"] / first[placement]["time"], rel=1e-3
        )


def test_the_environment_has_no_secrets_and_no_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/somebody/topologies/box.xml")
    monkeypatch.setenv("OMPI_MCA_paths", "a:/usr/lib/x,~b;c=/opt/y/z/")
    monkeypatch.setenv("UNICOLL_STORE", "tcp://host:1/x")
    monkeypatch.setenv("UNICOLL_SECRET", "s" * 32)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert _environment() == [
        "NCCL_TOPO_FILE=.../box.xml",
        "OMPI_MCA_paths=a:.../x,~b;c=.../",
        "UNICOLL_STORE=tcp://host:1/x",
    ]


def test_two_ranks_without_a_launcher(tmp_path: Path) -> None:
    out, plot_file = tmp_path / "out.json", tmp_path / "out.png"
    plot_flags = ("--plot", str(plot_file)) if HAS_MATPLOTLIB else ()
    done = bench(
        "all_gather",
        "-n",
        "2",
        "--sizes",
        "8,64K",
        *QUICK,
        "--json",
        str(out),
        *plot_flags,
        PYTHONWARNINGS="error",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "# Collective test starting: all_gather_perf" in lines
    assert table.header(False) == [line for line in lines if line.startswith("#  ")][-3:]
    assert sum(line.startswith("#  Rank ") for line in lines) == 2
    staged = next(line for line in lines if line.startswith("# staging: "))
    assert staged.endswith("constant in the message size")
    assert [line.split()[:5] for line in lines if not line.startswith("#")] == [
        ["8", "1", "float", "none", "-1"],
        ["65536", "8192", "float", "none", "-1"],
    ]
    data = json.loads(out.read_text())
    check_json(data, ["gloo"], [8, 65536], 2)
    staging = data["staging"]["gloo"]
    assert staging["bytes_per_rank"] == staging["bytes_per_rank_after"] > 0
    assert not HAS_MATPLOTLIB or plot_file.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(Path(p).name for p in (out, *plot_flags[1:]))


def test_compression(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("all_reduce", "--compression", "int8", "--sizes", "8,256K", *QUICK, "--json", str(out))
    done = bench(
        *arguments, "--backend", "gloo,torch-unicoll-gloo", "--peer", "floor", UNICOLL_TRANSPORT="tcp"
    )
    assert done.returncode == 0, done.stderr
    assert "torch-unicoll-gloo is not measured" in done.stderr
    assert [(row[0], row[12], row[13]) for row in rows(done.stdout)] == [
        ("8", "0", "gloo"),
        ("8", "N/A", "floor"),
        ("262144", "0", "gloo"),
        ("262144", "N/A", "floor"),
    ]
    data = json.loads(out.read_text())
    assert data["config"]["compression"] == "int8"
    assert "compression int8" in data["contenders"]["gloo"]["transport"]


@pytest.mark.slow
def test_point_to_point_under_our_launcher() -> None:
    command = [
        sys.executable,
        "-m",
        "unicoll.run",
        "--nproc-per-node",
        "3",
        "--no-prefix",
        "-m",
        "unicoll.bench",
    ]
    for name in ("sendrecv", "latency"):
        done = subprocess.run(
            [*command, name, "--sizes", "64", *QUICK, "--osu-full"],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (line,) = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
        least, mean, most = float(line[2]), float(line[1]), float(line[3])
        assert line[0] == "64"
        assert 0 < least <= mean <= most


@pytest.mark.slow
@pytest.mark.torch
def test_comparison_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "out.json"
    done = bench(
        "all_reduce",
        "--backend",
        "gloo",
        "--peer",
        "torch-gloo",
        "--sizes",
        "8,4K",
        *QUICK,
        "--json",
        str(out),
    )
    assert done.returncode == 0, done.stderr
    assert [(r[12], r[13]) for r in rows(done.stdout)] == [("0", "gloo"), ("0", "torch-gloo")] * 2
    data = json.loads(out.read_text())
    check_json(data, ["gloo", "torch-gloo"], [8, 4096], 2)
    assert "torch" in data["machine"]


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or launch.mpirun() is None,
    reason="there is no mpi4py with mpirun",
)
def test_comparison_with_mpi4py(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ("--backend", "gloo", "--peer", "mpi4py", "--sizes", "8,4K", *QUICK, "--json", str(out))
    done = bench("all_reduce", *flags)
    assert done.returncode == 0, done.stderr
    assert [r[12:14] for r in rows(done.stdout)] == [["0", "gloo"], ["0", "mpi4py"]] * 2
    data = json.loads(out.read_text())
    check_json(data, ["gloo", "mpi4py"], [8, 4096], 2)
    assert data["machine"]["mpi"]


def test_the_exit_status_is_that_of_the_ranks() -> None:
    done = bench("broadcast", "-n", "2", "--sizes", "64", *QUICK, "-r", "5")
    assert done.returncode == 2
    assert "-r 5: the job has 2 ranks" in done.stderr


# --- parts ----------------------------------------------------------------------------------------------------------


def test_the_command_for_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    command, variables = launch.mpirun_command("/x/mpirun", 2, ["all_reduce", "-n", "2"])
    assert command == ["/x/mpirun", "-n", "2", sys.executable, "-m", "unicoll.bench", "all_reduce", "-n", "2"]
    assert not any("ROOT" in name or "oversubscribe" in value for name, value in variables.items())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    variables = launch.mpirun_command("/x/mpirun", 3, [])[1]
    assert variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert variables["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"


def test_json_is_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write({"a": 1}, str(path))
    with pytest.raises(ValueError, match="nan"):
        write({"a": math.nan}, str(path))
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_json_is_written_into_a_device_or_through_a_link(tmp_path: Path) -> None:
    """Not in its place: as root ``--json /dev/null`` would make it a file."""
    (tmp_path / "link").symlink_to(tmp_path / "x.json")
    write({"a": 1}, str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)) as reader:
        write({"a": 1}, str(tmp_path / "pipe"))
        assert json.load(reader) == {"a": 1}
    assert (tmp_path / "pipe").is_fifo()


def test_progress_is_written_only_if_enabled(capsys: pytest.CaptureFixture[str]) -> None:
    for enabled in (False, True):
        progress = Progress(enabled)
        progress.label = "all_reduce 8 bytes"
        progress.show("gloo, turn 1 of 5")
        progress.clear()
        progress.clear()
        expected = "\r\x1b[Kall_reduce 8 bytes: gloo, turn 1 of 5\r\x1b[K" if enabled else ""
        assert capsys.readouterr().err == expected


def entry(size: int, contender: str, us: float, ratio: float | None) -> dict[str, Any]:
    half = {"time": us, "alg_bw": size / us / 1e3, "bus_bw": size / us / 1e3, "nwrong": 0.0}
    kind = {"type": "float", "redop": "sum", "root": "    -1", OUT: None, IN: half}
    return {"size": size, "contender": contender, "ratio": ratio, **kind}


def drawable() -> dict[str, Any]:
    results = [entry(n, "gloo", 5 + n / 1e4, 1.0) for n in DEFAULT_SIZES]
    results += [entry(n, "mpi4py", 1 + n / 5e3, (1 + n / 5e3) / (5 + n / 1e4)) for n in DEFAULT_SIZES[:-1]]
    return {
        "operation": "all_reduce",
        "ranks": 2,
        "results": results,
        "devices": [{"hostname": "a"}] * 2,
        "machine": {"cpu": "a CPU", "cores": 2},
        "contenders": {"gloo": {"transport": "shared memory"}, "mpi4py": {"transport": "MPI 3"}},
        "config": {"statistic": "p50"},
    }


def test_curves_use_the_compared_placement() -> None:
    found = plot.curves(drawable())
    assert list(found) == ["unicoll (gloo)", "mpi4py"]
    assert [e["size"] for e in found["unicoll (gloo)"]] == list(DEFAULT_SIZES)
    assert len(found["mpi4py"]) == len(DEFAULT_SIZES) - 1


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_the_plot(tmp_path: Path) -> None:
    program = (
        "import json, sys; from unicoll.bench.plot import draw; data = json.load(sys.stdin);"
        " [draw(data, path) for path in sys.argv[1:]]"
    )
    paths = [str(tmp_path / name) for name in ("x.svg", "x.png")]
    drawing = [sys.executable, "-W", "error", "-c", program, *paths]
    done = subprocess.run(
        drawing,
        cwd=ROOT,
        env=environment(),
        input=json.dumps(drawable()),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "x.svg").read_text()
    assert text.startswith("<?xml")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.png", "x.svg"]


def test_plot_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert "pip install matplotlib" in (plot.plot_problem("x.png") or "")
    monkeypatch.setattr(plot, "find_spec", lambda name: object())
    assert "must end in .png" in (plot.plot_problem("x") or "")
    assert plot.plot_problem("x.svg") is None


# --- on a device ----------------------------------------------------------------------------------------------------

ON_DEVICE = ("--backend", "nccl", "--peer", "bare-nccl", *QUICK, "--sizes", "8,4K")


def on_device(*arguments: str) -> tuple[str, list[int]]:
    """The benchmark on two simulated devices: what rank 0 prints, and the exit statuses."""
    with SimulatedJob(2, join="env") as job:
        job.call(bench_jobs.bench, arguments)
        outcomes = job.results(120.0)
    return outcomes[0][1], [status for status, _ in outcomes]


@pytest.mark.every(7)
@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "sendrecv", "latency"]
)
def test_nccl_and_bare_nccl(op: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    printed, statuses = on_device(op, *ON_DEVICE, "--json", str(path))
    assert statuses == [0, 0], printed
    assert json.loads(path.read_text())["results"]
    assert "called directly" in printed
    contenders_seen = {name for line in rows(printed) for name in ("nccl", "bare-nccl") if name in line}
    assert contenders_seen == {"nccl", "bare-nccl"}, printed


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["-C1", "--events"])
def test_timing_on_a_device(how: str) -> None:
    arguments = ("-C", "1") if how == "-C1" else (how,)
    printed, statuses = on_device("all_reduce", *ON_DEVICE, *arguments)
    assert statuses == [0, 0], printed
    assert len(rows(printed)) == 4, printed


def test_host_time_and_events_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["all_reduce", "-C", "1", "--events"])
    assert "--events" in capsys.readouterr().err


@pytest.mark.slow
def test_operations_missing_in_bare_nccl_are_reported() -> None:
    printed, statuses = on_device("all_to_all", *ON_DEVICE)
    assert statuses == [0, 0]
    assert "all_to_all is not measured with bare NCCL" in printed
    assert len(rows(printed)) == 2, printed
