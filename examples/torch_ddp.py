"""Trains a small network on all processes with torch's DistributedDataParallel, over unicoll's
backends.

    torchrun --nproc-per-node 2 examples/torch_ddp.py
    unirun --nproc-per-node 2 examples/torch_ddp.py
    mpirun -n 2 python examples/torch_ddp.py

With GPUs each process uses one and the backend ``nccl``; on CPUs the backend is ``mpi`` under
mpirun, else ``gloo``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unicoll
import unicoll.torch_plugin

EPOCHS = 4


def dataset() -> TensorDataset:
    """Points in the plane, and whether they lie within a circle."""
    points = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.8).long())


def main() -> None:
    """The program of each process."""
    dist.init_process_group("unicoll")
    if dist.get_rank() == 0:
        print(unicoll.torch_plugin.explain())
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", unicoll.get_node_local_rank(0)) if cuda else torch.device("cpu")
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(dataset())
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        right = torch.zeros(2, device=device)
        for points, inside in DataLoader(dataset(), batch_size=50, sampler=sampler):
            points, inside = points.to(device), inside.to(device)
            scores = model(points)
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, inside).backward()
            optimizer.step()
            right += torch.stack(
                [(scores.argmax(1) == inside).sum(), torch.tensor(len(inside), device=device)]
            )
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {100 * (right[0] / right[1]).item():.1f} % right")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = weights.clone()
    dist.broadcast(first, 0)
    assert torch.equal(weights, first), "the processes have different weights"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
