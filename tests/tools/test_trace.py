"""``unicoll trace``: what it says about dumps of all kinds, and what it writes."""

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
from unicoll.trace import main, perfetto
from unicoll.trace.dumps import read
from unicoll.trace.findings import diagnose

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


GOOD = [call(seq) for seq in range(1, 17)]
WAITS = call(17, ago=12.3, state="started")
STUCK = [*GOOD, WAITS]
IN_PAIR = call(3, "broadcast", group=("pair", [2, 3]), ago=5.0, state="started", site="/x/pair.py:7")
REFUSED = call(17, ago=3.0, state="failed", shape=[5], error="CollectiveMismatchError: no")
FAST = [call(seq, took=0.9) for seq in range(1, 17)]
SLOW = [call(seq, ago=99.2 - seq, took=0.1) for seq in range(1, 17)]
DIED = "rank 2 (host node1, pid 102) died: its process ended"


def from_lines(first: list[int], others: list[int]) -> list[list[Call]]:
    """Three ranks that call from these lines, of which rank 0 waits in one more call."""
    waits = call(len(first) + 1, site="/home/user/train.py:14", state="started")
    lines = [first, others, others]
    made = [[call(s, site=f"/home/user/train.py:{n}") for s, n in enumerate(each, 1)] for each in lines]
    return [[*made[0], waits], *made[1:]]


WAIT = "ranks 0, 1 and 3 have waited for 12.3 s"
REDUCE = "all_reduce #17 of group 'world' (float32[4], SUM)"
NOT_CALLED = f"missing_call [2]: rank 2 has not called {REDUCE}"
DIFFERENT = (
    "mismatch [1]: the ranks called different operations as #17 of group 'world': ranks 0, 2 and 3"
    " all_reduce(float32[4], SUM) at train.py:38; rank 1 {} at train.py:38"
)
LINES = (
    "missing_call [1, 2]: ranks 1 and 2 have not called all_reduce #5 of group 'world' (float32[4], SUM);"
    " rank 0 has waited for 95 s in it; rank 1 is at train.py:40 in step; rank 2 is at train.py:40 in step"
)
SINCE = "since all_reduce #2 the ranks call from different lines: rank 0 at train.py:11; ranks 1 and 2 at train.py:12"
SAYS: dict[str, tuple[list[Any], list[str]]] = {
    "a rank has not called": (
        [STUCK, STUCK, GOOD, STUCK],
        [f"{NOT_CALLED}; {WAIT} in it; rank 2 is at train.py:40 in step"],
    ),
    "it is in a call of another group": (
        [STUCK, STUCK, [*GOOD, IN_PAIR], STUCK],
        [
            f"{NOT_CALLED}; {WAIT} in it; rank 2 is in broadcast(float32[4], root=0) #3 of group 'pair' at pair.py:7",
            "missing_call [3]: rank 3 has not called broadcast #3 of group 'pair' (float32[4], root=0); rank 2 has"
            " waited for 5 s in it; rank 3 is in all_reduce(float32[4], SUM) #17 of group 'world' at train.py:38",
        ],
    ),
    "and another one has left no dump": (
        [STUCK, STUCK, GOOD, None],
        [
            f"{NOT_CALLED}; ranks 0 and 1 have waited for 12.3 s in it; rank 2 is at train.py:40 in step",
            "missing_dump [3]: rank 3 left no dump: it died or was not reached",
        ],
    ),
    "ranks have skipped the second of five calls": (
        from_lines([10, 11, 12, 13], [10, 12, 13, 14]),
        [f"{LINES}; {SINCE}"],
    ),
    "branches of a condition at the end": (from_lines([10, 11, 12, 13], [10, 11, 12, 23]), [LINES]),
    "branches of a condition in a loop": (from_lines([10, 11, 11, 11], [10, 21, 21, 21]), [LINES]),
    "another operation": (
        [STUCK, [*GOOD, call(17, "broadcast", ago=3.0, state="started")], STUCK, STUCK],
        [DIFFERENT.format("broadcast(float32[4], root=0)")],
    ),
    "another shape": (
        [STUCK, [*GOOD, call(17, ago=3.0, state="started", shape=[5])], STUCK, STUCK],
        [DIFFERENT.format("all_reduce(float32[5], SUM)")],
    ),
    "another shape, which was refused": (
        [STUCK, [*GOOD, REFUSED], STUCK, STUCK],
        [DIFFERENT.format("all_reduce(float32[5], SUM)")],
    ),
    "sizes that may differ": (
        [[call(1, "all_gather", ago=9.0 - rank, state="started", shape=[rank])] for rank in range(4)],
        [
            "in_progress [3]: all ranks have called all_gather #1 of group 'world' (float32[0]); rank 3 was the last,"
            " 3 s after the first; ranks 0-3 have waited for 9 s in it"
        ],
    ),
    "a rank without a dump": (
        [STUCK, STUCK, None, STUCK],
        [f"missing_dump [2]: rank 2 left no dump: it died or was not reached; {WAIT} in {REDUCE}"],
    ),
    "a dead rank": ([STUCK, STUCK, DIED, STUCK], [f"missing_dump [2]: {DIED}; {WAIT} in {REDUCE}"]),
    "ranks without dumps of completed calls": (
        [GOOD, None, None, GOOD],
        [
            "missing_dump [1, 2]: ranks 1 and 2 left no dump: they died or were not reached;"
            " all calls of the other ranks have completed"
        ],
    ),
    "a message that waits": (
        [[*GOOD, call(0, "recv", peer=1, ago=4.0, state="started", inputs=[])], GOOD, GOOD, GOOD],
        [
            "message [1]: rank 0 has waited for 4 s in recv(float32[4], peer=1, tag=0) of group 'world'"
            " at train.py:38; rank 1 is at train.py:40 in step"
        ],
    ),
    "a slow rank": (
        [SLOW if rank == 2 else FAST for rank in range(4)],
        [
            "slow [2]: all calls have completed: 64 of ranks 0-3; rank 2 is slow: the other ranks have waited for it"
            " alone for 12.8 s of 15.9 s"
        ],
    ),
    "calls that have completed or were refused": (
        [[*GOOD, call(17)], [*GOOD[1:], call(17, state="failed", error="DistTypeError: no"), call(17)]],
        ["completed []: all calls have completed: 34 of ranks 0 and 1"],
    ),
}


@pytest.mark.parametrize(("ranks", "said"), SAYS.values(), ids=SAYS.keys())
def test_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: list[Any], said: list[str]
) -> None:
    """``ranks`` has the calls of each rank; None if it has left no dump, or how it has died."""
    departed = {str(rank): how for rank, how in enumerate(ranks) if isinstance(how, str)}
    for rank, calls in enumerate(ranks):
        if isinstance(calls, list):
            dump(tmp_path, rank, calls, len(ranks), departed=departed)
    found = diagnose(read(str(tmp_path)))
    assert [f"{each.kind} {list(each.ranks)}: {each.sentence}" for each in found] == said
    assert main([str(tmp_path)]) == (0 if found[0].kind in ("slow", "completed") else 1)
    out = capsys.readouterr().out
    assert out.startswith("\nalso: ".join(each.sentence for each in found))


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


def test_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        dump(tmp_path, rank, GOOD if rank == 2 else STUCK)
    main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "group 'world' (ranks 0-3; cpu:gloo)"
    rows = [line.split() for line in lines[3:] if line.startswith("  ")]
    assert rows[0] == ["#", "ranks", "call", "state", "begun", "took", "at"]
    assert [row[0] for row in rows[1:]] == ["12", "13", "14", "15", "16", "17", "17"]
    assert " ".join(rows[-2]) == "17 0, 1, 3 all_reduce(float32[4], SUM) started -12.3000 12.3000 train.py:38"
    assert " ".join(rows[-1]) == "17 2 not called train.py:40 in step"
    main([str(tmp_path), "--all"])
    assert len(capsys.readouterr().out.splitlines()) == len(lines) + 11
    main([str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    (diagnosis,) = found["diagnoses"]
    assert (diagnosis["kind"], diagnosis["group"], diagnosis["seq"]) == ("missing_call", "world", 17)
    assert diagnosis["since"] == END - 12.3
    assert [len(found["ranks"][str(rank)]["calls"]) for rank in range(4)] == [17, 17, 16, 17]
    assert found["clock_error"] == pytest.approx(0.002)
    assert found["ranks"]["0"].keys() == {"path", "host", "pid", "reason", "written", "at", "calls"}
    assert found["ranks"]["0"]["calls"][-1] == {
        **{name: WAITS[name] for name in ("seq", "state", "created", "started", "site", "error")},
        "group": "world",
        "call": WAITS["text"],
        "ended": None,
    }


def test_damaged_files_and_other_jobs_are_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = {1: "damaged", 3: "version is 2", 4: "no dump", 6: "nested", 7: "Infinity", 8: "field"}
    reasons |= {5: "field", 2: "another job"}  # in the order of the lines
    for rank in (0, 1, 8):
        dump(tmp_path, rank, GOOD, job=[] if rank == 8 else "0a")
    dump(tmp_path, 2, GOOD, job="0b", written={"wall": 1e9, "monotonic": END})
    dump(tmp_path, 3, GOOD, version=2)
    dump(tmp_path, 5, [{**GOOD[0], "created": None}])
    dump(tmp_path, 7, [{**GOOD[0], "seq": float("inf")}])
    for rank, change in (
        (1, lambda text: text[:200]),
        (4, lambda text: "[1]"),
        (6, lambda text: "[" * 100_000),
        (8, lambda text: text.replace('"rank": 8', '"rank": 0')),
    ):
        file = tmp_path / f"rank_{rank}.json"
        file.write_text(change(file.read_text() if file.exists() else ""))
    assert main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    prefix = f"python -m unicoll.trace: {tmp_path}/"
    for line, (rank, reason) in zip(err.splitlines(), reasons.items(), strict=True):
        assert line.startswith(f"{prefix}rank_{rank}.json is skipped: ")
        assert reason in line
    assert out.startswith("ranks 1-3 left no dump")


def test_the_command_and_its_output(tmp_path: Path) -> None:
    """Neither a text that the encoding does not take nor a reader that has ended is an error."""
    dump(tmp_path, 0, [call(1, site="/home/\udce9.py:3")], size=1)  # a file name that is not UTF-8
    command = [sys.executable, "-m", "unicoll.trace", str(tmp_path)]
    variables = environment({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\udce9.py:3" in done.stdout
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
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


def test_no_dump_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("other.json", "rank_0.json"):
        (tmp_path / name).write_text("")
        assert main([str(tmp_path)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "no dump of a flight recorder" in err
    assert main([str(tmp_path / "absent")]) == 2
    for arguments, status in (([], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == status


def test_clocks_that_were_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then the wall clocks are compared: rank 1's monotonic clock is 50 s ahead."""
    dump(tmp_path, 0, [call(1)], size=2)
    dump(tmp_path, 1, [call(1, ago=49.0)], 2, clock=None, written={"wall": 2e9, "monotonic": END + 50})
    trace = read(str(tmp_path))
    assert [dump.calls[0].created for dump in trace.dumps.values()] == [END - 99, END - 99]
    assert trace.clock_error is None
    assert main([str(tmp_path)]) == 0
    assert "clocks were not compared" in capsys.readouterr().out


def test_the_table_is_not_wider_than_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(0, 300, 2):
        long = call(1, shape=[7] * 40, site=f"/x/{'long' * 20}.py:{rank % 3}", state="started")
        dump(tmp_path, rank, [long], 300)
    main([str(tmp_path)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(rows) == 4
    assert max(map(len, rows)) <= 120
    begun = [row.split()[-3] for row in rows[1:]]
    assert begun == ["-99.0000"] * 3


def test_the_trace_for_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process per rank, tracks per group and for messages; calls of one track do not overlap."""
    overlapping = call(18, ago=12.0, state="started")
    message = call(0, "send", peer=1, ago=50.0)
    for rank in range(4):
        dump(tmp_path, rank, [*GOOD, message, WAITS, overlapping])
    file = tmp_path / "other.json"
    main([str(tmp_path), "--perfetto", str(file)])
    assert f"https://ui.perfetto.dev: {file}" in capsys.readouterr().out
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
