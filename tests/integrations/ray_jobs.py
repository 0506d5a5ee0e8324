"""Programs that test_ray.py starts as drivers of a Ray cluster; each prints one line of JSON.

Arguments: the name of the function, the cluster's address, and the function's arguments.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import ray.util.collective as col
from ray.experimental import internal_kv
from ray.experimental.collective import create_collective_group, destroy_collective_group
from ray.util.collective.types import RecvOptions, ReduceOp

import unicoll
import unicoll.bootstrap.enter
from unicoll.bootstrap import rendezvous_protocol
from unicoll.integrations import ray as unicoll_ray
from unicoll.integrations.ray import BACKEND

LIMIT_S = 120.0
"""For everything that a driver waits for."""
OPS = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}


@ray.remote(num_cpus=0, max_restarts=1, max_concurrency=3)
class Rank:
    """An actor with one rank in each of its groups."""

    def __init__(self) -> None:
        self.joined = 0
        self.stopped = threading.Event()

    def join(self, world_size: int, rank: int, name: str) -> int:
        col.init_collective_group(world_size, rank, BACKEND, name)
        self.joined += 1
        return self.joined

    def sum(self, name: str, value: float = 1.0) -> float:
        x = np.full(3, value)
        col.allreduce(x, name)
        return float(x[0])

    def sum_as_passed(self, name: str, x: Any) -> list[float]:
        """The different elements of an all_reduce of an array that Ray has passed."""
        assert not x.flags.writeable
        col.allreduce(x, name)
        return list(set(x))

    def refusals(self, name: str) -> list[str]:
        """The errors of arrays that cannot be written to, or are too small."""
        found = []
        frozen = np.ones(3)
        frozen.flags.writeable = False
        part = RecvOptions()
        part.src_rank, part.n_elements = 1 - col.get_rank(name), 3
        group = col.get_group_handle(name)
        calls: list[Any] = [
            lambda: col.allreduce(frozen, name),
            lambda: group.recv([np.ones((2, 2)).T], part),
            lambda: group.recv([np.ones(2)], part),
        ]
        for call in calls:
            try:
                call()
            except unicoll.errors.DistArgumentError as error:
                found.append(str(error))
        return found

    def hold_removal(self) -> None:
        """From now on a record is removed once :meth:`release_removal` is called."""
        remove = unicoll_ray._remove

        def wait(*args: Any) -> None:
            assert self.stopped.wait(LIMIT_S)
            remove(*args)

        unicoll_ray._remove = wait

    def release_removal(self) -> None:
        self.stopped.set()

    def has_used_record(self, name: str) -> bool:
        return key_of(name) in unicoll_ray._used

    def failure(self, name: str, times: int = 1) -> list[Any]:
        """The error of a call, and those of the next ones."""
        found = []
        for _ in range(times):
            try:
                self.sum(name)
            except unicoll.errors.DistError as error:
                found.append([type(error).__name__, error.rank, str(error)])
        return found

    def mismatch(self, name: str) -> str:
        """The error of ranks that call different functions."""
        x = np.ones(3)
        try:
            col.broadcast(x, 0, name) if col.get_rank(name) else col.allreduce(x, name)
        except unicoll.errors.CollectiveMismatchError as error:
            return str(error)
        return ""

    def wait_until_blocked(self) -> None:
        """Return when another thread of this actor is in an all_reduce of unicoll."""
        while not any(
            frame.f_code.co_name == "all_reduce" and "unicoll" in frame.f_globals["__name__"]
            for top in sys._current_frames().values()
            for frame in outwards(top)
        ):
            time.sleep(0.01)

    def join_failure(self, world_size: int, rank: int, name: str, seconds: float) -> str:
        """The traceback, with local variables, of a join that is given so many seconds."""
        unicoll_ray._JOIN_S = seconds
        try:
            self.join(world_size, rank, name)
        except Exception as error:
            return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
        return ""

    def stop_while_joining(self, world_size: int, rank: int, name: str) -> None:
        """Join up to the rendezvous, in which this process gets its rank, and stop there."""

        def stop(*args: Any) -> None:
            self.stopped.set()
            threading.Event().wait()

        unicoll.bootstrap.enter.enter = stop
        self.join(world_size, rank, name)

    def wait_until_stopped(self) -> None:
        assert self.stopped.wait(LIMIT_S)

    def join_error(self, world_size: int, rank: int, name: str) -> list[Any]:
        rendezvous_protocol.STALE_SECONDS = 0.5
        try:
            self.join(world_size, rank, name)
        except unicoll.errors.DistError as error:
            return [type(error).__name__, error.rank, str(error)]
        return []

    def leave(self, name: str) -> bool:
        col.destroy_collective_group(name)
        return col.is_group_initialized(name)

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def check_operations(self, name: str, family: str) -> list[str]:
        """The operations whose results are wrong; each rank has its own random arrays, and knows those of all."""
        rank, size = col.get_rank(name), col.get_collective_group_size(name)
        made = [
            np.random.default_rng(seed).integers(1, 5, (size, 6)).astype(np.float64) for seed in range(size)
        ]
        mine = made[rank]
        wrong = []

        def array(values: Any) -> Any:
            if family == "torch":
                import torch

                return torch.tensor(values)
            return np.array(values)

        def expect(what: str, found: Any, right: Any) -> None:
            if not np.array_equal(np.asarray(found), right):
                wrong.append(f"{what}: {found} is not {right}")

        for op, function in OPS.items():
            total = function.reduce(made)
            x = array(mine)
            col.allreduce(x, name, ReduceOp[op])
            expect(f"allreduce {op}", x, total)
            for root in range(size):
                x = array(mine)
                col.reduce(x, root, name, ReduceOp[op])
                expect(f"reduce {op} to {root}", x, total if rank == root else mine)
            parts, x = [array(row) for row in mine], array(np.zeros(6))
            col.reducescatter(x, parts, name, ReduceOp[op])
            expect(f"reducescatter {op}", x, total[rank])
            expect(f"reducescatter {op}: the inputs", [np.asarray(part) for part in parts], mine)
        for root in range(size):
            x = array(mine)
            col.broadcast(x, root, name)
            expect(f"broadcast from {root}", x, made[root])
        outputs = [array(np.zeros(mine.shape)) if i % 2 else np.zeros(mine.shape) for i in range(size)]
        col.allgather(outputs, array(mine), name)
        expect("allgather", [np.asarray(x) for x in outputs], made)
        x = array(np.zeros(mine.shape))
        if rank == 0:
            col.send(array(mine), size - 1, name)
            col.recv(x, size - 1, name)
            expect("recv", x, made[-1])
        elif rank == size - 1:
            col.recv(x, 0, name)
            expect("recv", x, made[0])
            col.send(array(mine), 0, name)
        col.barrier(name)
        return wrong


def outwards(frame: Any) -> Any:
    while frame is not None:
        yield frame
        frame = frame.f_back


def ranks(count: int, **variables: str) -> list[Any]:
    """Actors on both nodes in turn, with these environment variables."""
    runtime_env = {"env_vars": variables}
    return [
        Rank.options(resources={f"node{i % 2}": 1}, runtime_env=runtime_env).remote() for i in range(count)
    ]


def get(refs: Any) -> Any:
    return ray.get(refs, timeout=LIMIT_S)


def join(actors: list[Any], name: str) -> list[int]:
    found: list[int] = get([actor.join.remote(len(actors), i, name) for i, actor in enumerate(actors)])
    return found


def on_all(actors: list[Any], method: str, *args: Any) -> list[Any]:
    found: list[Any] = get([getattr(actor, method).remote(*args) for actor in actors])
    return found


def await_restart(actor: Any, killed: int) -> None:
    """Wait until another process than the killed one serves the actor."""

    def restarted() -> bool:
        try:
            return get(actor.pid.remote()) != killed
        except ray.exceptions.ActorUnavailableError:
            return False

    wait_until(restarted)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def key_of(name: str) -> str:
    return f"{ray.get_runtime_context().get_job_id()}/{name}"


def record_exists(name: str) -> bool:
    return bool(internal_kv._internal_kv_exists(key_of(name), namespace="unicoll"))


def await_record(name: str) -> None:
    wait_until(lambda: record_exists(name))


# --- the programs -------------------------------------------------------------------------------------------------


def operations(transport: str) -> Any:
    actors = ranks(3, UNICOLL_TRANSPORT=transport)
    join(actors, "all")
    wrong = {family: on_all(actors, "check_operations", "all", family) for family in ("numpy", "torch")}
    return {"wrong": wrong, "nodes": len(set(on_all(actors, "node")))}


def groups() -> Any:
    a, b, c = ranks(3)
    odd = "a group, 123?34!/\u00e9" + "x" * 100
    for members, name in (([a, b, c], "default"), ([c, a], odd), ([b, c], odd + "y")):
        join(members, name)
    found = {
        "several": [
            on_all([a, b, c], "sum", "default"),
            on_all([a, c], "sum", odd),
            on_all([b, c], "sum", odd + "y"),
        ],
        "left": on_all([a, b, c], "leave", "default"),
    }
    join([c, b], "default")
    found |= {"again": on_all([b, c], "sum", "default"), "others": on_all([a, c], "sum", odd)}
    # one object in the memory of the node of both actors, and one that is sent with the call
    for size in (1 << 18, 2):
        shared = ray.put(np.ones(size))
        found[f"passed {size}"] = on_all([a, c], "sum_as_passed", odd, shared)
    found["refused"] = on_all([a, c], "refusals", odd)
    col.create_collective_group([a, b], 2, [1, 0], BACKEND, "declared")
    found["declared"] = on_all([a, b], "sum", "declared")
    handle = create_collective_group([a, b], BACKEND)
    found["handle"] = on_all([a, b], "sum", handle.name)
    destroy_collective_group(handle)
    pair = [Rank.options(max_concurrency=1).remote() for _ in range(2)]  # their calls run on the main thread
    join(pair, "differs")
    found["mismatch"] = on_all(pair, "mismatch", "differs")
    join([a], "alone")
    found["alone"] = on_all([a], "sum", "alone")
    found["records"] = [record_exists(name) for name in ("default", odd, odd + "y", "declared")]
    return found


def killed(victim: str) -> Any:
    actors = ranks(3)
    dead = int(victim)
    left = [actor for i, actor in enumerate(actors) if i != dead]
    join(actors, "g")
    on_all(actors, "sum", "g")
    pending = [actor.failure.remote("g", 2) for actor in left]
    on_all(left, "wait_until_blocked")
    process = get(actors[dead].pid.remote())
    ray.kill(actors[dead], no_restart=False)
    found = {"errors": get(pending), "left": on_all(left, "leave", "g")}
    await_restart(actors[dead], process)
    found["joined"] = join(actors, "g")
    found["again"] = on_all(actors, "sum", "g")
    return found


def killed_while_joining() -> Any:
    actors = ranks(3)
    waiting = [actors[i].join_error.remote(3, i, "g") for i in (0, 2)]
    wait_until(lambda: get(actors[2].has_used_record.remote("g")))
    actors[1].stop_while_joining.remote(3, 1, "g")
    get(actors[1].wait_until_stopped.remote())
    process = get(actors[1].pid.remote())
    ray.kill(actors[1], no_restart=False)
    await_restart(actors[1], process)
    found = {"again": get(actors[1].join_error.remote(3, 1, "g")), "others": get(waiting)}
    found["joined"] = join(actors, "g")
    found["sums"] = on_all(actors, "sum", "g")
    return found


def two_ranks_0() -> Any:
    a, b, c = ranks(3)
    first = a.join_error.remote(2, 0, "g")
    await_record("g")
    found = {"errors": [get(b.join_error.remote(2, 0, "g")), get(first)]}
    found["left"] = record_exists("g")
    get([a.join.remote(2, 0, "g"), c.join.remote(2, 1, "g")])
    found["sums"] = on_all([a, c], "sum", "g")
    return found


def quick_rejoin() -> Any:
    """Rank 1 leaves a group and joins it again while rank 0 has not yet removed the first record."""
    a, b = ranks(2)
    get(a.hold_removal.remote())
    first = a.join.remote(2, 0, "g")
    get(b.join.remote(2, 1, "g"))
    get(b.leave.remote("g"))
    second = b.join.remote(2, 1, "g")
    get(a.release_removal.remote())
    get(first)
    get(a.leave.remote("g"))
    get([second, a.join.remote(2, 0, "g")])
    return on_all([a, b], "sum", "g")


def leftovers() -> Any:
    """Records that rank 0 could not remove: of a dead process, and of a server with another secret."""
    a, b, c = ranks(3)
    a.join.remote(2, 0, "g")
    await_record("g")
    ray.kill(a, no_restart=True)
    found = {"left": record_exists("g")}
    waiting = b.join.remote(2, 1, "g")
    get([waiting, c.join.remote(2, 0, "g")])
    found["dead"] = [on_all([b, c], "sum", "g"), record_exists("g")]
    secret = "0123456789abcdef" * 4
    server = unicoll.TCPStore("127.0.0.1", 0, is_master=True)
    for name in ("other", "alone"):
        record = json.dumps(["127.0.0.1", server.port, secret])
        internal_kv._internal_kv_put(key_of(name), record, namespace="unicoll")
    waiting = b.join.remote(2, 1, "other")
    get([waiting, c.join.remote(2, 0, "other")])
    found["other"] = [on_all([b, c], "sum", "other"), record_exists("other")]
    text = get(b.join_failure.remote(2, 1, "alone", 1.0))
    found["text"], found["secret"] = text, secret in text or secret.encode().hex() in text
    server.close()
    return found


def first_driver() -> Any:
    """Rank 0 waits for rank 1 until a line is on stdin: another driver uses the same name meanwhile."""
    a, b = ranks(2)
    waiting = a.join.remote(2, 0, "shared")
    await_record("shared")
    print(json.dumps("waits"), flush=True)
    sys.stdin.readline()
    get([waiting, b.join.remote(2, 1, "shared")])
    return on_all([a, b], "sum", "shared", 10.0)


def second_driver() -> Any:
    actors = ranks(2)
    get([actors[1].join.remote(2, 1, "shared"), actors[0].join.remote(2, 0, "shared")])
    return on_all(actors, "sum", "shared", 1.0)


def training_loop(config: dict[str, Any]) -> None:
    import hashlib

    import ray.train
    import torch
    import torch.distributed as dist

    secrets = [None] * 2
    dist.all_gather_object(secrets, hashlib.sha256(os.environ.get("UNICOLL_SECRET", "").encode()).hexdigest())
    x = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    source = [line for line in unicoll.explain().splitlines() if line.startswith("secret")]
    with open(f"{config['folder']}/{dist.get_rank()}", "w") as file:
        json.dump([dist.get_backend(), x.tolist(), len(set(secrets)), source], file)
    ray.train.report({"sum": float(x[0])})


def train(folder: str, config: str) -> Any:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        training_loop,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig("unicoll") if config == "ray" else unicoll_ray.TorchConfig(),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    found = []
    for rank in range(2):
        with open(f"{folder}/{rank}") as file:
            found.append(json.load(file))
    return found


if __name__ == "__main__":
    program, address, *arguments = sys.argv[1:]
    ray.init(address, namespace="tests", log_to_driver=False, logging_level="ERROR")
    print(json.dumps(globals()[program](*arguments)), flush=True)
    ray.shutdown()
