"""Pending sends and receives of a group, and messages that have arrived."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.backend.work import HostCompletion


class PendingRequest:
    """A send or receive in flight.

    Attributes:
        call: the operation.
        completion: finished when the operation has ended.
        deadline: when the operation times out (``time.monotonic()``).
        view: the array's memory as bytes.
        mpi_requests: MPI's requests of a send that are not done.
        matched: True once a receive has its message.
    """

    __slots__ = ("call", "completion", "deadline", "matched", "mpi_requests", "view")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.completion = HostCompletion((call,))
        self.deadline = time.monotonic() + call.timeout
        flat: Flat = (call.inputs or call.outputs)[0].flat  # type: ignore[assignment]
        self.view = flat.view(np.uint8)
        self.mpi_requests: list[Any] = []
        self.matched = False


class ArrivedMessage:
    """A message whose header has arrived.

    Attributes:
        peer, tag, dtype_code, size: sender, the user's tag, dtype code and bytes of the payload.
        payload_tag: MPI's tag of the payload; 0 if the payload arrived with the header.
        data: the memory of the payload, received or to be received; None until its receive is posted.
        serial: position in the order of arrival.
        arrived_at: when the header arrived (``time.monotonic()``).
        mpi_requests: MPI's receives of the payload that are not done.
        receiver: the receive that the message is matched with, or None.
    """

    __slots__ = (
        "arrived_at",
        "data",
        "dtype_code",
        "mpi_requests",
        "payload_tag",
        "peer",
        "receiver",
        "serial",
        "size",
        "tag",
    )

    def __init__(
        self, peer: int, tag: int, dtype_code: int, size: int, payload_tag: int, serial: int
    ) -> None:
        self.peer = peer
        self.tag = tag
        self.dtype_code = dtype_code
        self.size = size
        self.payload_tag = payload_tag
        self.data: Flat | None = None
        self.serial = serial
        self.arrived_at = time.monotonic()
        self.mpi_requests: list[Any] = []
        self.receiver: PendingRequest | None = None

    def fits(self, request: PendingRequest) -> bool:
        """True if the array of ``request`` has the message's size and dtype."""
        return request.call.outputs[0].dtype.code == self.dtype_code and request.view.size == self.size


def all_done(requests: list[Any]) -> bool:
    """True if all of MPI's requests are done; removes those found done from the end of the list."""
    while requests and requests[-1].Test():
        requests.pop()
    return not requests
