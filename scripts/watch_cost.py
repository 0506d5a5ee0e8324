#!/usr/bin/env python3
"""Measures what ``unicoll.torch_plugin.watch()`` costs a call and a training step over torch's own
Gloo.

    scripts/watch_cost.py --ranks 2

Jobs without and with UNICOLL_WATCH=1 run in turns. Each measures a step of DistributedDataParallel
with a model of 10 million parameters. Those that watch also measure an all_reduce of 16 bytes with
torch's methods and with the ones that record, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from torch_ddp_step import step, transformer

CLASSES = (dist.ProcessGroup, dist.Work)


def contents() -> list[dict[str, Any]]:
    """The attributes of torch's classes."""
    return [dict(cls.__dict__) for cls in CLASSES]


def measure_calls(torchs: list[dict[str, Any]], rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds of an all_reduce by torch's methods, and by those that record."""
    recording = contents()
    times: dict[str, list[float]] = {"torch": [], "recorded": []}
    x = torch.ones(4)
    for _ in range(rounds):
        for name, used in (("torch", torchs), ("recorded", recording)):
            for cls, old, new in zip(CLASSES, torchs, used, strict=True):
                for attribute in old:
                    if new[attribute] is not cls.__dict__[attribute]:
                        setattr(cls, attribute, new[attribute])
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                dist.all_reduce(x)
            times[name].append((time.perf_counter() - start) / count)
    return times


def measure_steps(rounds: int) -> list[float]:
    """Seconds of steps of training."""
    model = DistributedDataParallel(transformer())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randint(0, 2000, (2, 32))
    times = []
    for round_ in range(-3, rounds):
        dist.barrier()
        seconds = step(model, optimizer, x)
        if round_ >= 0:
            times.append(seconds)
    return times


def rank_main(rounds: int, calls: int) -> None:
    """One rank of a job."""
    torch.set_num_threads(1)
    torchs = contents()
    dist.init_process_group("gloo")
    time.sleep(1.0)  # until the groups are watched
    found: dict[str, Any] = {"step": measure_steps(rounds)}
    if os.environ.get("UNICOLL_WATCH"):
        found |= measure_calls(torchs, rounds, calls)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """The command-line program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=4, help="of each kind")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=300)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options.rounds, options.calls)
        return
    jobs: dict[str, list[dict[str, Any]]] = {"": [], "1": []}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc-per-node={options.ranks}", __file__, *sys.argv[1:]]
    for _ in range(options.jobs):
        for watched, found in jobs.items():
            env = {**os.environ, "UNICOLL_WATCH": watched, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                launch, env=env, capture_output=True, text=True, timeout=900, check=True
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
    plain, recorded = (
        1e6 * statistics.median(seconds for job in jobs["1"] for seconds in job[name])
        for name in ("torch", "recorded")
    )
    print(
        f"all_reduce of 16 bytes: {plain:.1f} us, recorded {recorded:.1f} us,"
        f" {recorded - plain:+.1f} us"
    )
    off, on = (
        1e3 * statistics.median(seconds for job in found for seconds in job["step"])
        for found in jobs.values()
    )
    print(f"step: {off:.1f} ms, watched {on:.1f} ms, {100 * (on / off - 1):+.1f} %")


if __name__ == "__main__":
    main()
