"""Ranks on a real GPU: :class:`ranks.Job` whose ranks may all use one device.

    with DeviceJob(2) as job: ...

NCCL refuses two ranks on one device unless it is told that it may (from 2.30), or that they are on different hosts
(before); the latencies of such ranks mean nothing, their results do.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpi_ranks import MpiJob

from unicoll.testing import worker
from unicoll.testing.ranks import Job

__all__ = ["NATIVE_SINCE", "SHARING", "DeviceJob", "DeviceMpiJob", "Settings", "shared_environment"]

SHARING = ("auto", "native", "hostid")
"""How NCCL is brought to put several ranks on one device; "auto" goes by its version."""
NATIVE_SINCE = 23000
"""The version of NCCL from which it does so when told to."""
_ALWAYS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


@dataclass(frozen=True)
class Settings:
    """How the ranks are to be.

    Attributes:
        backend: with which they join.
        libraries: array libraries that they import first: torch brings an NCCL, which is then everybody's.
        sharing: one of :data:`SHARING`.
    """

    backend: str | None = "cpu:gloo,cuda:nccl"
    libraries: tuple[str, ...] = ()
    sharing: str = "auto"


def shared_environment(rank: int, sharing: str, version: int) -> dict[str, str]:
    """Variables by which NCCL of a version puts several ranks on one device."""
    if sharing == "auto":
        sharing = "native" if version >= NATIVE_SINCE else "hostid"
    if sharing == "native":
        return _ALWAYS | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return _ALWAYS | {"NCCL_HOSTID": f"unicoll-rank-{rank}", "NCCL_NET": "Socket"}


def prepare(settings: Settings) -> None:
    """What a rank does before it joins."""
    rank, size = worker.place()
    worker.BACKEND = settings.backend
    bring(settings.libraries)
    if size > 1:
        from nccl_comm import library

        os.environ.setdefault("UNICOLL_NCCL_SHARE_DEVICE", "1")
        # The version can be asked for first: NCCL reads these when a communicator begins.
        os.environ.update(shared_environment(rank, settings.sharing, library.nccl().version))


def bring(libraries: Sequence[str]) -> None:
    """Import array libraries."""
    for name in libraries:
        importlib.import_module(name)


class DeviceJob(Job):
    """``size`` ranks on this machine's first GPU; keywords of :class:`Settings`, and those of :class:`ranks.Job`."""

    warnings = "default"  # array libraries have their own
    patience = 120.0  # importing torch from a cold disk takes its time

    def __init__(
        self, size: int, *, join: str = "file", env: dict[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(
            size, join=join, env=_ONE_GPU | (env or {}), quiet=False, prepare=(prepare, Settings(**settings))
        )


class DeviceMpiJob(MpiJob):
    """The same under mpirun, without NCCL."""

    warnings = DeviceJob.warnings
    patience = DeviceJob.patience

    def __init__(
        self, size: int, *, backend: str, libraries: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> None:
        super().__init__(
            size, backend=backend, env=_ONE_GPU | (env or {}), quiet=False, prepare=(bring, libraries)
        )


_ONE_GPU = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
