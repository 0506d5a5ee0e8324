"""Ranks with a real SYCL device: the CPU, through dpctl and Intel's OpenCL runtime (scripts/test_xccl)."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.nccl.staged import CHUNK
from tests.support.ranks import ProcessJob, run_ranks
from unicoll.staging import backend
from unicoll.testing.families import FAMILIES, ArrayFamily

_OPENCL = Path(sys.prefix, "lib", "libintelocl.so")


def unavailable_reason() -> str:
    """Why SYCL cannot be tested here; "" if it can."""
    # dpctl is not imported in the test's process, whose forks are ranks
    if importlib.util.find_spec("dpctl") is None or not _OPENCL.is_file():
        return "dpctl with Intel's OpenCL runtime is not here (scripts/test_xccl)"
    return ""


def import_dpctl() -> Any:
    """dpctl.tensor, with the CPU as a device."""
    os.environ["OCL_ICD_FILENAMES"] = str(_OPENCL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it moves to another package
        import dpctl.tensor

        return dpctl.tensor


class SyclFamily(ArrayFamily):
    """dpctl's arrays. Assigning to a strided one is how they are filled."""

    def from_numpy(self, values: Any) -> Any:
        return import_dpctl().asarray(values, copy=True)

    def to_numpy(self, array: Any) -> Any:
        return np.array(import_dpctl().asnumpy(array))


def prepare() -> None:
    """What a rank does before it joins."""
    FAMILIES["sycl"] = SyclFamily
    backend.CHUNK = CHUNK
    import_dpctl()


class SyclJob(ProcessJob):
    """A job whose ranks have SYCL arrays."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, prepare=(prepare,), **options)


def run(size: int, job: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
    """The results of a function on the ranks of a new job; ``options`` are those of :class:`SyclJob`."""
    return run_ranks(size, job, *args, start=SyclJob, **options)
