"""Data-parallel training: each process learns from its own share of the digits and averages the gradients.

The path of the data set is the script's second argument.
"""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from processes import say, start
from torch import nn

SAMPLES = 600
BATCH = 100  # over all processes
EPOCHS = 2

Samples = tuple[torch.Tensor, torch.Tensor]


class Share:
    """One process's samples out of a data set that is cut at random, the same way everywhere."""

    def __init__(self, data: Samples, parts: int, which: int, seed: int) -> None:
        order = list(range(len(data[1])))
        random.Random(seed).shuffle(order)
        length = len(order) // parts
        chosen = order[which * length : (which + 1) * length]
        self.images, self.labels = data[0][chosen], data[1][chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


def network() -> nn.Module:
    """A small convolutional network with drop-out; it gives logarithms of probabilities."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(72, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
        nn.LogSoftmax(1),
    )


def load_digits() -> Samples:
    path = os.environ["DIGITS"]
    table = np.loadtxt(path, delimiter=",", dtype=np.int64, max_rows=SAMPLES)
    images = torch.tensor(table[:, :-1] / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return images, torch.tensor(table[:, -1])


def average_gradients(model: nn.Module) -> None:
    size = float(dist.get_world_size())
    for param in model.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def worker(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    share = Share(load_digits(), dist.get_world_size(), dist.get_rank(), seed=7)
    batches = torch.utils.data.DataLoader(share, batch_size=BATCH // size, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for epoch in range(EPOCHS):
        total = 0.0
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(images), labels)
            total += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        say("rank", dist.get_rank(), "epoch", epoch, "loss", total / len(batches))
    weight = sum(p.detach().abs().sum().item() for p in model.parameters())
    say("rank", rank, "weights", weight)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["DIGITS"] = sys.argv[2]
    start(worker, 2)
