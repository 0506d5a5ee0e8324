"""What ranks do with the backend of docs/writing-a-backend.md when a peer fails."""

from __future__ import annotations

import numpy as np

import unicoll as dist
from tests.support.outcomes import CallOutcome, outcome_of

LARGE = 1 << 23
"""Elements of a message that the kernel does not buffer."""


def exchange() -> None:
    """An all_gather, which connects all ranks."""
    found = [np.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(found, np.full(1, float(dist.get_rank())))
    assert [float(x[0]) for x in found] == list(range(len(found)))


def send_to(peer: int, count: int, timeout: float) -> CallOutcome:
    return outcome_of(lambda: dist.send(np.ones(count), peer, timeout=timeout))


def receive_from(peer: int | None, timeout: float) -> CallOutcome:
    return outcome_of(lambda: dist.recv(np.ones(4), peer, timeout=timeout))
