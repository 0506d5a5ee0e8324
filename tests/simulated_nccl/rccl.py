"""A simulated AMD device, and an RCCL for it: the simulated NCCL with RCCL's facts."""

from __future__ import annotations

from nccl_comm.library.rccl import RcclFacts
from tests.simulated_nccl.cuda import SimulatedCuda
from tests.simulated_nccl.nccl import SimulatedNccl
from unicoll.devices.cuda.hip_driver import HipDriver


class SimulatedHip(SimulatedCuda):
    """The simulated devices as those of HIP."""

    name = HipDriver.name
    visible_devices = HipDriver.visible_devices


class SimulatedRccl(RcclFacts, SimulatedNccl):
    """One process's RCCL."""
