"""A simulated XPU, and a oneCCL for it: the simulated NCCL with what oneCCL has of it, and without what oneCCL lacks.

oneCCL has no asynchronous errors, does not abort a communicator, and orders a split by the parent's ranks.
"""

from __future__ import annotations

from tests.simulated_nccl.cuda import SimulatedCuda
from tests.simulated_nccl.nccl import SimulatedNccl, Slot
from unicoll.arrays.types import DType, Reduction
from unicoll.device_collectives.interface import SUCCESS, Config, NativeReduction
from xccl_comm.library.bindings import SYMBOLS, XpuOneCCL
from xccl_comm.library.errors import CODES, IN_PROGRESS, PEER_ERRORS

_NCCL_VERSION = 22800


class SimulatedXpu(SimulatedCuda):
    """The simulated devices as those of SYCL.

    Attributes:
        out_of_order: handles of streams that :meth:`in_order` is False for.
    """

    name = "SYCL"
    device_type = "xpu"
    visible_devices = "ZE_AFFINITY_MASK"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.out_of_order: set[int] = set()

    def in_order(self, stream: int) -> bool:
        return stream not in self.out_of_order


class SimulatedOneCCL(SimulatedNccl):
    """One process's oneCCL."""

    name = "oneCCL"
    device_type = XpuOneCCL.device_type
    codes = CODES
    in_progress = IN_PROGRESS
    peer_errors = PEER_ERRORS
    splits_by_key = XpuOneCCL.splits_by_key
    version_text = "2022.1"
    scales_one_rank = XpuOneCCL.scales_one_rank
    sets_up_one_sided = XpuOneCCL.sets_up_one_sided

    def __init__(self, *arguments: object) -> None:
        simulation, _, prompt = arguments
        super().__init__(simulation, _NCCL_VERSION, prompt)  # type: ignore[arg-type]

    def has(self, method: str) -> bool:
        return method in SYMBOLS

    def symbol(self, method: str) -> str:
        return SYMBOLS[method]

    def needed(self, method: str) -> str:
        return XpuOneCCL.needed(self, method)  # type: ignore[arg-type]

    def reduction(
        self, dtype: DType, reduction: Reduction, capability: tuple[int, int] | None = None
    ) -> NativeReduction | None:
        return XpuOneCCL.reduction(self, dtype, reduction, capability)  # type: ignore[arg-type]

    def comm_split(self, comm: int, color: int | None, key: int, config: Config) -> tuple[int, Slot]:
        return super().comm_split(comm, color, 0, config)

    def comm_state(self, comm: int) -> tuple[int, int]:
        return SUCCESS, SUCCESS

    def comm_abort(self, comm: int) -> int:
        raise AttributeError("oneCCL does not abort a communicator")

    def comm_revoke(self, comm: int) -> int:
        raise AttributeError("oneCCL does not stop a communicator")
