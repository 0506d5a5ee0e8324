"""Five programs as they are written with mpi4py, and the same with unicoll.

Their run times on one host: mpirun -n 2 python -m tests.mpi.ported_programs {mpi4py,mpi,gloo}
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from tests.support import worker

_RESULT, _STOP = 1, 2


def parts(count: int, size: int) -> list[int]:
    """Sizes of nearly equal parts."""
    return [count // size + (rank < count % size) for rank in range(size)]


# --- heat: Jacobi steps on a grid in two dimensions, with rows of neighbours -----------------------------------------


def _grid(count: int, dims: tuple[int, ...], coords: tuple[int, ...]) -> np.ndarray:
    """This rank's part of a square of ``count`` rows with a hot upper edge, and a border of one element."""
    shape = [parts(count, dims[i])[coords[i]] + 2 for i in range(2)]
    values = np.zeros(shape)
    if coords[0] == 0:
        values[0] = 100.0
    return values


def _step(old: np.ndarray, new: np.ndarray) -> float:
    new[1:-1, 1:-1] = 0.25 * (old[:-2, 1:-1] + old[2:, 1:-1] + old[1:-1, :-2] + old[1:-1, 2:])
    return float(np.abs(new[1:-1, 1:-1] - old[1:-1, 1:-1]).max())


def heat_mpi4py(scale: int) -> np.ndarray:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    cart = comm.Create_cart(MPI.Compute_dims(comm.size, 2))
    old = _grid(64 * scale, tuple(cart.dims), tuple(cart.coords))
    new, change = old.copy(), np.zeros(1)
    (up, down), (left, right) = cart.Shift(0, 1), cart.Shift(1, 1)
    column = np.empty(len(old))
    for _ in range(100 * scale):
        cart.Sendrecv(old[1], up, 0, old[-1], down)
        cart.Sendrecv(old[-2], down, 0, old[0], up)
        for mine, to, theirs, source in ((1, left, -1, right), (-2, right, 0, left)):
            cart.Sendrecv(old[:, mine].copy(), to, 0, column, source)
            if source != MPI.PROC_NULL:
                old[:, theirs] = column
        change[0] = _step(old, new)
        cart.Allreduce(MPI.IN_PLACE, change, MPI.MAX)
        old[1:-1, 1:-1] = new[1:-1, 1:-1]
    cart.Free()
    return np.append(old.ravel(), change)


def heat(scale: int) -> np.ndarray:
    mesh = dist.init_device_mesh("cpu", dist.dims_create(dist.get_world_size(), 2))
    coords = mesh.get_coordinate()
    assert coords is not None
    old = _grid(64 * scale, mesh.shape, tuple(coords))
    new, change = old.copy(), np.zeros(1)
    (up, down), (left, right) = mesh.shift(0, 1), mesh.shift(1, 1)
    for _ in range(100 * scale):
        dist.sendrecv(old[1], up, old[-1], down)
        dist.sendrecv(old[-2], down, old[0], up)
        dist.sendrecv(old[:, 1], left, old[:, -1], right)
        dist.sendrecv(old[:, -2], right, old[:, 0], left)
        change[0] = _step(old, new)
        dist.all_reduce(change, dist.ReduceOp.MAX)
        old[1:-1, 1:-1] = new[1:-1, 1:-1]
    return np.append(old.ravel(), change)


# --- sample sort -------------------------------------------------------------------------------------------------


def _values(rank: int, scale: int) -> np.ndarray:
    return np.sort(np.random.default_rng(rank).integers(0, 1 << 40, 20_000 * scale + 37 * rank))


def _splitters(samples: np.ndarray, size: int) -> np.ndarray:
    return np.sort(samples)[size::size][: size - 1]


def sample_sort_mpi4py(scale: int) -> np.ndarray:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for _ in range(10):
        mine = _values(comm.rank, scale)
        samples = np.empty(comm.size**2, np.int64)
        comm.Allgather(mine[:: len(mine) // comm.size][: comm.size].copy(), samples)
        ends = np.searchsorted(mine, _splitters(samples, comm.size))
        sent = np.diff(ends, prepend=0, append=len(mine))
        received = np.empty_like(sent)
        comm.Alltoall(sent, received)
        result = np.empty(received.sum(), np.int64)
        comm.Alltoallv([mine, sent], [result, received])
        result.sort()
    return result


def sample_sort(scale: int) -> np.ndarray:
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(10):
        mine = _values(rank, scale)
        samples = np.empty(size**2, np.int64)
        dist.all_gather_into_tensor(samples, mine[:: len(mine) // size][:size])
        ends = np.searchsorted(mine, _splitters(samples, size))
        sent = np.diff(ends, prepend=0, append=len(mine))
        received = np.empty_like(sent)
        dist.all_to_all_single(received, sent)
        result = np.empty(received.sum(), np.int64)
        dist.all_to_all_single(result, mine, received.tolist(), sent.tolist())
        result.sort()
    return result


# --- farm: rank 0 gives each task to the rank that asks next -------------------------------------------------------


def _work(task: float) -> float:
    return float(np.sqrt(np.arange(task, task + 20)).sum())


def farm_mpi4py(scale: int) -> np.ndarray:
    from mpi4py import MPI

    comm, status = MPI.COMM_WORLD, MPI.Status()
    tasks, message = 500 * scale, np.zeros(2)
    results = np.zeros(tasks)
    if comm.rank:
        while True:
            comm.Send(message, 0, _RESULT)
            comm.Recv(message, 0, MPI.ANY_TAG, status)
            if status.tag == _STOP:
                return results
            message[1] = _work(message[0])
    for task in range(tasks + comm.size - 1):
        # MPICH over UCX loses messages of a receive from any source while another thread, here unicoll's, is in MPI
        comm.Mprobe(MPI.ANY_SOURCE, _RESULT, status).Recv(message)
        if message[1]:
            results[int(message[0])] = message[1]
        message[:] = task, 0
        comm.Send(message, status.source, 0 if task < tasks else _STOP)
    return results


def farm(scale: int) -> np.ndarray:
    status = dist.Status()
    tasks, message = 500 * scale, np.zeros(2)
    results = np.zeros(tasks)
    if dist.get_rank():
        while True:
            dist.send(message, 0, tag=_RESULT)
            dist.recv(message, 0, tag=None, status=status)
            if status.tag == _STOP:
                return results
            message[1] = _work(message[0])
    for task in range(tasks + dist.get_world_size() - 1):
        worker = dist.recv(message, tag=_RESULT)
        if message[1]:
            results[int(message[0])] = message[1]
        message[:] = task, 0
        dist.send(message, worker, tag=0 if task < tasks else _STOP)
    return results


# --- matrix times vector, repeated: the largest eigenvalue -----------------------------------------------------------


def _rows(count: int, size: int, rank: int) -> np.ndarray:
    start = sum(parts(count, size)[:rank])
    i, k = np.ogrid[start : start + parts(count, size)[rank], :count]
    return 1.0 / (1.0 + np.abs(i - k))


def matrix_vector_mpi4py(scale: int) -> np.ndarray:
    from mpi4py import MPI

    comm, count = MPI.COMM_WORLD, 251 * scale
    counts = parts(count, comm.size)
    rows, vector, norm = _rows(count, comm.size, comm.rank), np.ones(count), np.zeros(1)
    for _ in range(200):
        mine = rows @ vector
        norm[0] = mine @ mine
        comm.Allreduce(MPI.IN_PLACE, norm)
        comm.Allgatherv(mine / np.sqrt(norm), [vector, counts])
    return np.append(vector, norm)


def matrix_vector(scale: int) -> np.ndarray:
    size, count = dist.get_world_size(), 251 * scale
    rows, vector, norm = _rows(count, size, dist.get_rank()), np.ones(count), np.zeros(1)
    pieces = np.split(vector, np.cumsum(parts(count, size))[:-1])
    for _ in range(200):
        mine = rows @ vector
        norm[0] = mine @ mine
        dist.all_reduce(norm)
        dist.all_gather(pieces, mine / np.sqrt(norm))
    return np.append(vector, norm)


# --- k-means -------------------------------------------------------------------------------------------------------


def _points(rank: int, scale: int) -> np.ndarray:
    drawn = np.random.default_rng(100 + rank)
    return drawn.integers(0, 8, (2000 * scale, 1)) * 3.0 + np.round(drawn.normal(size=(2000 * scale, 3)), 3)


def _sums(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Of each center the sum and the number of the points next to it, in 1/1000, which are exact."""
    nearest = ((points[:, None] - centers) ** 2).sum(2).argmin(1)
    found = np.zeros((len(centers), 4))
    np.add.at(found, nearest, np.append(np.round(points * 1000), np.full((len(points), 1), 1000.0), 1))
    return found


def k_means_mpi4py(scale: int) -> np.ndarray:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    points = _points(comm.rank, scale)
    centers = points[:8].copy()
    comm.Bcast(centers)
    for _ in range(40):
        sums = _sums(points, centers)
        comm.Allreduce(MPI.IN_PLACE, sums)
        centers = sums[:, :3] / np.maximum(sums[:, 3:], 1.0)
    return centers


def k_means(scale: int) -> np.ndarray:
    points = _points(dist.get_rank(), scale)
    centers = points[:8].copy()
    dist.broadcast(centers, src=0)
    for _ in range(40):
        sums = _sums(points, centers)
        dist.all_reduce(sums)
        centers = sums[:, :3] / np.maximum(sums[:, 3:], 1.0)
    return centers


Program = Callable[[int], np.ndarray]
PROGRAMS: dict[str, tuple[Program, Program]] = {
    "heat": (heat_mpi4py, heat),
    "sample_sort": (sample_sort_mpi4py, sample_sort),
    "farm": (farm_mpi4py, farm),
    "matrix_vector": (matrix_vector_mpi4py, matrix_vector),
    "k_means": (k_means_mpi4py, k_means),
}


def warm_up() -> None:
    """Run the mpi4py programs, so that what MPI opens for the life of the process is not reported as a leak."""
    for original, _ in PROGRAMS.values():
        original(1)
    worker.set_baseline(list)


def compare(name: str) -> None:
    """Run both forms of a program on this rank; their results are equal."""
    original, ported = PROGRAMS[name]
    wanted, found = original(1), ported(1)
    # only the order of a sum of floats may differ
    np.testing.assert_allclose(found, wanted, rtol=1e-12, err_msg=name)


def main(library: str, scale: int = 4, rounds: int = 5) -> None:
    """Print the least time of each program, in milliseconds, the largest of all ranks'."""
    if library != "mpi4py":
        dist.init_process_group(library)
    from mpi4py import MPI

    for name, forms in PROGRAMS.items():
        run: Any = forms[library != "mpi4py"]
        times = []
        for _ in range(rounds):
            MPI.COMM_WORLD.Barrier()
            begun = time.perf_counter()
            run(scale)
            times.append(time.perf_counter() - begun)
        longest = MPI.COMM_WORLD.allreduce(min(times), MPI.MAX)
        if MPI.COMM_WORLD.rank == 0:
            print(f"{library:8} {name:14} {longest * 1000:8.1f} ms", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:2])
