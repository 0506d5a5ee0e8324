"""Backends of third parties: registered, installed with an entry point, chosen by name and by device."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.conformance.counting import CountingBackend
from tests.support import worker
from tests.support.outcomes import CallOutcome, outcome_of
from tests.support.ports import listening_ports
from tests.support.programs import python
from tests.support.ranks import ROOT, ProcessJob, end_cleanly, joined
from unicoll.backend import Backend, Call, Caps, Context
from unicoll.backend import Backend as BackendBase
from unicoll.calls.work import Completion, HostCompletion
from unicoll.errors import BackendUnavailableError, DistArgumentError
from unicoll.group import backend_choice, registry
from unicoll.net.stores import Store
from unicoll.testing.ranks import Pool, RanksFailed


class ThroughStore(Backend):
    name = "through_store"
    caps = Caps(native=frozenset({"all_gather"}))

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        assert timeout == timedelta(minutes=30)
        self._store, self._rank, self._size = store, rank, world_size
        self._calls = 0

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        for call in calls:
            self._calls += 1
            self._store.set(f"{self._calls}/{self._rank}", call.inputs[0].flat.tobytes())
            for rank, output in enumerate(call.outputs):
                found = self._store.get(f"{self._calls}/{rank}")
                output.flat[:] = np.frombuffer(found, output.flat.dtype)
            call.write_back()
        done = HostCompletion(tuple(calls))
        done.finish()
        return done

    def abort(self, error: Exception) -> None: ...

    def close(self) -> None: ...


def make(store: Store, rank: int, world_size: int, timeout: timedelta) -> Backend:
    return ThroughStore(store, rank, world_size, timeout)


def by_options(options: Any, pg_options: Any) -> ThroughStore:
    assert pg_options == "mine"
    assert options.global_ranks_in_group == [0, 1]
    return ThroughStore(options.store, options.group_rank, options.group_size, options.timeout)


def sums() -> list[float]:
    """An all_reduce on the default group, on a new one and on one of its parts, each made by a function."""
    dist.Backend.register_backend("by_function", make)
    dist.Backend.register_backend("by_options", by_options, extended_api=True)
    dist.init_process_group("by_function")
    found = []
    groups = [
        dist.group.WORLD,
        dist.new_group([1, 0], sort_ranks=False),
        dist.split_group(split_ranks=[[0, 1]]),
    ]
    for group in [*groups, dist.new_group(backend="by_options", pg_options="mine")]:
        x = np.full(3, dist.get_rank() + 1.0)
        dist.all_reduce(x, group=group)
        found.append(float(x[0]))
    assert dist.get_backend() == "by_function"
    assert dist.Backend.backend_type_map["by_function"] is dist.ProcessGroup.BackendType.CUSTOM
    dist.destroy_process_group()
    return found


# --- tests ------------------------------------------------------------------------------------------

LARGE = 1 << 23
"""Elements of a message that the kernel does not buffer."""


def exchange() -> None:
    """An all_gather, which connects all ranks."""
    found = [np.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(found, np.full(1, float(dist.get_rank())))
    assert [float(x[0]) for x in found] == list(range(len(found)))


def send_to(peer: int, count: int, timeout: float) -> CallOutcome:
    return outcome_of(lambda: dist.send(np.ones(count), peer, timeout=timeout))


def receive_from(peer: int | None, timeout: float) -> CallOutcome:
    return outcome_of(lambda: dist.recv(np.ones(4), peer, timeout=timeout))


# --- tests ------------------------------------------------------------------------------------------

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _registry_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_registered_devices", dict(registry._registered_devices))
    monkeypatch.setattr(dist.Backend, "backend_list", list(dist.Backend.backend_list))
    monkeypatch.setattr(dist.Backend, "backend_type_map", dict(dist.Backend.backend_type_map))
    before = set(vars(dist.Backend))
    yield
    for name in set(vars(dist.Backend)) - before:
        delattr(dist.Backend, name)


class Broken(CountingBackend):
    """A backend that is there and cannot be used."""

    name = "broken"

    @classmethod
    def availability(cls) -> str | None:
        return "its cable is not plugged in"


class Elsewhere(CountingBackend):
    """A backend for arrays of a device that nobody else serves."""

    name = "elsewhere"
    caps = Caps(frozenset({"moon"}), CountingBackend.caps.native)


class Spoken(CountingBackend):
    """A backend that says what it moves data with."""

    name = "spoken"

    @classmethod
    def library(cls) -> str:
        return "libspoken 1.2 (/opt/spoken)"


class UnknownLibrary(CountingBackend):
    """A backend that cannot say what it moves data with."""

    name = "unknown_library"

    @classmethod
    def library(cls) -> str:
        raise ValueError("no version")


def make_counting() -> type[BackendBase]:
    return CountingBackend


# --- names ---------------------------------------------------------------------------------------------------------


def test_a_registered_class_is_known_by_its_name_in_any_case() -> None:
    dist.Backend.register_backend("Counting", CountingBackend)
    assert "counting" in registry.backend_names()
    assert "counting" in dist.Backend.backend_list
    assert dist.Backend.COUNTING == "counting"  # type: ignore[attr-defined]
    assert dist.Backend("COUNTING") == "counting"
    assert dist.is_backend_available("counting")
    (choice,) = backend_choice.choose("COUNTING")
    assert (choice.device, choice.cls) == ("cpu", CountingBackend)


@pytest.mark.parametrize("func", [make_counting, lambda: CountingBackend])
def test_a_factory_is_not_called_before_the_backend_is_asked_for(
    func: Callable[[], type[BackendBase]],
) -> None:
    calls = []

    def factory() -> type[BackendBase]:
        calls.append(1)
        return func()

    dist.Backend.register_backend("counting", factory, extended_api=True, devices=["cpu"])
    assert calls == []
    assert backend_choice.choose("cpu:counting")[0].cls is CountingBackend
    assert calls


@pytest.mark.parametrize(
    ("name", "func", "says"),
    [
        ("gloo", CountingBackend, "there is a backend 'gloo' already"),
        ("NCCL", CountingBackend, "there is a backend 'nccl' already"),
        ("with space", CountingBackend, "not a valid name of a backend"),
        ("1st", CountingBackend, "not a valid name of a backend"),
        ("counting", 42, "neither a Backend class nor a function"),
    ],
)
def test_bad_registrations_are_refused(name: str, func: Any, says: str) -> None:
    before = registry.backend_names()
    with pytest.raises(DistArgumentError, match=says):
        dist.Backend.register_backend(name, func)
    assert registry.backend_names() == before


def test_a_name_is_taken_once() -> None:
    dist.Backend.register_backend("counting", CountingBackend)
    with pytest.raises(DistArgumentError, match="there is a backend 'counting' already"):
        dist.Backend.register_backend("COUNTING", Broken)


# --- devices -------------------------------------------------------------------------------------------------------


def test_devices_come_from_the_class_unless_they_are_given() -> None:
    dist.Backend.register_backend("elsewhere", Elsewhere)
    dist.Backend.register_backend("both", CountingBackend, devices=["cpu", "moon"])
    assert [c.device for c in backend_choice.choose("elsewhere")] == ["moon"]
    assert [c.device for c in backend_choice.choose("both")] == ["cpu", "moon"]
    assert dist.get_default_backend_for_device("moon:0") == "both"
    assert dist.get_default_backend_for_device("cpu") == "gloo"  # the built-in ones stay the default
    with pytest.raises(BackendUnavailableError, match="'elsewhere' does not serve cpu arrays"):
        backend_choice.choose("cpu:elsewhere")


def test_one_backend_for_each_device() -> None:
    dist.Backend.register_backend("elsewhere", Elsewhere, devices="moon")
    choices = backend_choice.choose("cpu:gloo,moon:elsewhere")
    assert [(c.device, c.name) for c in choices] == [("cpu", "gloo"), ("moon", "elsewhere")]
    with pytest.raises(DistArgumentError, match="two backends of cpu arrays"):
        backend_choice.choose("cpu:gloo,cpu:gloo")


def test_a_backend_that_cannot_be_created_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no cable")

    dist.Backend.register_backend("counting", CountingBackend)
    dist.Backend.register_backend("elsewhere", Elsewhere)
    dist.init_process_group("counting", rank=0, world_size=1)
    try:
        monkeypatch.setattr(Elsewhere, "create", fail)
        before = CountingBackend.closed
        with pytest.raises(OSError, match="no cable"):
            dist.new_group(backend="cpu:counting,moon:elsewhere")
        assert CountingBackend.closed == before + 1
    finally:
        dist.destroy_process_group()


# --- reasons -------------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    dist.Backend.register_backend("counting", CountingBackend)
    with pytest.raises(BackendUnavailableError) as caught:
        dist.init_process_group("glooo", rank=0, world_size=1)
    for name in ("glooo", "gloo", "mpi", "nccl", "counting"):
        assert f"{name}" in str(caught.value)
    assert not dist.is_initialized()


def test_an_unavailable_backend_is_answered_with_its_reason() -> None:
    dist.Backend.register_backend("broken", Broken)
    assert not dist.is_backend_available("broken")
    with pytest.raises(BackendUnavailableError, match="backend 'broken': its cable is not plugged in"):
        dist.init_process_group("broken", rank=0, world_size=1)
    (line,) = [line for line in dist.explain().splitlines() if "broken" in line]
    assert line.startswith("backend 'broken'")
    assert line.endswith("its cable is not plugged in")


def test_a_factory_that_fails_is_a_reason_too() -> None:
    def factory() -> type[BackendBase]:
        raise ImportError("libwarp.so is not there")

    dist.Backend.register_backend("warp", factory)
    assert not dist.is_backend_available("warp")
    with pytest.raises(BackendUnavailableError, match=r"'?warp'?.*libwarp.so is not there"):
        backend_choice.choose("warp")


def test_every_candidate_that_was_tried_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from gloo_fallback.backend import GlooBackend

    monkeypatch.setattr(GlooBackend, "availability", lambda: "sockets are forbidden here")
    with pytest.raises(BackendUnavailableError) as caught:
        backend_choice.choose(None, started_by_mpi=True)
    mpi = registry.reason_against("mpi")
    assert "backend 'gloo': sockets are forbidden here" in str(caught.value)
    if mpi is not None:
        assert mpi in str(caught.value)


@pytest.mark.skipif(dist.is_nccl_available(), reason="NCCL can be used here")
def test_where_nccl_cannot_be_used_it_is_refused_with_its_reason() -> None:
    reason = registry.reason_against("nccl")
    assert reason
    with pytest.raises(BackendUnavailableError) as caught:
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    assert reason in str(caught.value)
    assert "nccl" in reason
    assert not dist.is_initialized()


@pytest.mark.parametrize("spec", ["cpu:", ":gloo", "cpu:gloo,", "cpu:gloo,cuda"])
def test_what_is_no_specification_is_refused(spec: str) -> None:
    with pytest.raises(DistArgumentError, match="not of the form"):
        backend_choice.choose(spec)


# --- at work -------------------------------------------------------------------------------------------------------


def installed(folder: Path, value: str) -> Path:
    """What pip would leave in site-packages for a distribution with one backend."""
    info = folder / "counting_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[unicoll.backends]\ncounting = {value}\n")
    (folder / "counting.py").write_text((HERE / "counting.py").read_text())
    return folder


@pytest.mark.every(n=4)
@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("registered", ""),
        ("installed", "counting:CountingBackend"),
        ("installed", "counting:backend_class"),
    ],
)
def test_every_operation_through_a_third_partys_backend(tmp_path: Path, how: str, value: str) -> None:
    path = [str(ROOT), str(installed(tmp_path, value)) if how == "installed" else str(HERE)]
    words = ["-W", "error", "-m", "unicoll.run", "--nproc-per-node", "3", "--no-prefix"]
    ended = python(*words, HERE / "counting_program.py", how, PYTHONPATH=":".join(path))
    assert (ended.returncode, ended.stderr) == (0, "")
    reports = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(reports) == 3
    for report in reports:
        assert report["backend"] == "counting"
        assert report["config"] == "cpu:counting"
        assert report["counts"] == report["expected"]
        assert "backend counting: backend='counting'" in report["explained"]
        assert report["closed"] == report["created"] == 2


BAD_ARITHMETIC = """
from counting import CountingBackend


class Off(CountingBackend):
    name = "off"

    def run(self, call):
        super().run(call)
        if call.op.name == "all_reduce" and call.dtype.name == "int16":
            call.outputs[0].flat[:] += 1
            call.write_back()
"""
SUITE = """
from unicoll.testing import Conformance


class TestBackend(Conformance):
    backend = "counting"
    large_sizes = coalesced_sizes = (2,)
"""


def suite(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What somebody runs who has nothing but the installed packages."""
    words = ["-W", "error", "-m", *arguments, "-q", "-p", "no:cacheprovider"]
    return python(*words, cwd=folder, PYTHONPATH=f"{ROOT}:{folder}")


def test_a_group_is_split_after_the_calls_that_are_queued() -> None:
    gate, done = threading.Event(), []

    class Splitting(CountingBackend):
        name = "splitting"
        caps = Caps(native=frozenset({"all_reduce", "broadcast"}))

        def run(self, call: Call) -> None:
            assert gate.wait(30)
            super().run(call)
            done.append(call.op.name)

        def split(self, context: Context | None) -> BackendBase | None:
            done.append("split")
            return super().split(context)

    dist.Backend.register_backend("splitting", Splitting)
    dist.init_process_group("splitting", rank=0, world_size=1)
    works = [dist.all_reduce(np.ones(1), async_op=True) for _ in range(2)]
    threading.Timer(0.2, gate.set).start()
    dist.new_group()
    assert done == ["all_reduce", "all_reduce", "split"]
    assert all(work is not None and work.wait() for work in works)
    dist.destroy_process_group()


def test_the_suite_passes_an_installed_backend(tmp_path: Path) -> None:
    installed(tmp_path, "counting:CountingBackend")
    (tmp_path / "test_counting.py").write_text(SUITE)
    done = suite(tmp_path, "pytest", "test_counting.py", "-k", "messages or coalesced")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def write_pipes(folder: Path) -> None:
    """The module of the documentation's backend, which sends and receives alone."""
    page = (ROOT / "docs" / "writing-a-backend.md").read_text()
    (code,) = re.findall(r"^```python file=pipes.py\n(.*?)^```$", page, re.M | re.S)
    (folder / "pipes.py").write_text(code)


@pytest.fixture
def pipes_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessJob]:
    """Three ranks that have joined with the documentation's backend."""
    write_pipes(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with joined(3, prepare=(worker.use, "pipes", ["pipes"])) as job:
        yield job


@pytest.mark.every(n=2)
@pytest.mark.parametrize("connected", [True, False])
def test_messages_to_and_from_a_stopped_rank_end_at_their_deadline(
    pipes_job: ProcessJob, connected: bool
) -> None:
    if connected:
        pipes_job.call(exchange)
        pipes_job.results()
    pipes_job.signal(2, signal.SIGSTOP)
    pipes_job.call(receive_from, 2, 1.0, ranks=[1])
    pipes_job.call(send_to, 2, LARGE, 2.0, ranks=[0])
    for outcome in pipes_job.collect(60, [0, 1]):
        failure, seconds = outcome.value
        assert failure.type == "OperationTimeoutError"
        assert seconds >= (2.0 if outcome.rank == 0 else 1.0) - 0.1


@pytest.mark.parametrize("peer", [2, None])
def test_messages_to_and_from_a_dead_rank_name_it(pipes_job: ProcessJob, peer: int | None) -> None:
    pipes_job.call(exchange)
    pipes_job.results()
    pipes_job.call(receive_from, peer, 60.0, ranks=[1])
    pipes_job.call(send_to, 2, LARGE, 60.0, ranks=[0])
    pipes_job.signal(2, signal.SIGKILL)
    for outcome in pipes_job.collect(30, [0, 1]):
        failure, _ = outcome.value
        assert failure.type == "RankLostError"
        assert f"pid {pipes_job.pids[2]}" in failure.message


def test_a_stranger_does_not_disturb_ranks_that_connect(pipes_job: ProcessJob) -> None:
    """It connects to every port, and says nothing."""
    pipes_job.call(listening_ports)
    addresses = {address for found in pipes_job.results() for address in found}
    assert len(addresses) >= pipes_job.size
    with ExitStack() as strangers:
        for address in addresses:
            strangers.enter_context(socket.create_connection(address))
        pipes_job.call(exchange)
        pipes_job.results()
        end_cleanly(pipes_job)


def test_the_suite_passes_the_backend_of_the_documentation(tmp_path: Path) -> None:
    """All tests of the suite, with a sample of the operations, for a backend that sends and receives alone."""
    write_pipes(tmp_path)
    info = tmp_path / "pipes_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pipes-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unicoll.backends]\npipes = pipes:Pipes\n")
    few = "messages or coalesced or barrier or same_bits or other_kinds or refuses or (every_type and all_to_all)"
    done = suite(tmp_path, "unicoll.testing", "pipes", "-k", few)
    assert done.returncode == 0, done.stdout


@pytest.mark.every(n=0)
def test_the_suite_finds_what_a_backend_does_wrong(tmp_path: Path) -> None:
    installed(tmp_path, "counting:CountingBackend")
    with (tmp_path / "counting_backend-1.0.dist-info" / "entry_points.txt").open("a") as entries:
        entries.write("off = off:Off\n")
    (tmp_path / "off.py").write_text(BAD_ARITHMETIC)
    done = suite(
        tmp_path, "unicoll.testing", "off", "-k", "every_type_and_reduction and (all_reduce or broadcast)"
    )
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "test_every_type_and_reduction[all_reduce-" in done.stdout
    wrong = [line for line in done.stdout.splitlines() if "rank 0: Case(" in line]
    assert wrong
    assert all("dtype='int16'" in line and "elements wrong" in line for line in wrong)
    assert "UNICOLL_TEST_SEED=" in done.stdout


@pytest.mark.every(n=3)
@pytest.mark.parametrize(
    ("function", "args", "says"),
    [
        (divmod, (1, 0), "rank 1: Traceback .*ZeroDivisionError"),
        (os._exit, (3,), "rank 1: died.*rank 1: exit code 3"),
        (time.sleep, (60,), r"ranks \[0, 1\] did not end in 1 s.*most recent call first.*in _work"),
        (os.pipe, (), "by rank: .*fd pipe"),
        (os.write, (2, b"a word"), "a word"),
    ],
)
def test_what_the_suite_reports_of_its_ranks(function: Callable[..., Any], args: Any, says: str) -> None:
    pool = Pool(2, "gloo")
    try:
        with pytest.raises(RanksFailed, match=f"(?s){says}"):
            pool.run(function, *args, timeout=1.0 if function is time.sleep else 60.0)
            pool.close()
        assert pool.run(os.getpid)[0] != os.getpid()  # new ranks
    finally:
        pool.close()


def test_a_function_of_torchs_four_arguments_makes_the_backend_of_each_group() -> None:
    with ProcessJob(2, join="env") as job:
        job.call(sums)
        assert job.results() == [[3.0] * 4] * 2
        end_cleanly(job)


def test_what_counts_as_torchs_function() -> None:
    """One that can be called with its arguments; a factory of a class cannot."""

    def with_defaults(store: Any = None, rank: int = 0, size: int = 0, timeout: Any = None) -> Any: ...

    for name, func, extended in (
        ("some", lambda *args: None, False),
        ("defaults", with_defaults, False),
        ("two", lambda options, group_options: None, True),
    ):
        dist.Backend.register_backend(name, func, extended)
        assert registry.load(name) is registry.load(name)
        assert registry.load(name).name == name
    dist.Backend.register_backend("factory", lambda unused=None: CountingBackend)
    assert registry.load("factory") is CountingBackend


def test_a_function_that_makes_no_backend() -> None:
    dist.Backend.register_backend("wrong", lambda store, rank, world_size, timeout: timeout)
    with pytest.raises(BackendUnavailableError, match=r"backend 'wrong': .* returned .*timedelta"):
        dist.init_process_group("wrong", rank=0, world_size=1)
    assert not dist.is_initialized()


class Few(CountingBackend):
    """A backend with one operation."""

    name = "few"
    caps = Caps(frozenset({"cpu"}), frozenset({"all_reduce"}))


def test_an_operation_that_a_backend_lacks_is_refused_before_it_is_called() -> None:
    dist.Backend.register_backend("few", Few)
    dist.init_process_group("few", rank=0, world_size=1)
    try:
        x = np.ones(3)
        dist.all_reduce(x)
        for call in (dist.barrier, lambda: dist.broadcast(x, 0), lambda: dist.all_gather([x], x)):
            with pytest.raises(BackendUnavailableError, match="backend few does not have this operation"):
                call()
        dist.all_reduce(x)
    finally:
        dist.destroy_process_group()


def test_an_installed_backend_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed(tmp_path, "counting_which_is_not_there:Backend")))
    assert "counting" in registry.backend_names()
    with pytest.raises(BackendUnavailableError, match=r"counting.*No module named"):
        backend_choice.choose("counting")


# --- explain -------------------------------------------------------------------------------------------------------


def test_explain_says_of_each_backend_what_it_uses_or_why_it_cannot_be_used() -> None:
    for cls in (CountingBackend, Broken, Spoken, UnknownLibrary):
        dist.Backend.register_backend(cls.name, cls)
    said = dist.explain().splitlines()
    assert "backend 'counting': available" in said
    assert "backend 'broken': its cable is not plugged in" in said
    assert "backend 'spoken': available: libspoken 1.2 (/opt/spoken)" in said
    assert "backend 'unknown_library': available: ValueError: no version" in said
