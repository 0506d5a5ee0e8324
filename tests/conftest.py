"""Fixtures that check every test for leaked processes, threads, descriptors and files in shared memory."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [p for p in (str(ROOT),) if p not in sys.path]

from tests.support import forkserver, ranks, selection  # noqa: E402 - needs the path
from tests.support.hosts import built_hosts, hosts  # noqa: E402, F401 - fixtures
from unicoll.testing import sampling  # noqa: E402
from unicoll.testing.ranks import leftovers, snapshot  # noqa: E402

with suppress(ImportError):  # it is not in all environments
    from hypothesis import HealthCheck, settings

    # How long an example takes depends on the machine's load; in the first one modules may be imported.
    common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("long", common, max_examples=300)
    settings.register_profile("short", common, max_examples=30, derandomize=True)  # the same ones every time
    settings.load_profile("short" if selection.is_short() else "long")

resource_tracker.ensure_running()  # it stays until the end of the run, and holds a pipe

_PATIENCE_S = 8.0
_SHARED_MEMORY = Path("/dev/shm")


def _mount_own_shared_memory() -> None:
    """Give this process and its children a /dev/shm of their own; nothing happens if this user may not mount."""
    new_mounts, recursive, private = 0x20000, 0x4000, 0x40000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_mounts) == 0 and libc.mount(b"none", b"/", None, recursive | private, None) == 0:
        libc.mount(b"tmpfs", bytes(_SHARED_MEMORY), b"tmpfs", 0, b"mode=1777")


def pytest_configure(config: pytest.Config) -> None:
    _mount_own_shared_memory()
    ranks.sample_seed()  # the same in all processes of pytest-xdist, which start later
    config.addinivalue_line(
        "markers", "every(n=...): the short run executes every nth case of this test, with n=0 none"
    )


def pytest_report_header() -> str:
    return (
        f"unicoll: samples are selected by {sampling.SEED_VARIABLE}={ranks.sample_seed()};"
        f" {sampling.FULL_VARIABLE}=1 runs all cases"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are not in this run's sample."""
    if sampling.wants_all(config.args):
        return
    seed = selection.table_seed()
    kept = selection.of_this_run([item for item in items if selection.is_drawn(item, seed)])
    names = {item.nodeid for item in kept}
    if left_out := [item for item in items if item.nodeid not in names]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish() -> None:
    """Exclude existing objects from the garbage collection after every test."""
    _exclude_from_collection()


_modules = 0


def _exclude_from_collection() -> None:
    """Exclude existing objects from the garbage collection: with torch's, one takes 60 ms."""
    global _modules
    _modules = len(sys.modules)
    gc.collect()
    gc.freeze()


def children() -> set[int]:
    """Direct children of this process and of its fork servers, except those that stay until the end."""
    found: set[int] = set()
    for parent in ("self", *forkserver.running()):
        for task in Path(f"/proc/{parent}/task").iterdir():
            try:
                found |= {int(pid) for pid in (task / "children").read_text().split()}
            except FileNotFoundError:  # the thread has ended
                continue
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    return found - {getattr(getattr(tracker, "_resource_tracker", None), "_pid", None)} - ranks.pooled()[0]


def shared_memory() -> set[str]:
    """Files of /dev/shm, except those of open pools and semaphores of other programs."""
    if not _SHARED_MEMORY.is_dir():
        return set()
    there = {p.name for p in _SHARED_MEMORY.iterdir() if not p.name.startswith("sem.mp-")}
    return there - ranks.pooled_memory()


def _is_of_others(name: str) -> bool:
    """True if only processes of another test run, not descendants of this one, map a file of /dev/shm."""
    file = str(_SHARED_MEMORY / name)
    parents: dict[int, int] = {}
    users = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if file in (process / "maps").read_text():
                users.add(int(process.name))
        except OSError:  # it has ended or belongs to another user
            continue
    own = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in own} - own:
        own |= more
    return bool(users) and not users & own


def _new(before: set[object], now: Callable[[], set[object]]) -> set[object]:
    deadline = time.monotonic() + _PATIENCE_S
    while (left := now() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


class _Watch:
    """Resources at the start of a test, for comparison at its end."""

    def __init__(self) -> None:
        self.children: set[object] = set(children())
        self.files: set[object] = set(shared_memory())
        self.own = snapshot()
        self.pooled = ranks.pooled()[1]

    def complaints(self) -> list[str]:
        gc.collect()  # objects in reference cycles are not leaks
        found = []
        if left := _new(self.children, lambda: set(children())):
            found.append(f"processes {sorted(map(str, left))} are still running")
        known = self.files
        if left := _new(known, lambda: {f for f in shared_memory() - known if not _is_of_others(str(f))}):
            found.append(f"files {sorted(map(str, left))} are left in /dev/shm")
        more = ranks.pooled()[1] - self.pooled
        if leaks := leftovers([*self.own, *more.elements()], matters=_matters):
            found.append(f"not released: {', '.join(leaks)}")
        return found


def _matters(word: str) -> bool:
    if word.startswith("thread "):
        return True
    return any(
        kind in word for kind in ("socket", "pipe", "eventfd", "eventpoll", "memfd", "pidfd", "deleted")
    )


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing() -> Iterator[None]:
    watch = _Watch()
    yield
    complaints = watch.complaints()
    gc.freeze()  # as _exclude_from_collection
    assert not complaints, f"after the last test of this module: {'; '.join(complaints)}"


@pytest.fixture(autouse=True)
def _test_leaves_nothing() -> Iterator[None]:
    watch = _Watch()
    yield
    complaints = watch.complaints()
    if len(sys.modules) > _modules + 100:
        _exclude_from_collection()
    assert not complaints, "; ".join(complaints)


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], ranks.Pool]]:
    """``pool(n).run(fn, ...)``: calls on n ranks that stay joined for all tests of a module."""
    with ranks.pools() as made:
        yield made


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of this run's random values; it is printed at the start of the run."""
    return ranks.sample_seed()


@pytest.fixture
def port() -> Iterator[int]:
    with ranks.reserved_port() as number:
        yield number
