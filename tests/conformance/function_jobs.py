"""A backend that torch's kind of function creates, from store, rank, size and timeout; its data goes by the store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.backend import Backend, Call, Caps
from unicoll.calls.work import Completion, HostCompletion
from unicoll.net.stores import Store


class ThroughStore(Backend):
    name = "through_store"
    caps = Caps(native=frozenset({"all_gather"}))

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        assert timeout == timedelta(minutes=30)
        self._store, self._rank, self._size = store, rank, world_size
        self._calls = 0

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        for call in calls:
            self._calls += 1
            self._store.set(f"{self._calls}/{self._rank}", call.inputs[0].flat.tobytes())
            for rank, output in enumerate(call.outputs):
                found = self._store.get(f"{self._calls}/{rank}")
                output.flat[:] = np.frombuffer(found, output.flat.dtype)
            call.write_back()
        done = HostCompletion(tuple(calls))
        done.finish()
        return done

    def abort(self, error: Exception) -> None: ...

    def close(self) -> None: ...


def make(store: Store, rank: int, world_size: int, timeout: timedelta) -> Backend:
    return ThroughStore(store, rank, world_size, timeout)


def by_options(options: Any, pg_options: Any) -> ThroughStore:
    assert pg_options == "mine"
    assert options.global_ranks_in_group == [0, 1]
    return ThroughStore(options.store, options.group_rank, options.group_size, options.timeout)


def sums() -> list[float]:
    """An all_reduce on the default group, on a new one and on one of its parts, each made by a function."""
    dist.Backend.register_backend("by_function", make)
    dist.Backend.register_backend("by_options", by_options, extended_api=True)
    dist.init_process_group("by_function")
    found = []
    groups = [
        dist.group.WORLD,
        dist.new_group([1, 0], sort_ranks=False),
        dist.split_group(split_ranks=[[0, 1]]),
    ]
    for group in [*groups, dist.new_group(backend="by_options", pg_options="mine")]:
        x = np.full(3, dist.get_rank() + 1.0)
        dist.all_reduce(x, group=group)
        found.append(float(x[0]))
    assert dist.get_backend() == "by_function"
    assert dist.Backend.backend_type_map["by_function"] is dist.ProcessGroup.BackendType.CUSTOM
    dist.destroy_process_group()
    return found
