"""``unicoll.spawn``."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launcher.launching import BOUND, LaunchFolder, all_gone, environment, wait_until
from unicoll.api.spawn import ProcessContext, SpawnError, spawn
from unicoll.errors import DistArgumentError, DistError, DistTypeError, RankLostError


def write_environment(rank: int, folder: str, word: str) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"]
    shared = [os.environ[name] for name in ("UNICOLL_STORE", "UNICOLL_SECRET", "MASTER_ADDR", "MASTER_PORT")]
    assert all(shared)
    Path(folder, str(rank)).write_text(" ".join([word, *(os.environ.get(name, "-") for name in names)]))


def fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1's own")
    time.sleep(600)


def die_on_rank_1(rank: int, how: str) -> None:
    if rank == 1:
        if how == "exit":
            os._exit(5)
        if how == "sys.exit":
            sys.exit(6)
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(600)


def fail_in_consequence(rank: int) -> None:
    if rank == 0:
        raise RankLostError("rank 1 is gone", rank=1)
    time.sleep(0.3)
    raise KeyError("the cause")


def die_one_after_the_other(rank: int, folder: str) -> None:
    if rank == 0:
        wait_until(
            lambda: os.path.exists(f"{folder}/pid") and all_gone([int(Path(folder, "pid").read_text())])
        )
        time.sleep(1)  # the parent detects the first end
    else:
        Path(folder, "new").write_text(str(os.getpid()))
        os.rename(f"{folder}/new", f"{folder}/pid")
    os.kill(os.getpid(), signal.SIGKILL)


def fail_without_ending(rank: int) -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise ValueError("and yet it runs")


def wait_for_file(rank: int, path: str) -> None:
    wait_until(lambda: os.path.exists(path))


def count_in_store(rank: int) -> None:
    from unicoll.net.stores import TCPStore
    from unicoll.net.wire.secret import find_secret

    host, _, port = os.environ["UNICOLL_STORE"].rpartition(":")
    store = TCPStore(host, int(port), is_master=False, secret=find_secret())
    store.add("count", 1)
    while store.add("count", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    store.close()


def give(rank: int, values: list[Any]) -> Any:
    return values[rank]


def give_array(rank: int, size: int) -> dict[str, Any]:
    return {"rank": rank, "array": np.full(size, rank, np.uint8)}


def give_or_fail(rank: int, how: str) -> Any:
    if rank == 1:
        if how == "raises":
            raise ValueError("rank 1's own")
        return threading.Lock() if how == "cannot be pickled" else OfOneProcess()
    return np.ones(LARGE)


def give_and_fork(rank: int, forked_returns: bool) -> str:
    forked = os.fork()
    if forked == 0:
        if forked_returns:
            return "of the forked process"
        time.sleep(600)
    if forked_returns:
        os.waitpid(forked, 0)
    return f"of rank {rank}"


def exit_without_failure(rank: int) -> int:
    sys.exit(0)


class OfOneProcess:
    """Can be pickled, but not unpickled in another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return of_process, (os.getpid(),)


def of_process(pid: int) -> OfOneProcess:
    if os.getpid() != pid:
        raise ValueError("it is of another process")
    return OfOneProcess()


LARGE = 5 << 20
"""Bytes of a result: much more than a pipe holds."""


def wait_for_a_part(context: ProcessContext, rank: int) -> None:
    """Return when a rank has begun to send its result."""
    assert wait([context._receivers[rank].fileno()], BOUND)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_every_rank_runs_with_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    assert spawn(write_environment, (str(tmp_path), "word"), nprocs=3) == [None] * 3
    assert dict(os.environ) == before
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {
        str(r): f"word {r} {r} 3 3 1" for r in range(3)
    }
    spawn(write_environment, (str(tmp_path), "one"))  # one process is the default
    assert [f.name for f in tmp_path.iterdir() if f.read_text().startswith("one")] == ["0"]


def test_the_processes_share_a_store() -> None:
    assert spawn(count_in_store, nprocs=3) == [None] * 3


def test_results_are_a_list_by_rank() -> None:
    values = ["text", None, {"a": [1, 2.5]}]
    assert spawn(give, (values,), nprocs=3) == values
    assert spawn(exit_without_failure) == [None]
    results = spawn(give_array, (LARGE,), nprocs=2)
    assert [result["rank"] for result in results] == [0, 1]
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result["array"], np.full(LARGE, rank, np.uint8))


@pytest.mark.parametrize(
    ("how", "exitcode", "text"),
    [
        (
            "cannot be pickled",
            1,
            "DistTypeError: spawn: rank 1's result, of type _thread.lock, cannot be pickled: TypeError: ",
        ),
        (
            "cannot be unpickled",
            0,
            rf"its result, of type {__name__}.OfOneProcess, cannot be unpickled: ValueError: it is of",
        ),
    ],
)
def test_a_result_that_cannot_be_sent_is_a_failure(how: str, exitcode: int, text: str) -> None:
    with pytest.raises(SpawnError, match=text) as caught:
        spawn(give_or_fail, (how,), nprocs=2)
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    assert str(caught.value).startswith(f"process 1 (pid {caught.value.pid})")


def test_results_without_join() -> None:
    context = spawn(give_array, (LARGE,), nprocs=2, join=False)
    wait_for_a_part(context, 1)
    assert context.join(timeout=0) is False
    assert context.results == []
    assert context.join(timeout=BOUND) is True
    assert [(result["rank"], result["array"].sum()) for result in context.results] == [(0, 0), (1, LARGE)]


def test_a_process_is_stopped_while_it_sends() -> None:
    context = spawn(give_array, (LARGE,), join=False)
    wait_for_a_part(context, 0)
    os.kill(context.pids()[0], signal.SIGSTOP)
    assert context.join(timeout=0.5) is False
    os.kill(context.pids()[0], signal.SIGCONT)
    assert context.join(timeout=BOUND) is True
    assert len(context.results[0]["array"]) == LARGE


def test_a_process_is_killed_while_it_sends() -> None:
    context = spawn(give_array, (LARGE,), nprocs=2, join=False)
    wait_for_a_part(context, 1)
    os.kill(context.pids()[1], signal.SIGKILL)
    with pytest.raises(SpawnError, match="SIGKILL") as caught:
        context.join()
    assert (caught.value.rank, caught.value.exitcode) == (1, -signal.SIGKILL)
    assert context.results == []


@pytest.mark.parametrize("forked_returns", [False, True])
def test_a_process_of_a_rank_has_the_pipe_too(forked_returns: bool) -> None:
    results = spawn(give_and_fork, (forked_returns,), nprocs=2)
    assert results == ["of rank 0", "of rank 1"]


def test_results_are_received_after_a_failure_too() -> None:
    """Otherwise rank 0 does not end, and the grace period is waited for in vain."""
    context = spawn(give_or_fail, ("raises",), nprocs=2, join=False)
    with pytest.raises(SpawnError, match="rank 1's own"):
        context.join(grace_period=BOUND)
    assert context.processes[0].exitcode == 0


def test_no_descriptor_is_left() -> None:
    """The ends of the pipes are closed while the context and its error still exist."""
    before = descriptors()
    contexts = [
        spawn(give_or_fail, (how,), nprocs=2, join=False) for how in ("raises", "cannot be unpickled")
    ]
    contexts += [spawn(give_array, (LARGE,), nprocs=2, join=False)]
    errors = []
    for context in contexts[:2]:
        with pytest.raises(SpawnError) as caught:
            context.join()
        errors.append(caught.value)
    assert contexts[2].join()
    for context in contexts:
        for process in context.processes:
            process.close()  # multiprocessing's own descriptors
    assert descriptors() == before
    with pytest.raises(TypeError, match="pickle") as unpicklable:
        spawn(give, (threading.Lock(),))
    assert descriptors() == before
    assert (len(errors), unpicklable.type) == (2, TypeError)


def test_an_exception_is_raised_in_the_parent() -> None:
    with pytest.raises(SpawnError, match="ValueError: rank 1's own") as caught:
        spawn(fail_on_rank_1, nprocs=3)
    error = caught.value
    assert isinstance(error, DistError)
    assert (error.rank, error.exitcode, error.signal) == (1, 1, None)
    assert error.pid > 0
    assert "in fail_on_rank_1" in str(error)
    assert "spawn.py" not in str(error).replace("test_spawn.py", "")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.pid) == (str(error), error.rank, error.pid)


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("how", "exitcode"), [("exit", 5), ("sys.exit", 6), ("SIGKILL", -9), ("SIGTERM", -15), ("SIGSEGV", -11)]
)
def test_other_failures_are_raised_in_the_parent(how: str, exitcode: int) -> None:
    with pytest.raises(SpawnError) as caught:
        spawn(die_on_rank_1, (how,), nprocs=2)
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    assert caught.value.signal == (how if exitcode < 0 else None)
    assert (how if exitcode < 0 else f"exit code {exitcode}") in str(caught.value)


def test_the_cause_is_raised_not_its_consequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicoll.api.spawn._CAUSE_SECONDS", BOUND)  # rank 1 may start late
    with pytest.raises(SpawnError, match="KeyError: 'the cause'") as caught:
        spawn(fail_in_consequence, nprocs=2)
    assert caught.value.rank == 1


def test_the_first_failure_is_raised_though_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(time.time(), -3600)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    context = spawn(die_one_after_the_other, (str(tmp_path),), nprocs=2, join=False)
    with pytest.raises(SpawnError) as caught:
        context.join(grace_period=BOUND)
    assert caught.value.rank == 1


def test_a_failed_process_that_does_not_end_is_a_failure() -> None:
    with pytest.raises(SpawnError, match="and yet it runs"):
        spawn(fail_without_ending, nprocs=2)


def test_a_context_without_join(tmp_path: Path) -> None:
    context = spawn(wait_for_file, (str(tmp_path / "go"),), nprocs=2, join=False)
    assert len(context.processes) == 2
    assert not all_gone(context.pids())
    assert context.join(timeout=0) is False
    (tmp_path / "go").touch()
    assert context.join(timeout=BOUND) is True
    assert context.join() is True
    assert all_gone(context.pids())


def test_join_after_a_failure_leaves_nothing() -> None:
    context = spawn(fail_on_rank_1, nprocs=3, join=False)
    with pytest.raises(SpawnError):
        context.join(grace_period=0.2)
    assert all_gone(context.pids())


def test_spawn_from_a_thread_that_ends(tmp_path: Path) -> None:
    contexts = []

    def start() -> None:
        contexts.append(spawn(wait_for_file, (str(tmp_path / "go"),), nprocs=2, join=False))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(BOUND)
    (context,) = contexts
    assert context.join(timeout=0.5) is False  # the thread's end is not the parent's
    (tmp_path / "go").touch()
    assert context.join(timeout=BOUND)


def test_bad_arguments() -> None:
    with pytest.raises(DistTypeError, match="fn"):
        spawn(3)  # type: ignore[call-overload]
    for options in ({"nprocs": 0}, {"start_method": "fork"}):
        with pytest.raises(DistArgumentError, match=next(iter(options))):
            spawn(fail_on_rank_1, **options)
    with pytest.raises(TypeError, match="pickle"):
        spawn(fail_on_rank_1, args=(threading.Lock(),))


SESSION = """
import dataclasses, numpy as np, sys, unicoll as dist
@dataclasses.dataclass
class Factor:
    value: float
def make(offset):
    def work(rank, factor):
        dist.init_process_group()
        x = np.array([factor.value * rank + offset])
        dist.all_reduce(x)
        print(rank, x, flush=True)
        if offset > 1:
            raise KeyError(factor)
        return Factor(x[0] + rank), lambda: rank
    return work

for factor, closure in dist.spawn(make(1), args=(Factor(10.0),), nprocs=2):
    print("result", isinstance(factor, Factor), factor.value, closure())
"""
"""Functions and classes as of a notebook's cells: in no file, one a closure."""


@pytest.mark.every(n=0)
def test_functions_of_an_interactive_session(folder: LaunchFolder) -> None:
    pytest.importorskip("cloudpickle")
    done = folder.python("-c", SESSION)
    *printed, first, second = done.stdout.splitlines()
    assert sorted(printed) == ["0 [12.]", "1 [12.]"], done.stderr
    assert (first, second) == ("result True 12.0 0", "result True 13.0 1")
    done = folder.python("-c", SESSION.replace("make(1)", "make(2)"))
    assert re.search(r"SpawnError: process [01] \(pid \d+\) failed:", done.stderr)
    assert "KeyError: Factor(value=10.0)" in done.stderr


def test_results_of_a_scripts_own_class(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import dataclasses, unicoll
        @dataclasses.dataclass
        class Factor:
            value: int
        if __name__ == "__main__":
            print(unicoll.spawn(Factor, nprocs=2) == [Factor(0), Factor(1)])
        """
    )
    done = folder.python(script)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_functions_of_an_interactive_session_need_cloudpickle(folder: LaunchFolder) -> None:
    without = "import sys; sys.modules['cloudpickle'] = None\n"
    done = folder.python("-c", without + SESSION)
    assert "DistArgumentError: spawn: fn is defined in an interactive session" in done.stderr
    assert "install cloudpickle" in done.stderr
    assert "%%writefile" in done.stderr
    imported = "import time, unicoll\nunicoll.spawn(time.sleep)"
    done = folder.python("-c", without + imported)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.every(n=2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("from_thread", [False, True])
def test_nothing_survives_the_parent(folder: LaunchFolder, number: signal.Signals, from_thread: bool) -> None:
    script = folder.script(
        """
        import os, pathlib, subprocess, sys, threading, time
        from unicoll.api.spawn import spawn

        def note(name, pid):
            pathlib.Path(f"pid.{name}.{pid}").write_text(f"{pid}\\n")

        def work(rank):
            note("child", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
            note("worker", os.getpid())
            time.sleep(600)

        if __name__ == "__main__":
            if sys.argv[1] == "thread":
                threading.Thread(target=spawn, args=(work, (), 2)).start()
                time.sleep(600)
            spawn(work, nprocs=2)
        """
    )
    parent = subprocess.Popen(
        [sys.executable, script, "thread" if from_thread else "main"],
        cwd=folder.path,
        env=environment(TMPDIR=str(folder.path)),
    )
    try:
        pids = folder.pids(4)
        assert not all_gone(pids)
    finally:
        parent.send_signal(number)
        parent.wait(BOUND)
    wait_until(lambda: all_gone(pids))
    wait_until(lambda: list(folder.path.glob("unicoll_spawn_*")) == [])
