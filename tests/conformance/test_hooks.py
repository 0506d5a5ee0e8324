"""Hooks around calls, the check for NaN and infinity, counters, and ranges in profilers."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import unicoll as dist
from tests.conformance import hook_jobs as jobs
from tests.support.ranks import Pool, joined
from tests.support.worker import leave

Pools = Callable[[int], Pool]


def test_hooks_see_the_calls_of_their_groups_in_order(pool: Pools) -> None:
    for rank, found in enumerate(pool(2).run(jobs.calls_around)):
        part, later = found["part"], found["later"]
        reduce, message = "all_reduce(float64[4], SUM)", ["send(float64[4], peer=1, tag=0)"] * (rank == 0)
        message += ["recv(float64[4], peer=0, tag=0)"] * (rank == 1)
        seen = [event for event in found["seen"] if event[:2] != ("after", reduce) or event[2] == "world"]
        assert seen[0] == ("before", reduce, "world", 0, 1, 1)
        after = seen[1]
        assert after[:3] == ("returned", reduce)[:3] or after[:3] == ("after", reduce, "world")
        names = [(event[0], event[1]) for event in seen]
        assert names.count(("one", reduce)) == 1
        assert ("before", "barrier()", later, 0, 0, 0) in seen
        assert [event[1] for event in seen if event[0] == "before"][3:] == message
        ended = [event for event in found["seen"] if event[0] == "after"]
        assert {(event[1], event[2]) for event in ended} >= {
            (reduce, "world"),
            (reduce, part),
            ("barrier()", later),
        }
        assert all(event[3] > 0 for event in ended if event[1] in (reduce, "barrier()"))
        assert all(event[4] == 0 and event[5] == "" for event in ended)
        assert found["values"] == [[6.0] * 4, [6.0] * 4]
        assert found["sites"] == ["dist.barrier()"]


def test_an_exception_before_a_call_is_the_callers(pool: Pools) -> None:
    assert pool(2).run(jobs.raising) == [[["'no'", "'no'"], [2.0, 2.0]]] * 2


def test_hooks_before_one_that_raises_see_the_call_end(pool: Pools) -> None:
    begun, returned, ended = ["first", "before"], ["first", "returned"], ["first", "after", "KeyError: 'no'"]
    last = [["last", "before"], ["last", "after", "KeyError: 'no'"], ["last", "returned"]]
    for single, batch in pool(2).run(jobs.refused_by_a_later_hook):
        assert single == [begun, returned, ended]
        assert batch == [begun, last[0], begun, returned, ended, ended, last[1], returned, last[2]]


def test_nan_and_infinity_are_refused(pool: Pools) -> None:
    for rank, (found, good, passed) in enumerate(pool(2).run(jobs.nonfinite)):
        for text, dtype in zip(found, ("float64", "float32", "complex128"), strict=True):
            assert text.startswith(
                f"all_reduce({dtype}[4], SUM) on group 'world': the input of rank {rank} has "
            )
            assert text.endswith(" infinite of 4 elements")
        assert "has 1 NaN and 2 infinite" in found[0]
        assert good == [0, 2, 4]
        assert passed


def test_counters(pool: Pools) -> None:
    first, second = pool(2).run(jobs.counted)
    for found in (first, second):
        assert found["counts"] == {
            ("all_reduce", "world"): (8, 0, 32_000),
            ("broadcast", "world"): (1, 0, 4_000),
            ("barrier", "world"): (1, 0, 0),
        }
        assert found["positive"]
    assert first["waiting"] > 0.1
    assert first["seconds"] > 0.1


def test_the_counters_file(tmp_path: Path) -> None:
    with joined(2, env={"UNICOLL_METRICS_FILE": str(tmp_path / "m.prom")}) as job:
        job.call(jobs.written, str(tmp_path / "now"))
        for rank, text in enumerate(job.results()):
            assert f'unicoll_calls_total{{op="all_reduce",group="world",rank="{rank}"}} 1\n' in text
            assert f'unicoll_bytes_total{{op="all_reduce",group="world",rank="{rank}"}} 24\n' in text
            assert "# TYPE unicoll_waiting_seconds_total counter\n" in text
        job.call(leave)
        assert job.results() == [[], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "m.rank0.prom",
        "m.rank1.prom",
        "now.0",
        "now.1",
    ]
    for rank in range(2):
        text = (tmp_path / f"m.rank{rank}.prom").read_text()
        assert f'unicoll_calls_total{{op="all_reduce",group="world",rank="{rank}"}} 1\n' in text


def test_a_counters_file_in_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICOLL_METRICS_FILE", str(tmp_path / "none" / "m.prom"))
    with pytest.raises(dist.DistArgumentError, match="UNICOLL_METRICS_FILE: there is no directory"):
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_calls_are_ranges_in_torchs_profiler() -> None:
    with joined(2, quiet=False) as job:  # torch's profiler writes to standard error
        job.call(jobs.annotated)
        found = job.results()
        job.call(leave)
        assert job.results() == [[], []]
    for names in [names for of_rank in found for names in of_rank]:
        ops = [name.partition(" ")[0] for name in names]
        assert ops == ["unicoll::all_reduce", "unicoll::all_reduce", "unicoll::barrier"]
        assert all(f" at {jobs.__file__}:" in name for name in names)


def test_calls_are_ranges_of_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    nvtx = types.SimpleNamespace(
        start_range=lambda message, domain: events.append((message.partition(" ")[0], domain)) or len(events),
        end_range=events.append,
    )
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with dist.annotate(nvtx=True, torch=False):
            dist.all_reduce(np.ones(2))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert events == [("unicoll::all_reduce", "unicoll"), 1]


def test_annotate_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch=True`` was accepted, and every collective raised."""
    for name in ("torch", "torch.autograd.profiler", "nvtx"):
        monkeypatch.setitem(sys.modules, name, None)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(dist.BackendUnavailableError, match="annotate: torch cannot be imported: "):
            dist.annotate(torch=True)
        with pytest.raises(
            dist.BackendUnavailableError, match=r"nothing records ranges: .* \(or torch=False\)"
        ):
            dist.annotate(torch=False)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_arguments() -> None:
    with pytest.raises(dist.NotInitializedError):
        dist.add_hook(print)
    with pytest.raises(dist.DistArgumentError, match="give before, after"):
        dist.add_hook()
    with pytest.raises(dist.DistTypeError, match=r"add_hook: Hook\(.* is not a function"):
        dist.add_hook(dist.Hook(before=print))  # type: ignore[arg-type]
