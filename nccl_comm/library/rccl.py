"""librccl: NCCL's API on AMD's devices, with NCCL's version numbers
(https://rocm.docs.amd.com/projects/rccl)."""

from __future__ import annotations

from nccl_comm.library.bindings import Bindings
from nccl_comm.library.nccl import NcclFacts
from unicoll.arrays.types import DType, Reduction
from unicoll.device_collectives.interface import NativeReduction


class RcclFacts(NcclFacts):
    """What differs from NCCL.

    RCCL's 8-bit floating types have the format of the device (FNUZ on gfx942, OCP on gfx950), so
    they are moved and not reduced: unicoll's are those of OCP.
    """

    name = "RCCL"
    full_capability = (0, 0)

    def reduction(
        self, dtype: DType, reduction: Reduction, capability: tuple[int, int] | None = None
    ) -> NativeReduction | None:
        return (
            None
            if dtype.name.startswith("float8")
            else super().reduction(dtype, reduction, capability)
        )


class RcclBindings(RcclFacts, Bindings):
    """One loaded librccl."""
