"""unicoll.profile: the summary, the late rank and its line, the files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import unicoll as dist
from tests.conformance import profile_jobs as jobs
from tests.support.ranks import Pool

Pools = Callable[[int], Pool]

LATE_S = 2.0
"""More than other waits on a busy machine."""


def test_a_late_rank_is_named_with_its_line(pool: Pools, tmp_path: Path) -> None:
    found, *others = pool(3).run(jobs.late_rank, str(tmp_path / "made" / "here"), {0: LATE_S})
    lines = Path(jobs.__file__).read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if "# the late call" in line)
    place = f"profile_jobs.py:{number}"
    longest = [max(wait[3].values()) for wait in found["waits"]]
    assert longest == sorted(longest, reverse=True)
    late = [wait for wait in found["waits"] if wait[:3] == (0, "broadcast", place)]
    assert any(sorted(wait[3]) == [1, 2] and min(wait[3].values()) > LATE_S / 2 for wait in late)
    assert late[0][4] == "all_reduce"
    calls, nbytes, waiting, waited_for = found["totals"]["broadcast"]
    assert (calls, nbytes) == (30, 30 * 40)
    assert waiting > 0.01
    assert max(waited_for, key=waited_for.get) == 0
    assert found["totals"]["all_reduce"][:2] == (30, 30 * 8000)
    said = "for rank 0 in broadcast(float32[10], root=0)"
    assert said in found["text"]
    assert f"rank 0 called it at profile_jobs.py:{number}" in found["text"]
    assert [other["text"] for other in others] == ["", ""]
    names = {"rank_0.json", "rank_1.json", "rank_2.json", "summary.txt", "trace.json"}
    if importlib.util.find_spec("matplotlib") is not None:
        names.add("profile.svg")
    assert {path.name for path in (tmp_path / "made" / "here").iterdir()} == names
    assert (tmp_path / "made" / "here" / "summary.txt").read_text().strip() == found["text"]
    events = json.loads((tmp_path / "made" / "here" / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event.get("ph") == "X"]) >= 3 * 60


def test_another_late_rank(pool: Pools, tmp_path: Path) -> None:
    found = pool(3).run(jobs.late_rank, str(tmp_path), {2: LATE_S})[0]
    # in the broadcast, if its other ranks wait, else in the all_reduce after it; ranks may be late for other reasons
    late = [seconds for rank, op, _, seconds, _ in found["waits"] if rank == 2]
    assert any(set(seconds) == {0, 1} and min(seconds.values()) > LATE_S / 4 for seconds in late)


def test_a_late_message(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(jobs.late_sender, str(tmp_path), LATE_S)[0]
    assert [rank for rank, op, seconds in found if op == "send" and seconds.get(1, 0) > LATE_S / 2] == [0]


def test_nothing_is_written_if_the_block_raises(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(jobs.failing, str(tmp_path)) == ["'of the program'"] * 2
    assert list(tmp_path.iterdir()) == []


def test_before_the_job_it_is_refused() -> None:
    with pytest.raises(dist.NotInitializedError, match="profile"):
        dist.profile("anywhere")
