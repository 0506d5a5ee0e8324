"""The JSON of a run: nccl-tests' format with each contender's statistics and a description of the
machine."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.bench.args import BenchOptions
from unicoll.bench.arrays import device_index
from unicoll.bench.contract import Contender
from unicoll.bench.mpi import library
from unicoll.devices import runtimes
from unicoll.process.files import write_whole

_FORMAT = 1
"""Version of nccl-tests' JSON format."""
_TIME = "%Y-%m-%d %H:%M:%S"
_VARIABLES = re.compile(
    r"(UNICOLL|OMP|NCCL|RCCL|HIP|HSA|OMPI_MCA|MPICH|MPIR_CVAR|FI|UCX|GLOO|CUDA)_"
)
_SECRET = ("SECRET", "KEY", "TOKEN", "PASS")
_FOLDERS = re.compile(r"(?<![\w/])/(?!/)(?:[^/:,;\s]+/)+")
"""The directories of a path, without its last part; does not match the slashes of a URL."""


def load_warning(load: float, cores: int) -> str | None:
    """The warning that the load average of one minute exceeds half of the cores."""
    if load <= cores / 2:
        return None
    return (
        f"load average {load:.1f} on {cores} cores: other processes run, or did within the last"
        " minute; times and ratios vary"
    )


def machine() -> dict[str, Any]:
    """Hardware and software of this host that affect the results."""
    found: dict[str, Any] = {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "unicoll": dist.__version__,
    }
    for name in ("torch", "cupy", "mpi4py", "ml_dtypes"):
        if name in sys.modules:
            found[name] = sys.modules[name].__version__
    if "mpi4py.MPI" in sys.modules:
        found["mpi"] = library(sys.modules["mpi4py.MPI"])
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["hip" if torch.version.hip else "cuda"] = torch.version.hip or torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:(.*)", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def device(rank: int, contenders: Sequence[Contender]) -> dict[str, Any]:
    """nccl-tests' entry for the device of a rank: the GPU if one is used, else the CPU."""
    index, bus, info = -1, "cpu", cpu()
    used = [c.device for c in contenders if c.device != "cpu"]
    if used:
        index = device_index(used[0])
        found = runtimes.runtime(used[0].partition(":")[0]).facts(index)
        bus, info = found.bus, found.name
    return {
        "rank": rank,
        "group": 0,
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "device": index,
        "device_hex": bus,
        "device_info": info,
    }


def _environment() -> list[str]:
    """Environment variables that affect the results, without secrets and with paths cut to their
    last part."""
    return [
        f"{name}={_FOLDERS.sub('.../', value)}"
        for name, value in sorted(os.environ.items())
        if _VARIABLES.match(name) and not any(part in name.upper() for part in _SECRET)
    ]


def begin(
    options: BenchOptions,
    ranks: int,
    devices: Sequence[Mapping[str, Any]],
    transports: Mapping[str, str],
    staging: Mapping[str, int],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """The JSON of a run without results.

    ``devices`` has :func:`device` of each rank; the last three have a value by contender.
    """
    return {
        "version": _FORMAT,
        "start_time": time.strftime(_TIME),
        "args": ["unicoll.bench", *options.argv],
        "env": _environment(),
        "nccl_version": 0,
        "config": _config(options),
        "devices": devices,
        "operation": options.op.name,
        "program": options.op.program,
        "ranks": ranks,
        "machine": machine(),
        "load_average": os.getloadavg(),
        "contenders": {name: {"transport": text} for name, text in transports.items()},
        "skipped_contenders": skipped,
        "staging": {
            name: {"bytes_per_rank": n, "bytes_per_rank_after": n} for name, n in staging.items()
        },
        "explain": dist.explain().splitlines(),
        "results": [],
        "errors": [],
    }


def _config(options: BenchOptions) -> dict[str, Any]:
    step, kind = options.step.rstrip(")").split("(")
    config: dict[str, Any] = {
        "nthreads": 1,
        "ngpus": 1,
        "minimum_bytes": options.sizes[0],
        "maximum_bytes": options.sizes[-1],
    }
    if kind != "list":
        config["step_factor" if kind == "factor" else "step_bytes"] = int(step)
    return config | {
        "warmup_iters": options.warmup,
        "iterations": options.iters,
        "aggregated_iterations": options.aggregate,
        "validation": options.checks,
        "graph": 0,
        "blocking_collectives": _bool_text(options.blocking),
        "parallel_init": _bool_text(False),
        "unalign": options.unalign,
        "sizes": options.sizes,
        "turns": options.turns,
        "budget_s": None if options.iters else options.budget,
        "statistic": options.statistic,
        "average": options.average,
        "osu_sizes": _bool_text(options.osu),
        "compression": options.compression or None,
    }


def finish(
    data: dict[str, Any], failed: int, average: Mapping[str, float], minimum: float | None
) -> Any:
    """The complete JSON, with nccl-tests' summary."""
    first = next(iter(average.values()), 0.0)
    for name, bandwidth in average.items():
        data["contenders"][name]["average_bus_bandwidth"] = bandwidth
    data["out_of_bounds"] = {"count": failed, "okay": _bool_text(failed == 0)}
    okay = "unchecked" if minimum is None else _bool_text(first >= minimum * 0.9)
    data["average_bus_bandwidth"] = {"bandwidth": first, "okay": okay}
    data["load_average_at_end"] = os.getloadavg()
    data["end_time"] = time.strftime(_TIME)
    return _rounded(data)


def _bool_text(value: bool) -> str:
    """nccl-tests writes booleans as strings."""
    return "true" if value else "false"


def _rounded(value: Any) -> Any:
    """JSON with at most six decimals, and null for NaN."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def write(data: Mapping[str, Any], path: str) -> None:
    """Write JSON to a file atomically; OSError if that is impossible."""
    write_whole(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode(), mode=0o644)
