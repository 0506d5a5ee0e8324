"""Backends with few operations of their own: the CPU backend, with the others done by fallbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import unicoll as dist
from gloo_fallback.backend import GlooBackend
from unicoll.backend import Backend, Call, Caps, Context
from unicoll.calls.work import Completion

__all__ = ["Broadcasts", "Gathers", "Lists", "Messages", "Most", "Posts"]


class Messages(GlooBackend):
    """Sends and receives alone."""

    name = "messages"
    caps = Caps()


class Gathers(GlooBackend):
    """One collective that moves data, and one that reduces."""

    name = "gathers"
    caps = Caps(native=frozenset({"all_gather_into_tensor", "all_reduce"}))


class Lists(GlooBackend):
    """One collective alone, with a list of arrays."""

    name = "lists"
    caps = Caps(native=frozenset({"all_gather"}))


class Broadcasts(GlooBackend):
    """One collective alone."""

    name = "broadcasts"
    caps = Caps(native=frozenset({"broadcast"}))


class Most(GlooBackend):
    """All but a few collectives, which are in flight at the same time as native ones if ranks call differently."""

    name = "most"
    caps = Caps(native=GlooBackend.caps.native - {"all_reduce", "scatter", "scan", "all_to_all", "barrier"})


class Posts(Backend):
    """The three methods that a backend must have, and no others."""

    name = "posts"

    def __init__(self, context: Context) -> None:
        self._inner = GlooBackend(context)

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        return self._inner.post(calls)

    def abort(self, error: Exception) -> None:
        self._inner.abort(error)

    def close(self) -> None:
        self._inner.close()


for _cls in (Messages, Gathers, Lists, Broadcasts, Most, Posts):
    dist.Backend.register_backend(_cls.name, _cls)
