"""Counts of CUDA calls by thread: calls that query the device wait for it, or could."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, cast

from unicoll.arrays import cuda
from unicoll.arrays.cuda import Cuda

__all__ = ["WAITING_CALLS", "CountingCuda", "install", "of_this_thread"]

WAITING_CALLS = ("event_done", "stream_done", "allocate", "free", "pin", "unpin", "destroy_stream")
"""Calls that query the device, or may wait for it."""


class CountingCuda:
    """A :class:`unicoll.arrays.cuda.Cuda` that counts the calls of each thread."""

    def __init__(self, real: Cuda) -> None:
        self._real = real
        self.calls: Counter[tuple[int, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name.startswith("_") or not callable(found):
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[threading.get_ident(), name] += 1
            return found(*args, **kwargs)

        setattr(self, name, counted)
        return counted

    def of_this_thread(self) -> Counter[str]:
        """The calls of this thread by name."""
        me = threading.get_ident()
        return Counter({name: n for (thread, name), n in self.calls.items() if thread == me})


_installed: CountingCuda | None = None


def install() -> None:
    """Start counting; before any group is made."""
    global _installed
    if _installed is None:
        _installed = CountingCuda(cuda.cuda())
        cuda.install(cast(Cuda, _installed))


def of_this_thread() -> Counter[str]:
    """The calls of this thread so far."""
    assert _installed is not None
    return _installed.of_this_thread()
