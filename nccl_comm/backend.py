"""The NCCL backend: arrays on NVIDIA GPUs, over libnccl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nccl_comm.library import locate
from nccl_comm.transport_report import expected, logged, settings
from unicoll.arrays.types import DType, Reduction
from unicoll.backend import Caps
from unicoll.calls.options import Options
from unicoll.device_collectives.backend import NATIVE_OPERATIONS, DeviceBackend
from unicoll.device_collectives.interface import CollectiveLibrary, Config
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import DeviceRuntime


def _reduces(dtype: DType, reduction: Reduction) -> bool:
    return locate.nccl().reduction(dtype, reduction) is not None


class NCCLBackend(DeviceBackend):
    """The NCCL backend of one group."""

    name = "nccl"
    caps = Caps(frozenset(("cuda",)), NATIVE_OPERATIONS, _reduces, tags=False, joins_batches=True)

    @classmethod
    def availability(cls) -> str | None:
        found = locate.find()
        return found if isinstance(found, str) else runtimes.reason_against("cuda")

    @classmethod
    def load_library(cls) -> CollectiveLibrary:
        return locate.nccl()

    @classmethod
    def load_runtime(cls) -> DeviceRuntime:
        return runtimes.runtime("cuda")

    def configure(self, options: Options) -> Config:
        config = super().configure(options)
        variables = settings(self.native.name)
        # NCCL prefers the variable to the option if it is 0 or 1. The backend has to know, because
        # it sets one-sided operations up on blocking communicators only (one_sided.set_up).
        blocking = variables.get("NCCL_COMM_BLOCKING")
        return config if blocking not in ("0", "1") else replace(config, blocking=blocking == "1")

    def describe_transports(self, facts: Sequence[dict[str, Any]]) -> list[str]:
        """The transports that NCCL has probably chosen, and those in its log."""
        variables = settings(self.native.name)
        return [
            expected(self.context.rank, facts, self.runtime, self._options.net_name, variables),
            logged(variables),
        ]
