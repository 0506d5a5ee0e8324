"""Removes the safeguards of the NCCL backend one at a time, so that tests can show that they find it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unicoll.device_collectives.stream_completion import StreamCompletion
from unicoll.device_collectives.stream_order import StreamOrder

__all__ = ["MUTATIONS", "mutated"]

_hold = StreamCompletion.__init__


def _without_hold(self: StreamCompletion, *args: Any, **kwargs: Any) -> None:
    """No reference keeps the arrays alive while the device uses them."""
    _hold(self, *args, **kwargs)
    self._calls = ()
    self.work.release()


def _nothing(self: Any, *args: Any) -> None:
    """The safeguard is left out."""


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "producers": (StreamOrder, "wait_for_producers", _nothing),
    "end": (StreamCompletion, "_order", _nothing),
    "hold": (StreamCompletion, "__init__", _without_hold),
}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Remove a safeguard within the block."""
    if name is None:
        yield
        return
    owner, method, replacement = MUTATIONS[name]
    kept = owner.__dict__[method]  # a method of another name would not be a mutation
    setattr(owner, method, replacement)
    try:
        yield
    finally:
        setattr(owner, method, kept)
