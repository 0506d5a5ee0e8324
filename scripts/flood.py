#!/usr/bin/env python3
"""A flood of connections against a job on loopback, and the times of the job's operations
meanwhile.

Starts a job of two ranks with a secret and floods every port on which they listen (the store's, the
control plane's and the data listeners') in two ways: with silent connections, which are reopened
when the job closes them, and with connections that are reset once they are established. Meanwhile
the ranks do all_reduce, store.set and store.get, and open files, and clients that hold the secret
connect to the store. Prints the time of each without the flood and with it, the open descriptors of
the ranks, and "held" if every operation and every client succeeded and the descriptors stayed under
their cap; else what failed, and the exit code is 1.

The job leaves most of the connections in the kernel's queue, so the rate counts attempts; the
output has the number of established ones.

The traffic stays on loopback; number, rate and time are bounded. The only target is the job that
this program starts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from itertools import cycle, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[1])
MOST_CONNECTIONS, MOST_RATE, MOST_SECONDS = 50_000, 50_000, 60.0
OPERATIONS = ("all_reduce", "store.set", "store.get", "open 32 files")
NEW_CLIENT = "new client"
CLIENT_THREADS = 8
CLIENT_PAUSE_SECONDS = 0.05
CONNECT_SECONDS = 60.0
FILES = 32
PAUSE_SECONDS = 0.002
TIMEOUT_SECONDS = 20.0
START_SECONDS = 60.0
MOST_ATTACK_SECONDS = 180.0
ESTABLISHED, SYN_SENT = 1, 2  # states of TCP in Linux
RESET_AT_CLOSE = struct.pack("ii", 1, 0)
# Outside the range of ephemeral ports, which other programs on the host need.
SOURCE_PORTS = range(10_000, 20_000)
SOURCE_HOSTS = 8
SPARE = 16
"""Descriptors of a rank beyond those open without the flood, its files and unauthenticated
connections."""


# --- the job --------------------------------------------------------------------------------------


def run_rank(rank: int, port: int, secret: str, limit: int, pipe: Connection) -> None:
    """One rank of the job: joins, sends its ports, and executes operations in the phases that the
    pipe starts."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    os.environ.update(
        UNICOLL_SECRET=secret,
        UNICOLL_TRANSPORT="tcp",
        UNICOLL_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    import unicoll as dist
    from tests.support.ports import listening_ports
    from unicoll.net.wire.admission import max_unauthenticated

    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT_SECONDS)
    work(rank, store, 0.2)  # opens the connections
    ports = [port for _, port in listening_ports()]
    pipe.send(
        {
            "ports": ports,
            "unauthenticated": len(ports) * max_unauthenticated(),
            "open": descriptors(),
        }
    )
    while (seconds := pipe.recv()) is not None:
        pipe.send(work(rank, store, seconds))
    dist.destroy_process_group()
    store.close(linger=True)


def descriptors(pid: int | str = "self") -> int:
    """How many descriptors a process has open; 0 if it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def work(rank: int, store: Any, seconds: float) -> dict[str, Any]:
    """Operations for this many seconds; returns their times and the first error."""
    import numpy as np

    import unicoll as dist

    took: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    began = time.monotonic(), threads_time()
    until = time.monotonic() + seconds

    def reduce() -> bool:
        x = np.ones(1024)
        x[1] = (
            rank == 0 and time.monotonic() >= until
        )  # rank 0 ends the phase, so that both ranks have equal numbers
        dist.all_reduce(x)
        if x[0] != 2.0:
            raise ValueError(f"the sum is {x[0]}")
        return bool(x[1])

    def get() -> None:
        if store.get(f"flood/{rank}") != b"value":
            raise ValueError("the store has another value")

    def open_files() -> None:
        opened = []
        try:
            for _ in range(FILES):
                opened.append(os.open(__file__, os.O_RDONLY))
        finally:
            for fd in opened:
                os.close(fd)

    error = None
    steps = (reduce, lambda: store.set(f"flood/{rank}", "value"), get, open_files)
    try:
        over = False
        while not over and time.monotonic() < until + TIMEOUT_SECONDS:
            for name, step in zip(OPERATIONS, steps, strict=True):
                started = time.perf_counter()
                over = bool(step()) or over
                took[name].append(time.perf_counter() - started)
            time.sleep(PAUSE_SECONDS)
    except Exception as e:
        error = f"rank {rank}: {name}: {type(e).__name__}: {e}"
    share = (threads_time() - began[1]) / (time.monotonic() - began[0])
    return {"took": took, "error": error, "threads": share}


def threads_time() -> float:
    """Seconds of processor time that the other threads of this process, unicoll's, have taken."""
    return time.process_time() - time.thread_time()


def connect_clients(port: int, secret: str, pipe: Connection) -> None:
    """New clients of the store, sequentially on each of several threads, in the phases that the
    pipe starts."""
    from unicoll import TCPStore
    from unicoll.net.wire.secret import Secret

    def connect(until: float, took: list[float], errors: list[str]) -> None:
        try:
            while time.monotonic() < until:
                started = time.perf_counter()
                TCPStore(
                    "127.0.0.1",
                    port,
                    timeout=CONNECT_SECONDS,
                    secret=Secret(secret.encode(), "flood"),
                ).close()
                took.append(time.perf_counter() - started)
                time.sleep(CLIENT_PAUSE_SECONDS)
        except Exception as error:
            errors.append(f"a new client: {type(error).__name__}: {error}")

    while (seconds := pipe.recv()) is not None:
        took: list[float] = []
        errors: list[str] = []
        arguments = (time.monotonic() + seconds, took, errors)
        threads = [threading.Thread(target=connect, args=arguments) for _ in range(CLIENT_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.send({"took": {NEW_CLIENT: took}, "error": errors[0] if errors else None})


# --- the attackers --------------------------------------------------------------------------------


def attack(
    number: int, ports: list[int], connections: int, rate: float, seconds: float, pipe: Connection
) -> None:
    """Holds this many silent connections, and resets this many others per second; sends the numbers
    at the end."""
    wanted = connections + 64
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        hard = wanted  # only root may
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    addresses = zip(sources(number), cycle(ports))
    held: list[socket.socket] = []
    most = (0, 0)
    opened = reset = refused = 0
    started = time.monotonic()
    swept_at = started
    while (now := time.monotonic()) < started + seconds and not pipe.poll():
        for _ in range(min(1024, connections - len(held))):
            sock, _ = dial(next(addresses))
            if sock is not None:
                held.append(sock)
                opened += 1
        for _ in range(min(256, int(rate * (now - started)) - reset - refused)):
            sock, established = dial(next(addresses))
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
                sock.close()
            reset += established
            refused += not established
        if now - swept_at > 0.25:
            swept_at = now
            held, counts = sweep(held)
            most = max(most, counts, key=sum)
        time.sleep(0.005)
    held, counts = sweep(held)
    most = max(most, counts, key=sum)
    pipe.send((*most, opened, reset, refused, time.monotonic() - started))
    for sock in held:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        sock.close()


def sources(number: int) -> Iterator[tuple[str, int]]:
    """Endless source addresses that no other attacker uses."""
    hosts = [f"127.0.{number + 1}.{host}" for host in range(1, SOURCE_HOSTS + 1)]
    return cycle((host, port) for port, host in product(SOURCE_PORTS, hosts))


def dial(addresses: tuple[tuple[str, int], int]) -> tuple[socket.socket | None, bool]:
    """A connection, and whether it is established; None if the source port is taken."""
    source, port = addresses
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.bind(source)
        sock.connect_ex(("127.0.0.1", port))
        # If it is not established, the listener's queue is full, and the kernel tries again.
        return sock, state(sock) == ESTABLISHED
    except OSError:
        sock.close()
        return None, False


def state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def sweep(held: list[socket.socket]) -> tuple[list[socket.socket], tuple[int, int]]:
    """The connections that the job has not closed; the numbers of established and of unanswered
    ones."""
    states = [state(sock) for sock in held]
    kept = []
    for sock, now in zip(held, states, strict=True):
        if now in (ESTABLISHED, SYN_SENT):
            kept.append(sock)
        else:
            sock.close()
    return kept, (states.count(ESTABLISHED), states.count(SYN_SENT))


# --- both -----------------------------------------------------------------------------------------


class Program:
    """The processes of one run."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.processes: list[Any] = []

    def start(self, target: Any, *args: Any) -> tuple[Any, Connection]:
        """A process, and this end of its pipe."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(*args, theirs))
        process.start()
        theirs.close()
        self.processes.append(process)
        return process, ours

    def close(self) -> None:
        """End the processes that still run."""
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def receive(pipes: list[Connection], seconds: float) -> list[Any]:
    """One message of each process.

    Raises:
        TimeoutError: they have not all come in time. EOFError: a process has ended.
    """
    answers = []
    until = time.monotonic() + seconds
    for pipe in pipes:
        if not pipe.poll(max(0.0, until - time.monotonic())):
            raise TimeoutError(f"a process has not answered in {seconds:g} s")
        answers.append(pipe.recv())
    return answers


def measure(
    ranks: list[Any], pipes: list[Connection], seconds: float
) -> tuple[list[Any], list[int]]:
    """Run a phase; returns the results of ranks and clients, and each rank's maximum number of
    descriptors."""
    for pipe in pipes:
        pipe.send(seconds)
    most = [0] * len(ranks)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        most = [max(n, descriptors(process.pid)) for n, process in zip(most, ranks, strict=True)]
        time.sleep(0.05)
    return receive(pipes, seconds + CONNECT_SECONDS + TIMEOUT_SECONDS), most


def table(undisturbed: list[Any], flooded: list[Any]) -> str:
    """The times of the operations on all ranks and of new clients, without the flood and with
    it."""
    lines = [
        f"{'milliseconds':<16}{'without the flood':>30}{'with it':>30}",
        f"{'':<16}" + f"{'p50':>10}{'p99':>10}{'max':>10}" * 2,
    ]
    for name in (*OPERATIONS, NEW_CLIENT):
        line = f"{name:<16}"
        for reports in (undisturbed, flooded):
            took = sorted(t for one in reports for t in one["took"].get(name, ())) or [float("nan")]
            for at in (0.5, 0.99, 1.0):
                line += f"{took[min(len(took) - 1, int(at * len(took)))] * 1000:>10.3f}"
        lines.append(line)
    for name, at, of in (("rounds", 0, OPERATIONS[-1]), ("new clients", -1, NEW_CLIENT)):
        lines.append(
            f"{name:<16}"
            + "".join(f"{len(reports[at]['took'][of]):>30}" for reports in (undisturbed, flooded))
        )
    lines.append(
        f"{'server threads':<16}"
        + "".join(f"{reports[0]['threads']:>30.1%}" for reports in (undisturbed, flooded))
    )
    return "\n".join(lines)


def flood(args: argparse.Namespace, program: Program) -> list[str]:
    """The whole run; what failed."""
    from unicoll.run.job import reserve_port

    secret = secrets.token_hex(32)
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        started = [program.start(run_rank, rank, port, secret, args.limit) for rank in range(2)]
        ranks = [process for process, _ in started]
        joined = receive([pipe for _, pipe in started], START_SECONDS)
    ports = [port for rank in joined for port in rank["ports"]]
    started.append(program.start(connect_clients, port, secret))
    pipes = [pipe for _, pipe in started]
    print(f"2 ranks with at most {args.limit} descriptors each listen on {len(ports)} ports")

    undisturbed, _ = measure(ranks, pipes, args.seconds / 2)
    shares = [
        args.connections // args.processes + (i < args.connections % args.processes)
        for i in range(args.processes)
    ]
    attackers = [
        program.start(attack, i, ports, n, args.rate / args.processes, MOST_ATTACK_SECONDS)
        for i, n in enumerate(shares)
    ]
    time.sleep(1.0)  # for the processes to start and to reach their number
    flooded, most = measure(ranks, pipes, args.seconds)
    for _, pipe in attackers:
        pipe.send("stop")
    reached = receive([pipe for _, pipe in attackers], START_SECONDS)
    for pipe in pipes:
        pipe.send(None)

    established, waiting, opened, reset, refused = (
        sum(one[i] for one in reached) for i in range(5)
    )
    seconds = max(one[5] for one in reached)
    print(
        f"open at once: {established + waiting} silent connections ({established} established,"
        f" {waiting} waiting for a listener's queue)\nconnects a second:"
        f" {(opened + reset + refused) / seconds:.0f} ({opened / seconds:.0f} silent,"
        f" {reset / seconds:.0f} established and reset, {refused / seconds:.0f} abandoned since the"
        f" queue was full), for {seconds:.1f} s\n"
    )
    print(table(undisturbed, flooded), end="\n\n")
    failures = [one["error"] for one in (*undisturbed, *flooded) if one["error"]]
    for i, (rank, peak) in enumerate(zip(joined, most, strict=True)):
        cap = min(args.limit, rank["open"] + rank["unauthenticated"] + FILES + SPARE)
        print(
            f"descriptors of rank {i}: {rank['open']} without the flood, at most {peak} with it;"
            f" the cap is {cap}"
        )
        if peak > cap:
            failures.append(f"rank {i} had {peak} descriptors, more than {cap}")
    for i, process in enumerate(ranks):
        process.join(TIMEOUT_SECONDS)
        if process.exitcode != 0:
            failures.append(f"rank {i} did not end well: exit code {process.exitcode}")
    return failures


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: it is wrong, or asks for more than a run may do.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--connections", type=int, default=20_000, help="silent connections at once (20000)"
    )
    parser.add_argument(
        "--rate", type=float, default=10_000, help="connections made and reset a second (10000)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the flood (10)")
    parser.add_argument("--processes", type=int, default=4, help="attackers (4)")
    parser.add_argument(
        "--limit", type=int, default=None, help="limit of open files of a rank (what there is)"
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="1000 connections, 200 a second, 2 s, 1024 open files a rank",
    )
    args = parser.parse_args(argv)
    if args.short:
        args.connections, args.rate, args.seconds, args.processes = 1000, 200, 2.0, 2
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hard = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    args.limit = min(hard, args.limit or (1024 if args.short else hard))
    if not 0 <= args.connections <= MOST_CONNECTIONS or not 0 <= args.rate <= MOST_RATE:
        parser.error(f"at most {MOST_CONNECTIONS} connections and {MOST_RATE} a second")
    if not 0 < args.seconds <= MOST_SECONDS or not 1 <= args.processes <= 32:
        parser.error(f"at most {MOST_SECONDS:g} seconds and 32 processes")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    program = Program()
    try:
        failures = flood(args, program)
    except (EOFError, TimeoutError) as error:
        failures = [f"a process has ended: {error}" if isinstance(error, EOFError) else str(error)]
        for process in program.processes:
            process.kill()
    finally:
        program.close()
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("held")
    return 1 if failures else 0


if __name__ == "__main__":
    # In the place of this file's directory, where Python looks first.
    sys.path[0] = ROOT
    sys.exit(main())
