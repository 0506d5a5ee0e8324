"""Futures of asynchronous work: Python's methods and torch's."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from unicoll.backend.futures import Future


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


def test_of_real_work() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        x = np.arange(3.0)
        work: Any = dist.all_reduce(x, async_op=True)
        half = work.get_future().then(lambda done: done.value()[0] / 2)
        np.testing.assert_array_equal(half.wait(60), [0, 0.5, 1])
        assert work.get_future() is work.get_future()
    finally:
        dist.destroy_process_group()
