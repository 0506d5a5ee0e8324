"""Programs of the ranks of test_hosts.py: ``python host_programs.py NAME [ARGUMENT]``, started by the launcher.

Each rank prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import unicoll as dist

Report = dict[str, Any]
PATIENCE_S = 60.0
TIMEOUT = 4.0
"""Timeout of what waits in vain."""
LARGE_TIMEOUT = 10.0
"""The same where operations on large arrays come before."""


class Pickled:
    """An object that only pickle can encode."""


def connections() -> list[tuple[str, int, str, int]]:
    """Local address and port, peer address and port, of every TCP connection of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            try:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    found.append((*sock.getsockname()[:2], *sock.getpeername()[:2]))
            except OSError:  # a listener
                continue
    return sorted(found)


def caught(error: BaseException) -> Report:
    return {"error": type(error).__name__, "message": str(error), "error_rank": getattr(error, "rank", None)}


@contextmanager
def member(timeout: float = PATIENCE_S) -> Iterator[tuple[int, int]]:
    """Join the job, and leave it when all ranks have come to the end; rank and number of ranks."""
    dist.init_process_group(timeout=timeout)
    yield dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()


def everything() -> Report:
    """Check collectives and messages of several sizes on several groups."""
    with member() as (rank, size):
        for group in [None, *(dist.new_group() for _ in range(3))]:
            for count in (1, 1000, 300_000):
                data = np.arange(count, dtype=np.float64) * (rank + 1)
                dist.all_reduce(data, group=group)
                np.testing.assert_array_equal(data, np.arange(count) * (size * (size + 1) / 2))
                outputs = [np.empty(count, np.int64) for _ in range(size)]
                dist.all_to_all(outputs, [np.full(count, 10 * rank + i) for i in range(size)], group=group)
                assert [int(o[-1]) for o in outputs] == [10 * i + rank for i in range(size)]
                data = np.full(count, rank)
                dist.broadcast(data, src=size - 1, group=group)
                assert (data == size - 1).all()
        request: Any = dist.isend(np.full(200_000, rank), (rank + 1) % size)
        received = np.empty(200_000, np.int64)
        dist.recv(received, (rank - 1) % size)
        request.wait()
        assert (received == (rank - 1) % size).all()
        return {"explained": dist.explain(), "connections": connections(), "host": socket.gethostname()}


def reduce_large(compression: str) -> Report:
    """Run a large all_reduce; report the transport, the bytes that each interface sent, and the largest error."""
    with member() as (rank, size):
        world: Any = dist.group.WORLD
        data = np.linspace(-1, 1, 2_000_000, dtype=np.float32)
        exact = data * (size * (size + 1) / 2)
        data *= rank + 1
        dist.barrier()
        before = sent_by_interface()
        dist.all_reduce(data, group=world.using(compression=compression))
        dist.barrier()
        taken = {name: count - before[name] for name, count in sent_by_interface().items() if name != "lo"}
        error = float(np.abs(data - exact).max())
        return {"explained": dist.explain(), "sent": taken, "bytes": data.nbytes, "error": error}


def sent_by_interface() -> dict[str, int]:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {line.split(":")[0].strip(): int(line.partition(":")[2].split()[8]) for line in lines}


def join(timeout: float = PATIENCE_S) -> Report:
    """Join the job, or report the error."""
    try:
        with member(timeout):
            return {"joined": True}
    except dist.DistError as error:
        return caught(error)


def join_briefly(folder: str) -> Report:
    """Join; rank 0's deadline is later than rank 1's, as it begins when rank 1 is ready to join."""
    _begin_after_rank_1(folder)
    return join(TIMEOUT)


def join_without_rank_1(folder: str) -> Report:
    """Join a job that refuses rank 1; rank 0, which waits for it in vain, begins when rank 1 is ready to join."""
    _begin_after_rank_1(folder)
    return join(TIMEOUT if os.environ["RANK"] == "0" else PATIENCE_S)


def _begin_after_rank_1(folder: str) -> None:
    importlib.import_module("unicoll.bootstrap.enter")  # as init_process_group does
    if int(os.environ["RANK"]) == 1:
        Path(folder, "ready.1").touch()
    else:
        await_file(Path(folder, "ready.1"))


def await_file(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def exchange_objects() -> Report:
    """Gather a plain object, and one that needs pickle."""
    with member() as (rank, size):
        plain: list[Any] = [None] * size
        dist.all_gather_object(plain, {"rank": rank})
        report: Report = {"plain": plain}
        try:
            dist.all_gather_object([None] * size, Pickled())
            report["pickled"] = True
        except dist.DistError as error:
            report.update(caught(error))
        return report


def send_marks(array: str, message: str, value: str) -> Report:
    """Send three texts over the network: in a reduced array, in a message and in the store."""
    with member() as (rank, _):
        x = np.frombuffer(array.encode(), np.uint8) * np.uint8(1 - rank)
        dist.all_reduce(x)
        y = np.frombuffer(message.encode(), np.uint8) * np.uint8(1 - rank)
        port: list[Any] = [None]
        if rank == 0:
            dist.send(y, 1)
            store = dist.TCPStore("10.77.0.1", 0, is_master=True, wait_for_workers=False)
            port = [store.port]
        else:
            dist.recv(y, 0)
        dist.broadcast_object_list(port)
        if rank == 1:
            store = dist.TCPStore("10.77.0.1", port[0])
            store.set("k", value)
        arrived = [bytes(x), bytes(y), store.get("k")] == [t.encode() for t in (array, message, value)]
        dist.barrier()
        store.close()
        return {"arrived": arrived, "explained": dist.explain()}


def lose_the_link(folder: str, count: str) -> Report:
    """Repeat an all_reduce of ``count`` numbers until the connection is lost."""
    dist.init_process_group(timeout=PATIENCE_S)
    data = np.zeros(int(count))
    timeout = TIMEOUT if data.size < 1000 else LARGE_TIMEOUT
    dist.all_reduce(data)
    Path(folder, f"ready.{dist.get_rank()}").touch()
    started = time.monotonic()
    try:
        while time.monotonic() < started + PATIENCE_S:
            dist.all_reduce(data, timeout=timeout)
    except dist.DistError as error:
        report = caught(error)
        report["host"] = socket.gethostname()
        dist.destroy_process_group()
        return report
    raise AssertionError("the link was never cut")


def connect_late(folder: str, operation: str) -> Report:
    """Make the first connection of a group once the other host does not answer."""
    dist.init_process_group(timeout=PATIENCE_S)
    rank, data = dist.get_rank(), np.zeros(3)
    Path(folder, f"ready.{rank}").touch()
    await_file(Path(folder, "dropped"))
    try:
        if operation == "all_reduce":
            dist.all_reduce(data, timeout=TIMEOUT)
        else:
            dist.send(data, 1 - rank, timeout=TIMEOUT)
            dist.recv(data, 1 - rank, timeout=TIMEOUT)
        return {"reached": True}
    except dist.DistError as error:
        return caught(error)


def listen_apart(folder: str) -> Report:
    """Rank 1 listens on an interface that rank 0 cannot reach, and connects when rank 0 has tried to connect to it."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        os.environ["UNICOLL_SOCKET_IFNAME"] = "apart"
    dist.init_process_group(timeout=PATIENCE_S)
    tried = Path(folder, "tried")
    if rank == 1:
        await_file(tried)
    try:
        dist.all_reduce(np.zeros(3), timeout=TIMEOUT)
        return {"reached": True}
    except dist.DistError as error:
        return caught(error)
    finally:
        tried.touch()


def main() -> None:
    name, *arguments = sys.argv[1:]
    print(json.dumps({"rank": int(os.environ["RANK"]), **globals()[name](*arguments)}), flush=True)


if __name__ == "__main__":
    main()
