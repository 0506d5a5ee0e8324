"""all_reduce of the CPU backend beside torch's Gloo, in the same processes, turn by turn.

    python -m unicoll.run --nproc-per-node 2 benchmarks/all_reduce_vs_gloo.py [--json FILE] [--plot FILE]

UNICOLL_TRANSPORT=tcp forces sockets. Prints, for each size, the median time of one blocking call in microseconds for
both, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as td

import unicoll as dist

SIZES = [8, 64, 512, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
TURNS = 5
TRANSPORT = "TCP" if os.environ.get("UNICOLL_TRANSPORT") == "tcp" else "shared memory"


def timed(call: Callable[[], Any], sync: Callable[[], Any], times: int) -> list[float]:
    """Seconds of each of ``times`` calls; all ranks start a large one together."""
    samples = []
    for _ in range(times):
        sync()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return samples


def measure(size: int) -> dict[str, float]:
    ours, theirs = np.zeros(size // 4, np.float32), torch.zeros(size // 4)
    times = max(3, min(400, int(4e7 / (size + 1e5))))
    calls = {"unicoll": lambda: dist.all_reduce(ours), "torch-gloo": lambda: td.all_reduce(theirs)}
    sync = dist.barrier if size > 1 << 19 else (lambda: None)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        timed(call, sync, 3)
    for _ in range(TURNS):
        for name, call in calls.items():
            samples[name] += timed(call, sync, times)
    return {name: float(np.median(s)) * 1e6 for name, s in samples.items()}


def draw(rows: list[dict[str, float]], world: int, path: str) -> None:
    """Latency over size, both axes logarithmic; readable in black and white."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    sizes = [row["bytes"] for row in rows]
    for name, style in (("torch-gloo", "s--"), ("unicoll", "o-")):
        axes.loglog(sizes, [row[name] for row in rows], style, color="black", label=name, base=2, markersize=5)
    for row in rows:
        axes.annotate(
            f"{row['ratio']:.1f}x", (row["bytes"], row["unicoll"]), xytext=(0, -14), textcoords="offset points",
            ha="center", fontsize=7,
        )  # fmt: skip
    axes.set_yscale("log", base=10)
    axes.set_ylim(bottom=min(row["unicoll"] for row in rows) / 2)
    axes.set_xticks(sizes, [_size(n) for n in sizes])
    axes.set_xlabel("size of the array")
    axes.set_ylabel("microseconds per call (median)")
    axes.set_title(f"blocking all_reduce, float32, {world} processes on one machine, {TRANSPORT}", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:g}\n{unit}"
        n /= 1024
    return f"{n:g}\nGiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--plot", help="draw the results into this file (needs matplotlib)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    td.init_process_group("gloo", rank=rank, world_size=world)
    rows = []
    if rank == 0:
        print(f"{'bytes':>12} {'unicoll us':>12} {'torch us':>12} {'ratio':>7}", flush=True)
    for size in SIZES:
        result = measure(size)
        rows.append({"bytes": size, **result, "ratio": result["torch-gloo"] / result["unicoll"]})
        if rank == 0:
            print(
                f"{size:12d} {result['unicoll']:12.1f} {result['torch-gloo']:12.1f} {rows[-1]['ratio']:7.2f}",
                flush=True,
            )
    if rank == 0 and args.json:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
        }
        what = f"all_reduce float32 sum, {TRANSPORT}"
        with open(args.json, "w") as file:
            json.dump({"operation": what, "ranks": world, "machine": machine, "rows": rows}, file, indent=1)
    if rank == 0 and args.plot:
        draw(rows, world, args.plot)
    td.destroy_process_group()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
