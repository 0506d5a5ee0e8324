#!/usr/bin/env python3
"""Measures a DDP step of a small transformer on unicoll's CPU backend and on torch's Gloo,
alternating in one job.

    unirun --nproc-per-node 2 --no-prefix scripts/torch_ddp_step.py --json step.json

Each round has one step on each backend and one without communication (``no_sync``), in rotating
order. The difference to the step without communication is the communication that does not overlap
the backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unicoll.torch_plugin  # noqa: F401 - registers the backends

BACKENDS = ("unicoll-gloo", "gloo")
BASELINE = "no communication"


def transformer(width: int = 384, layers: int = 5, tokens: int = 2000) -> nn.Module:
    """A transformer encoder with about 10 million parameters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(tokens, width), encoder, nn.Linear(width, tokens))


def step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> float:
    """Run one training step; returns its seconds. The caller synchronises the ranks."""
    start = time.perf_counter()
    optimizer.zero_grad(set_to_none=False)
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    """The command-line program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("unicoll-gloo")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    models = {
        name: DistributedDataParallel(transformer(), process_group=group)
        for name, group in groups.items()
    }
    optimizers = {name: torch.optim.SGD(model.parameters(), 1e-3) for name, model in models.items()}
    x = torch.randint(0, 2000, (options.batch, options.length))
    times: dict[str, list[float]] = {name: [] for name in (*BACKENDS, BASELINE)}
    for round_ in range(-2, options.rounds):
        order = list(times)
        for name in order[round_ % 3 :] + order[: round_ % 3]:
            dist.barrier()
            if name == BASELINE:
                model = models[BACKENDS[0]]
                with model.no_sync():
                    seconds = step(model, optimizers[BACKENDS[0]], x)
            else:
                seconds = step(models[name], optimizers[name], x)
            slowest = torch.tensor([seconds])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if round_ >= 0:
                times[name].append(slowest.item())
    bare = reductions(groups)
    if dist.get_rank() == 0:
        report(times, bare, options, models[BACKENDS[0]])
    dist.destroy_process_group()


def reductions(groups: dict[str, dist.ProcessGroup]) -> dict[str, float]:
    """Seconds of the gradients' reduction alone, in 25 MiB buckets, by backend."""
    buckets = [torch.ones(25 << 18), torch.ones(15 << 18)]
    times: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(10):
        for name, group in groups.items():
            dist.barrier()
            start = time.perf_counter()
            for bucket in buckets:
                dist.all_reduce(bucket.fill_(1.0), group=group)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def report(
    times: dict[str, list[float]],
    bare: dict[str, float],
    options: argparse.Namespace,
    model: DistributedDataParallel,
) -> None:
    """Print the results and write them to a file."""
    steps = {name: statistics.median(seconds) for name, seconds in times.items()}
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, {dist.get_world_size()} ranks on {os.cpu_count()}"
        " cores"
    )
    for name, seconds in steps.items():
        exposed = (
            ""
            if name == BASELINE
            else f"  exposed communication {1e3 * (seconds - steps[BASELINE]):8.1f} ms"
        )
        reduction = "" if name == BASELINE else f"  reductions alone {1e3 * bare[name]:7.1f} ms"
        print(f"{name:18} step {1e3 * seconds:8.1f} ms{exposed}{reduction}")
    if options.json:
        facts = {
            "torch": torch.__version__,
            "ranks": dist.get_world_size(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "parameters": parameters,
            "unit": "s",
            "step": steps,
            "reductions": bare,
            "steps": times,
        }
        Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
