"""Training as in ``training``, with the model wrapped so that its gradients are averaged while they are computed."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from processes import say, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from training import BATCH, EPOCHS, Share, load_digits, network


def worker(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(1234 + rank)  # the wrapper gives all ranks the first one's weights
    torch.set_num_threads(1)
    share = Share(load_digits(), size, rank, seed=7)
    batches = DataLoader(share, batch_size=BATCH // size, shuffle=True)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for epoch in range(EPOCHS):
        total = 0.0
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(images), labels)
            total += loss.item()
            loss.backward()
            optimizer.step()
        say("rank", dist.get_rank(), "epoch", epoch, "loss", total / len(batches))
    for name, value in model.state_dict().items():
        say("rank", rank, name, value.double().abs().sum().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["DIGITS"] = sys.argv[2]
    start(worker, 2)
