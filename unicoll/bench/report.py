"""What is kept of a run: nccl-tests' JSON with each contender's statistics and a description of the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import unicoll as dist

from .args import Options
from .contract import Contender
from .cuda import facts
from .mpi import library
from .operations import IN, OUT
from .table import Half, Line

__all__ = ["Report", "cpu", "device", "machine", "write"]

_FORMAT = 1
"""Version of nccl-tests' JSON that this follows."""
_TIME = "%Y-%m-%d %H:%M:%S"
_TELLING = ("UNICOLL_", "OMP_", "NCCL_", "OMPI_MCA_", "MPICH_", "MPIR_CVAR_", "FI_", "UCX_", "GLOO_", "CUDA_")
_SECRET = ("SECRET", "KEY", "TOKEN", "PASS")
_FOLDERS = re.compile(r"(?<![\w/])/(?!/)(?:[^/:,;\s]+/)+")
"""Where a path begins, up to its last part; not the slashes of a URL."""


def machine() -> dict[str, Any]:
    """Hardware and software of this host, as far as they matter to the numbers."""
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
            found[name] = _version(name)
    if "mpi4py.MPI" in sys.modules:
        found["mpi"] = library(sys.modules["mpi4py.MPI"])
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _version(name: str) -> str:
    own = getattr(sys.modules[name], "__version__", None)
    try:
        return str(own or version(name))
    except PackageNotFoundError:
        return "unknown"


def cpu() -> str:
    """The model of this host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device(rank: int, contenders: Sequence[Contender]) -> dict[str, Any]:
    """nccl-tests' line on the device of a rank: the CUDA device if one is used, else the CPU."""
    index, place, words = -1, "cpu", cpu()
    used = [c.device for c in contenders if c.device != "cpu"]
    if used:
        index = int(used[0].partition(":")[2])
        found = facts(used[0])
        place, words = found.bus, found.name
    return {
        "rank": rank,
        "group": 0,
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "device": index,
        "device_hex": place,
        "device_info": words,
    }


def _environment() -> list[str]:
    """The variables that change what is measured; no secrets, and of paths the last part only."""
    return [
        f"{name}={_FOLDERS.sub('.../', value)}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_TELLING) and not any(word in name.upper() for word in _SECRET)
    ]


class Report:
    """The JSON of a run, while it is filled.

    Args:
        options: what was asked for.
        ranks: number of ranks.
        devices: :func:`device` of each rank.
        transports: how each contender's data moves.
        staging: bytes of staging memory per rank of each contender that says so.
        skipped: contenders that could not be measured, and why.
    """

    def __init__(
        self,
        options: Options,
        ranks: int,
        devices: Sequence[Mapping[str, Any]],
        transports: Mapping[str, str],
        staging: Mapping[str, int],
        skipped: Mapping[str, str],
    ) -> None:
        self._options = options
        self._staging = {
            name: {"bytes_per_rank": n, "bytes_per_rank_after": n} for name, n in staging.items()
        }
        self._results: list[dict[str, Any]] = []
        self._errors: list[str] = []
        self.data: dict[str, Any] = {
            "version": _FORMAT,
            "start_time": time.strftime(_TIME),
            "args": ["unicoll.bench", *options.argv],
            "env": _environment(),
            "nccl_version": 0,
            "config": self._config(),
            "devices": [dict(d) for d in devices],
            "operation": options.op.name,
            "program": options.op.program,
            "ranks": ranks,
            "machine": machine(),
            "load_average": list(os.getloadavg()),
            "contenders": {name: {"transport": text} for name, text in transports.items()},
            "skipped_contenders": dict(skipped),
            "staging": self._staging,
            "explain": dist.explain().splitlines(),
            "results": self._results,
        }

    def _config(self) -> dict[str, Any]:
        options, pace = self._options, self._options.pace
        step, kind = options.sweep.step.rstrip(")").split("(")
        config: dict[str, Any] = {
            "nthreads": 1,
            "ngpus": 1,
            "minimum_bytes": options.sweep.sizes[0],
            "maximum_bytes": options.sweep.sizes[-1],
        }
        if kind != "list":
            config["step_factor" if kind == "factor" else "step_bytes"] = int(step)
        return config | {
            "warmup_iters": pace.warmup,
            "iterations": pace.iters,
            "aggregated_iterations": pace.aggregate,
            "validation": options.checks,
            "graph": 0,
            "blocking_collectives": _word(pace.sync),
            "parallel_init": _word(False),
            "unalign": options.unalign,
            "sizes": list(options.sweep.sizes),
            "turns": pace.turns,
            "budget_s": None if pace.iters else pace.budget,
            "statistic": options.statistic,
            "average": options.average,
            "osu_sizes": _word(options.osu),
        }

    def add(self, line: Line) -> None:
        """Keep a line of the table."""
        entry: dict[str, Any] = {
            "size": line.size,
            "count": line.count,
            "type": line.type,
            "redop": line.redop,
            "root": f"{line.root:6d}",
        }
        for name in (OUT, IN):
            half = line.halves.get(name)
            entry[name] = None if half is None else self._half(half)
        calls = max((half.calls for half in line.halves.values()), default=0)
        entry |= {"actual_iterations": calls, "experiment_name": line.contender}
        self._results.append(entry | {"contender": line.contender, "ratio": _finite(line.ratio)})

    def _half(self, half: Half) -> dict[str, Any]:
        label = "cpu_time" if self._options.pace.host_time else "time"
        return {
            label: _finite(half.time),
            "alg_bw": _finite(half.algbw),
            "bus_bw": _finite(half.busbw),
            "nwrong": None if half.wrong is None else float(half.wrong),
            "iterations": half.calls,
            "us": {name: _finite(us) for name, us in half.stats.items()},
            "us_by_rank": {name: [_finite(us) for us in all_us] for name, all_us in half.by_rank.items()},
        }

    def add_overlap(self, entry: Mapping[str, Any]) -> None:
        """Keep a line of the overlap table."""
        self._results.append(dict(entry))

    def add_error(self, text: str) -> None:
        """Keep what went wrong, or could not be measured."""
        self._errors.append(text)

    def note_staging(self, name: str, bytes_per_rank: int) -> bool:
        """Keep the staging memory after a line; whether it is what it was at the start."""
        kept = self._staging[name]
        kept["bytes_per_rank_after"] = max(kept["bytes_per_rank_after"], bytes_per_rank)
        return kept["bytes_per_rank_after"] == kept["bytes_per_rank"]

    def finish(self, failed: int, average: Mapping[str, float], least: float | None) -> dict[str, Any]:
        """The whole, with nccl-tests' summary."""
        first = next(iter(average.values()), 0.0)
        for name, bandwidth in average.items():
            self.data["contenders"][name]["average_bus_bandwidth"] = _finite(bandwidth)
        self.data["out_of_bounds"] = {"count": failed, "okay": _word(failed == 0)}
        okay = "unchecked" if least is None else _word(first >= least * 0.9)
        self.data["average_bus_bandwidth"] = {"bandwidth": _finite(first), "okay": okay}
        self.data["errors"] = self._errors
        self.data["load_average_at_end"] = list(os.getloadavg())
        self.data["end_time"] = time.strftime(_TIME)
        return self.data


def _word(value: bool) -> str:
    """nccl-tests writes truth values as words."""
    return "true" if value else "false"


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)


def write(data: Mapping[str, Any], path: str) -> None:
    """Write JSON; the file is there as a whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    with tempfile.NamedTemporaryFile(
        "w", dir=target.parent, prefix=f".{target.name}.", delete=False, encoding="utf-8"
    ) as file:
        try:
            json.dump(data, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
