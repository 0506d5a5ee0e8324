"""unicoll.profile: the summary, the late rank and its line, the files."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.support.order import await_word, send_word_in_call
from tests.support.ranks import Pool
from unicoll.trace.dumps import Call, Dump, Trace
from unicoll.trace.profile import find_waits, summary, totals


def late_rank(directory: str, delays: dict[int, float]) -> dict[str, Any]:
    """Thirty rounds, in three of which ranks are late; what the profile says. Others may be late in one of them."""
    me = dist.get_rank()
    x, y = np.zeros(1000), np.zeros(10, np.float32)
    dist.barrier()
    threads = []
    with dist.profile(directory, file=None) as profile:
        for step in range(30):
            dist.all_reduce(x)
            if step in (10, 15, 20) and me in delays:
                for _ in range(dist.get_world_size() - 1):
                    await_word()  # the other ranks wait
                time.sleep(delays[me])
            elif step in (10, 15, 20):
                threads += [send_word_in_call(late) for late in delays]
            dist.broadcast(y, src=0)  # the late call
    dist.barrier()
    for thread in threads:
        thread.join()
    return {
        "text": profile.text,
        "totals": {t.op: (t.calls, t.nbytes, t.waiting, t.waited_for) for t in profile.totals},
        "waits": [
            (w.call.rank, w.call.op, w.call.place, w.seconds, w.previous and w.previous.op)
            for w in profile.waits
        ],
    }


def late_sender(directory: str, delay: float) -> list[Any]:
    """Rank 1 waits for a message of rank 0."""
    x = np.zeros(100)
    dist.barrier()
    threads = []
    with dist.profile(directory, file=None) as profile:
        for step in range(5):
            if dist.get_rank() == 0:
                if step == 3:
                    await_word()
                    time.sleep(delay)
                dist.send(x, 1)
            else:
                if step == 3:
                    threads = [send_word_in_call(0)]
                dist.recv(x, 0)
    for thread in threads:
        thread.join()
    return [(w.call.rank, w.call.op, w.seconds) for w in profile.waits]


def failing(directory: str) -> str:
    """The block raises; calls are recorded as before afterwards."""
    try:
        with dist.profile(directory):
            dist.all_reduce(np.zeros(3))
            raise KeyError("of the program")
    except KeyError as e:
        dist.barrier()
        return str(e)


# --- tests ------------------------------------------------------------------------------------------

Pools = Callable[[int], Pool]

LATE_S = 2.0
"""More than other waits on a busy machine."""


def test_a_late_rank_is_named_with_its_line(pool: Pools, tmp_path: Path) -> None:
    found, *others = pool(3).run(late_rank, str(tmp_path / "made" / "here"), {0: LATE_S})
    lines = Path(__file__).read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if "# the late call" in line)
    place = f"test_profile.py:{number}"
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
    assert f"rank 0 called it at test_profile.py:{number}" in found["text"]
    assert [other["text"] for other in others] == ["", ""]
    names = {"rank_0.json", "rank_1.json", "rank_2.json", "summary.txt", "trace.json"}
    if importlib.util.find_spec("matplotlib") is not None:
        names.add("profile.svg")
    assert {path.name for path in (tmp_path / "made" / "here").iterdir()} == names
    assert (tmp_path / "made" / "here" / "summary.txt").read_text().strip() == found["text"]
    events = json.loads((tmp_path / "made" / "here" / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event.get("ph") == "X"]) >= 3 * 60


def test_another_late_rank(pool: Pools, tmp_path: Path) -> None:
    found = pool(3).run(late_rank, str(tmp_path), {2: LATE_S})[0]
    # in the broadcast, if its other ranks wait, else in the all_reduce after it; ranks may be late for other reasons
    late = [seconds for rank, op, _, seconds, _ in found["waits"] if rank == 2]
    assert any(set(seconds) == {0, 1} and min(seconds.values()) > LATE_S / 4 for seconds in late)


def test_a_late_message(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(late_sender, str(tmp_path), LATE_S)[0]
    assert [rank for rank, op, seconds in found if op == "send" and seconds.get(1, 0) > LATE_S / 2] == [0]


def test_nothing_is_written_if_the_block_raises(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(failing, str(tmp_path)) == ["'of the program'"] * 2
    assert list(tmp_path.iterdir()) == []


def test_before_the_job_it_is_refused() -> None:
    with pytest.raises(dist.NotInitializedError, match="profile"):
        dist.profile("anywhere")


def recorded(rank: int, *times: tuple[float, float]) -> Dump:
    """The dump of a rank with all_reduce calls from when to when."""
    text, calls = "all_reduce(float64[1], SUM)", []
    for seq, (created, ended) in enumerate(times, 1):
        kind = ("world", (0, 1), seq, "all_reduce", (), (), 8, "SUM", -1, -1, 0, "gloo", "train.py:7")
        calls.append(Call(*kind, "completed", created, created, ended, False, rank=rank, text=text))
    return Dump("", rank, 2, "", 0, "", "", 100.0, 100.0, 0.0, {}, (), tuple(calls), "")


def test_time_in_several_calls_at_once_counts_once() -> None:
    one = recorded(0, (0.0, 0.25), (1.0, 3.5), (1.5, 4.0), (10.0, 11.5), (20.5, 21.0))
    other = recorded(1, (0.0, 0.25), (3.0, 3.5), (3.25, 4.0), (11.0, 11.5), (20.0, 21.0))
    trace = Trace({0: one, 1: other}, (), ())
    waits = find_waits(trace)
    (total,) = totals(trace, waits)
    # rank 0 waits from 1 to 3.25, of which both calls have 1.5 to 3, and from 10 to 11, rank 1 from 20 to 20.5
    assert [wait.seconds for wait in waits] == [{0: 2.0}, {0: 1.75}, {0: 1.0}, {1: 0.5}]
    assert total.waited_for == {1: 3.25, 0: 0.5}
    assert total.waiting == (3.25 + 0.5) / 2
    # rank 0 is in calls for 0.25 + 3 + 1.5 + 0.5 s, rank 1 for 0.25 + 1 + 0.5 + 1 s
    assert total.seconds == (5.25 + 2.75) / 2
    assert total.bandwidth == 5 * 8 / (4.0 - 1.875)
    said = "rank 0 waited 3250.0 ms (at most 2000.0 ms) in 3 calls for rank 1 in all_reduce(float64[1], SUM)"
    assert said in summary(trace, [total], waits)
