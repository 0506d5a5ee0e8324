"""What the ranks of :mod:`test_torch_interrupts` do."""

from __future__ import annotations

import copy
import os
import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d as c10d

from tests.faults import interrupt_jobs as jobs
from tests.support.interrupts import Interrupt, Point, Points, describe
from tests.support.order import await_true
from unicoll.bootstrap import process_end
from unicoll.errors import DistError, GroupAbortedError, OperationTimeoutError
from unicoll.torch_plugin import reconfigurable_group
from unicoll.torch_plugin.compat import RequestedGroup


class Torch(jobs.Library):
    """torch.distributed over the plug-in, with tensors on the CPU.

    An exception in torch's own functions comes before or after the call of the group's method, which is then not made,
    or done. torch.distributed does not undo what it has done, for example one of the two calls of all_gather_object.
    """

    dist = dist
    outside = (os.path.dirname(torch.__file__) + os.sep,)

    def full(self, shape: int | tuple[int, int], value: float) -> Any:
        return torch.full((shape,) if isinstance(shape, int) else shape, value, dtype=torch.float64)

    def values(self, x: Any) -> Any:
        return x.numpy()

    def group(self, group: Any) -> Any:
        return group.unicoll


TORCH = Torch()

_LIMIT = timedelta(seconds=jobs.TIMEOUT_S)
_STEPS = 6
_STRUCK = 2
"""The step that is interrupted; DDP has made its buckets anew by then."""
_FEATURES = 20


def trials(name: str, goes_on: bool, every: int, first: int) -> tuple[int, int, list[str]]:
    """Interrupt a call of torch.distributed at its points, as :func:`tests.faults.interrupt_jobs.trials` does."""
    return jobs.trials(name, goes_on, every=every, first=first, of=TORCH)


def waits(how: str) -> None:
    """Ctrl-C in a wait of torch's code, which does not repeat it, or of the program, which does."""
    group, by_torch = dist.new_group(timeout=_LIMIT), how != "program"
    x, device = torch.full((5,), dist.get_rank() + 1.0), torch.device("cpu")
    if dist.get_rank() == jobs.VICTIM:
        if how == "functional":
            wait = partial(
                functional.wait_tensor, torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)
            )
        elif how == "coalesced":
            group._start_coalescing(device)
            dist.all_reduce(x, group=group, async_op=True)
            manager = c10d._CoalescingManager()
            manager.append(group._end_coalescing(device))
            wait = manager.wait
        else:
            wait = dist.all_reduce(x, group=group, async_op=True).wait
        queue = group.unicoll._backends.for_device("cpu").queue
        await_true(lambda: queue.in_background)
        with jobs.struck_while_waiting():
            wait()
        dist.barrier()
        if not by_torch:
            wait()
    else:
        dist.barrier()
        if not by_torch:
            dist.all_reduce(x, group=group)
    if by_torch:
        with pytest.raises(GroupAbortedError, match=r"rank 0 .*KeyboardInterrupt$"):
            dist.all_reduce(x, group=group)
    else:
        assert (x == 3).all()
        dist.all_reduce(x, group=group)
        assert (x == 6).all()
    dist.destroy_process_group(group)


class Alarm(Exception):
    """Raised by the handler of SIGALRM."""


class Alarms:
    """Raises :class:`Alarm` at a random time of a ``with`` block, where the plug-in's code runs.

    An exception elsewhere in the block, in torch or the program, is the program's: the rank makes fewer calls than the
    others then, which would average gradients of different steps.

    Attributes:
        count: exceptions that were raised.
    """

    def __init__(self, rng: random.Random) -> None:
        self.count = 0
        self._rng = rng
        self._points = Points(outside=TORCH.outside)
        self._armed = False
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, _: int, frame: FrameType | None) -> None:
        if not self._armed:
            return
        if self._points.is_within(frame):
            self._armed = False
            self.count += 1
            raise Alarm("the alarm of a test")
        signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(1e-5, 2e-4))

    @contextmanager
    def one(self, wanted: bool) -> Iterator[None]:
        self._armed = wanted
        signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(1e-5, 2e-3))
        try:
            yield
        finally:
            self._armed = False


class _Layers(nn.Sequential):
    """Four layers, in buckets of their own, and a buffer, which DDP broadcasts in each forward pass."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(_FEATURES, _FEATURES, dtype=torch.float64) for _ in range(4)))
        self.register_buffer("passes", torch.zeros(1))


def _loss(model: nn.Module, step: int, rank: int) -> Any:
    x = torch.linspace(rank, step + 1, _FEATURES, dtype=torch.float64)
    return model(x.expand(2, _FEATURES)).square().sum()


def _mean(model: nn.Module, step: int) -> list[Any]:
    """The mean of the ranks' gradients, without communication."""
    found = []
    for rank in range(dist.get_world_size()):
        alone = copy.deepcopy(model)
        alone.zero_grad()
        _loss(alone, step, rank).backward()
        found.append([p.grad.numpy() for p in alone.parameters()])
    return [np.mean(each, axis=0) for each in zip(*found, strict=True)]


def _is_known(error: BaseException) -> bool:
    """True for an error of the library, which torch's futures raise as a RuntimeError, and for DDP's own.

    DDP refuses to go on after an exception in the middle of its backward pass, also by an internal assertion.
    """
    if isinstance(error, OperationTimeoutError):
        return False
    texts = "GroupAbortedError: ", "Alarm: ", "Expected to have finished reduction", "reducer.cpp"
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def _steps(model: nn.Module, group: Any, alarms: Alarms, struck: str, goes_on: bool) -> list[str]:
    """Steps of DDP, one of which is interrupted on one rank, in the ``struck`` pass; returns how each ended."""
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001)
    ends = []
    for step in range(_STEPS):
        expected = _mean(model, step)
        ddp.zero_grad()
        is_struck = step == _STRUCK and dist.get_rank() == jobs.VICTIM
        try:
            with alarms.one(is_struck and struck == "forward"):
                loss = _loss(ddp, step, dist.get_rank())
            with alarms.one(is_struck and struck == "backward"):
                loss.backward()
        except Exception as error:
            if not (isinstance(error, Alarm) or _is_known(error)):
                raise
            ends.append(type(error).__name__)
            if isinstance(error, Alarm) and not goes_on:
                break
            continue
        for found, mean in zip(model.parameters(), expected, strict=True):
            np.testing.assert_allclose(found.grad.numpy(), mean, rtol=1e-12, err_msg=f"step {step}: {ends}")
        ends.append("")
    return ends


def data_parallel_steps(trials: int, seed: int) -> tuple[int, list[str]]:
    """Interrupt steps of DDP at random times; returns the number that were, and what was wrong on this rank."""
    jobs.prepare()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, rng, wrong = _Layers(), random.Random(seed), []
    alarms = Alarms(random.Random(seed))
    _steps(model, None, alarms, "", True)  # the first use of DDP imports for seconds
    for trial in range(trials):
        goes_on, struck = rng.random() < 0.5, rng.choice(("forward", "backward", "backward", "backward"))
        group = dist.new_group(timeout=_LIMIT)
        try:
            _steps(model, group, alarms, struck, goes_on)
        except Exception as error:
            wrong.append(f"trial {trial}: {type(error).__name__}: {error}")
        dist.destroy_process_group(group)
    return alarms.count, wrong


def reconfigurations(folder: str, every: int, first: int) -> int:
    """Interrupt reconfigurations of a group of one rank, at every nth point in the plug-in; returns their number.

    The next one then works, and the process is in no other job.
    """
    jobs.prepare()
    plugin = os.path.dirname(reconfigurable_group.__file__) + os.sep
    group = reconfigurable_group.ReconfigurableGroup(
        RequestedGroup(),
        "unicoll-gloo",
        "one",
        None,
        dist.FileStore(f"{folder}/store", 1),
        0,
        1,
        _LIMIT,
        None,
    )
    numbers = count(1)

    def reconfigure(point: Point | None = None) -> Points:
        options = SimpleNamespace(handles=[group.get_reconfigure_handle()], uuid=next(numbers), timeout=None)
        with Points(point, TORCH.outside) as points:
            group.reconfigure(options)
        return points

    reconfigure()
    tried = [point for point in reconfigure().seen if point[0].startswith(plugin)][first % every :: every]
    for point in tried:
        with pytest.raises(Interrupt):
            reconfigure(point)
        reconfigure()
        x = torch.ones(1)
        group.allreduce([x]).wait()
        assert x == 1
        assert len(process_end._joined) == 1, describe(point)
    group.shutdown()
    assert not process_end._joined
    return len(tried)
