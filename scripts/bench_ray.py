#!/usr/bin/env python3
"""Measures all_reduce of two Ray actors over Ray's Gloo group and over unicoll's, alternating in
the same two actors.

    python scripts/bench_ray.py --sizes 8,16384,1048576,67108864

Both are called by ``ray.util.collective.allreduce`` on the same float32 array. A block is a barrier
and several calls; the figure of a size is the median over all blocks of the time of a call, of the
slower rank.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import ray
import ray.util.collective as col

from unicoll.integrations.ray import BACKEND

GROUPS = {"gloo": "gloo", "unicoll": BACKEND}
BLOCK_S = 0.05
"""About how long a block takes."""


@ray.remote(num_cpus=1)
class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def join(self) -> None:
        for name, backend in GROUPS.items():
            col.init_collective_group(2, self.rank, backend, name)

    def measure(self, size: int, blocks: int) -> dict[str, list[float]]:
        """Seconds of a call in each block, by group; ``size`` is in bytes."""
        x = np.zeros(size // 4, np.float32)
        calls = {name: self._calls(name, x) for name in GROUPS}
        found: dict[str, list[float]] = {name: [] for name in GROUPS}
        for _ in range(blocks):
            for name in GROUPS:
                found[name].append(self._block(name, x, calls[name]))
        for name in GROUPS:  # both sum the same values
            x = np.arange(size // 4, dtype=np.float32) * (self.rank + 1)
            col.allreduce(x, name)
            assert np.array_equal(x, np.arange(size // 4, dtype=np.float32) * 3)
        return found

    def _calls(self, name: str, x: np.ndarray) -> int:
        """Calls of a block: rank 0 doubles them until the block takes long enough, and tells the
        other rank."""
        calls, enough = 3, np.zeros(1)
        while not enough[0]:
            calls *= 2
            enough[0] = self._block(name, x, calls) * calls > BLOCK_S
            col.broadcast(enough, 0, name)
        return calls

    def _block(self, name: str, x: np.ndarray, calls: int) -> float:
        col.barrier(name)
        start = time.perf_counter()
        for _ in range(calls):
            col.allreduce(x, name)
        return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="8,16384,1048576,67108864", help="bytes")
    parser.add_argument("--blocks", type=int, default=21, help="blocks of each size and group")
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    actors = [Rank.remote(rank) for rank in range(2)]
    ray.get([actor.join.remote() for actor in actors])
    print(f"{'bytes':>10} {'gloo us':>12} {'unicoll us':>12} {'gloo / unicoll':>15}")
    for size in map(int, options.sizes.split(",")):
        ranks = ray.get([actor.measure.remote(size, options.blocks) for actor in actors])
        times = {
            name: statistics.median(
                max(pair) for pair in zip(*(rank[name] for rank in ranks), strict=True)
            )
            for name in GROUPS
        }
        ratio = times["gloo"] / times["unicoll"]
        print(
            f"{size:>10} {1e6 * times['gloo']:>12.1f} {1e6 * times['unicoll']:>12.1f}"
            f" {ratio:>15.2f}",
            flush=True,
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
