"""A third party's backend, which forwards every call to the CPU backend and counts the calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from gloo_fallback.backend import GlooBackend
from unicoll.backend import Backend, Call, Caps, Context, Job
from unicoll.calls.work import Completion

__all__ = ["CountingBackend", "backend_class"]


class CountingBackend(Backend):
    """``counts`` has the number of calls by operation, ``created`` and ``closed`` those of groups."""

    name = "counting"
    caps = Caps(frozenset({"cpu"}), GlooBackend.caps.native, GlooBackend.caps.reduces)
    counts: ClassVar[Counter[str]] = Counter()
    created: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @classmethod
    def prepare(cls, job: Job) -> None:
        GlooBackend.prepare(job)

    @classmethod
    def create(cls, context: Context) -> CountingBackend:
        CountingBackend.created += 1
        return cls(GlooBackend.create(context))

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        self.counts.update(call.op.name for call in calls)
        return self._inner.post(calls, stream)

    @property
    def sequence(self) -> int:
        return self._inner.sequence

    def abort(self, error: Exception) -> None:
        self._inner.abort(error)

    def close(self) -> None:
        CountingBackend.closed += 1
        self._inner.close()


def backend_class() -> type[Backend]:
    """Returns the class, for an entry point that is a function."""
    return CountingBackend
