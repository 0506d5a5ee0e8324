"""Trains a small transformer whose parameters are sharded over all processes, with torch's FSDP2,
and saves it.

    torchrun --nproc-per-node 2 examples/torch_fsdp2.py
    unirun --nproc-per-node 2 examples/torch_fsdp2.py
    mpirun -n 2 python examples/torch_fsdp2.py

The backend is ``nccl`` if each process has a GPU, else ``mpi`` or ``gloo`` on CPUs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unicoll
import unicoll.torch_plugin

WORDS, STEPS = 50, 20


class Copier(nn.Module):
    """A transformer that learns to reproduce its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(64, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logarithms of probabilities, of shape (batch, length, WORDS)."""
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.log_softmax(self.head(x), -1)


def main() -> None:
    """The program of each process."""
    dist.init_process_group("unicoll")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", unicoll.get_node_local_rank(0)) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Copier().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 0.005)
    torch.manual_seed(dist.get_rank())
    for step in range(STEPS):
        words = torch.randint(0, WORDS, (16, 10), device=device)
        loss = nn.functional.nll_loss(model(words).flatten(0, 1), words.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {mean.item():.2f}")
    where: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=where[0])
    if dist.get_rank() == 0:
        files = sorted(path.suffix for path in Path(str(where[0])).iterdir())
        print(f"saved in {sum(suffix == '.distcp' for suffix in files)} parts")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
