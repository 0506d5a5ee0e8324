"""Trains a network on images of handwritten digits, and goes on with the same result when processes
die.

    unirun -n 4 --replace examples/recover_digits.py

Each batch is cut into eight micro-batches, which the processes share, and an ``ExactSum`` adds
their gradients: so the weights have the same bits for every number of processes. Kill any process
while it runs (``kill -9``): the others get RankLostError, the launcher starts another process,
``recover`` gives it the weights of one of the others, and the step is made again. The printed
digest is that of a run in which nothing was killed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.parallel import parameters_digest

sys.path.insert(0, str(Path(__file__).parent))
from train_digits import Images, Network, Optimizer, count_correct, load_digits

BATCH, MICRO_BATCHES = 64, 8


def train(
    images: Images,
    epochs: int,
    before_step: Callable[[dist.ProcessGroup, int, int], None] | None = None,
) -> Network:
    """Train together with the other processes.

    Args:
        before_step: called with the group, the number of the step and that of all steps.
    """
    network = Network(seed=0)
    per_epoch = len(images) // BATCH
    optimizer = Optimizer(network.parameters, 0.1, epochs * per_epoch)
    state: dict[str, Any] = {
        "step": 0,
        "parameters": network.parameters,
        "velocities": optimizer.velocities,
    }
    gradients = dist.ExactSum(network.parameters)
    group = dist.recover(state)
    while True:
        step = optimizer.done = state["step"]
        try:
            if step == epochs * per_epoch:
                group.barrier()  # a process that has ended cannot recover with the others
                return network
            if before_step is not None:
                before_step(group, step, epochs * per_epoch)
            order = np.random.default_rng(step // per_epoch).permutation(len(images)).tolist()
            batch = order[step % per_epoch * BATCH :][:BATCH]
            gradients.reset()
            for pixels, labels in [*images.batches(batch, BATCH // MICRO_BATCHES)][
                group.rank() :: group.size()
            ]:
                found = dict(network.backward(network.forward(pixels), labels))
                gradients.add([found[i] for i in range(len(found))])
            gradients.all_reduce(group)
        except (dist.RankLostError, dist.GroupAbortedError):
            group = dist.recover(state)
            continue
        optimizer.step([total / MICRO_BATCHES for total in gradients.result()])
        state["step"] = step + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    training, test = load_digits()
    network = train(training, parser.parse_args().epochs)
    if dist.get_rank() == 0:
        correct = count_correct(network, test)
        print(f"test accuracy: {correct / len(test):.1%} ({correct} of {len(test)})")
        print(f"weights: SHA-256 {parameters_digest(network.parameters)}")


if __name__ == "__main__":
    main()
