"""Counts what is asked of CUDA, by thread: who asks the device anything waits for it, or could."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, cast

from unicoll import streams
from unicoll.streams import Cuda

__all__ = ["ASKING", "Asked", "install", "mine"]

ASKING = ("event_done", "stream_done", "allocate", "free", "pin", "unpin", "destroy_stream")
"""Calls that ask the device how far it is, or may wait for it."""


class Asked:
    """A :class:`unicoll.streams.Cuda` that counts the calls of each thread."""

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

    def mine(self) -> Counter[str]:
        """Calls of this thread by name."""
        me = threading.get_ident()
        return Counter({name: n for (thread, name), n in self.calls.items() if thread == me})


_installed: Asked | None = None


def install() -> None:
    """Count from now on; before any group is made."""
    global _installed
    if _installed is None:
        _installed = Asked(streams.cuda())
        streams.install(cast(Cuda, _installed))


def mine() -> Counter[str]:
    """Calls of this thread so far."""
    assert _installed is not None
    return _installed.mine()
