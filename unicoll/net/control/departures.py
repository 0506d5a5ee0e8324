"""The ranks whose processes have ended, as far as this process knows, and how each ended: it left,
failed or died."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from unicoll.net.objects.received_json import parse
from unicoll.process.formatting import printable_line
from unicoll.process.interrupts import Changes

if TYPE_CHECKING:
    from unicoll.net.control.relay import Departure
    from unicoll.net.stores import Store

_REFUSAL = "refusal"
ENDED_KEY = "launcher/ended"
"""Key in the launcher's store for a rank whose program has ended without an error, with
``--replace``."""


def exit_key(rank: int, replacement: int = 0) -> str:
    """Key in the launcher's store for how a rank ended: JSON with its pid, status (``-N`` for
    signal N) and cause.

    ``replacement`` is the process's number among those that were started for this rank.
    """
    return f"launcher/exit/{rank}" + (f"/{replacement}" if replacement else "")


def publish_refusal(store: Store, rank: int, error: BaseException) -> None:
    """Let rank 0, which waits for all ranks, know that ``rank`` will not connect because of
    ``error``."""
    process = f"rank {rank} (host {socket.gethostname()}, pid {os.getpid()})"
    reason = f"{process} could not join: {type(error).__name__}: {error}"
    store.set(_REFUSAL, json.dumps([rank, reason]))


class Departures:
    """The ranks that have ended, and how.

    Attributes:
        departed: for each rank that has ended, how it ended.
        left: the ranks that left the job without an exception.
        died: the ranks that ended without leaving the job.
        loss_listeners: functions that are called with the reason when the first rank has failed or
            died, on the thread that has learned of it. Later ones fail because of the first.
    """

    def __init__(self, changed: Changes) -> None:
        self.departed: dict[int, str] = {}
        self.left: set[int] = set()
        self.died: set[int] = set()
        self.loss_listeners: list[Callable[[str], object]] = []
        self._changed = changed

    def record(self, rank: int, reason: str, manner: str) -> None:
        """``rank`` has ended; the first report of a rank is kept. ``manner`` is that of a
        :data:`Departure`."""
        # Another process has sent the text, which becomes a part of errors and logs.
        reason = printable_line(reason)
        with self._changed.lock:
            is_new = rank not in self.departed
            first_loss = is_new and manner != "left" and self.departed.keys() == self.left
            if is_new:
                self.departed[rank] = reason
                # A rank that failed is in neither set.
                {"left": self.left, "died": self.died}.get(manner, set()).add(rank)
            self._changed.notify_all()
        if first_loss:
            for listener in self.loss_listeners:
                listener(reason)

    def read_refusal(self, store: Store) -> None:
        """Record the rank of :func:`publish_refusal`, if there is one."""
        found = store.try_get(_REFUSAL)
        if found is not None:
            # In an open job any process may have stored the value, so one of another form is
            # ignored.
            with suppress(ValueError):
                rank, reason = parse(found, (int, str))
                self.record(rank, reason, "failed")

    def all(self) -> list[Departure]:
        """All departures, for a new relay."""
        return [(rank, reason, self._manner(rank)) for rank, reason in self.departed.items()]

    def _manner(self, rank: int) -> str:
        return "left" if rank in self.left else "died" if rank in self.died else "failed"

    def await_departure(self, rank: int, timeout: float = 0.5) -> str | None:
        """How ``rank`` has ended, waiting up to ``timeout`` seconds; None if it has not."""
        self._changed.wait_for(lambda: rank in self.departed, timeout)
        return self.departed.get(rank)

    def find_lost_rank(self, peer: int, members: Iterable[int], timeout: float) -> int | None:
        """The rank that caused the end of a connection to ``peer``, waiting up to ``timeout``
        seconds; None if unknown.

        It is the peer if it has ended, else a lost member of the group, after which the peer closed
        its connections.
        """
        self._changed.wait_for(lambda: peer in self.departed or self._lost(members), timeout)
        if peer in self.departed:
            return peer
        return next(iter(self._lost(members)), None)

    def _lost(self, members: Iterable[int]) -> list[int]:
        return [rank for rank in members if rank in self.departed and rank not in self.left]
