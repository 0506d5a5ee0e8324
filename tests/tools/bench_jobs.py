"""Functions of the ranks in the tests of the benchmark: on the simulated device, and of the contender floor."""

from __future__ import annotations

import contextlib
import io
import socket
import struct
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np

import unicoll as dist
from tests.simulated_nccl import arrays as simulated_arrays
from unicoll.arrays.types import BY_NAME, DType
from unicoll.bench import contract, main
from unicoll.bench.arrays import BenchArrays
from unicoll.bench.contract import BenchCase, BenchJob, Call
from unicoll.bench.floor import Floor
from unicoll.bench.operations import OPERATIONS


def _simulated(array_name: str | None, device: str, dtype: DType) -> BenchArrays:
    return BenchArrays(lambda count, dtype, _: simulated_arrays.empty(count, dtype.storage), device)


def bench(argv: tuple[str, ...]) -> tuple[int, str]:
    """Run the benchmark as this rank, on arrays of the simulated device; returns its exit status and output."""
    printed = io.StringIO()
    with (
        patch.object(contract, "family", _simulated),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        status = main(argv)
    return status, printed.getvalue()


@contextlib.contextmanager
def _floor_call(name: str, nbytes: int, timeout: float) -> Iterator[tuple[Floor, Call]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    op = OPERATIONS[name]
    counts = op.divide(nbytes // 4, size)
    case = BenchCase(op, op.placements[0], BY_NAME["float32"], "sum", 0, counts, rank, size)
    floor = Floor("floor")
    floor.open(BenchJob(rank, size, rank, ("host",) * size, timeout))
    try:
        yield floor, floor.call(case, np.zeros(counts.send, "f4"), np.zeros(counts.recv, "f4"))
    finally:
        floor.close()


def floor_traffic(name: str, nbytes: int, times: int) -> int:
    """Bytes that the kernel has received for the contender floor in so many calls of an operation on two ranks."""
    with _floor_call(name, nbytes, 30.0) as (floor, call):
        before = _received(floor)
        dist.barrier()
        for _ in range(times):
            call()
        received = _received(floor) - before
        dist.barrier()  # the end of the connection counts as a byte
        return received


def floor_waits(nbytes: int) -> str:
    """The error of a call of the contender floor that only rank 0 makes."""
    error = ""
    with _floor_call("all_reduce", nbytes, 0.3) as (_, call):
        if dist.get_rank() == 0:
            try:
                call()
            except TimeoutError as e:
                error = str(e)
        dist.barrier()
    return error


def _received(floor: Floor) -> int:
    """``tcpi_bytes_received`` of struct tcp_info, of the connection from the rank before."""
    medium: Any = floor._medium
    info = medium._before.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("Q", info, 128)[0])
