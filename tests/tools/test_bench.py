"""The benchmark command: its tables, sizes, data and checks, and small runs of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.simulated_nccl.ranks import SimulatedJob
from tests.support.programs import python
from tests.support.ranks import ROOT, environment, reserved_port
from tests.tools import bench_jobs
from unicoll.arrays.compression import codec_for
from unicoll.arrays.types import BY_NAME, COMPRESSIONS
from unicoll.bench import contenders, main, plot, table
from unicoll.bench.args import DEFAULT_SIZES, TYPES, parse, parse_size
from unicoll.bench.arrays import Unsupported
from unicoll.bench.contract import BenchCase
from unicoll.bench.distributed import Unicoll
from unicoll.bench.measure import over_ranks
from unicoll.bench.mpi import Mpi4py
from unicoll.bench.operations import IN, OPERATIONS, OUT, REDUCED, CallRank, SourceRange, find_operation
from unicoll.bench.report import _environment, write
from unicoll.bench.values import PERIOD, REDOPS, Values, decoded, encoded
from unicoll.calls.ops import OPS, Arity
from unicoll.group import registry
from unicoll.run.mpirun import mpirun, mpirun_variables

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
QUICK = "--budget 0.01 --turns 2"


def bench(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it, from another directory."""
    return python(ROOT / "scripts" / "bench.py", *command.split(), cwd=Path("/"), **variables)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], int]]:
    """The command as the only rank of a job, in this process; the first word may set a variable."""
    for name in [n for n in os.environ if n not in environment()]:
        monkeypatch.delenv(name)
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "UNICOLL_SECRET": "x" * 32}
    for name, value in job.items():
        monkeypatch.setenv(name, value)

    def run(command: str) -> int:
        words = command.split()
        if "=" in words[0]:
            monkeypatch.setenv(*words.pop(0).split("="))
        try:
            return main(words)
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


def test_numbers_are_printed_as_nccl_tests_prints_them() -> None:
    seven = {0.0: "   0.00", 0.456: "   0.46", 9999.99: "9999.99", 10000.0: "10000.0", 99999.96: "100000.0"}
    seven |= {100000.0: " 100000", 9999999.0: "9999999", 1e7: "1.0e+07", math.nan: "    N/A"}
    six = {0.0: "  0.00", 999.99: "999.99", 1000.0: "1000.0", 10000.0: " 10000", 1e6: " 1e+06"}
    for width, texts in ((7, seven), (6, six)):
        assert [table.float_str(value, width) for value in texts] == list(texts.values())


def result(us: float, algbw: float, busbw: float, wrong: int | None) -> dict[str, Any]:
    by_rank = {"avg": [us - 1, us + 1, math.nan]}
    half = {"time": us, "alg_bw": algbw, "bus_bw": busbw, "nwrong": wrong}
    return half | {"iterations": 10, "us_by_rank": by_rank}


def entry(size: int, contender: str, ratio: float | None, out: Any, inside: Any) -> dict[str, Any]:
    kind = {"type": "float", "redop": "sum", "root": "    -1"}
    places = {OUT: out, IN: inside}
    return {"size": size, "count": size // 4, "contender": contender, "ratio": ratio} | kind | places


LINE = entry(1048576, "gloo", 1.0, result(61.22, 17.13, 17.13, 0), result(1e5, 0.01, 0.01, 3))


def test_the_table_is_that_of_nccl_tests_with_two_more_columns() -> None:
    assert table.header(False) == [
        "#" + " " * 62 + "out-of-place" + " " * 23 + "in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw"
        "  #wrong ",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)"
        "         ",
    ]
    line = (
        "     1048576        262144     float     sum      -1    61.22   17.13   17.13       0   100000    0.01    0.01"
        "       3"
    )
    assert table.line(LINE, False) == line
    unchecked = table.line(LINE | {OUT: None, IN: result(5.0, 1.0, 1.0, None)}, False)
    assert unchecked.split()[5:] == ["N/A"] * 4 + ["5.00", "1.00", "1.00", "N/A"]
    assert len(unchecked) == len(line)
    other = table.line(LINE | {"contender": "torch-gloo", "ratio": 12.345}, True)
    assert other == line + "   torch-gloo             12.35"
    assert table.line(LINE | {"ratio": None}, True).split()[-2:] == ["unicoll", "N/A"]
    titles = table.header(True, cpu_time=True)[1]
    assert titles.split()[-2:] == ["contender", "ratio"]
    assert titles.split().count("cputime") == 2
    assert len(titles) == len(other)


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
    assert lines[1:3] == ["# Avg bus bandwidth    : 3.25 FAILED unicoll", "# Avg bus bandwidth    : 1 mpi4py"]


def test_contenders_of_unicoll_are_called_unicoll() -> None:
    names = {"gloo": "unicoll", "mpi": "unicoll (mpi)", "nccl": "unicoll (nccl)", "mine": "unicoll (mine)"}
    names |= {"gloo-symmetric": "unicoll (symmetric)", "mpi-symmetric": "unicoll (mpi-symmetric)"}
    others = ("torch-gloo", "torch-unicoll-gloo", "mpi4py", "bare-nccl", "floor")
    assert {name: contenders.label(name) for name in (*names, *others)} == names | {n: n for n in others}


def test_osus_columns() -> None:
    op = OPERATIONS["all_gather"]
    assert table.osu_header(op, "gloo", "1", "int32", True, False) == [
        "# OSU gloo Allgather Latency Test v1",
        "# Datatype: MPI_INT.",
        "# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations",
    ]
    short = entry(8, "gloo", 1.0, result(10.05, 0, 0, 0), None)
    assert table.osu_line(op, short, 2, False, False) == "4                      10.05"
    full = table.osu_line(op, short, 2, True, False)
    assert full == "4                      10.05              9.05             11.05          10"
    assert len(full) == len(table.osu_header(op, "gloo", "1", "int32", True, False)[2])
    compared = table.osu_line(op, short, 2, False, True)
    assert compared.split()[-2:] == ["unicoll", "1.00"]
    assert len(compared) == len(table.osu_header(op, "gloo", "1", "int32", False, True)[2])
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
        1.5: "all_reduce",
        0.75: "all_gather reduce_scatter all_to_all gather scatter",
        1.0: "broadcast reduce sendrecv latency scan exscan",
        0.0: "barrier",
    }
    assert sorted(" ".join(factors.values()).split()) == sorted(OPERATIONS)
    for factor, names in factors.items():
        for name in names.split():
            assert table.bandwidths(OPERATIONS[name], 1_000_000, 100.0, 4) == (10.0, 10.0 * factor)


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_rank_has_what_it_gets_before_the_call(name: str) -> None:
    """Else the check of the results would find nothing wrong if nothing was received."""
    op = OPERATIONS[name]
    calls = [CallRank(rank, 4, 0) for rank in range(4)]
    same = [call.rank for call in calls if [] != op.expected(call, 9) == op.source(call, 9)]
    row = op.collective
    keeps = row is not None and (row.exclusive or row.outputs is Arity.ONE_OFF_ROOT)  # rank 0 keeps its array
    assert same == ([0] if keeps else [])


def test_mpi4py_lacks_what_has_no_counterpart_in_mpi() -> None:
    op = dataclasses.replace(OPERATIONS["scan"], collective=dataclasses.replace(OPS["scan"], mpi=""))
    case = BenchCase(op, IN, BY_NAME["float32"], "sum", 0, op.divide(8, 2), 0, 2)
    with pytest.raises(Unsupported, match="MPI has no scan"):
        Mpi4py("mpi4py").call(case, np.ones(8), np.ones(8))


def test_counts_are_those_of_nccl_tests() -> None:
    counts = {name: OPERATIONS[name].divide(1000, 3) for name in OPERATIONS}
    assert counts["all_reduce"] == (1000, 1000, 1000)
    assert counts["all_gather"] == counts["gather"] == (333, 333, 999)
    assert counts["reduce_scatter"] == counts["scatter"] == (333, 999, 333)
    assert counts["all_to_all"] == (333, 999, 999)


def test_sizes_with_units() -> None:
    sizes = {"8": 8, "4K": 4096, "4k": 4096, "1.5M": 3 << 19, "2G": 2 << 30, "0": 0, " 64M ": 64 << 20}
    assert [parse_size(text) for text in sizes] == list(sizes.values())
    for text in ("", "K", "8T", "-8", "1e3", "8 8"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "sizes", "step"),
    [
        ("", DEFAULT_SIZES, "0(list)"),
        ("-b 8 -e 64 -f 2", (8, 16, 32, 64), "2(factor)"),
        ("-b 8 -e 1K -f 8", (8, 64, 512), "8(factor)"),
        ("-b 1K -e 3K -i 1K", (1024, 2048, 3072), "1024(bytes)"),
        ("-e 32", (8, 16, 32), "2(factor)"),
        ("-b 128M", (128 << 20,), "2(factor)"),
        ("--sizes 4K,8,8", (8, 4096), "0(list)"),
    ],
)
def test_the_sweep(alone: object, arguments: str, sizes: Sequence[int], step: str) -> None:
    options = parse(["all_reduce", *arguments.split()])
    assert (options.sizes, options.step) == (tuple(sizes), step)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("all_redue", "no operation"),
        ("all_reduce -n 2", "has started 1 ranks"),
        ("sendrecv", "needs 2 ranks"),
        ("all_reduce -t 2", "-t/--nthreads: a rank is a process"),
        ("all_reduce -g 8", "-g/--ngpus: a rank drives one GPU"),
        ("all_reduce -G 1", "CUDA graphs"),
        ("all_reduce -R 1", "not registered"),
        ("all_reduce -z 2", "2 is neither 0 nor 1"),
        ("all_reduce -C 1 --events", "choose one"),
        ("all_reduce --backend ,", "the list is empty"),
        ("all_reduce -b 1M -e 1K", "invalid sizes"),
        ("all_reduce -b 8 --sizes 8", "exclude each other"),
        ("all_reduce -i 8 -f 2", "exclude each other"),
        ("all_reduce --sizes " + "9" * 400, "more than memory can be"),
        ("all_reduce -f 1", "the factor"),
        ("all_reduce -d quadruple", "expected some of int8, uint8"),
        ("all_reduce -o median", "expected some of sum, prod"),
        ("all_reduce -r first", "expected a rank or all"),
        ("all_reduce --backend smoke", "no backend 'smoke'"),
        ("all_reduce --backend torch-gloo", "use --peer torch-gloo"),
        ("all_reduce --peer gloo", "no peer 'gloo'"),
        ("all_reduce --iters 0", "--iters"),
        ("all_reduce --budget 0", "--budget"),
        ("all_reduce --osu --overlap", "choose one"),
        ("all_reduce --overlap --plot x.png", "--plot shows"),
        ("barrier --overlap", "no asynchronous form"),
        ("all_reduce --json /nonexistent/x.json", "cannot be written"),
        ("all_reduce --compression int4", "invalid choice: 'int4'"),
        ("broadcast --compression int8", "--compression needs all_reduce"),
        ("all_reduce --compression int8 -d half", "-d float or double"),
        ("all_reduce --compression int8 -o all", "-o sum or avg"),
        ("all_reduce --no-such-flag", "unrecognized arguments"),
        ("NCCL_TESTS_MIN_BW=much all_reduce", "NCCL_TESTS_MIN_BW=much is not a number"),
    ],
)
def test_invalid_arguments_are_one_line(
    alone: Callable[[str], int], capsys: pytest.CaptureFixture[str], command: str, text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        alone(command)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert text in error
    assert error.count("\n") == 1


def test_accepted_values_of_nccl_tests_flags(alone: object) -> None:
    flags = "-t 1 -g 1 -p 0 -G 0 -R 0 -D 0 -V 16 -M 0 -w 3 -m 4 -c 2 -a 3 -z 1"
    options = parse(["all_reduce", *flags.split()])
    assert (options.warmup, options.aggregate, options.checks, options.average) == (3, 4, 2, 3)
    assert options.blocking
    assert parse(["all_reduce", "-d", "all", "-o", "all"]).redops == REDOPS
    assert parse(["all_reduce", "-d", "float32"]).types == ("float",)
    assert parse(["all_reduce", "-o", "sum,exact"]).redops == ("sum", "exact")


def test_over_the_ranks() -> None:
    values = np.array([4.0, 1.0, math.nan, 7.0])
    assert [over_ranks(values, a) for a in (0, 1, 2, 3)] == [4.0, 4.0, 1.0, 7.0]


# --- data and checks ------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_torch_and_ml_dtypes_convert_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    dtype = BY_NAME[name]
    codes = np.arange(1 << (8 * dtype.itemsize)).astype(dtype.storage)
    numbers = np.linspace(-20, 20, 997)
    with np.errstate(invalid="ignore"):
        by_torch = decoded(codes, dtype), encoded(numbers, dtype)
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.delitem(sys.modules, "torch")
        by_ml_dtypes = decoded(codes, dtype), encoded(numbers, dtype)
    np.testing.assert_array_equal(by_torch[0], by_ml_dtypes[0])
    np.testing.assert_array_equal(by_torch[1], by_ml_dtypes[1])


FOLD: dict[str, Callable[[Any], Any]] = {
    "sum": lambda stacked: stacked.sum(0),
    "prod": lambda stacked: stacked.prod(0),
    "max": lambda stacked: stacked.max(0),
    "min": lambda stacked: stacked.min(0),
    "avg": lambda stacked: stacked.sum(0) / len(stacked),
    "mulsum": lambda stacked: 2 * stacked.sum(0),
    "exact": lambda stacked: stacked.sum(0),
}
"""Independent reductions in float64."""


@pytest.mark.every(n=6)
@pytest.mark.parametrize("redop", REDOPS)
@pytest.mark.parametrize("type_name", TYPES)
def test_wrong_elements_are_counted(type_name: str, redop: str) -> None:
    dtype = BY_NAME[TYPES[type_name]]
    for ranks in (2, 3):
        values = Values(dtype, redop, ranks)
        count = PERIOD + 500
        sources = [values.elements([SourceRange(r, 0, count)], 1) for r in range(ranks)]
        numbers = [decoded(s, dtype) if dtype.kind == "f" else s.astype(float) for s in sources]
        result = FOLD[redop](np.stack(numbers))
        got = encoded(result if dtype.kind == "f" else np.trunc(result), dtype)
        expected = [SourceRange(REDUCED, 0, count)]
        assert values.wrong(got, expected, 1) == 0
        assert values.wrong(got, expected, 2) > count // 5, "a result of another iteration"
        assert values.wrong(np.roll(got, 1024), expected, 1) > count // 5, "in the wrong place"
        assert values.wrong(sources[0], expected, 1) > count // 5, "not reduced"
        assert values.wrong(values.poison(count), expected, 1) > count * 9 // 10, "not written"
        assert values.wrong(got[:-7], expected, 1) == 7, "too short"
        places = [0, PERIOD - 1, PERIOD, count - 1]
        changed = int(np.count_nonzero(got[places] != values.poison(4)))
        got[places] = values.poison(4)
        assert values.wrong(got, expected, 1) == changed
        assert changed == 4 or dtype.itemsize == 1


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
    alone: Callable[[str], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(contenders.TABLE, "broken", contenders.ContenderRow(Broken, "--backend"))
    out = tmp_path / "out.json"
    command = f"all_reduce --backend gloo,broken --sizes 256,4K {QUICK} --json {out}"
    assert alone(f"{command} -c 3") == 1
    printed = capsys.readouterr().out
    assert [(r[12], r[13]) for r in rows(printed)] == [("0", "unicoll"), ("3", "broken")] * 2
    assert "Out of bounds values : 6 FAILED" in printed
    found = json.loads(out.read_text())
    assert [r["in_place"]["nwrong"] for r in found["results"]] == [0.0, 3.0, 0.0, 3.0]
    assert found["out_of_bounds"] == {"count": 6, "okay": "false"}
    assert alone(f"{command} -c 0") == 0
    assert [r[12] for r in rows(capsys.readouterr().out)] == ["N/A"] * 4


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [op.name for op in OPERATIONS.values() if op.min_ranks == 1])
def test_every_operation_alone(
    alone: Callable[[str], int], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert alone(f"{name} --sizes 64,1K {QUICK} -d int32 -o max") == 0
    lines = rows(capsys.readouterr().out)
    assert [line[0] for line in lines] == (["0"] if name == "barrier" else ["64", "1024"])
    columns = {OUT: 5, IN: 9}
    for line in lines:
        for placement, at in columns.items():
            measured = placement in OPERATIONS[name].placements
            assert (line[at] != "N/A", line[at + 3]) == (measured, "0" if measured else "N/A")


def test_types_and_reductions_in_a_loop(
    alone: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ml_dtypes")
    assert alone(f"all_reduce --sizes 64 {QUICK} -d all -o all -u 1") == 0
    lines = rows(capsys.readouterr().out)
    measured = {(line[2], line[3]) for line in lines}
    expected = {(t, o) for t in ("int8", "half", "double", "bfloat16") for o in REDOPS} - {("int8", "exact")}
    assert expected <= measured
    assert {line[12] for line in lines} == {"0"}


@pytest.mark.parametrize(
    ("command", "status", "lines", "text"),
    [
        ("all_gather --sizes 2", 1, 0, "nothing was measured"),
        ("all_reduce --sizes 8 --json /dev/full", 1, 1, "unicoll.bench: the results cannot be written: "),
        ("NCCL_TESTS_MIN_BW=1e9 broadcast --sizes 64", 1, 1, "FAILED"),
        ("all_reduce --place out --sizes 64,1K", 1, 0, "# unicoll does not support all_reduce out of place"),
        ("all_to_all --place in --sizes 64,1K", 1, 0, "# unicoll does not support all_to_all in place"),
        ("all_reduce --place out --overlap", 1, 0, "# unicoll does not support all_reduce out of place"),
        ("all_to_all --place in --overlap", 1, 0, "# unicoll does not support all_to_all in place"),
    ],
)
def test_failures(
    command: str,
    status: int,
    lines: int,
    text: str,
    alone: Callable[[str], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert alone(f"{command} {QUICK}") == status
    seen = capsys.readouterr()
    assert len(rows(seen.out)) == lines
    assert (seen.out + seen.err).count(text) == 1


@pytest.mark.parametrize("reason", [None, "mpi4py is not installed (pip install mpi4py)"])
def test_contenders_that_are_missing_are_named(
    reason: str | None,
    alone: Callable[[str], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry.load("mpi"), "availability", lambda: reason)
    for others, status in (("--backend gloo", 0), ("", 1)):
        assert alone(f"all_reduce {others} --peer mpi4py --sizes 64 {QUICK}") == status
        seen = capsys.readouterr()
        assert f"mpi4py is not measured: {reason or 'the ranks were not started by mpirun'}" in seen.err
        assert len(rows(seen.out)) == 1 - status


def test_a_size_that_does_not_fit_the_memory_does_not_end_the_run(
    alone: Callable[[str], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    assert alone(f"all_reduce --sizes 8,1000000G {QUICK} --json {out}") == 0
    assert [row[0] for row in rows(capsys.readouterr().out)] == ["8"]
    data = json.loads(out.read_text())
    assert [row["size"] for row in data["results"]] == [8]
    assert "Unable to allocate" in data["errors"][0]


def test_overlap(alone: Callable[[str], int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert alone(f"all_reduce --overlap --sizes 64K --iters 3 --json {out}") == 0
    (line,) = rows(capsys.readouterr().out)
    assert [line[0], line[1], line[2], line[-2], line[-1]] == ["65536", "float", "sum", "0", "unicoll"]
    (found,) = json.loads(out.read_text())["results"]
    assert found["contender"] == "gloo"
    assert found["speedup"] == pytest.approx(found["serial_us"] / found["overlapped_us"], rel=1e-2)


PLACEMENT_KEYS = {"time", "alg_bw", "bus_bw", "nwrong", "iterations", "calls", "us", "us_by_rank"}
RESULT_KEYS = {"size", "count", "type", "redop", "root", "out_of_place", "in_place", "actual_iterations"}
RESULT_KEYS |= {"experiment_name", "contender", "ratio"}
KEYS = {"version", "start_time", "args", "env", "nccl_version", "config", "devices", "results", "errors"}
KEYS |= {"out_of_bounds", "average_bus_bandwidth", "end_time"}  # those of nccl-tests
KEYS |= {"machine", "contenders", "staging", "explain"}


def check_json(path: Path, names: list[str], sizes: list[int]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    assert set(data) >= KEYS
    assert [(d["rank"], d["group"], d["device"]) for d in data["devices"]] == [(0, 0, -1), (1, 0, -1)]
    assert data["config"]["sizes"] == sizes
    assert set(data["machine"]) >= {"cpu", "cores", "kernel", "python", "numpy"}
    assert list(data["contenders"]) == names
    assert not any("SECRET" in variable for variable in data["env"])
    assert [(r["size"], r["contender"]) for r in data["results"]] == [(s, n) for s in sizes for n in names]
    place = OPERATIONS[data["operation"]].placements[0]
    for row in data["results"]:
        assert set(row) == RESULT_KEYS
        measured = [row[name] for name in (OUT, IN) if row[name] is not None]
        assert measured
        for part in measured:
            us = part["us"]
            assert set(part) == PLACEMENT_KEYS
            assert part["nwrong"] == 0.0
            assert 0 < us["min"] <= us["p50"] <= us["p99"] <= us["max"]
            assert part["time"] == us["p50"]
            assert len(part["us_by_rank"]["p50"]) == 2
        assert row["actual_iterations"] >= 4
        first = next(r for r in data["results"] if r["size"] == row["size"])
        assert row["ratio"] == pytest.approx(row[place]["time"] / first[place]["time"], rel=1e-3)
    return data


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
    plot_flags = f"--plot {plot_file}" if HAS_MATPLOTLIB else ""
    command = f"all_gather -n 2 --sizes 8,64K {QUICK} --json {out} {plot_flags}"
    done = bench(command, PYTHONWARNINGS="error")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "# Collective test starting: all_gather_perf" in lines
    assert "# unicoll: unicoll (gloo) over shared memory: all ranks are on one host" in lines
    assert table.header(False) == [line for line in lines if line.startswith("#  ")][-3:]
    assert sum(line.startswith("#  Rank ") for line in lines) == 2
    staged = next(line for line in lines if line.startswith("# staging: "))
    assert staged.endswith("constant in the message size")
    assert [line.split()[:5] for line in lines if not line.startswith("#")] == [
        ["8", "1", "float", "none", "-1"],
        ["65536", "8192", "float", "none", "-1"],
    ]
    staging = check_json(out, ["gloo"], [8, 65536])["staging"]["gloo"]
    assert staging["bytes_per_rank"] == staging["bytes_per_rank_after"] > 0
    assert not HAS_MATPLOTLIB or plot_file.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "out.png"][: 1 + HAS_MATPLOTLIB]


def test_compression(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    names = "--backend gloo,torch-unicoll-gloo --peer floor"
    command = f"all_reduce --compression int8 {names} --sizes 8,256K {QUICK} --json {out}"
    done = bench(command, UNICOLL_TRANSPORT="tcp")
    assert done.returncode == 0, done.stderr
    assert "torch-unicoll-gloo is not measured" in done.stderr
    unicoll, floor = ("0", "unicoll"), ("N/A", "floor")
    assert [(row[12], row[13]) for row in rows(done.stdout)] == [unicoll, floor] * 2
    data = json.loads(out.read_text())
    assert data["config"]["compression"] == "int8"
    assert "compression int8" in data["contenders"]["gloo"]["transport"]


@pytest.mark.every(n=0)
@pytest.mark.parametrize("name", ["sendrecv", "latency"])
def test_point_to_point_under_our_launcher(name: str) -> None:
    command = f"-m unicoll.run -n 3 --no-prefix -m unicoll.bench {name} --sizes 64 {QUICK} --osu-full"
    done = python(*command.split())
    assert done.returncode == 0, done.stderr
    (line,) = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    least, mean, most = float(line[2]), float(line[1]), float(line[3])
    assert line[0] == "64"
    assert 0 < least <= mean <= most


@pytest.mark.every(n=0)
@pytest.mark.parametrize(
    ("peer", "version"), [pytest.param("torch-gloo", "torch", marks=pytest.mark.torch), ("mpi4py", "mpi")]
)
def test_comparison(peer: str, version: str, tmp_path: Path) -> None:
    pytest.importorskip("torch" if version == "torch" else "mpi4py")
    if version == "mpi" and mpirun() is None:
        pytest.skip("there is no mpirun")
    out = tmp_path / "out.json"
    done = bench(f"all_reduce --backend gloo --peer {peer} --sizes 8,4K {QUICK} --json {out}")
    assert done.returncode == 0, done.stderr
    assert [(r[12], r[13]) for r in rows(done.stdout)] == [("0", "unicoll"), ("0", peer)] * 2
    assert check_json(out, ["gloo", peer], [8, 4096])["machine"][version]


def test_the_exit_status_is_that_of_the_ranks() -> None:
    done = bench(f"broadcast -n 2 --sizes 64 {QUICK} -r 5")
    assert done.returncode == 2
    assert "-r 5: the job has 2 ranks" in done.stderr


# --- parts ----------------------------------------------------------------------------------------------------------


def test_the_variables_for_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    variables = mpirun_variables(2)
    assert not any("ROOT" in name or "oversubscribe" in value for name, value in variables.items())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    variables = mpirun_variables(3)
    assert variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert variables["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"


def test_json_is_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write({"a": 1}, str(path))
    with pytest.raises(ValueError, match="nan"):
        write({"a": math.nan}, str(path))
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def drawable() -> dict[str, Any]:
    results = [entry(n, "gloo", 1.0, None, result(5 + n / 1e4, n, n, 0)) for n in DEFAULT_SIZES]
    results += [
        entry(n, "mpi4py", (1 + n / 5e3) / (5 + n / 1e4), None, result(1 + n / 5e3, n, n, 0))
        for n in DEFAULT_SIZES[:-1]
    ]
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
    assert list(found) == ["unicoll", "mpi4py"]
    assert [e["size"] for e in found["unicoll"]] == list(DEFAULT_SIZES)
    assert len(found["mpi4py"]) == len(DEFAULT_SIZES) - 1


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_the_plot(tmp_path: Path) -> None:
    program = (
        "import json, sys; from unicoll.bench.plot import draw; data = json.load(sys.stdin);"
        " [draw(data, path) for path in sys.argv[1:]]"
    )
    paths = [tmp_path / name for name in ("x.svg", "x.png")]
    done = python("-W", "error", "-c", program, *paths, input=json.dumps(drawable()))
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "x.svg").read_text()
    assert text.startswith("<?xml")
    assert text.count("<!-- size, bytes -->") == 2
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.png", "x.svg"]


def test_plot_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert "pip install matplotlib" in (plot.plot_problem("x.png") or "")
    monkeypatch.setattr(plot, "find_spec", lambda name: object())
    assert "must end in .png" in (plot.plot_problem("x") or "")
    assert plot.plot_problem("x.svg") is None


# --- on a device ----------------------------------------------------------------------------------------------------


def on_device(command: str) -> str:
    """The benchmark on two simulated devices: what rank 0 prints."""
    with SimulatedJob(2, join="env") as job:
        flags = f"{command} --backend nccl --peer bare-nccl {QUICK} --sizes 8,4K"
        job.call(bench_jobs.bench, tuple(flags.split()))
        outcomes = job.results(120.0)
    printed: str = outcomes[0][1]
    assert [status for status, _ in outcomes] == [0, 0], printed
    return printed


@pytest.mark.every(n=0)
@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "sendrecv", "latency"]
)
def test_nccl_and_bare_nccl(op: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    printed = on_device(f"{op} --json {path}")
    assert json.loads(path.read_text())["results"]
    assert "called directly" in printed
    assert {line[-2] for line in rows(printed)} == {"(nccl)", "bare-nccl"}, printed


@pytest.mark.every(n=0)
@pytest.mark.parametrize("how", ["-C 1", "--events"])
def test_timing_on_a_device(how: str) -> None:
    printed = on_device(f"all_reduce {how}")
    assert len(rows(printed)) == 4, printed


@pytest.mark.every(n=0)
def test_operations_missing_in_bare_nccl_are_reported() -> None:
    printed = on_device("all_to_all")
    assert "all_to_all is not measured with bare NCCL" in printed
    assert len(rows(printed)) == 2, printed


# --- committed results -----------------------------------------------------------------------------------------------

OF_THE_NAME = {
    "shm": {"gloo": "over shared memory"},
    "symmetric": {"gloo-symmetric": "arrays in symmetric memory"},
    "tcp": {"gloo": "over sockets"},
    "torch": {"torch-unicoll-gloo": "unicoll-gloo: "},
    "one_host": {"gloo": "over shared memory"},
    "mpich": {"mpi4py": "MPICH"},
    "openmpi": {"mpi4py": "Open MPI"},
    "intelmpi": {"mpi4py": r"Intel\(R\) MPI"},
}
"""By a word of a file's name: contenders that must have run, and part of what they say that they ran over."""
RESULTS = [path for path in sorted((ROOT / "benchmarks").glob("*.json")) if "_perf" in path.read_text()]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_are_of_what_their_names_say(path: Path) -> None:
    found = json.loads(path.read_text())
    ran_over = {name: each["transport"] for name, each in found["contenders"].items()}
    words = [word for word in OF_THE_NAME if f"_{word}_" in f"_{path.stem}_"]
    for word in words:
        for name, text in OF_THE_NAME[word].items():
            assert re.search(text, ran_over[name]), (word, ran_over)
    if "tcp" not in words:
        assert not any("over sockets" in text for text in ran_over.values())
    (ranks,) = re.findall(r"_(\d)ranks", path.stem)
    assert found["ranks"] == int(ranks)
    types = {"bfloat16"} if "bfloat16" in path.stem else {"float"}
    assert {result["type"] for result in found["results"]} == types
