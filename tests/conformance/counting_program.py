"""Every operation through the counting backend, on the world and on a group; prints one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from counting import CountingBackend

import unicoll as dist
from unicoll.calls.ops import OPS
from unicoll.testing.cases import Case, run_cases

COLLECTIVES = sorted(CountingBackend.caps.native - {"send", "recv", "probe"})


def vector(value: float, count: int = 4) -> Any:
    return np.full(count, float(value))


def collectives(group: str) -> None:
    """Each native collective once; the results are compared with the reference."""
    cases = [Case(op, "float64", "SUM" if OPS[op].reduces else None, group=group) for op in COLLECTIVES]
    for case, verdict in zip(cases, run_cases(cases), strict=True):
        assert verdict is not None
        assert verdict[0] is None, (case, verdict)


def batches_and_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = [vector(1), vector(2).astype("float32")]  # with one dtype the fallback adapter would coalesce them
    dist.all_reduce_coalesced(pair)
    assert [x[0] for x in pair] == [size, 2 * size]
    work = dist.all_reduce(vector(1), async_op=True)
    assert work is not None
    assert (work.result()[0] == size).all()
    right, left = (rank + 1) % size, (rank - 1) % size
    x = vector(0)
    ops = [dist.P2POp(dist.isend, vector(rank), right), dist.P2POp(dist.irecv, x, left)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    assert (x == left).all()


def main() -> None:
    if sys.argv[1] == "registered":
        dist.Backend.register_backend("counting", CountingBackend)
    dist.init_process_group("counting", timeout=60)
    collectives("world")
    collectives("reversed")
    batches_and_messages()
    expected = dict.fromkeys(COLLECTIVES, 2) | {"send": 1, "recv": 1}
    expected["all_reduce"] += 3  # two as one batch, one in the background
    report: dict[str, Any] = {
        "backend": dist.get_backend(),
        "config": dist.get_backend_config(),
        "explained": dist.explain(),
        "counts": dict(CountingBackend.counts),
        "expected": expected,
    }
    dist.destroy_process_group()
    report |= {"created": CountingBackend.created, "closed": CountingBackend.closed}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
