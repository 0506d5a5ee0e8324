"""Hooks around calls, the check for NaN and infinity, counters, and ranges in profilers."""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.support.on_ranks import on_ranks
from tests.support.order import await_word, send_word
from tests.support.ranks import joined, run_ranks
from tests.support.worker import leave


@on_ranks(2)
def test_hooks_see_the_calls_of_their_groups_in_order() -> None:
    """Hooks of one group and of all groups, until they are removed."""
    me = dist.get_rank()
    events: list[Any] = []
    part: Any = dist.new_group([0, 1])
    everywhere = dist.add_hook(
        lambda c: events.append(("before", str(c), c.group, c.seq, len(c.inputs), len(c.outputs))),
        lambda c: events.append(("after", str(c), c.group, c.seq, len(c.inputs), c.error)),
        returned=lambda c: events.append(("returned", str(c))),
    )
    one = dist.add_hook(lambda c: events.append(("one", str(c))), group=part)
    x = np.full(4, me + 1.0)
    dist.all_reduce(x)
    y = x.copy()
    dist.all_reduce(y, group=part, async_op=True).wait()  # type: ignore[union-attr]
    later: Any = dist.new_group([0, 1])
    dist.barrier(group=later)
    if me == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    everywhere.remove()
    one.remove()
    one.remove()
    dist.all_reduce(x, group=part)
    sites: list[str] = []
    with dist.add_hook(lambda c: sites.append(c.site)):
        dist.barrier()
    dist.barrier()

    reduce = "all_reduce(float64[4], SUM)"
    message = "recv(float64[4], peer=0, tag=0)" if me else "send(float64[4], peer=1, tag=0)"
    seen = [event for event in events if event[:2] != ("after", reduce) or event[2] == "world"]
    assert seen[0] == ("before", reduce, "world", 0, 1, 1)
    assert seen[1] == ("returned", reduce) or seen[1][:3] == ("after", reduce, "world")
    assert [(event[0], event[1]) for event in seen].count(("one", reduce)) == 1
    assert ("before", "barrier()", later.name, 0, 0, 0) in seen
    assert [event[1] for event in seen if event[0] == "before"][3:] == [message]
    ended = [event for event in events if event[0] == "after"]
    assert {(event[1], event[2]) for event in ended} >= {
        (reduce, "world"),
        (reduce, part.name),
        ("barrier()", later.name),
    }
    assert all(event[3] > 0 for event in ended if event[1] in (reduce, "barrier()"))
    assert all(event[4] == 0 and event[5] == "" for event in ended)
    assert [x.tolist(), y.tolist()] == [[6.0] * 4] * 2
    lines = Path(__file__).read_text().splitlines()
    assert [lines[int(site.rpartition(":")[2]) - 1].strip() for site in sites] == ["dist.barrier()"]


@on_ranks(2)
def test_an_exception_before_a_call_is_the_callers() -> None:
    def refuse(call: Any) -> None:
        raise KeyError("no")

    x = np.ones(2)
    with dist.add_hook(refuse):
        for start in (False, True):
            with pytest.raises(KeyError, match=r"^'no'$"):
                dist.all_reduce(x, async_op=start)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]


@on_ranks(2)
def test_hooks_before_one_that_raises_see_the_call_end() -> None:
    """Also if it raises for the second of a batch."""
    events: list[Any] = []
    refused: list[bool] = []

    def refuse(call: Any) -> None:
        if refused.pop(0):
            raise KeyError("no")

    def hook(name: str) -> Any:
        return dist.add_hook(
            lambda call: events.append([name, "before"]),
            lambda call: events.append([name, "after", call.error]),
            returned=lambda call: events.append([name, "returned"]),
        )

    begun, returned, ended = ["first", "before"], ["first", "returned"], ["first", "after", "KeyError: 'no'"]
    last = [["last", "before"], ["last", "after", "KeyError: 'no'"], ["last", "returned"]]
    with hook("first"), dist.add_hook(refuse), hook("last"):
        refused[:] = [True]
        with pytest.raises(KeyError):
            dist.all_reduce(np.ones(2))
        assert events == [begun, returned, ended]
        events.clear()
        refused[:] = [False, True]
        with pytest.raises(KeyError):
            dist.all_reduce_coalesced([np.ones(2), np.ones(3)])
        assert events == [begun, last[0], begun, returned, ended, ended, last[1], returned, last[2]]
    dist.barrier()


@on_ranks(2)
def test_nan_and_infinity_are_refused() -> None:
    me = dist.get_rank()
    with dist.check_finite():
        bad = np.array([1.0, np.nan, np.inf, -np.inf])
        for array, counts in (
            (bad, "1 NaN and 2 infinite"),
            (bad.astype(np.float32), ".* infinite"),
            (bad + 1j, ".* infinite"),
        ):
            words = rf"^all_reduce\({array.dtype}\[4\], SUM\) on group 'world': the input of rank {me} has {counts}"
            with pytest.raises(dist.DistArgumentError, match=f"{words} of 4 elements, at "):
                dist.all_reduce(array)
        good = np.arange(3)
        dist.all_reduce(good)
        assert good.tolist() == [0, 2, 4]
        dist.all_reduce(np.zeros(0))
        received = np.full(2, np.nan)  # an output may have anything
        dist.broadcast(np.ones(2) if me == 0 else received, 0)
    dist.all_reduce(bad)
    assert np.isnan(bad[1])


@on_ranks(2)
def test_counters() -> None:
    """Of calls of several kinds, one of which waits for another rank."""
    me = dist.get_rank()
    x = np.ones(1000, np.float32)
    dist.metrics.reset()
    dist.metrics.enable()
    dist.metrics.enable()
    for _ in range(5):
        dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]
    dist.broadcast(x, 0)
    dist.all_reduce_coalesced([x, x.copy()])
    if me == 1:
        await_word()
        time.sleep(1.0)
    else:
        send_word(1)
    dist.barrier()
    dist.metrics.disable()
    dist.all_reduce(x)
    found = dist.metrics.snapshot()
    assert {key: (c.calls, c.errors, c.bytes) for key, c in found.items()} == {
        ("all_reduce", "world"): (8, 0, 32_000),
        ("broadcast", "world"): (1, 0, 4_000),
        ("barrier", "world"): (1, 0, 0),
    }
    assert all(c.seconds > 0 and c.waiting > 0 for c in found.values())
    if me == 0:
        assert found["barrier", "world"].waiting > 0.1
        assert found["barrier", "world"].seconds > 0.1


def _write_counters(path: str) -> None:
    rank = dist.get_rank()
    dist.all_reduce(np.ones(3))
    dist.metrics.write(f"{path}.{rank}")
    text = Path(f"{path}.{rank}").read_text()
    assert f'unicoll_calls_total{{op="all_reduce",group="world",rank="{rank}"}} 1\n' in text
    assert f'unicoll_bytes_total{{op="all_reduce",group="world",rank="{rank}"}} 24\n' in text
    assert "# TYPE unicoll_waiting_seconds_total counter\n" in text


def test_the_counters_file(tmp_path: Path) -> None:
    run_ranks(
        2, _write_counters, str(tmp_path / "now"), env={"UNICOLL_METRICS_FILE": str(tmp_path / "m.prom")}
    )
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


def _annotated() -> list[list[str]]:
    """The names of the ranges that torch's profiler has: of itself, and with hooks of the user around and inside it."""
    import torch

    def profiled(*contexts: Callable[[], AbstractContextManager[Any]]) -> list[str]:
        x = torch.ones(4)
        dist.all_reduce(x)
        with ExitStack() as entered:
            made = [entered.enter_context(context()) for context in contexts]
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
            dist.barrier()
        dist.all_reduce(x)
        profile = next(one for one in made if isinstance(one, torch.profiler.profile))
        return [event.name for event in profile.events() if event.name.startswith("unicoll::")]

    def profiler() -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU]
        )
        return made

    return [profiled(profiler), profiled(profiler, dist.annotate), profiled(dist.annotate, profiler)]


@pytest.mark.every(n=0)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_calls_are_ranges_in_torchs_profiler() -> None:
    with joined(2, quiet=False) as job:  # torch's profiler writes to standard error
        job.call(_annotated)
        found = job.results()
        job.call(leave)
        assert job.results() == [[], []]
    for names in [names for of_rank in found for names in of_rank]:
        ops = [name.partition(" ")[0] for name in names]
        assert ops == ["unicoll::all_reduce", "unicoll::all_reduce", "unicoll::barrier"]
        assert all(f" at {__file__}:" in name for name in names)


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
