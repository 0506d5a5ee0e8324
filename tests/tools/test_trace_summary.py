"""unicoll.trace.summary: sums, dumps, and the dry run of a program."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.support.programs import python
from unicoll.arrays.types import BY_NAME, COMPRESSIONS
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


def _recorded(op: str, inputs: Any, outputs: Any, n: int = 4, group: str = "world") -> RecordedCall:
    arrays = [tuple((BY_NAME["float32"], shape) for shape in shapes) for shapes in (inputs, outputs)]
    nbytes = sum(4 * int(np.prod(shape)) for shape in inputs or outputs)
    where = (group, tuple(range(n)), 1, op, *arrays, nbytes)
    return RecordedCall(*where, "", -1, -1, 0, "gloo", "x.py:1", "completed", 1.0, 1.0, 2.0, True)


def test_sums_by_operation_and_group() -> None:
    exact = _recorded("all_reduce", [(9,)], [(9,)])
    calls: list[Any] = [
        (_recorded("all_reduce", [(5,)], [(5,)]), 3),
        _recorded("all_reduce", [(7,)], [(7,)]),
        _recorded("all_reduce", [(7,)], [(7,)], n=2, group="pair"),
        _recorded("recv", [], [(500,)]),
        _recorded("barrier", [], [], n=1, group="alone"),
        *[replace(exact, compression=name) for name in COMPRESSIONS],
    ]
    table = summary.add_up(calls)
    assert {
        (line.op, line.compression, line.group, line.ranks, line.calls, line.nbytes) for line in table.lines
    } == {
        ("all_reduce", "", "world", 4, 4, 4 * (3 * 5 + 7)),
        ("all_reduce", "", "pair", 2, 1, 4 * 7),
        ("recv", "", "world", 4, 1, 4 * 500),
        ("barrier", "", "alone", 1, 1, 0),
        *[("all_reduce", name, "world", 4, 1, 4 * 9) for name in COMPRESSIONS],
    }
    sizes = [line.nbytes for line in table.lines]
    assert sizes == sorted(sizes, reverse=True)
    assert (table.total.calls, table.total.nbytes) == (7 + len(COMPRESSIONS), sum(sizes))
    lines = str(table).splitlines()
    assert lines[1].split() == ["recv", "world", "4", "1", "2", "KB"]
    assert {line.split("  ")[0] for line in lines} > {"all_reduce", "all_reduce, int8", "total"}


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
    assert found["all_reduce"].nbytes == 2500 * 80
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
        assert {line.compression: line.calls for line in table.lines} == {"int8": 2, "": 2}


def test_a_program_is_run_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    options = ["--dry-run", "--world-size", "256", "--rank", "130", "--nproc-per-node", "8"]
    done = python("-W", "error", "-m", "unicoll.trace.summary", *options, path, "7")
    assert done.stderr == ""
    assert done.returncode == 3
    printed, _, *lines = done.stdout.splitlines()
    assert printed == "130 256 128 256.0 2"
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
    assert capsys.readouterr().out.splitlines()[1].split()[:6] == [
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
        ([str(tmp_path / "empty")], "no dump of a flight recorder"),
        (["--dry-run", str(tmp_path / "none.py")], "none.py: no such file"),
        (["--dry-run", "--nproc-per-node", "0", str(dump)], "--nproc-per-node 0 is not positive"),
    ]:
        with pytest.raises(SystemExit) as end:
            summary.main(args)
        assert end.value.code == 2
        assert message in capsys.readouterr().err
