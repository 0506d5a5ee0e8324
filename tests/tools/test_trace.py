"""``python -m unicoll.trace``: what it says about dumps of all kinds, and what it writes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import ROOT, environment, joined
from tests.support.worker import leave
from tests.tools import dump_jobs
from unicoll.trace import perfetto
from unicoll.trace.diagnosis import diagnose
from unicoll.trace.dumps import name_ranks, read

END = 1000.0
"""When the dumps of these tests are written, on each rank's clock."""

Call = dict[str, Any]


def call(seq: int, op: str = "all_reduce", **changed: Any) -> Call:
    """A completed call that began ``ago`` seconds before the dump and took ``took``."""
    ago, took = changed.pop("ago", 100.0 - seq), changed.pop("took", 0.5)
    shape, group = changed.pop("shape", [4]), changed.pop("group", ("world", None))
    state = changed.get("state", "completed")
    base: Call = {
        "group": group[0],
        "ranks": group[1],
        "seq": seq,
        "op": op,
        "inputs": [["float32", shape]],
        "outputs": [["float32", shape]],
        "bytes": 16,
        "reduce": "SUM" if op == "all_reduce" else "",
        "compression": "",
        "root": 0 if op == "broadcast" else -1,
        "peer": -1,
        "tag": 0,
        "backend": "gloo",
        "site": "/home/user/train.py:38",
        "state": "completed",
        "created": END - ago,
        "started": END - ago,
        "ended": END - ago + took if state in ("completed", "failed") else 0,
        "blocking": True,
        "error": "",
    }
    details = [f"float32{shape}", *filter(None, [base["reduce"]])] + (["root=0"] if op == "broadcast" else [])
    if op in ("send", "recv"):
        details.append(f"peer={changed['peer']}, tag=0")
    return base | {"text": f"{op}({', '.join(details)})"} | changed


def dump(directory: Path, rank: int, calls: list[Call], size: int = 4, **changed: Any) -> None:
    """Write a dump."""
    place = {"file": "/home/user/train.py", "line": 40, "function": "step"}
    content: dict[str, Any] = {
        "format": "unicoll flight recorder",
        "version": 1,
        "reason": "group 'world' failed: OperationTimeoutError: late",
        "failure": True,
        "rank": rank,
        "world_size": size,
        "host": "node1",
        "pid": 100 + rank,
        "job": "0a",
        "written": {"wall": 2e9, "monotonic": END},
        "clock": {"offset": 0.0, "error": 0.001},
        "departed": {},
        "groups": [{"name": "world", "description": "", "ranks": list(range(size)), "backends": "cpu:gloo"}],
        "threads": [{"name": "MainThread", "main": True, "at": place, "stack": [place]}],
        "calls": [each | {"ranks": each["ranks"] or list(range(size))} for each in calls],
        "failures": [],
    }
    (directory / f"rank_{rank}.json").write_text(json.dumps(content | changed))


def sentence(directory: Path) -> str:
    return diagnose(read(str(directory)))[0].sentence


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unicoll.trace", *arguments]
    variables = environment({"PYTHONPATH": str(ROOT)})
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)


GOOD = [call(seq) for seq in range(1, 17)]
WAITS = call(17, ago=12.3, state="started")


def test_the_dumps_of_these_tests_have_the_fields_of_real_ones(tmp_path: Path) -> None:
    dump(tmp_path, 0, GOOD)
    made = json.loads((tmp_path / "rank_0.json").read_text())
    with joined(2) as job:
        job.call(dump_jobs.some_calls, str(tmp_path / "real"))
        job.results()
        job.call(leave)
        job.results()
    real = json.loads((tmp_path / "real" / "rank_0.json").read_text())
    assert real.keys() == made.keys()
    for name in ("written", "clock"):
        assert real[name].keys() == made[name].keys()
    for name in ("groups", "threads", "calls"):
        assert real[name][0].keys() == made[name][0].keys()
    assert diagnose(read(str(tmp_path / "real")))[0].kind == "completed"


def test_a_rank_that_has_not_called(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        dump(tmp_path, rank, [*GOOD, WAITS])
    dump(tmp_path, 2, GOOD)
    assert sentence(tmp_path) == (
        "rank 2 has not called all_reduce #17 of group 'world' (float32[4], SUM);"
        " ranks 0, 1 and 3 have waited for 12.3 s in it; rank 2 is at train.py:40 in step"
    )
    done = tool(str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0] == sentence(tmp_path)
    assert lines[2] == "group 'world' (ranks 0-3; cpu:gloo)"
    rows = [line.split() for line in lines[3:] if line.startswith("  ")]
    assert rows[0] == ["#", "ranks", "call", "state", "begun", "took", "at"]
    assert [row[0] for row in rows[1:]] == ["12", "13", "14", "15", "16", "17", "17"]
    assert " ".join(rows[-2]) == "17 0, 1, 3 all_reduce(float32[4], SUM) started -12.3000 12.3000 train.py:38"
    assert " ".join(rows[-1]) == "17 2 not called train.py:40 in step"
    assert len(tool(str(tmp_path), "--all").stdout.splitlines()) == len(lines) + 11
    found = json.loads(tool(str(tmp_path), "--json").stdout)
    diagnosis = found["diagnoses"][0]
    assert (diagnosis["kind"], diagnosis["group"], diagnosis["seq"], diagnosis["ranks"]) == (
        "missing_call",
        "world",
        17,
        [2],
    )
    assert diagnosis["since"] == END - 12.3
    assert [len(found["ranks"][str(rank)]["calls"]) for rank in range(4)] == [17, 17, 16, 17]
    assert found["clock_error"] == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("first", "others", "skips"),
    [
        ([10, 11, 12, 13], [10, 12, 13, 14], True),  # the second of five calls
        ([10, 11, 12, 13], [10, 11, 12, 23], False),  # two branches of a condition at the end
        ([10, 11, 11, 11], [10, 21, 21, 21], False),  # and in a loop
    ],
)
def test_ranks_that_call_from_different_lines(
    tmp_path: Path, first: list[int], others: list[int], skips: bool
) -> None:
    for rank in range(3):
        lines = enumerate(others if rank else first, 1)
        calls = [call(seq, site=f"/home/user/train.py:{line}") for seq, line in lines]
        waiting = [] if rank else [call(5, site="/home/user/train.py:14", state="started")]
        dump(tmp_path, rank, calls + waiting, size=3)
    (found,) = diagnose(read(str(tmp_path)))
    assert found.kind == "missing_call"
    since = "; since all_reduce #2 the ranks call from different lines: "
    assert found.sentence.endswith(f"{since}rank 0 at train.py:11; ranks 1 and 2 at train.py:12") == skips
    assert ("different lines" in found.sentence) == skips


def test_a_rank_in_a_call_of_another_group(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        dump(tmp_path, rank, [*GOOD, WAITS])
    inside = call(3, "broadcast", group=("pair", [2, 3]), ago=5.0, state="started", site="/x/pair.py:7")
    dump(tmp_path, 2, [*GOOD, inside])
    first, second = diagnose(read(str(tmp_path)))
    assert "rank 2 is in broadcast(float32[4], root=0) #3 of group 'pair' at pair.py:7" in first.sentence
    assert second.sentence == (
        "rank 3 has not called broadcast #3 of group 'pair' (float32[4], root=0); rank 2 has waited for 5 s"
        " in it; rank 3 is in all_reduce(float32[4], SUM) #17 of group 'world' at train.py:38"
    )


def test_a_rank_without_a_dump_besides(tmp_path: Path) -> None:
    for rank in (0, 1):
        dump(tmp_path, rank, [*GOOD, WAITS])
    dump(tmp_path, 2, GOOD)
    first, second = diagnose(read(str(tmp_path)))
    assert (first.kind, first.ranks) == ("missing_call", (2,))
    assert second.sentence == "rank 3 left no dump: it died or was not reached"
    assert f"\nalso: {second.sentence}\n" in tool(str(tmp_path)).stdout


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (call(17, "broadcast", ago=3.0, state="started"), "broadcast(float32[4], root=0)"),
        (call(17, ago=3.0, state="started", shape=[5]), "all_reduce(float32[5], SUM)"),
        (
            call(17, ago=3.0, state="failed", shape=[5], error="CollectiveMismatchError: no"),
            "all_reduce(float32[5], SUM)",
        ),
    ],
)
def test_ranks_that_called_different_operations(tmp_path: Path, other: Call, text: str) -> None:
    for rank in (0, 2, 3):
        dump(tmp_path, rank, [*GOOD, WAITS])
    dump(tmp_path, 1, [*GOOD, other])
    assert sentence(tmp_path) == (
        "the ranks called different operations as #17 of group 'world': ranks 0, 2 and 3"
        f" all_reduce(float32[4], SUM) at train.py:38; rank 1 {text} at train.py:38"
    )


def test_sizes_may_differ_in_operations_that_allow_it(tmp_path: Path) -> None:
    for rank in range(4):
        dump(tmp_path, rank, [call(1, "all_gather", ago=9.0 - rank, state="started", shape=[rank])])
    (diagnosis,) = diagnose(read(str(tmp_path)))
    assert (diagnosis.kind, diagnosis.ranks) == ("in_progress", (3,))
    assert (
        "rank 3 was the last, 3 s after the first; ranks 0-3 have waited for 9 s in it" in diagnosis.sentence
    )


@pytest.mark.parametrize("how", ["", "rank 2 (host node1, pid 102) died: its process ended"])
def test_a_rank_without_a_dump(tmp_path: Path, how: str) -> None:
    for rank in (0, 1, 3):
        dump(tmp_path, rank, [*GOOD, WAITS], departed={"2": how} if how else {})
    waits = "ranks 0, 1 and 3 have waited for 12.3 s in all_reduce #17 of group 'world' (float32[4], SUM)"
    reason = how or "rank 2 left no dump: it died or was not reached"
    assert sentence(tmp_path) == f"{reason}; {waits}"
    assert tool(str(tmp_path)).returncode == 1


def test_a_rank_without_a_dump_of_calls_that_have_completed(tmp_path: Path) -> None:
    for rank in (0, 3):
        dump(tmp_path, rank, GOOD)
    assert sentence(tmp_path) == (
        "ranks 1 and 2 left no dump: they died or were not reached; all calls of the other ranks have completed"
    )


def test_messages_that_wait(tmp_path: Path) -> None:
    receive = call(0, "recv", peer=1, ago=4.0, state="started", inputs=[])
    dump(tmp_path, 0, [*GOOD, receive])
    for rank in (1, 2, 3):
        dump(tmp_path, rank, GOOD)
    assert sentence(tmp_path) == (
        "rank 0 has waited for 4 s in recv(float32[4], peer=1, tag=0) of group 'world' at train.py:38;"
        " rank 1 is at train.py:40 in step"
    )
    assert tool(str(tmp_path)).returncode == 1


def test_a_slow_rank(tmp_path: Path) -> None:
    for rank in range(4):
        late = 0.8 if rank == 2 else 0.0
        dump(tmp_path, rank, [call(s, ago=100.0 - s - late, took=0.9 - late) for s in range(1, 17)])
    (diagnosis,) = diagnose(read(str(tmp_path)))
    assert (diagnosis.kind, diagnosis.ranks) == ("slow", (2,))
    assert (
        "rank 2 is slow: the other ranks have waited for it alone for 12.8 s of 15.9 s" in diagnosis.sentence
    )
    assert tool(str(tmp_path)).returncode == 0


def test_calls_that_have_completed(tmp_path: Path) -> None:
    refused = call(17, state="failed", error="DistTypeError: no")
    for rank in range(4):
        dump(tmp_path, rank, [*GOOD[rank:], *([refused] if rank == 1 else []), call(17)])
    assert sentence(tmp_path) == "all calls have completed: 63 of ranks 0-3"
    done = tool(str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_damaged_files_and_other_jobs_are_named_and_skipped(tmp_path: Path) -> None:
    for rank in range(4):
        dump(tmp_path, rank, GOOD)
    cut = tmp_path / "rank_1.json"
    cut.write_text(cut.read_text()[:200])
    dump(tmp_path, 2, GOOD, job="0b", written={"wall": 1e9, "monotonic": END})
    dump(tmp_path, 3, GOOD, version=2)
    (tmp_path / "rank_4.json").write_text("[1]")
    (tmp_path / "rank_6.json").write_text("[" * 100_000)
    dump(tmp_path, 5, [{**GOOD[0], "created": None}])
    dump(tmp_path, 7, [{**GOOD[0], "seq": float("inf")}])
    dump(tmp_path, 8, GOOD, job=[])
    other = tmp_path / "rank_8.json"
    other.write_text(other.read_text().replace('"rank": 8', '"rank": 0'))
    done = tool(str(tmp_path))
    assert done.returncode == 1
    texts = [line.removeprefix(f"python -m unicoll.trace: {tmp_path}/") for line in done.stderr.splitlines()]
    assert [text.partition(":")[0] for text in texts] == [
        "rank_1.json is skipped",
        "rank_3.json is skipped",
        "rank_4.json is skipped",
        "rank_6.json is skipped",
        "rank_8.json is skipped",
        "rank_5.json is skipped",
        "rank_7.json is skipped",
        "rank_2.json is skipped",
    ]
    for text, reason in zip(
        texts,
        ("damaged", "version is 2", "no dump", "nested", "field", "field", "field", "another job"),
        strict=True,
    ):
        assert reason in text
    assert done.stdout.startswith("ranks 1-3 left no dump")


def test_output_that_the_reader_or_the_encoding_does_not_take(tmp_path: Path) -> None:
    dump(tmp_path, 0, [call(1, site="/home/\udce9.py:3")], size=1)  # a file name that is not UTF-8
    done = tool(str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\udce9.py:3" in done.stdout
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        command = [sys.executable, "-m", "unicoll.trace", str(tmp_path)]
        variables = environment({"PYTHONPATH": str(ROOT)})
        ended = subprocess.run(
            command, env=variables, stdout=closed, stderr=subprocess.PIPE, timeout=300, check=False
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_trace_that_cannot_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump(tmp_path, 0, GOOD, size=1)
    file = tmp_path / "trace.json"
    file.write_text("earlier")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        perfetto.write(read(str(tmp_path)), str(file))
    assert file.read_text() == "earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0.json", "trace.json"]


@pytest.mark.every(2)
@pytest.mark.parametrize("files", [[], ["rank_0.json"]])
def test_no_dump_is_an_error(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_text("")
    done = tool(str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no dump of a flight recorder" in done.stderr
    assert tool(str(tmp_path / "absent")).returncode == 2
    assert tool().returncode == 2
    assert tool("--help").returncode == 0


def test_clocks_that_were_not_compared(tmp_path: Path) -> None:
    """Then the wall clocks are compared: rank 1's monotonic clock is 50 s ahead."""
    dump(tmp_path, 0, [call(1)], size=2)
    dump(tmp_path, 1, [call(1, ago=49.0)], 2, clock=None, written={"wall": 2e9, "monotonic": END + 50})
    trace = read(str(tmp_path))
    assert [dump.calls[0].created for dump in trace.dumps.values()] == [END - 99, END - 99]
    assert trace.clock_error is None
    assert "clocks were not compared" in tool(str(tmp_path)).stdout


def test_the_table_is_not_wider_than_a_page(tmp_path: Path) -> None:
    for rank in range(0, 300, 2):
        long = call(1, shape=[7] * 40, site=f"/x/{'long' * 20}.py:{rank % 3}", state="started")
        dump(tmp_path, rank, [long], 300)
    lines = tool(str(tmp_path)).stdout.splitlines()
    rows = [line for line in lines if line.startswith("  ")]
    assert len(rows) == 4
    assert max(map(len, rows)) <= 120
    begun = [row.split()[-3] for row in rows[1:]]
    assert begun == ["-99.0000"] * 3


def test_the_trace_for_perfetto(tmp_path: Path) -> None:
    """A process per rank, tracks per group and for messages; calls of one track do not overlap."""
    overlapping = call(18, ago=12.0, state="started")
    message = call(0, "send", peer=1, ago=50.0)
    for rank in range(4):
        dump(tmp_path, rank, [*GOOD, message, WAITS, overlapping])
    file = tmp_path / "other.json"
    assert f"https://ui.perfetto.dev: {file}" in tool(str(tmp_path), "--perfetto", str(file)).stdout
    assert not (tmp_path / "trace.json").exists()
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank} (node1, pid {100 + rank})" for rank in range(4)}
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    titles = {"group 'world'", "group 'world' (2)", "messages of group 'world'"}
    assert {title for (rank, _), title in tracks.items() if rank == 3} == titles
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert tracks[event["pid"], event["tid"]]
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, slices.values())) == 4 * 19
    for spans in slices.values():
        spans.sort()
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in pairwise(spans))
    (slice_,) = [e for e in events if e["ph"] == "X" and e["name"] == "all_reduce #17" and e["pid"] == 2]
    assert slice_["dur"] == pytest.approx(12.3e6)
    assert slice_["args"]["site"] == "/home/user/train.py:38"
    assert slice_["args"]["inputs"] == ["float32[4]"]
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert sorted(starts) == sorted(event["id"] for event in events if event["ph"] == "f")
    assert len(set(starts)) == len(starts) == 18 * 3


def test_names_of_ranks() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([1, 0]) == "ranks 0 and 1"
    assert name_ranks([5, 0, 1, 2, 7, 8]) == "ranks 0-2, 5, 7 and 8"
