"""Functions that ranks run in the tests of hooks and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.order import await_word, send_word


def calls_around() -> dict[str, Any]:
    """What hooks of one group and of all groups see, in order, and after their removal."""
    me, n = dist.get_rank(), dist.get_world_size()
    seen: list[Any] = []
    part = dist.new_group(list(range(n)))
    everywhere = dist.add_hook(
        lambda c: seen.append(("before", str(c), c.group, c.seq, len(c.inputs), len(c.outputs))),
        lambda c: seen.append(("after", str(c), c.group, c.seq, len(c.inputs), c.error)),
        returned=lambda c: seen.append(("returned", str(c))),
    )
    one = dist.add_hook(lambda c: seen.append(("one", str(c))), group=part)
    x = np.full(4, me + 1.0)
    dist.all_reduce(x)
    y = x.copy()
    dist.all_reduce(y, group=part, async_op=True).wait()
    later = dist.new_group(list(range(n)))
    dist.barrier(group=later)
    if me == 0:
        dist.send(x, 1)
    elif me == 1:
        dist.recv(x, 0)
    everywhere.remove()
    one.remove()
    one.remove()
    dist.all_reduce(x, group=part)
    lines = Path(__file__).read_text().splitlines()
    sites: list[str] = []
    with dist.add_hook(lambda c: sites.append(c.site)):
        dist.barrier()
    dist.barrier()
    return {
        "seen": seen,
        "values": [x.tolist(), y.tolist()],
        "sites": [lines[int(site.rpartition(":")[2]) - 1].strip() for site in sites],
        "part": part.name,
        "later": later.name,
    }


def raising() -> list[Any]:
    """A hook that raises before a call, and one that raises after it: what the caller gets, and the call after."""

    def refuse(call: Any) -> None:
        raise KeyError("no")

    x = np.ones(2)
    found: list[Any] = []
    with dist.add_hook(refuse):
        for start in (False, True):
            try:
                dist.all_reduce(x, async_op=start)
            except KeyError as e:
                found.append(str(e))
    dist.all_reduce(x)
    return [found, x.tolist()]


def refused_by_a_later_hook() -> list[Any]:
    """A hook that raises, also for the second of a batch: what the hooks before and after it see."""
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

    found = []
    with hook("first"), dist.add_hook(refuse), hook("last"):
        for answers in ([True], [False, True]):
            refused[:] = answers
            events.clear()
            try:
                if len(answers) == 1:
                    dist.all_reduce(np.ones(2))
                else:
                    dist.all_reduce_coalesced([np.ones(2), np.ones(3)])
            except KeyError:
                found.append([*events])
    dist.barrier()
    return found


def nonfinite() -> list[Any]:
    """The check for NaN and infinity: what it refuses and what it lets pass."""
    found: list[Any] = []
    with dist.check_finite():
        bad = np.array([1.0, np.nan, np.inf, -np.inf])
        for array in (bad, bad.astype(np.float32), bad + 1j):
            try:
                dist.all_reduce(array)
            except dist.DistArgumentError as e:
                found.append(str(e).partition(", at ")[0])
        good = np.arange(3)
        dist.all_reduce(good)
        empty = np.zeros(0)
        dist.all_reduce(empty)
        received = np.full(2, np.nan)  # an output may have anything
        dist.broadcast(np.ones(2) if dist.get_rank() == 0 else received, 0)
    dist.all_reduce(bad)
    return [found, good.tolist(), np.isnan(bad[1])]


def counted() -> dict[str, Any]:
    """The counters after calls of several kinds, one of which waits for another rank."""
    me = dist.get_rank()
    x = np.ones(1000, np.float32)
    dist.metrics.reset()
    dist.metrics.enable()
    dist.metrics.enable()
    for _ in range(5):
        dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.broadcast(x, 0)
    dist.all_reduce_coalesced([x, x])
    if me == 1:
        await_word()
        time.sleep(1.0)
    elif me == 0:
        send_word(1)
    dist.barrier()
    dist.metrics.disable()
    dist.all_reduce(x)
    found = dist.metrics.snapshot()
    return {
        "counts": {key: (c.calls, c.errors, c.bytes) for key, c in found.items()},
        "waiting": found["barrier", "world"].waiting,
        "seconds": found["barrier", "world"].seconds,
        "positive": all(c.seconds > 0 and c.waiting > 0 for c in found.values()),
    }


def written(path: str) -> str:
    """The file of this rank's counters."""
    path = f"{path}.{dist.get_rank()}"
    dist.all_reduce(np.ones(3))
    dist.metrics.write(path)
    return Path(path).read_text()


def annotated() -> list[list[str]]:
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
