"""unicoll.trace.summary: sums, dumps, and the dry run of a program (tests/scaling checks the formulas)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from gloo_fallback.transport.selection import OPERATIONS
from tests.support.programs import python
from unicoll.arrays.compression import BLOCK, codec_for
from unicoll.arrays.types import BY_NAME, COMPRESSIONS
from unicoll.calls.ops import OPS
from unicoll.diagnosis import dump_format
from unicoll.diagnosis.recorder_contents import RecordedCall, recorded_calls
from unicoll.errors import DistArgumentError
from unicoll.trace import summary

PROGRAM = """
import os, sys
import numpy as np
import unicoll as dist

dist.init_process_group("nccl")
half, _ = dist.new_subgroups(128, backend="gloo")
for step in range(int(sys.argv[1])):
    x = np.ones(1000, np.float32)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(np.empty(128), np.ones(1), group=half)
print(dist.get_rank(), dist.get_world_size(), half.ranks[0], x[0], os.environ["LOCAL_RANK"])
dist.destroy_process_group()
sys.exit(3)
"""


@pytest.mark.parametrize("op", OPERATIONS)
def test_an_operation_by_a_fallback_costs_as_much_as_one_with_the_same_sizes(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPS, "new", replace(OPS[op], name="new", code=100, fallback="new"))
    for n in (1, 2, 8, 64):
        for size in (8, 1 << 14, 1 << 20):
            assert summary.cost("new", n, size, 2) == summary.cost(op, n, size, 2), (n, size)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressed_parts_that_are_not_equal(compression: str) -> None:
    kind = BY_NAME["float32"]
    nbytes = codec_for(compression, kind.storage).nbytes
    size = 4 * (65 * BLOCK - 5)
    # of 65 blocks the ranks reduce 17, 16, 16, 16; in a group of 1000, one each as long as there are any
    assert summary.compressed_cost(4, size, compression, kind).sent == (
        2 * 32 + 3 * nbytes(16 * BLOCK) + 3 * nbytes(17 * BLOCK)
    )
    assert summary.compressed_cost(1000, size, compression, kind).sent == 10 * 32 + (64 + 999) * nbytes(BLOCK)


def _recorded(op: str, inputs: Any, outputs: Any, n: int = 4, group: str = "world") -> RecordedCall:
    arrays = [tuple((BY_NAME["float32"], shape) for shape in shapes) for shapes in (inputs, outputs)]
    nbytes = sum(4 * int(np.prod(shape)) for shape in inputs or outputs)
    where = (group, tuple(range(n)), 1, op, *arrays, nbytes)
    return RecordedCall(*where, "", -1, -1, 0, "gloo", "x.py:1", "completed", 1.0, 1.0, 2.0, True)


def test_sums_by_operation_and_group() -> None:
    network = summary.Network(latency=1e-3, bandwidth=1e6)
    calls: list[Any] = [
        (_recorded("all_reduce", [(5,)], [(5,)]), 3),
        _recorded("all_reduce", [(7,)], [(7,)]),
        _recorded("all_reduce", [(7,)], [(7,)], n=2, group="pair"),
        _recorded("send", [(250,)], []),
        _recorded("recv", [], [(500,)]),
        _recorded("scatter", [], [(2,)]),
        _recorded("all_to_all_single", [(8,)], [(8,)]),
        _recorded("barrier", [], [], n=1, group="alone"),
    ]
    table = summary.add_up(calls, network)
    found = {(line.op, line.group): line for line in table.lines}
    world = found["all_reduce", "world"]
    assert (world.ranks, world.calls, world.nbytes) == (4, 4, 88)
    assert world.sent == 4 * 64 + 3 * 88  # four exchanges of two headers, and of three contributions
    assert world.seconds == pytest.approx(4 * 2e-3 + world.sent / 1e6)
    assert found["all_reduce", "pair"].sent == 32 + 28
    assert (found["send", "world"].sent, found["recv", "world"].sent) == (1000, 0)
    assert found["send", "world"].seconds == pytest.approx(2e-3)
    assert found["recv", "world"].seconds == pytest.approx(3e-3)
    assert found["scatter", "world"].sent == 2 * (32 + 4 * 8)
    assert found["all_to_all_single", "world"].sent == 64 + 16 * 12 + 3 * 8
    assert (found["barrier", "alone"].sent, found["barrier", "alone"].seconds) == (0, 0)
    assert [line.seconds for line in table.lines] == sorted(
        (line.seconds for line in table.lines), reverse=True
    )
    assert table.total.calls == 10
    assert table.total.seconds == pytest.approx(sum(line.seconds for line in table.lines))
    assert str(table).splitlines()[0] == "latency 1 ms, bandwidth 1 MB/s"
    assert str(table).splitlines()[-1].split()[:3] == ["total", "4", "10"]


def test_a_compression_has_a_line_of_its_own() -> None:
    exact = _recorded("all_reduce", [(1 << 20,)], [(1 << 20,)], n=2)
    calls = [(exact, 2), *[replace(exact, compression=name) for name in COMPRESSIONS]]
    table = summary.add_up(calls)
    found = {line.compression: line for line in table.lines}
    assert {name: line.calls for name, line in found.items()} == {"": 2, "bfloat16": 1, "int8": 1}
    assert {line.nbytes // line.calls for line in table.lines} == {4 << 20}
    assert found["bfloat16"].sent == 32 + (2 << 20)
    assert found["int8"].sent == 32 + (260 << 12)
    assert found[""].sent == 2 * (32 + (4 << 20))
    assert found[""].seconds / 2 > found["bfloat16"].seconds > found["int8"].seconds
    assert {line.split("  ")[0] for line in str(table).splitlines()[2:]} == {
        "all_reduce",
        "all_reduce, bfloat16",
        "all_reduce, int8",
        "total",
    }


def test_the_summary_of_a_dry_run_has_every_call() -> None:
    dist.init_process_group("fake", rank=3, world_size=256)
    try:
        recorded_before = summary.add_up(recorded_calls())
        for _ in range(2500):
            dist.all_reduce(np.ones(10))
        dist.scatter(np.ones(1), None, src=0)
    finally:
        dist.destroy_process_group()
    found = {line.op: line for line in summary.dry_run_summary().lines}
    assert (found["all_reduce"].calls, found["all_reduce"].ranks) == (2500, 256)
    assert found["all_reduce"].sent == 2500 * (8 * 32 + 255 * 80)
    assert found["scatter"].calls == 1
    recorded = summary.add_up(recorded_calls())
    assert recorded.total.calls <= 2000 < summary.dry_run_summary().total.calls
    assert recorded.total.calls >= recorded_before.total.calls


def test_compressed_calls_of_a_dry_run() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, pg_options={"compression": "int8"})
    try:
        x = np.ones(1 << 20, np.float32)
        dist.all_reduce(x)
        work: Any = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.all_reduce(x, op="MAX")
        group: Any = dist.group.WORLD
        group.using(compression="none").all_reduce(x)
        calls = recorded_calls()[-4:]
    finally:
        dist.destroy_process_group()
    assert [call.describe() for call in calls] == [
        "all_reduce(float32[1048576], SUM, compression=int8)",
        "all_reduce(float32[1048576], SUM, compression=int8)",
        "all_reduce(float32[1048576], MAX)",
        "all_reduce(float32[1048576], SUM)",
    ]
    dumped = summary.from_dump({"calls": [dump_format._call(call) for call in calls]})
    for table in (summary.dry_run_summary(), summary.add_up(calls), summary.add_up(dumped)):
        found = {line.compression: (line.calls, line.sent) for line in table.lines}
        assert found == {"int8": (2, 2 * (32 + (260 << 12))), "": (2, 2 * (32 + (4 << 20)))}


def test_a_program_is_run_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    options = ["--dry-run", "--world-size", "256", "--rank", "130", "--nproc-per-node", "8"]
    options += ["--latency", "5us", "--bandwidth", "400Gbit/s", str(path), "7"]
    done = python("-W", "error", "-m", "unicoll.trace.summary", *options)
    assert done.stderr == ""
    assert done.returncode == 3
    printed, heading, _, *lines = done.stdout.splitlines()
    assert printed == "130 256 128 256.0 2"
    assert heading == "latency 5 us, bandwidth 50 GB/s"
    assert {tuple(line.split()[:4]) for line in lines} == {
        ("all_reduce", "world", "256", "7"),
        ("all_gather_into_tensor", "group-2", "128", "7"),
        ("total", "256", "14", "28.06"),
    }


def test_dumps_and_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "rank_0.json"
    call = dump_format._call(_recorded("all_reduce", [(4, 5)], [(4, 5)], n=2))
    del call["compression"]  # older dumps have none
    dump.write_text(json.dumps({"calls": [call] * 3 + [{**call, "state": "failed"}]}))
    assert summary.main([str(dump), str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:6] == [
        "all_reduce",
        "world",
        "2",
        "6",
        "480",
        "B",
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DistArgumentError, match="not a dump"):
        summary.from_dump({"calls": [{"group": "world"}]})
    for args, message in [
        ([], "give a program"),
        ([str(tmp_path / "none.json")], "No such file"),
        (["--dry-run", "--rank", "4", "--world-size", "4", "x.py"], "--rank 4 is not below"),
        (["--latency", "5", "x.json"], "not a time such as 20us"),
        (["--latency", "1.2.3us", "x.json"], "not a time such as 20us"),
        (["--bandwidth", "fast", "x.json"], "not a bandwidth such as"),
        ([str(tmp_path / "empty")], "no dump of a flight recorder"),
        (["--dry-run", str(tmp_path / "none.py")], "none.py: no such file"),
        (["--dry-run", "--nproc-per-node", "0", str(dump)], "--nproc-per-node 0 is not positive"),
    ]:
        with pytest.raises(SystemExit) as end:
            summary.main(args)
        assert end.value.code == 2
        assert message in capsys.readouterr().err
