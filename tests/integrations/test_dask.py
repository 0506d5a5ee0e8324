"""``unicoll.integrations.dask``: jobs on the workers of local Dask clusters.

Each test runs a program with a cluster of its own, and checks its output. A worker executes one task at a time unless
a test says otherwise, so a task that does not end makes the next run fail.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import python
from tests.support.ranks import ROOT

pytest.importorskip("distributed")

HEAD = '''
import json, logging, os, signal, socket, subprocess, sys, textwrap, threading, time
from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
from distributed import Client, Event, LocalCluster, get_worker, wait

import unicoll as dist
from unicoll.integrations.dask import run

WAIT_S = 60
# a cluster gives a worker up that is missing this long after a loss, also if it was replaced and killed again
dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"})

def cluster(workers, threads=1, processes=True, level=logging.CRITICAL):
    return LocalCluster(
        n_workers=workers, threads_per_worker=threads, processes=processes, dashboard_address=":0", silence_logs=level
    )

def summed(value=0, *, scale=1):
    """Rank, number of ranks, and the sum of (rank + value) * scale over the ranks."""
    x = np.full(2, dist.get_rank() + value, np.float64)
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), float(x[1]) * scale

def error_of(*args, **kwargs):
    """Type, text and notes of what run raises."""
    try:
        return ["no error", str(run(*args, **kwargs)), []]
    except BaseException as error:
        notes = getattr(error, "__notes__", None) or [str(error.__cause__)]
        return [type(error).__name__, str(error), notes]

def runs_well(client, ranks, workers=None):
    expected = [(rank, ranks, ranks * (ranks - 1) / 2) for rank in range(ranks)]
    return run(client, summed, workers=workers) == expected

def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

def wait_for_new_workers(client, number, old):
    wait_until(lambda: len(client.nthreads()) == number and old not in client.nthreads())
    # a nanny does not replace a worker that is killed before the nanny has noticed its start
    wait_until(lambda: set(client.run(lambda dask_worker: dask_worker.status.name, nanny=True).values()) == {"running"})

def show(value):
    print(json.dumps(value), flush=True)
'''


def run_program(folder: Path, body: str) -> tuple[list[Any], str]:
    """What a program shows, and all that it and the workers print on standard error."""
    main = textwrap.indent(body, "    ")
    path = folder / "program.py"
    path.write_text(f'{HEAD}\ndef main():\n{main}\nif __name__ == "__main__":\n    main()\n')
    done = python(path, cwd=folder, PYTHONPATH=str(ROOT), DASK_TEMPORARY_DIRECTORY=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_results_are_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    program = """
def worker():
    return get_worker().address

with cluster(3) as local, Client(local) as client:
    addresses = sorted(client.nthreads())
    show(run(client, summed))
    show(run(client, worker) == addresses)
    show(run(client, worker, workers=[addresses[2], addresses[0]]) == [addresses[2], addresses[0]])
    show(run(client, summed, 10, scale=2, workers=addresses[1:]))
    show(run(client, summed, workers=addresses[1]))
    futures = client.scatter([1, 20, 300])
    show(run(client, lambda mine, more: summed(sum(mine) + more), 4000, per_rank=[futures[:1], futures[1:], []]))
    show(list(client.run(dist.is_initialized).values()))
"""
    shown, _ = run_program(tmp_path, program)
    assert shown == [
        [[0, 3, 3], [1, 3, 3], [2, 3, 3]],
        True,
        True,
        [[0, 2, 42], [1, 2, 42]],
        [[0, 1, 0]],
        [[0, 3, 12324], [1, 3, 12324], [2, 3, 12324]],
        [False] * 3,
    ]


def test_runs_on_common_workers_follow_one_another(tmp_path: Path) -> None:
    program = """
def alone(run):
    # with two threads a worker could execute two tasks at once
    assert not hasattr(sys, "run_in_progress")
    sys.run_in_progress = run
    try:
        x = np.full(1, run, np.float64)
        for _ in range(5):
            dist.all_reduce(x, op=dist.ReduceOp.AVG)
        assert sys.run_in_progress == run
        return float(x[0])
    finally:
        del sys.run_in_progress

def several(client, workers, first, ready):
    ready.wait(WAIT_S)
    return [run(client, alone, number, workers=workers) for number in range(first, first + 20)]

with cluster(3, threads=2) as local, Client(local) as client, Client(local) as other, ThreadPoolExecutor(3) as pool:
    a, b, c = sorted(client.nthreads())
    ready = threading.Barrier(3)
    jobs = [
        pool.submit(several, client, [a, b], 0, ready),
        pool.submit(several, client, [c, a], 20, ready),
        pool.submit(several, other, [b, c], 40, ready),
    ]
    for job in jobs:
        show(job.result())
"""
    shown, _ = run_program(tmp_path, program)
    assert shown == [[[n, n] for n in range(first, first + 20)] for first in (0, 20, 40)]


def test_runs_on_different_workers_go_on_at_the_same_time(tmp_path: Path) -> None:
    program = """
def meet(own, other):
    Event(own).set()
    met = Event(other).wait(WAIT_S)
    dist.barrier()
    return met

with cluster(4) as local, Client(local) as client, Client(local) as second, ThreadPoolExecutor(2) as pool:
    workers = sorted(client.nthreads())
    jobs = [
        pool.submit(run, client, meet, "a", "b", workers=workers[:2]),
        pool.submit(run, second, meet, "b", "a", workers=workers[2:]),
    ]
    show([job.result() for job in jobs])
"""
    assert run_program(tmp_path, program)[0] == [[[True, True], [True, True]]]


def test_an_error_names_rank_and_worker_and_the_workers_can_be_used_again(tmp_path: Path) -> None:
    program = """
class OwnError(Exception):
    pass

def fail(rank):
    if dist.get_rank() == rank:
        raise OwnError("no data")
    dist.barrier()

def mismatch():
    dist.all_reduce(np.ones(1 + dist.get_rank()))

def initialise():
    dist.init_process_group("gloo", rank=0, world_size=1)

with cluster(3) as local, Client(local) as client:
    workers = sorted(client.nthreads())
    show(workers)
    for rank in range(3):
        show(error_of(client, fail, rank))
        show(runs_well(client, 3))
    show(error_of(client, mismatch))
    lock = threading.Lock()
    show(error_of(client, lambda: lock))
    show(error_of(client, summed, lock))
    client.run(initialise, workers=workers[1:2])
    show(error_of(client, summed))
    client.run(dist.destroy_process_group, workers=workers[1:2])
    show(runs_well(client, 3))
    show(error_of(client, summed, workers=["tcp://127.0.0.1:1"]))
    show(error_of(client, summed, workers=workers[:1] * 2))
    show(error_of(client, summed, per_rank=[1, 2]))
    show(error_of(client, "summed"))
    show(runs_well(client, 3))
"""
    shown, _ = run_program(tmp_path, program)
    workers, shown = shown[0], shown[1:]
    for rank in range(3):
        kind, text, notes = shown.pop(0)
        assert (kind, text) == ("OwnError", "no data")
        assert f"rank {rank} on worker {workers[rank]}" in notes[0]
        assert shown.pop(0) is True
    assert shown.pop(0)[0] == "CollectiveMismatchError"
    assert [shown.pop(0)[0], shown.pop(0)[0]] == ["TypeError", "TypeError"]
    kind, text, _ = shown.pop(0)
    assert kind == "DistArgumentError"
    assert f"rank 1 on worker {workers[1]} has a default process group already" in text
    assert shown.pop(0) is True
    for expected, part in [
        ("DistArgumentError", "are not in the cluster"),
        ("DistArgumentError", "are not the addresses of different workers"),
        ("DistArgumentError", "2 values for 3 workers"),
        ("DistTypeError", "must be a function, not str"),
    ]:
        kind, text, _ = shown.pop(0)
        assert kind == expected
        assert part in text
    assert shown == [True]


KILLS = """
def die_in(name):
    # the names are the steps of a task, in this order
    from unicoll.integrations import dask as module
    owner = module._Member if hasattr(module._Member, name) else module
    setattr(owner, name, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))

def die_between_calls(rank):
    x = np.ones(1000)
    for step in range(100):
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        if step == 5 and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

def busy():
    Event("never").wait(WAIT_S)

def kill_before_start(client, victim):
    wait_until(lambda: len(client.processing([victim])[victim]) == 2)
    os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)

with cluster(3) as local, Client(local) as client, ThreadPoolExecutor(1) as pool:
    for step in ("_membership", "_open_store", "_await_ranks", "enter_world", "call", "queued"):
        workers = sorted(client.nthreads())
        victim = workers[RANK]
        fn, args = summed, ()
        killer = None
        if step == "call":
            fn, args = die_between_calls, (RANK,)
        elif step == "queued":
            task = client.submit(busy, workers=[victim])
            wait_until(lambda: client.processing([victim])[victim])
            killer = pool.submit(kill_before_start, client, victim)
        else:
            client.run(die_in, step, workers=[victim])
        kind, text, _ = error_of(client, fn, *args)
        if killer is not None:
            killer.result()
            client.cancel(task)
        show([step, kind, f"lost before its result had arrived: rank {RANK} on worker {victim};" in text])
        others = [worker for worker in workers if worker != victim]
        show([runs_well(client, 2, others) for _ in range(5)])
        wait_for_new_workers(client, 3, victim)
        show([runs_well(client, 3) for _ in range(5)])
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_named_and_ten_runs_follow(rank: int, tmp_path: Path) -> None:
    shown, _ = run_program(tmp_path, KILLS.replace("RANK", str(rank)))
    for step in ("_membership", "_open_store", "_await_ranks", "enter_world", "call", "queued"):
        assert shown.pop(0) == [step, "RankLostError", True]
        assert shown.pop(0) == [True] * 5
        assert shown.pop(0) == [True] * 5
    assert not shown


def test_a_worker_that_is_killed_after_its_result_does_no_harm(tmp_path: Path) -> None:
    program = """
def wait_on_rank_0():
    if dist.get_rank() == 0:
        return Event("killed").wait(WAIT_S)
    return get_worker().address, os.getpid()

from unicoll.integrations import dask as module

fetched = threading.Event()
ended = []
fetch = module._fetch

async def observed(task):
    result = await fetch(task)
    ended.append(result)
    fetched.set()
    return result

module._fetch = observed
with cluster(2) as local, Client(local) as client, ThreadPoolExecutor(1) as pool:
    job = pool.submit(run, client, wait_on_rank_0)
    assert fetched.wait(WAIT_S)
    address, pid = ended[0]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: address not in client.nthreads())
    Event("killed", client=client).set()
    show(job.result() == [True, (address, pid)])
"""
    assert run_program(tmp_path, program)[0] == [True]


def test_a_worker_that_comes_back_at_its_address_is_lost(tmp_path: Path) -> None:
    program = f"""
def first_time_killed():
    marker = {str(tmp_path / "marker")!r}
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

with socket.socket() as reserved:
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    local = LocalCluster(n_workers=1, worker_port=reserved.getsockname()[1], dashboard_address=":0")
    with local, Client(local) as client:
        sys.modules[run.__module__]._POLL_S = WAIT_S  # the worker is back before the client looks for it
        show(error_of(client, first_time_killed)[:2])
        sys.modules[run.__module__]._POLL_S = 0.5
        client.wait_for_workers(1, timeout=WAIT_S)
        show(runs_well(client, 1))
"""
    (kind, text), well = run_program(tmp_path, program)[0]
    assert kind == "RankLostError"
    assert "rank 0 on worker tcp://127.0.0.1:" in text
    assert well


def test_a_later_loss_does_not_replace_the_first_failure(tmp_path: Path) -> None:
    program = """
def fail():
    if dist.get_rank() == 1:
        raise MemoryError("first failure")
    try:
        dist.barrier()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)

with cluster(2) as local, Client(local) as client:
    show(error_of(client, fail)[:2])
"""
    assert run_program(tmp_path, program)[0] == [["MemoryError", "first failure"]]


def test_data_that_was_lost_with_its_worker_is_named(tmp_path: Path) -> None:
    """The run waited for five minutes, and its error was about busy threads."""
    program = """
def first(values, *rest):
    return summed(float(values[0]))

with cluster(2) as local, Client(local) as client:
    workers = sorted(client.nthreads())
    scattered = [client.scatter(np.arange(3.0) + i, workers=[worker]) for i, worker in enumerate(workers)]
    bound = [client.submit(np.ones, 2 + i, workers=[worker], key=f"bound{i}") for i, worker in enumerate(workers)]
    free = [client.submit(np.ones, 4 + i, key=f"free{i}") for i in range(2)]
    wait([*bound, *free])
    next_ones = [client.submit(np.sqrt, one, key=f"next {one.key}") for one in bound]
    os.kill(client.run(os.getpid, workers=[workers[0]])[workers[0]], signal.SIGKILL)
    wait_for_new_workers(client, 2, workers[0])
    show([scattered[0].key, "bound0", "next bound0"])
    for lost in (scattered, bound, next_ones):
        show(error_of(client, first, per_rank=[[1.0], lost[0]]))
        show(error_of(client, first, [1.0], {"more": [lost[0]]}))
    show(run(client, first, per_rank=[free[0], free[1]]))
    show(runs_well(client, 2))
"""
    shown, _ = run_program(tmp_path, program)
    for key in shown.pop(0):
        for rank in (1, 0):
            kind, text, _ = shown.pop(0)
            assert kind == "DistError"
            assert f"run: data in the arguments of rank {rank} on worker " in text
            assert f"cannot be computed again: {key};" in text
    assert shown == [[[0, 2, 3.0], [1, 2, 3.0]], True]


def test_limits_of_the_time_to_start(tmp_path: Path) -> None:
    program = """
def wait_for(name):
    Event(name + " started").set()
    Event(name).wait(WAIT_S)

with cluster(2) as local, Client(local) as client, ThreadPoolExecutor(1) as pool:
    workers = sorted(client.nthreads())
    show(workers)
    for worker in workers:
        client.submit(wait_for, worker, workers=[worker], key="busy " + worker)
        Event(worker + " started", client=client).wait(WAIT_S)
        show(error_of(client, summed, timeout=1))
        Event(worker, client=client).set()
        show(runs_well(client, 2))
    job = pool.submit(run, client, wait_for, "end", workers=workers[1:])
    Event("end started", client=client).wait(WAIT_S)
    show(error_of(client, summed, timeout=1))
    Event("end", client=client).set()
    show(runs_well(client, 2))
"""
    shown, _ = run_program(tmp_path, program)
    workers, shown = shown[0], shown[1:]
    for rank in range(2):
        kind, text, _ = shown.pop(0)
        assert kind == "OperationTimeoutError"
        assert f"has not started: rank {rank} on worker {workers[rank]};" in text
        assert shown.pop(0) is True
    kind, text, _ = shown.pop(0)
    assert kind == "OperationTimeoutError"
    assert f"another run still has worker {workers[1]}" in text
    assert shown == [True]


def test_ctrl_c_ends_the_job_on_the_workers(tmp_path: Path) -> None:
    program = """
def wait_for_a_message():
    if dist.get_rank() == 1:
        Event("started").set()
        dist.recv(np.empty(1), src=0)
    else:
        Event("end").wait(WAIT_S)

def interrupt(client):
    Event("started", client=client).wait(WAIT_S)
    os.kill(os.getpid(), signal.SIGINT)
    Event("end", client=client).set()

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background of a shell
with cluster(2) as local, Client(local) as client, ThreadPoolExecutor(1) as pool:
    pool.submit(interrupt, client)
    show(error_of(client, wait_for_a_message)[0])
    show(runs_well(client, 2))
"""
    assert run_program(tmp_path, program)[0] == ["KeyboardInterrupt", True]


def test_a_killed_client_does_not_keep_the_workers(tmp_path: Path) -> None:
    program = """
CLIENT = '''
import sys
from distributed import Client, Event
from unicoll.integrations.dask import run

def wait():
    Event("started").set()
    Event("end").wait(60)

run(Client(sys.argv[1]), wait)
'''
# the client gives the lease its timeout, the scheduler the interval in which it looks for old ones
timeout = {"DASK_DISTRIBUTED__SCHEDULER__LOCKS__LEASE_TIMEOUT": "1s"}
with dask.config.set({"distributed.scheduler.locks.lease-validation-interval": "200ms"}):
    with cluster(2) as local, Client(local) as client:
        command = [sys.executable, "-c", textwrap.dedent(CLIENT), local.scheduler_address]
        first = subprocess.Popen(command, env={**os.environ, **timeout})
        assert Event("started", client=client).wait(WAIT_S)
        first.kill()
        first.wait()
        Event("end", client=client).set()
        show(runs_well(client, 2))
"""
    assert run_program(tmp_path, program)[0] == [True]


def test_workers_that_are_threads_of_one_process_are_refused(tmp_path: Path) -> None:
    program = """
with cluster(2, processes=False) as local, Client(local) as client:
    show(error_of(client, summed))
    show(run(client, summed, workers=sorted(client.nthreads())[:1]))
    show(dist.is_initialized())
"""
    shown, _ = run_program(tmp_path, program)
    kind, text, _ = shown[0]
    assert kind == "DistArgumentError"
    assert "are threads of one process" in text
    assert shown[1:] == [[[0, 1, 0]], False]


def test_no_text_has_the_secret(tmp_path: Path) -> None:
    program = """
from unicoll.integrations import dask as module

secrets = []
new_key_text = module.new_key_text
module.new_key_text = lambda: secrets.append(new_key_text()) or secrets[-1]

def fail():
    raise ValueError("no data")

with cluster(2, level=logging.DEBUG) as local, Client(local) as client:
    run(client, summed)
    error = error_of(client, fail)
    lock = threading.Lock()
    refused = error_of(client, summed, lock)
    texts = [error, refused, client.get_events(), client.get_worker_logs(), client.get_scheduler_logs()]
text = repr(texts)
show([[secret in text for secret in secrets], "fail-" in text])
with open("secrets", "w") as file:
    file.write(" ".join(secrets))
"""
    shown, errors = run_program(tmp_path, program)
    assert shown == [[[False] * 3, True]]
    assert "Compute Failed" in errors
    secrets = (tmp_path / "secrets").read_text().split()
    assert [len(secret) for secret in secrets] == [64] * 3
    assert [secret for secret in secrets if secret in errors] == []


def test_the_example_gives_numpys_result(tmp_path: Path) -> None:
    pytest.importorskip("dask.array")
    done = python(ROOT / "examples" / "dask_kmeans.py", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [words[:2] for words in lines] == [["rank", "0:"], ["rank", "1:"]]
    assert sum(int(words[2]) for words in lines) == 40_000
    assert all(words[3:8] == ["of", "40000", "points,", "NumPy's", "centers:"] for words in lines)
