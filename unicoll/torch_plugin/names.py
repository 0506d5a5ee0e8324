"""Names: our backends as torch.distributed knows them, and what a backend string asks of unicoll."""

from __future__ import annotations

from unicoll import registry

__all__ = ["BACKENDS", "MPI", "asks_for_us", "spec_of"]

_PREFIX = "unicoll"
BACKENDS: dict[str, tuple[str, ...]] = {
    "unicoll": ("cpu", "cuda"),
    "unicoll-gloo": ("cpu",),
    "unicoll-mpi": ("cpu", "cuda"),
    "unicoll-nccl": ("cuda",),
}
"""Our names, and the devices that torch is told they serve."""

MPI = "mpi"
"""torch's own name for MPI, ours after ``enable_mpi()``."""


def asks_for_us(backend: str | None, mpi_is_ours: bool) -> bool:
    """Whether a backend string of torch names one of our backends, for any device."""
    parts = [part.rpartition(":")[2].strip() for part in (backend or "").lower().split(",")]
    return any(part in BACKENDS or (mpi_is_ours and part == MPI) for part in parts)


def spec_of(backend: str) -> str | None:
    """unicoll's backend specification for a string that one of our names is in.

    ``"unicoll"`` is None (chosen by device), ``"unicoll-gloo"`` is ``"gloo"``, ``"cpu:unicoll-gloo,cuda:nccl"`` is
    ``"cpu:gloo,cuda:nccl"``: a group of ours serves all its devices itself, so torch's names mean our backends too.
    """
    backend = backend.lower()
    if ":" not in backend:
        return _own(backend) or None
    parts = []
    for part in backend.split(","):
        device, _, name = part.strip().partition(":")
        parts.append(f"{device}:{_own(name.strip()) or registry.default_backend_for_device(device)}")
    return ",".join(parts)


def _own(name: str) -> str:
    """``"unicoll-gloo"`` is ``"gloo"``; "" where the device decides."""
    return name[len(_PREFIX) :].lstrip("-") if name.startswith(_PREFIX) else name
