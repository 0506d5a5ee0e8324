"""An exception of a signal's handler in a method of a store: it is done or not, and the store remains usable."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.interrupts import Point, Points
from tests.support.order import await_true
from tests.support.selection import is_short
from tests.unit.interrupt_points import each_point, interrupt_at
from tests.unit.test_stores import KINDS, StoreUnderTest
from unicoll.net.stores import FileStore, PrefixStore, Store, TCPStore, listener
from unicoll.net.stores.signed import SignedStore


@pytest.fixture(params=KINDS)
def under_test(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    under_test = StoreUnderTest(request.param, tmp_path)
    yield under_test
    under_test.close()
    gc.collect()
    await_true(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()  # its thread exists
        yield executor


Call = Callable[[Store, str], Any]

CALLS: dict[str, tuple[Call, Call, tuple[Any, ...]]] = {
    # the call, its effect, and what that may be afterwards
    "set": (lambda s, k: s.set(k, "v"), lambda s, k: s.try_get(k), (None, b"v")),
    "get": (lambda s, k: s.get("there"), lambda s, k: s.get("there"), (b"x" * 100,)),
    "add": (lambda s, k: s.add(k, 1), lambda s, k: s.add(k, 0), (0, 1)),
    "wait": (lambda s, k: s.wait(["there"]), lambda s, k: s.check(["there", k]), (False,)),
    "compare_set": (lambda s, k: s.compare_set(k, "", "v"), lambda s, k: s.try_get(k), (None, b"v")),
    "append": (lambda s, k: s.append(k, "v"), lambda s, k: s.try_get(k), (None, b"v")),
    "multi_set": (
        lambda s, k: s.multi_set([k, k + "/2"], ["v", "w"]),
        lambda s, k: (s.try_get(k), s.try_get(k + "/2")),
        ((None, None), (b"v", None), (b"v", b"w")),
    ),
    "queue_push": (lambda s, k: s.queue_push(k, "v"), lambda s, k: s.queue_len(k), (0, 1)),
    "queue_push another": (
        lambda s, k: (s.queue_push(k, "v"), s.queue_push(k, "w")),
        lambda s, k: s.queue_len(k),
        (0, 1, 2),
    ),
    "queue_pop": (
        lambda s, k: (s.queue_push(k, "v"), s.queue_push(k, "w"), s.queue_pop(k), s.queue_pop(k)),
        lambda s, k: s.queue_len(k),
        (0, 1, 2),
    ),
    "delete_key": (
        lambda s, k: (s.set(k, "v"), s.delete_key(k)),
        lambda s, k: s.try_get(k),
        (None, b"v"),
    ),
}


@pytest.mark.every(n=6)
@pytest.mark.parametrize("name", CALLS)
def test_the_next_calls(
    under_test: StoreUnderTest, name: str, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """They have right results, on each thread and in other processes; a call that was interrupted is done or not."""
    call, effect, possible = CALLS[name]
    store, other = under_test.handle(), under_test.handle()
    numbers = itertools.count()
    store.set("there", b"x" * 100)
    for what, point in each_point(lambda: call(store, str(next(numbers)))):
        key = str(next(numbers))
        interrupt_at(lambda key=key: call(store, key), point)
        found = pool.submit(effect, store, key).result(60)
        assert found in possible, (what, found)
        assert effect(other, key) == found, what
        store.queue_push(key + "q", "1")
        assert store.queue_pop(key + "q", block=False) == b"1", what
        assert store.add("count", 1) == other.add("count", 0), what
        assert not store.check([key + "q"])
    with _of_another_process(under_test, tmp_path) as third:
        assert third.get("there") == b"x" * 100
        assert third.add("count", 0) == store.add("count", 0)
        assert third.num_keys() == store.num_keys()
    if isinstance(store, TCPStore):
        assert set(store._pool._users.values()) == {None}
        (server,) = listener._servers.values()
        await_true(
            lambda: (
                len(server._clients)
                == sum(len(s._pool._users) for s in under_test.made if isinstance(s, TCPStore))
            )
        )


@contextlib.contextmanager
def _of_another_process(under_test: StoreUnderTest, folder: Path) -> Iterator[Store]:
    """For a file: what another process reads, which has not replayed it yet."""
    if under_test.kind != "file":
        yield under_test.handle()
        return
    copy = folder / "copy"
    shutil.copy(under_test.path, copy)
    with FileStore(str(copy)) as store:
        yield store


@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
def test_connecting(tmp_path: Path) -> None:
    """An exception in a request that makes its own connection; a lost socket is closed by the garbage collector."""
    under_test = StoreUnderTest("tcp", tmp_path)
    store = under_test.handle()
    store.set("k", "v")

    def trial(point: Point | None) -> Points:
        with store.clone() as clone:
            assert isinstance(clone, TCPStore)
            points = interrupt_at(lambda: clone.get("k"), point)[1]
            assert clone.get("k") == b"v", points.at
            assert list(clone._pool._users.values()) == [None]
        return points

    for point in list(dict.fromkeys(trial(None).seen))[:: 4 if is_short() else 1]:
        trial(point)
    under_test.close()


@pytest.mark.parametrize("of", ["get", "wait", "queue_pop"])
def test_waiting(under_test: StoreUnderTest, of: str, pool: ThreadPoolExecutor) -> None:
    """The key comes while the call waits."""
    store, other = under_test.handle(), under_test.handle()
    numbers = itertools.count()
    calls: dict[str, Call] = {
        "get": lambda s, k: s.get(k),
        "wait": lambda s, k: s.wait([k]),
        "queue_pop": lambda s, k: s.queue_pop(k),
    }

    puts: queue.SimpleQueue[str] = queue.SimpleQueue()

    def put() -> None:
        while key := puts.get():
            time.sleep(0.01)
            if of == "queue_pop":
                other.queue_push(key, "v")
            other.set(key, "v")

    putting = pool.submit(put)
    key = ""

    def call() -> None:
        nonlocal key
        key = str(next(numbers))
        puts.put(key)
        calls[of](store, key)

    for what, point in each_point(call, 3):
        interrupt_at(call, point)
        other.wait([key], 60)
        assert store.get(key) == b"v", what
        assert store.queue_len(key) <= 1
        store.set("k", what)
        assert other.get("k") == what.encode()
    puts.put("")
    putting.result(60)


@pytest.mark.parametrize("of", ["get", "wait", "queue_pop"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_a_signal_in_a_call_that_waits(
    under_test: StoreUnderTest, of: str, error: type[BaseException]
) -> None:
    """The handler's exception is raised, whatever it is, and not an error of the store's server."""
    store = under_test.handle()

    def handler(*_: object) -> None:
        raise error("timed out")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(error, match="timed out"):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            getattr(store, of)(["never"] if of == "wait" else "never")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_views(tmp_path: Path) -> None:
    """A signed value under a prefix."""
    under_test = StoreUnderTest("tcp", tmp_path)
    store = SignedStore(PrefixStore("p", under_test.handle()), b"k" * 32)
    numbers = itertools.count()
    for what, point in each_point(lambda: store.set(str(next(numbers)), "v")):
        key = str(next(numbers))
        interrupt_at(lambda key=key: store.set(key, "v"), point)
        assert store.try_get(key) in (None, b"v"), what
    under_test.close()


def test_a_handler_that_uses_the_file_in_an_operation(tmp_path: Path) -> None:
    """It gets an error: the operation that it interrupts has not ended."""
    with FileStore(str(tmp_path / "store")) as store:
        found: list[str] = []
        real = store._log._replay_new_records

        def replay() -> None:
            try:
                store.set("inner", "v")
            except Exception as error:
                found.append(str(error))
            real()

        store._log._replay_new_records = replay  # type: ignore[method-assign]
        store.set("outer", "v")
        assert store._log._holder is None
        store._log._replay_new_records = real  # type: ignore[method-assign]
        assert "within an operation" in found[0]
        assert store.get("outer") == b"v"
        assert store.try_get("inner") is None
        assert threading.active_count() >= 1
