#!/usr/bin/env python3
"""Runs random correct programs over torch's own Gloo with UNICOLL_WATCH=1, which must log nothing.

    scripts/watch_random.py --programs 1000 --ranks 3 --seed 1

A program makes groups, and collectives and messages in them, blocking or not, with late ranks
between; some works are never waited for, some groups never destroyed.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

SIZES = (1, 4, 1000, 100_000)


def collectives(
    x: torch.Tensor, group: Any, ranks: Sequence[int], root: int
) -> dict[str, Callable[[bool], Any]]:
    """The collectives of a group by name, with the argument ``async_op``."""
    n, size, is_root = len(x), len(ranks), dist.get_rank() == root
    parts = [torch.empty(n) for _ in ranks]
    large = torch.ones(n * size)
    return {
        "all_reduce": lambda a: dist.all_reduce(x, group=group, async_op=a),
        "broadcast": lambda a: dist.broadcast(x, root, group=group, async_op=a),
        "all_gather": lambda a: dist.all_gather(parts, x, group=group, async_op=a),
        "reduce": lambda a: dist.reduce(x, root, group=group, async_op=a),
        "barrier": lambda a: dist.barrier(group=group, async_op=a),
        "gather": lambda a: dist.gather(
            x, parts if is_root else None, root, group=group, async_op=a
        ),
        "scatter": lambda a: dist.scatter(
            x, parts if is_root else None, root, group=group, async_op=a
        ),
        "reduce_scatter": lambda a: dist.reduce_scatter_tensor(x, large, group=group, async_op=a),
        "all_to_all": lambda a: dist.all_to_all_single(
            large.clone(), large, group=group, async_op=a
        ),
        "objects": lambda a: dist.all_gather_object(
            [None] * size, "x" * dist.get_rank(), group=group
        ),
        "functional": lambda a: (
            functional.all_reduce(x, "sum", group or dist.group.WORLD).sum() and None
        ),
    }


def message(
    x: torch.Tensor, group: Any, sender: int, receiver: int, waits: bool, from_any: bool
) -> list[Any]:
    """A message between two members; the works that are to be waited for."""
    rank = dist.get_rank()
    if sender == receiver or rank not in (sender, receiver):
        return []
    if not waits:
        start, peer = (dist.isend, receiver) if rank == sender else (dist.irecv, sender)
        return [start(x, peer, group=group, tag=7)]
    if rank == sender:
        dist.send(x, receiver, group=group, tag=8)
    else:
        dist.recv(x, None if from_any else sender, group=group, tag=8)
    return []


def train() -> None:
    """A step of DistributedDataParallel, whose collectives torch's C++ code makes."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()


def run_program(seed: int, from_any: bool) -> None:
    """The random program of a seed, on all ranks."""
    choose, rank, world = random.Random(seed), dist.get_rank(), range(dist.get_world_size())
    groups: list[tuple[Any, Sequence[int]]] = [(None, world)]
    for _ in range(choose.randrange(3)):
        ranks = sorted(choose.sample(world, choose.randint(1, len(world))))
        groups.append((dist.new_group(ranks), ranks))
    works: list[Any] = []
    for _ in range(choose.randint(3, 15)):
        group, ranks = choose.choice(groups)
        root, sender, receiver = (choose.choice(ranks) for _ in range(3))
        size, is_async, waits = choose.choice(SIZES), choose.random() < 0.4, choose.random() < 0.5
        late, seconds, kind = choose.choice(world), choose.choice((0, 0.01, 0.3)), choose.random()
        name = choose.randrange(11)
        if kind < 0.1:
            time.sleep(seconds * (rank == late))
        elif kind < 0.15:
            train()
        elif rank in ranks and kind < 0.3:
            x = torch.ones(
                4 if from_any else size
            )  # from any rank messages may come in another order
            works += message(x, group, sender, receiver, waits, from_any)
        elif rank in ranks:
            calls = collectives(torch.ones(size), group, ranks, root)
            work = [*calls.values()][name](is_async)
            works += [work] if isinstance(work, dist.Work) else []
        if waits:
            while works:
                works.pop(0).wait()
    if choose.random() < 0.8:
        for work in works:
            work.wait()
    dist.barrier()
    for group, ranks in groups[1:]:
        if choose.random() < 0.7 and rank in ranks:
            dist.destroy_process_group(group)


def rank_main(options: argparse.Namespace) -> None:
    """One rank: some thousand groups in one job would exhaust the ports, so each job runs a part of
    the programs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for seed in range(options.seed, options.seed + options.programs):
        run_program(seed, options.seed % 2 == 1)
    dist.destroy_process_group()


def main() -> None:
    """The command-line program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--per-job", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warning", type=int, default=10, help="UNICOLL_STALL_WARNING")
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options)
        return
    for done in range(0, options.programs, options.per_job):
        count = min(options.per_job, options.programs - done)
        seed = options.seed + done // options.per_job * 1001  # odd and even ones in turns
        logged = run_job(options.ranks, [f"--programs={count}", f"--seed={seed}"], options.warning)
        print(f"{done + count} programs, seed {seed}: {logged or 'nothing logged'}", flush=True)
        if logged:
            sys.exit(1)


def run_job(size: int, arguments: list[str], warning: int) -> str:
    """Run one job; returns what its ranks have logged."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "UNICOLL_WATCH": "1",
        "UNICOLL_STALL_WARNING": str(warning),
        "OMP_NUM_THREADS": "1",
    }
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *arguments],
            env={**env, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    logged = "".join(f"rank {rank}: {popen.communicate()[1]}" for rank, popen in enumerate(ranks))
    failed = [rank for rank, popen in enumerate(ranks) if popen.returncode]
    silent = "".join(f"rank {rank}: " for rank in range(size))
    return "" if logged == silent and not failed else f"{logged} failed: {failed}"


if __name__ == "__main__":
    main()
