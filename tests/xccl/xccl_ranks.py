"""Ranks of the backend xccl: oneCCL with its plug-in for the CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from tests.support import worker
from tests.support.ranks import ProcessJob


def unavailable_reason() -> str:
    """Why oneCCL cannot be tested here; "" if it can."""
    # the library is not loaded in the test's process, whose forks are ranks
    if not Path(sys.prefix, "lib", "libccl.so.2").is_file():
        return "oneCCL is not here (scripts/test_xccl)"
    return "" if importlib.util.find_spec("xccl_comm") else "there is no xccl_comm"


class XcclJob(ProcessJob):
    """A job whose ranks join with the backend xccl. oneCCL writes to standard error."""

    def __init__(self, size: int, **options: Any) -> None:
        options.setdefault("quiet", False)
        super().__init__(size, prepare=(worker.use, "xccl"), **options)
