"""Ranks on a real GPU, which may all use one device.

    with DeviceJob(2) as job: ...

NCCL refuses two ranks on one device unless a variable allows it (from 2.30), or different host ids are set (before).
The results of such ranks are valid, their latencies are not.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.mpi.mpi_ranks import MpiJob
from tests.support import worker
from tests.support.ranks import ProcessJob

__all__ = ["NATIVE_SINCE", "SHARING", "DeviceJob", "DeviceMpiJob", "Settings", "shared_environment"]

SHARING = ("auto", "native", "hostid")
"""Ways to make NCCL accept several ranks on one device; "auto" depends on its version."""
NATIVE_SINCE = 23000
"""The first version of NCCL with a variable for it."""
_ALWAYS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


@dataclass(frozen=True)
class Settings:
    """Settings of the ranks.

    Attributes:
        backend: backend of the default group.
        libraries: array libraries that the ranks import first: torch brings an NCCL, which the process then uses.
        sharing: one of :data:`SHARING`.
    """

    backend: str | None = "cpu:gloo,cuda:nccl"
    libraries: tuple[str, ...] = ()
    sharing: str = "auto"


def shared_environment(rank: int, sharing: str, version: int) -> dict[str, str]:
    """Variables with which NCCL of a version accepts several ranks on one device."""
    if sharing == "auto":
        sharing = "native" if version >= NATIVE_SINCE else "hostid"
    if sharing == "native":
        return _ALWAYS | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return _ALWAYS | {"NCCL_HOSTID": f"unicoll-rank-{rank}", "NCCL_NET": "Socket"}


def prepare(settings: Settings) -> None:
    """Prepare a rank before it joins."""
    rank, size = worker.rank_and_size()
    worker.BACKEND = settings.backend
    bring(settings.libraries)
    if size > 1:
        from nccl_comm.library import locate

        os.environ.setdefault("UNICOLL_NCCL_SHARE_DEVICE", "1")
        # after the query of the version: NCCL reads these when a communicator is created
        os.environ.update(shared_environment(rank, settings.sharing, locate.nccl().version))


def bring(libraries: Sequence[str]) -> None:
    """Import array libraries."""
    for name in libraries:
        importlib.import_module(name)


class DeviceJob(ProcessJob):
    """``size`` ranks on this machine's first GPU; keywords of :class:`Settings` and of :class:`ProcessJob`."""

    warnings = "default"  # array libraries emit their own
    prepare_timeout = 120.0  # importing torch from a cold disk takes long

    def __init__(
        self, size: int, *, join: str = "file", env: dict[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(
            size,
            join=join,
            env=_ONE_GPU | (env or {}),
            quiet=False,
            prepare=(prepare, Settings(**settings)),
            fresh=True,
        )


class DeviceMpiJob(MpiJob):
    """The same under mpirun, without NCCL."""

    warnings = DeviceJob.warnings
    prepare_timeout = DeviceJob.prepare_timeout

    def __init__(
        self, size: int, *, backend: str, libraries: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> None:
        super().__init__(
            size, backend=backend, env=_ONE_GPU | (env or {}), quiet=False, prepare=(bring, libraries)
        )


_ONE_GPU = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
