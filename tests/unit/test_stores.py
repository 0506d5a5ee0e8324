"""Conformance tests for every store, then tests of HashStore and FileStore."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpi_comm import store as mpi_store
from tests.support.forks import exit_code, fork, in_fork
from tests.support.order import await_true
from unicoll.errors import (
    DistArgumentError,
    DistStoreError,
    DistTypeError,
    QueueEmptyError,
    StoreTimeoutError,
)
from unicoll.net.stores import FileStore, HashStore, PrefixStore, Store, TCPStore, file_log, protocol
from unicoll.net.stores.signed import SignedStore
from unicoll.net.stores.table import Table, WaitRequired
from unicoll.net.wire.secret import Secret

SECRET = Secret(b"s" * 32, "test")
# Some of these tests fork.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
KINDS = ("tcp", "file", "hash")


class StoreUnderTest:
    """Makes handles on one store, and closes them."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.path = str(directory / "store")
        self.made: list[Store] = []
        self.master = self._first()
        self.made.append(self.master)

    def _first(self) -> Store:
        if self.kind == "tcp":
            return TCPStore("127.0.0.1", 0, is_master=True, timeout=20.0, secret=SECRET)
        return FileStore(self.path) if self.kind == "file" else HashStore()

    def handle(self) -> Store:
        if isinstance(self.master, TCPStore):
            store: Store = TCPStore("127.0.0.1", self.master.port, timeout=20.0, secret=SECRET)
        elif self.kind == "file":
            store = FileStore(self.path)
        else:
            store = self.master.clone()
        self.made.append(store)
        return store

    def close(self) -> None:
        for store in reversed(self.made):
            store.close()


@pytest.fixture(params=KINDS)
def under_test(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    under_test = StoreUnderTest(request.param, tmp_path)
    yield under_test
    under_test.close()


@pytest.fixture(params=["plain", "prefix", "nested"])
def handle(request: pytest.FixtureRequest, under_test: StoreUnderTest) -> Callable[[], Store]:
    def make() -> Store:
        store = under_test.handle()
        store.set_timeout(20.0)
        if request.param != "plain":
            store = PrefixStore("outer", store)
        return PrefixStore("inner", store) if request.param == "nested" else store

    return make


@pytest.fixture
def store(handle: Callable[[], Store]) -> Store:
    return handle()


@pytest.fixture
def other(handle: Callable[[], Store]) -> Store:
    return handle()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


# --- conformance ------------------------------------------------------------------------------------------------


class Raises(NamedTuple):
    """The error of a call."""

    error: type[Exception]
    message: str = ""


CALLS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("set", ("text", "wört"), None),
    ("get", ("text",), "wört".encode()),
    ("set", ("bytes", b"\xff\0\r\n"), None),
    ("get", ("bytes",), b"\xff\0\r\n"),
    ("set", ("array", bytearray(b"abc")), None),
    ("get", ("array",), b"abc"),
    ("set", ("empty", ""), None),
    ("get", ("empty",), b""),
    ("set", ("", "the empty key"), None),
    ("get", ("",), b"the empty key"),
    ("set", ("odd/key \udcff\n", "1"), None),
    ("get", ("odd/key \udcff\n",), b"1"),
    ("set", ("text", "abc"), None),
    ("try_get", ("text",), b"abc"),
    ("try_get", ("absent",), None),
    ("add", ("text", 1), Raises(DistStoreError, "not a number")),
    ("get", ("text",), b"abc"),
    ("add", ("n", 5), 5),
    ("add", ("n", np.int64(-7)), -2),
    ("add", ("n", 0), -2),
    ("get", ("n",), b"-2"),
    ("set", ("n", "40"), None),
    ("add", ("n", 2), 42),
    ("compare_set", ("c", "expected", "desired"), b"expected"),
    ("check", (["c"],), False),
    ("compare_set", ("c", "", "first"), b"first"),
    ("compare_set", ("c", "", "second"), b"first"),
    ("compare_set", ("c", "wrong", "second"), b"first"),
    ("compare_set", ("c", "first", "second"), b"second"),
    ("get", ("c",), b"second"),
    ("check", ([],), True),
    ("wait", ([],), None),
    ("check", (["c", "n"],), True),
    ("check", (["c", "absent"],), False),
    ("wait", (["c", "n"], timedelta(seconds=0)), None),
    ("delete_key", ("n",), True),
    ("delete_key", ("n",), False),
    ("check", (["n"],), False),
    ("add", ("n", 1), 1),
    ("append", ("a", "po"), None),
    ("append", ("a", "tato"), None),
    ("get", ("a",), b"potato"),
    ("compare_set", ("a", "potato", "z"), b"z"),
    ("multi_set", (["m", "b"], ["1", "2"]), None),
    ("multi_get", (["b", "m", "b"],), [b"2", b"1", b"2"]),
    ("multi_get", ([],), []),
    ("multi_set", ([], []), None),
    ("queue_len", ("q",), 0),
    ("queue_push", ("q", "1"), None),
    ("queue_push", ("q", "2"), None),
    ("queue_push", ("q", "3"), None),
    ("queue_len", ("q",), 3),
    ("queue_pop", ("q",), b"1"),
    ("queue_pop", ("q", False), b"2"),
    ("check", (["q"],), True),
    ("wait", (["q"],), None),
    ("queue_pop", ("q",), b"3"),
    ("check", (["q"],), False),
    ("queue_pop", ("q", False), Raises(QueueEmptyError, "q' is empty")),
    ("list_keys", (), sorted(["text", "bytes", "array", "empty", "", "odd/key \udcff\n", *"ncamb"])),
    ("has_extended_api", (), True),
]
"""Calls with their results; each is made by the handle that did not make the one before."""


def test_the_results_of_every_call(store: Store, other: Store):
    before = store.num_keys()
    for i, (name, arguments, expected) in enumerate(CALLS):
        call = getattr((store, other)[i % 2], name)
        if isinstance(expected, Raises):
            with pytest.raises(expected.error, match=expected.message):
                call(*arguments)
            continue
        found = call(*arguments)
        assert (sorted(found) if name == "list_keys" else found) == expected, (i, name, arguments)
        assert name != "get" or type(found) is bytes
    assert store.num_keys() == before + 11
    store.set_timeout(0.05)
    with pytest.raises(StoreTimeoutError):
        store.queue_pop("q")


def test_large_values(store: Store, other: Store):
    value = os.urandom(3 << 20)
    store.set("large", value)
    assert other.get("large") == value
    assert other.multi_get(["large", "large"]) == [value, value]


def test_a_waiting_get_blocks_no_other_call(store: Store, pool: ThreadPoolExecutor):
    waiting = [pool.submit(store.get, "late"), pool.submit(store.multi_get, ["late", "later"])]
    waiting.append(pool.submit(store.wait, ["later", "late"]))
    popping = pool.submit(store.queue_pop, "q")
    time.sleep(0.05)
    store.set("late", "1")
    store.set("later", "2")
    store.queue_push("q", "3")
    assert [future.result(timeout=20) for future in waiting] == [b"1", [b"1", b"2"], None]
    assert popping.result(timeout=20) == b"3"


def test_a_pushed_value_ends_the_wait_of_one_caller():
    """torch's documentation of queues. Who has not waited yet finds a queue that is not empty."""
    table = Table()

    def waits(again: bool) -> bool:
        try:
            table.apply(protocol.StoreOp.WAIT, (b"q",), again)
        except WaitRequired:
            return True
        return False

    assert waits(again=False)
    table.apply(protocol.StoreOp.QUEUE_PUSH, (b"q", b"x"))
    assert [waits(again=True), waits(again=True), waits(again=False)] == [False, True, False]
    table.apply(protocol.StoreOp.SET, (b"q", b"a value, too"))
    assert not waits(again=True)
    table.apply(protocol.StoreOp.DELETE, (b"q",))
    table.apply(protocol.StoreOp.QUEUE_PUSH, (b"q", b"x"))
    assert not waits(again=True)


def test_pushed_values_end_the_waits_of_as_many_callers(
    under_test: StoreUnderTest, store: Store, other: Store, pool: ThreadPoolExecutor
):
    master = under_test.master
    waiting = [pool.submit(each.wait, ["q"], 30.0) for each in (store, other, store)]

    def blocked() -> int:
        if isinstance(master, TCPStore):
            pending = master._finalizer.peek()
            assert pending is not None
            return sum(len(clients) for clients in pending[2][1]._waiters.values())
        return len(master._shared.changes._waiters)  # type: ignore[attr-defined]

    for ended in (1, 2, 3):
        if isinstance(master, FileStore):
            store.queue_push("q", "x")
            continue
        await_true(lambda ended=ended: blocked() == 4 - ended)
        store.queue_push("q", "x")
        await_true(lambda ended=ended: sum(future.done() for future in waiting) == ended)
    for future in waiting:
        future.result(timeout=30)


def test_every_pushed_value_is_popped_once(store: Store, other: Store, pool: ThreadPoolExecutor):
    popped = [pool.submit(each.queue_pop, "q") for each in (store, other) * 3]
    for i in range(6):
        store.queue_push("q", str(i))
    assert sorted(future.result(timeout=20) for future in popped) == [b"%d" % i for i in range(6)]


def test_many_threads_on_one_handle(store: Store, pool: ThreadPoolExecutor):
    def work(i: int) -> None:
        for j in range(10):
            store.add("sum", 1)
            store.set(f"{i}/{j}", str(i * j))
            assert store.get(f"{i}/{j}") == b"%d" % (i * j)

    for future in [pool.submit(work, i) for i in range(8)]:
        future.result(timeout=30)
    assert store.add("sum", 0) == 80


def test_barrier(store: Store, other: Store, pool: ThreadPoolExecutor):
    store.barrier("alone", 1)
    first = pool.submit(store.barrier, "both", 2, 20.0)
    other.barrier("both", 2)
    first.result(timeout=20)
    with pytest.raises(StoreTimeoutError, match=r"barrier 'missing' of .*: 1 of 2 callers had come when"):
        store.barrier("missing", 2, 0.05)


def test_timeout_errors_have_the_missing_keys_and_the_store(store: Store, under_test: StoreUnderTest):
    store.set("there", "")
    with pytest.raises(StoreTimeoutError) as caught:
        store.wait(["there", "absent-1", "absent-2"], 0.05)
    message = str(caught.value)
    assert all(part in message for part in ("absent-1", "absent-2", "0.05 s"))
    assert "'there'" not in message
    if isinstance(under_test.master, TCPStore):
        assert f"127.0.0.1:{under_test.master.port}" in message
    if under_test.kind == "file":
        assert under_test.path in message
    assert isinstance(caught.value, TimeoutError)
    store.set_timeout(timedelta(seconds=0.02))
    assert store.timeout == timedelta(seconds=0.02)
    for waiting in (lambda: store.get("absent"), lambda: store.multi_get(["there", "absent"])):
        with pytest.raises(StoreTimeoutError, match="absent"):
            waiting()
    with pytest.raises(StoreTimeoutError, match="and 92 more"):
        store.wait([str(i) for i in range(100)])
    assert store.get("there") == b""


WRONG: list[tuple[Callable[[Any], object], type[Exception]]] = [
    (lambda s: s.set(1, "v"), DistTypeError),
    (lambda s: s.set(b"k", "v"), DistTypeError),
    (lambda s: s.set("k", 1), DistTypeError),
    (lambda s: s.set("k", None), DistTypeError),
    (lambda s: s.get(None), DistTypeError),
    (lambda s: s.add("k", "1"), DistTypeError),
    (lambda s: s.add("k", 1.5), DistTypeError),
    (lambda s: s.append("k", 1), DistTypeError),
    (lambda s: s.compare_set("k", 1, "v"), DistTypeError),
    (lambda s: s.check("k"), DistTypeError),
    (lambda s: s.check(5), DistTypeError),
    (lambda s: s.wait("k"), DistTypeError),
    (lambda s: s.wait(["k"], "soon"), DistTypeError),
    (lambda s: s.multi_get([1]), DistTypeError),
    (lambda s: s.multi_set("k", "v"), DistTypeError),
    (lambda s: s.multi_set(["k"], [3]), DistTypeError),
    (lambda s: s.queue_push("k", 1), DistTypeError),
    (lambda s: s.set_timeout("soon"), DistTypeError),
    (lambda s: s.multi_set(["a", "b"], ["1"]), DistArgumentError),
    (lambda s: s.set("k" * (protocol.MAX_KEY + 1), ""), DistArgumentError),
    (lambda s: s.add("k", 1 << 63), DistArgumentError),
    (lambda s: s.wait(["k"], -1.0), DistArgumentError),
    (lambda s: s.set_timeout(float("nan")), DistArgumentError),
]


@pytest.mark.parametrize(("call", "error"), WRONG)
def test_wrong_arguments_are_refused_and_nothing_changes(
    call: Callable[[Any], object], error: type[Exception]
):
    for store in (HashStore(), PrefixStore("p", HashStore())):
        with pytest.raises(error):
            call(store)
        assert store.num_keys() == 0


def test_a_number_is_not_signed_as_that_many_zeros():
    store = SignedStore(PrefixStore("p", HashStore()), b"key")
    for call in (lambda: store.set("k", 3), lambda: store.multi_set(["k"], [3])):
        with pytest.raises(DistTypeError):
            call()
    assert store.num_keys() == 0


def test_the_limit_on_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("UNICOLL_STORE_MAX_VALUE", "1000")
    for kind in KINDS:
        under_test = StoreUnderTest(kind, tmp_path)
        try:
            store = under_test.handle()
            store.set("k", b"x" * 1000)
            with pytest.raises(DistArgumentError, match="1000"):
                store.set("k", b"x" * 1001)
            with pytest.raises(DistStoreError, match="limit of 1000"):
                store.append("k", "y")
            assert store.get("k") == b"x" * 1000
        finally:
            under_test.close()


def test_closing_a_clone_and_a_handle(under_test: StoreUnderTest, pool: ThreadPoolExecutor):
    store = under_test.handle()
    with store.clone() as twin:
        twin.set_timeout(3)
        assert store.timeout == timedelta(seconds=20) or under_test.kind != "tcp"
        store.set("k", "v")
        assert twin.get("k") == b"v"
    assert store.get("k") == b"v"
    waiting = pool.submit(store.wait, ["never"], 15.0)
    time.sleep(0.05)
    store.close()
    store.close()
    with pytest.raises(DistStoreError, match="closed"):
        waiting.result(timeout=20)
    with pytest.raises(DistStoreError, match="closed"):
        store.get("k")
    assert under_test.master.get("k") == b"v"


# --- prefixes -----------------------------------------------------------------------------------------------------


def test_nested_prefixes():
    base = HashStore()
    inner = PrefixStore("a", base)
    outer = PrefixStore("b", inner)
    outer.set("k", "v")
    assert base.get("a/b/k") == b"v"
    assert inner.list_keys() == ["b/k"]
    assert outer.underlying_store is inner
    outer.set_timeout(7.0)
    assert base.timeout == timedelta(seconds=7)
    outer.close()
    assert outer.get("k") == b"v"
    assert "a" in repr(outer)


def test_a_prefix_store_needs_a_store():
    for arguments in (("p", {}), (1, HashStore())):
        with pytest.raises(DistTypeError):
            PrefixStore(*arguments)  # type: ignore[arg-type]


@pytest.mark.torch
def test_a_prefix_over_torchs_store():
    store = PrefixStore("p", pytest.importorskip("torch.distributed").HashStore())
    store.set("k", "v")
    assert [store.get("k"), store.try_get("k"), store.add("n", 2)] == [b"v", b"v", 2]
    store.wait(["k"], 1.0)


class Minimal(Store):
    """A third party's store with the abstract methods only."""

    def __init__(self) -> None:
        self.inner = HashStore()


for _name in Store.__abstractmethods__:
    setattr(Minimal, _name, lambda self, *args, _name=_name: getattr(self.inner, _name)(*args))
Minimal.__abstractmethods__ = frozenset()


def test_a_third_partys_store():
    with Minimal() as store:
        assert store.try_get("k") is None
        store.multi_set(["k", "l"], ["1", "2"])
        assert store.multi_get(["l", "k"]) == [b"2", b"1"]
        assert store.try_get("k") == b"1"
        store.barrier("b", 1)
        assert not store.has_extended_api()
        for call in (store.list_keys, store.clone, lambda: store.append("k", "v")):
            with pytest.raises(DistStoreError, match="Minimal has no"):
                call()
        for call in (
            lambda: store.queue_push("q", "v"),
            lambda: store.queue_pop("q"),
            lambda: store.queue_len("q"),
        ):
            with pytest.raises(DistStoreError, match="Minimal has no queue"):
                call()


# --- the names and meanings of torch ------------------------------------------------------------------------------


@pytest.mark.torch
def test_all_of_torchs_methods_exist():
    distributed = pytest.importorskip("torch.distributed")
    for ours in (Store, TCPStore, FileStore, HashStore, PrefixStore):
        theirs = getattr(distributed, ours.__name__)
        public = {name for name in dir(theirs) if not name.startswith("_")} - {"libuvBackend"}
        assert public <= set(dir(ours)), ours.__name__


@pytest.mark.torch
def test_the_results_are_those_of_torchs_hash_store():
    store = pytest.importorskip("torch.distributed").HashStore()
    store.set_timeout(timedelta(seconds=1))
    for name, arguments, expected in CALLS:
        if name in ("try_get", "list_keys") or isinstance(expected, Raises):
            continue
        if arguments[:1] in (("bytes",), ("array",), ("odd/key \udcff\n",)):
            continue  # torch takes text only
        plain = [int(a) if isinstance(a, np.integer) else a for a in arguments]
        assert getattr(store, name)(*plain) == expected, (name, arguments)


# --- HashStore, FileStore -----------------------------------------------------------------------------------------


def test_a_hash_store_is_not_shared_with_a_child():
    store = HashStore()
    store.set("k", "v")

    def refused() -> bool:
        try:
            store.get("k")
        except DistStoreError as error:
            return "process" in str(error)
        return False

    assert in_fork(refused) == 0


def test_the_file_is_private_and_removed_with_its_last_user(tmp_path: Path):
    path = tmp_path / "store"
    stores = [FileStore(str(path), 2) for _ in range(2)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    stores[0].set("k", "v")
    assert stores[1].get("k") == b"v"
    assert stores[0].num_keys() == 2
    stores[0].close()
    assert path.exists()
    stores[1].close()
    assert not path.exists()
    FileStore(str(path), 1).set("k", "v")  # garbage-collected
    assert not path.exists()


def test_a_file_without_a_number_of_users_is_kept(tmp_path: Path):
    path = str(tmp_path / "store")
    with FileStore(path) as store:
        assert store.try_get("k") is None
        store.set("k", "v")
    with FileStore(path) as store:
        assert store.get("k") == b"v"


def test_an_incomplete_record_is_ignored_and_truncated(tmp_path: Path):
    path = tmp_path / "store"
    whole = protocol.pack_request(protocol.StoreOp.SET, (b"torn", b"x" * 100))
    with FileStore(str(path)) as writer, FileStore(str(path)) as reader:
        for cut in (1, protocol.REQUEST.size, len(whole) - 1):
            writer.set("k", str(cut))
            with path.open("ab") as file:
                file.write(whole[:cut])
            assert reader.get("k") == b"%d" % cut
            assert not reader.check(["torn"])
            writer.set("after", str(cut))
            assert reader.get("after") == b"%d" % cut
    with FileStore(str(path)) as fresh:
        assert sorted(fresh.list_keys()) == ["after", "k"]


def test_an_incomplete_first_line_is_rewritten(tmp_path: Path):
    path = tmp_path / "store"
    path.write_bytes(b"unicoll")
    with FileStore(str(path)) as store:
        assert store.try_get("k") is None
        store.set("k", "v")
        assert store.get("k") == b"v"


@pytest.mark.parametrize("content", [b"root:x:0:0\n", b"unicoll file store 1\n" + b"\xff" * 100])
def test_another_programs_file_is_not_changed(tmp_path: Path, content: bytes):
    path = tmp_path / "store"
    path.write_bytes(content)
    with (
        FileStore(str(path)) as store,
        pytest.raises(DistStoreError, match=r"not a file of a FileStore|damaged"),
    ):
        store.set("k", "v")
    assert path.read_bytes() == content


def test_a_truncated_or_deleted_file_is_detected(tmp_path: Path):
    with FileStore(str(tmp_path / "store")) as store:
        store.set("k", "v")
        os.truncate(store.path, 30)
        with pytest.raises(DistStoreError, match="truncated"):
            store.get("k")
    with FileStore(str(tmp_path / "other")) as store:
        os.unlink(store.path)
        with pytest.raises(StoreTimeoutError, match="deleted or replaced"):
            store.wait(["k"], 0.05)


def test_a_file_removed_by_its_last_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "store")
    last = FileStore(path, 1)
    opened = file_log.open_log
    seen = []

    def open_late(found: str) -> file_log.FileLog:
        log = opened(found)
        last.close()  # between opening and counting the new user
        seen.append(log)
        return log

    monkeypatch.setattr(file_log, "open_log", open_late)
    with FileStore(path, 2) as store:
        assert len(seen) == 2
        store.set("k", "v")
        with FileStore(path, 2) as other:
            assert other.get("k") == b"v"
        assert os.path.exists(path)
    assert not os.path.exists(path)
    assert not file_log._logs


@pytest.mark.parametrize(
    ("where", "message"),
    [("absent/store", "cannot be opened"), (".", "cannot be opened"), ("fifo", "regular")],
)
def test_a_file_that_cannot_be_opened(tmp_path: Path, where: str, message: str):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DistStoreError, match=message):
        FileStore(str(tmp_path / where))


def test_a_full_disk_leaves_the_file_store_readable(tmp_path: Path):
    import resource

    store = FileStore(str(tmp_path / "store"))

    def fill() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        store.set("k", "v")
        for big in (b"x" * 20_000, b"x" * 9_990):
            try:
                store.set("big", big)
                return False
            except DistStoreError as error:
                if store.path not in str(error):
                    return False
        store.set("small", "again")
        return store.get("k") == b"v" and not store.check(["big"])

    try:
        assert in_fork(fill) == 0
        assert store.multi_get(["k", "small"]) == [b"v", b"again"]
    finally:
        store.close()


def test_a_file_store_works_in_a_forked_child(tmp_path: Path):
    path = tmp_path / "store"
    store = FileStore(str(path), 1)
    store.set("k", "v")

    def use() -> bool:
        store.set("from child", store.get("k"))
        store.close()
        return True

    assert in_fork(use) == 0
    assert store.get("from child") == b"v"
    store.close()
    assert not path.exists()


def test_processes_add_up_exactly(under_test: StoreUnderTest):
    if under_test.kind == "hash":
        pytest.skip("a HashStore has one process")
    store = under_test.handle()

    def work() -> bool:
        for _ in range(50):
            store.add("sum", 1)
            store.append("text", "x")
        return True

    pids = [fork(work) for _ in range(4)]
    assert [exit_code(pid) for pid in pids] == [0] * 4
    assert store.add("sum", 0) == 200
    assert store.get("text") == b"x" * 200


class _Close:
    """MPI's message with which a process closes its store over MPI."""

    data = mpi_store._ENVELOPE.pack(mpi_store._KIND_CLOSE, 0)

    def Recv(self, buffer: list[Any]) -> None:
        buffer[0][:] = self.data


def test_a_store_over_mpi_receives_all_messages_before_mpi_is_finalised() -> None:
    """The other processes have sent them by then, and MPI has not received them yet."""
    stopping, polls, received = threading.Event(), 0, []

    def improbe(source: int, tag: int, status: Any) -> _Close | None:
        nonlocal polls
        polls += stopping.is_set()
        if polls != 5:
            return None
        received.append(source)
        return _Close()

    status = SimpleNamespace(Get_count=lambda kind: len(_Close.data), Get_source=lambda: 1)
    mpi: Any = SimpleNamespace(
        MPI=SimpleNamespace(ANY_SOURCE=-1, BYTE=None, Status=lambda: status),
        call=lambda function, *arguments: function(*arguments),
        before_end=[],
        lost={},
        size=2,
    )
    server = mpi_store._Server(mpi, SimpleNamespace(Improbe=improbe))
    server._clients[1] = 1
    server.open()
    server.close()
    stopping.set()
    mpi.before_end[0]()
    assert received == [-1]
    assert server._thread.ident is None


def test_a_store_over_mpi_is_closed_after_rank_0_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI does not complete the message to it."""
    monkeypatch.setattr(mpi_store, "_CLOSE_S", 0.1)
    monkeypatch.setattr(mpi_store, "_unsent", [])
    is_alive = True
    mpi: Any = SimpleNamespace(
        MPI=SimpleNamespace(BYTE=None, Is_finalized=lambda: False),
        call=lambda function, *arguments: function(*arguments),
        rank=1,
    )
    request = SimpleNamespace(Test=lambda: is_alive)
    store = mpi_store.MPIStore(mpi, SimpleNamespace(Isend=lambda *arguments: request), None)
    is_alive = False
    store.close()
    assert [kept for kept, _ in mpi_store._unsent] == [request]
