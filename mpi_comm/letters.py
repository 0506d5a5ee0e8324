"""What a mailroom handles: letters (operations) and messages that have come."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from unicoll.backend import Call
from unicoll.kernels import Flat
from unicoll.work import HostCompletion

__all__ = ["Letter", "Message", "all_done"]


class Letter:
    """A send or receive in flight."""

    __slots__ = ("begun", "call", "completion", "deadline", "requests", "view")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.completion = HostCompletion((call,))
        self.deadline = time.monotonic() + call.timeout
        flat: Flat = (call.inputs or call.outputs)[0].flat  # type: ignore[assignment]
        self.view = flat.view(np.uint8)
        self.requests: list[Any] = []
        self.begun = False


class Message:
    """A message that has come, or whose header has.

    Attributes:
        peer, tag, code, size: sender, our tag, dtype code and bytes of payload.
        payload: MPI's tag of the payload; 0 where it has come with the header.
        data: where the payload is, or goes; None until that is decided.
        serial: position among all messages.
        since: when its header came.
        requests: the payload on its way.
        letter: who gets it.
    """

    __slots__ = ("code", "data", "letter", "payload", "peer", "requests", "serial", "since", "size", "tag")

    def __init__(self, peer: int, tag: int, code: int, size: int, payload: int, serial: int) -> None:
        self.peer = peer
        self.tag = tag
        self.code = code
        self.size = size
        self.payload = payload
        self.data: Flat | None = None
        self.serial = serial
        self.since = time.monotonic()
        self.requests: list[Any] = []
        self.letter: Letter | None = None

    def fits(self, letter: Letter) -> bool:
        """Whether the letter's array has its size and type."""
        return letter.call.outputs[0].dtype.code == self.code and letter.view.size == self.size


def all_done(requests: list[Any]) -> bool:
    """Whether all requests are done; those that are found done are taken out."""
    while requests and requests[-1].Test():
        requests.pop()
    return not requests
