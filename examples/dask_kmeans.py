"""k-means on a dask array: each rank has the partitions on its worker; the result is compared with
NumPy's.

python examples/dask_kmeans.py [address of a Dask scheduler]
"""

import sys
from collections import defaultdict

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, futures_of, wait

import unicoll as dist
from unicoll.integrations.dask import run

STEPS = 10


def kmeans(points, centers, add_up):
    """Lloyd's algorithm; ``add_up`` adds the sums of all processes, in place."""
    for _ in range(STEPS):
        nearest = ((points[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1)
        members = np.eye(len(centers))[nearest]
        totals = np.column_stack([members.T @ points, members.sum(axis=0)])
        add_up(totals)
        centers = totals[:, :-1] / totals[:, -1:]
    return centers


def fit(blocks, centers):
    """What each rank executes, with the blocks of the array that are on its worker."""
    points = np.concatenate(blocks)
    return len(points), kmeans(points, centers, dist.all_reduce)


def blocks_by_worker(client, array):
    """The futures of the blocks of a persisted array, by the address of the worker that has
    them."""
    blocks = futures_of(array)
    workers = client.who_has(blocks)
    found = defaultdict(list)
    for block in blocks:
        found[workers[block.key][0]].append(block)
    return found


def main(client):
    random = da.random.default_rng(1)
    offsets = random.integers(0, 4, size=(40_000, 1), chunks=(5_000, 1)) * 3.0
    points = client.persist(random.normal(size=(40_000, 2), chunks=(5_000, 2)) + offsets)
    wait(points)
    start = points[:4].compute()

    blocks = blocks_by_worker(client, points)
    results = run(client, fit, start, workers=list(blocks), per_rank=list(blocks.values()))

    expected = kmeans(points.compute(), start, lambda totals: None)
    for rank, (size, centers) in enumerate(results):
        np.testing.assert_allclose(centers, expected)
        print(
            f"rank {rank}: {size} of {len(points)} points, NumPy's centers:",
            *centers.round(2).tolist(),
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Client(sys.argv[1]))
    else:
        with LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
            main(client)
