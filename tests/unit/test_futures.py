"""Futures of asynchronous work: Python's methods and torch's."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from unicoll.calls.futures import Future


def test_then_gives_what_the_callback_makes_of_it() -> None:
    future: Future[int] = Future()
    doubled = future.then(lambda done: 2 * done.value())
    text = doubled.then(lambda done: str(done.wait()))
    assert isinstance(future, concurrent.futures.Future)
    assert not text.done()
    future.set_result(4)
    assert (doubled.value(), text.wait(60), text.result()) == (8, "8", "8")
    assert future.then(lambda done: done).value() is future  # called at once


def test_errors_travel_along_the_chain() -> None:
    future: Future[int] = Future()
    after = future.then(lambda done: done.value())
    caught = future.then(lambda done: type(done.exception()).__name__)
    failing = caught.then(lambda done: 1 // 0)
    future.set_exception(KeyError("a"))
    with pytest.raises(KeyError):
        after.value()
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    assert caught.value() == "KeyError"


def test_the_value_of_a_future_that_is_not_done() -> None:
    future: Future[int] = Future()
    for ask in (future.value, lambda: future.wait(0.01)):
        with pytest.raises(concurrent.futures.TimeoutError):
            ask()


@pytest.mark.torch
def test_of_work_on_torch_tensors() -> None:
    """A torch.futures.Future, of which torch's functions take several."""
    torch: Any = pytest.importorskip("torch")
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        tensors = [torch.ones(3), torch.ones(2)]
        works: list[Any] = [dist.all_reduce(x, async_op=True) for x in tensors]
        futures = [work.get_future() for work in works]
        assert futures[0] is works[0].get_future()
        for x, done in zip(tensors, torch.futures.collect_all(futures).wait(), strict=True):
            assert done.value()[0] is x
        assert futures[0].then(lambda done: done.value()[0].sum()).wait() == 3
        assert works[0].get_future_result().wait() == 0
        assert works[0].block_current_stream() is None
    finally:
        dist.destroy_process_group()


@pytest.mark.torch
def test_an_error_that_torch_shows_has_no_frames_of_unicoll() -> None:
    """Ray Train and programs print its text, in which ``At:`` and a line for each frame displace the message."""
    torch: Any = pytest.importorskip("torch")
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        late: Any = dist.irecv(torch.ones(1), 0, timeout=0.1)
        future = late.get_future()
        for ask in (future.wait, future.value):
            with pytest.raises(RuntimeError, match=r"OperationTimeoutError: recv.* timed out") as raised:
                ask()
            assert "At:" not in str(raised.value)
            assert ".py" not in str(raised.value).partition(" at ")[0]
    finally:
        dist.destroy_process_group()


def test_of_work_on_numpy_arrays() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        reduced: Any = dist.all_reduce(np.arange(3.0), async_op=True)
        half = reduced.get_future().then(lambda done: done.value()[0] / 2)
        np.testing.assert_array_equal(half.wait(60), [0, 0.5, 1])
        x = np.ones(1)
        late: Any = dist.irecv(x, 0, timeout=0.1)
        assert late.get_future_result().wait(60) == 1
        lost: Any = dist.irecv(x, 0)
        ended = lost.get_future_result()
    finally:
        dist.destroy_process_group()
    assert ended.wait(60) == 2
