"""Names of unicoll's backends in torch.distributed, and conversion of torch's backend strings."""

from __future__ import annotations

from unicoll.group import backend_choice
from unicoll.torch_autoload import BACKENDS

_PREFIX = "unicoll"
MPI = "mpi"
"""torch's name of its MPI backend; unicoll's after ``enable_mpi()``."""


def names_unicoll(backend: str | None, include_mpi: bool) -> bool:
    """True if a backend string, such as ``"cpu:unicoll-gloo,cuda:nccl"``, names a unicoll backend
    for any device.

    ``"mpi"`` is one with ``include_mpi``.
    """
    parts = [part.rpartition(":")[2].strip() for part in (backend or "").lower().split(",")]
    return any(part in BACKENDS or (include_mpi and part == MPI) for part in parts)


def spec_of(backend: str) -> str | None:
    """unicoll's backend specification for a backend string with at least one unicoll name.

    ``"unicoll"`` is None (chosen by device), ``"unicoll-gloo"`` is ``"gloo"``,
    ``"cpu:unicoll-gloo,cuda:nccl"`` is ``"cpu:gloo,cuda:nccl"``: a unicoll group serves all its
    devices itself, so torch's names denote unicoll's backends too.
    """
    backend = backend.lower()
    if ":" not in backend:
        return _backend_name(backend) or None
    parts = []
    for part in backend.split(","):
        device, _, name = part.strip().partition(":")
        parts.append(
            f"{device}:{_backend_name(name.strip()) or backend_choice.default_backend_for_device(device)}"
        )
    return ",".join(parts)


def _backend_name(name: str) -> str:
    """``"gloo"`` for ``"unicoll-gloo"``; "" for ``"unicoll"``, which is chosen by device."""
    return name[len(_PREFIX) :].lstrip("-") if name.startswith(_PREFIX) else name
