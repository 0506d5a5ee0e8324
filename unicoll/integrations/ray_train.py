"""Ray Train over unicoll: a ``TorchConfig`` that gives the workers a secret."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray.train.torch

from unicoll.net.wire.secret import KeyText, new_key_text


def _prepare(secret: KeyText) -> None:
    os.environ["UNICOLL_SECRET"] = secret
    # This import registers the backend's names also where torch loads no entry points.
    import unicoll.torch_plugin  # noqa: F401


_TorchBackend: Any = ray.train.torch.TorchConfig().backend_cls


# Ray has no types.
class _SecretBackend(_TorchBackend):  # type: ignore[misc]
    """Ray's backend for torch, whose workers have a new secret each time that they are started."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_prepare, new_key_text())
        super().on_start(worker_group, backend_config)


@dataclass
# Ray has no types.
class TorchConfig(ray.train.torch.TorchConfig):  # type: ignore[misc]
    """Ray Train's ``TorchConfig`` for a backend of unicoll: ``TorchTrainer(...,
    torch_config=TorchConfig())``.

    Ray's own ``TorchConfig(backend="unicoll")`` works, too, but any process that can reach rank 0
    can join the job: this one gives each worker a secret in UNICOLL_SECRET.

    Args:
        backend: a backend of unicoll in torch.distributed: ``unicoll``, ``unicoll-gloo``,
            ``unicoll-nccl`` ...
        init_method, timeout_s: as for Ray's.
    """

    backend: str | None = "unicoll"

    @property
    def backend_cls(self) -> type[_SecretBackend]:
        return _SecretBackend
