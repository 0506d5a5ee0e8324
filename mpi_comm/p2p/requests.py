"""Pending sends and receives of a group, and messages that have arrived."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.calls.work import HostCompletion

_NOTHING: Flat = np.empty(0, np.uint8)


class PendingRequest:
    """A send, receive or probe in flight.

    Attributes:
        call: the operation.
        completion: finished when the operation has ended.
        deadline: when the operation times out (``time.monotonic()``).
        view: the array's memory as bytes; empty for a probe.
        mpi_requests: MPI's requests of a send that are not done.
        matched: True once a receive has its message.
    """

    __slots__ = ("call", "completion", "deadline", "matched", "mpi_requests", "view")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.completion = HostCompletion((call,))
        self.deadline = time.monotonic() + call.timeout
        self.view: Flat = _NOTHING
        # A probe has no array.
        if buffers := call.inputs or call.outputs:
            flat: Flat = buffers[0].flat  # type: ignore[assignment]
            self.view = flat.view(np.uint8)
        self.mpi_requests: list[Any] = []
        self.matched = False


class ArrivedMessage:
    """A message whose header has arrived.

    Attributes:
        peer, tag, code, size: sender, the user's tag, code of the element type and bytes of the
            payload.
        payload_tag: MPI's tag of the payload; 0 if the payload arrived with the header.
        data: the memory of the payload, received or to be received; None until its receive is
            posted.
        in_place: True if that is the memory of the receive's array.
        arrived_at: when the header arrived (``time.monotonic()``).
        mpi_requests: MPI's receives of the payload that are not done.
        receiver: the receive that the message is matched with, or None.
    """

    __slots__ = (
        "arrived_at",
        "code",
        "data",
        "in_place",
        "mpi_requests",
        "payload_tag",
        "peer",
        "receiver",
        "size",
        "tag",
    )

    def __init__(self, peer: int, tag: int, code: int, size: int, payload_tag: int) -> None:
        self.peer = peer
        self.tag = tag
        self.code = code
        self.size = size
        self.payload_tag = payload_tag
        self.data: Flat | None = None
        self.in_place = False
        self.arrived_at = time.monotonic()
        self.mpi_requests: list[Any] = []
        self.receiver: PendingRequest | None = None


def all_done(requests: list[Any]) -> bool:
    """True if all of MPI's requests are done; removes those found done from the end of the list."""
    while requests and requests[-1].Test():
        requests.pop()
    return not requests
