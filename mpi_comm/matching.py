"""Messages in a group's communicator: headers, payloads, and which receive gets which.

MPI's tags are short and its receives match blindly, so a message begins with a header of its own: our tag, element
type and size. Small messages travel with it; of large ones the header announces a tag of MPI's under which the data
follows, received straight into the array that it fits. One receive from any source is kept open for headers.

What begins operations, looks or shuts calls MPI, so it runs on a thread that may; the rest runs on any.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from unicoll.backend import Context
from unicoll.device_memory import DeviceFlat, DeviceMemory
from unicoll.errors import MessageMismatchError
from unicoll.kernels import Flat
from unicoll.types import DTYPES

from .flats import land
from .letters import Letter, Message, all_done
from .team import HEADER_TAG, PAYLOAD_TAGS, Team

__all__ = ["BOX", "PACK", "Matching"]

_HEADER = struct.Struct("<qqqq")
"""Our tag, dtype code, bytes of payload, MPI's tag of the payload (0 if it is in the same message)."""
PACK = _HEADER.pack
BOX = 4096
"""Bytes of the longest message that travels with its header."""
_CHUNK = 1 << 30
"""Bytes of payload to one message of MPI's: counts stay far below 2^31."""
_NAMES = {d.code: d.name for d in DTYPES}
_PATIENCE_S = 0.002
"""How long an announced payload waits for the array that it is to go to."""


class Matching:
    """What a group has to send, awaits, and has received without being asked for."""

    def __init__(self, context: Context, team: Team) -> None:
        self._context = context
        self._team = team
        self._mpi = team.mpi
        self._byte = team.mpi.MPI.BYTE
        self._lock = threading.RLock()
        self._posted: list[Letter] = []  # receives without a message
        self._sending: list[Letter] = []
        self._coming: list[Message] = []  # payloads on their way
        self._announced: list[Message] = []  # payloads that nobody has asked for yet
        self._queues: list[deque[Message]] = [deque() for _ in range(context.size)]
        self._serials = [0] * context.size
        self._arrivals = 0
        self._span = team.mpi.largest_tag // 2 - PAYLOAD_TAGS
        self._box = bytearray(_HEADER.size + BOX)
        self._opening: Any = None  # the receive that is open for headers
        self._status: Any = None
        self._device: DeviceMemory | None = None  # of the last message whose address MPI was given

    def take(self, letter: Letter) -> None:
        """Begin a send or receive; like everything that takes the lock and calls MPI, on a thread that may."""
        if isinstance(letter.view, DeviceFlat):
            self._device = letter.view.memory
        if self._device is None:
            self._take(letter)
        else:  # MPI wants the device of what it is given to be the thread's, whoever's thread that is
            with self._device.bound():
                self._take(letter)

    def _take(self, letter: Letter) -> None:
        with self._lock:
            if letter.call.op.name == "send":
                self._send(letter)
                return
            if self._opening is None:
                self._open()
            if not self._claim(letter):
                self._posted.append(letter)

    def _send(self, letter: Letter) -> None:
        comm, byte, call = self._team.comm, self._mpi.MPI.BYTE, letter.call
        size, peer = letter.view.size, call.peer
        code = call.inputs[0].dtype.code
        if size <= BOX:
            packed = _HEADER.pack(call.tag, code, size, 0) + letter.view.tobytes()
            letter.requests.append(comm.Isend([packed, byte], peer, HEADER_TAG))
        else:
            serial = self._serials[peer] = (self._serials[peer] + 1) % self._span
            tag = PAYLOAD_TAGS + serial
            letter.requests.append(
                comm.Isend([_HEADER.pack(call.tag, code, size, tag), byte], peer, HEADER_TAG)
            )
            for start in range(0, size, _CHUNK):
                letter.requests.append(comm.Isend([letter.view[start : start + _CHUNK], byte], peer, tag))
        if all_done(letter.requests):
            letter.completion.finish()
        else:
            self._sending.append(letter)

    def _claim(self, letter: Letter) -> bool:
        """Give a new receive the oldest unexpected message that fits it."""
        call = letter.call
        found: Message | None = None
        for peer in range(self._context.size) if call.peer < 0 else (call.peer,):
            for message in self._queues[peer]:
                if message.tag == call.tag:
                    if found is None or message.serial < found.serial:
                        found = message
                    break
        if found is None:
            return False
        self._queues[found.peer].remove(found)
        call.source = found.peer
        self._give(found, letter)
        return True

    def _give(self, message: Message, letter: Letter) -> None:
        """A message has found its receiver."""
        message.letter = letter
        letter.begun = True
        if message.data is None:
            self._fetch(message, letter.view if message.fits(letter) else None)
        elif not message.requests:
            self._deliver(message)

    def _fetch(self, message: Message, room: Flat | None) -> None:
        """Let the payload come, into ``room`` or memory of our own."""
        comm, byte = self._team.comm, self._byte
        message.data = data = room if room is not None else np.empty(message.size, np.uint8)
        for start in range(0, message.size, _CHUNK):
            piece = data[start : start + _CHUNK]
            message.requests.append(comm.Irecv([piece, byte], message.peer, message.payload))
        self._coming.append(message)

    # --- looking -------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Look once at everything; whether anything has come to its end."""
        if self._device is None:
            return self._look()
        with self._device.bound():
            return self._look()

    def _look(self) -> bool:
        with self._lock:
            moved = self._opening is not None and self._look_at_headers()
            if self._coming or self._announced:
                moved |= self._look_at_payloads()
            if self._sending:
                moved |= self._look_at_sends()
            return moved

    def _look_at_payloads(self) -> bool:
        if self._announced:
            self._fetch_the_old()
        whole = [m for m in self._coming if all_done(m.requests)]
        for message in whole:
            self._coming.remove(message)
            if message.letter is not None:
                self._deliver(message)
        return bool(whole)

    def _fetch_the_old(self) -> None:
        """Payloads that nobody has asked for in a while come into our memory: their senders are to go on."""
        now = time.monotonic()
        for message in [m for m in self._announced if m.data is not None or now - m.since > _PATIENCE_S]:
            self._announced.remove(message)
            if message.data is None:
                self._fetch(message, None)

    def _look_at_sends(self) -> bool:
        sent = [n for n in self._sending if all_done(n.requests)]
        for letter in sent:
            self._sending.remove(letter)
            letter.completion.finish()
        return bool(sent)

    # --- headers -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Await headers from now on."""
        mpi, comm = self._mpi.MPI, self._team.comm
        self._status = mpi.Status()
        self._opening = comm.Recv_init([self._box, mpi.BYTE], mpi.ANY_SOURCE, HEADER_TAG)
        self._opening.Start()

    def _look_at_headers(self) -> bool:
        moved = False
        opening, status, box = self._opening, self._status, self._box
        for _ in range(16):  # then payloads have a turn
            if not opening.Test(status):
                break
            peer = status.Get_source()
            if peer < 0:  # it was not open: an interruption came between two steps
                opening.Start()
                continue
            tag, code, size, payload = _HEADER.unpack_from(box)
            data = None if payload else np.frombuffer(box, np.uint8, size, _HEADER.size).copy()
            opening.Start()
            self._arrivals += 1
            message = Message(peer, tag, code, size, payload, self._arrivals)
            message.data = data
            self._begin(message)
            moved = True
        return moved

    def _begin(self, message: Message) -> None:
        """A header has come: find out whose message this is."""
        letter = self._next_for(message.peer, message.tag)
        if letter is not None:
            self._give(message, letter)
            return
        self._queues[message.peer].append(message)
        if message.data is None:
            self._announced.append(message)

    def _next_for(self, peer: int, tag: int) -> Letter | None:
        """The first receive that awaits such a message."""
        for letter in self._posted:
            if letter.call.tag == tag and letter.call.peer in (peer, -1):
                self._posted.remove(letter)
                letter.call.source = peer
                return letter
        return None

    def _deliver(self, message: Message) -> None:
        """A whole message to its receiver, if it fits."""
        letter = message.letter
        assert letter is not None
        call = letter.call
        buffer = call.outputs[0]
        if message.fits(letter):
            if message.data is not None and message.data is not letter.view:
                land(letter.view, message.data)
            call.write_back()
            letter.completion.finish()
            return
        came = f"{message.size} bytes of {_NAMES.get(message.code, '?')}"
        letter.completion.finish(
            MessageMismatchError(
                f"{call.describe()}: {self._context.who(message.peer)} sent {came}, the array holds"
                f" {buffer.nbytes} bytes of {buffer.dtype}",
                group=self._context.name,
                rank=self._context.ranks[message.peer],
                op=call.op.name,
            )
        )

    # --- what is there -------------------------------------------------------------------------------------------

    def letters(self) -> list[Letter]:
        """All sends and receives that are not done."""
        with self._lock:
            coming = [m.letter for m in self._coming if m.letter is not None]
            return [*self._posted, *self._sending, *coming]

    def pending(self) -> bool:
        """Whether anything is to be done."""
        return bool(self._posted or self._sending or self._coming or self._announced)

    def sending(self) -> bool:
        """Whether messages are on their way out."""
        return bool(self._sending)

    def receiving(self) -> bool:
        """Whether payload is on its way in: then MPI wants to be called often."""
        return bool(self._coming)

    def add_send(self, letter: Letter) -> None:
        """A send that has been begun, and is not done."""
        with self._lock:
            self._sending.append(letter)

    def withdraw(self, letter: Letter) -> None:
        """A letter is given up: a receive takes nothing any more, and MPI keeps what it has begun."""
        with self._lock:
            if letter in self._posted:
                self._posted.remove(letter)
            if letter in self._sending:
                self._sending.remove(letter)
                self._mpi.left_behind.append((letter.requests, letter.view))
            for message in [m for m in self._coming if m.letter is letter]:
                message.letter = None  # it is received all the same, and then nobody's

    def give_up(self) -> list[Letter]:
        """All letters are given up; returns them."""
        with self._lock:
            letters = self.letters()
            self._posted.clear()
            for letter in self._sending:
                self._mpi.left_behind.append((letter.requests, letter.view))
            for message in self._coming:
                self._mpi.left_behind.append((message.requests, message.data))
            self._sending.clear()
            self._coming.clear()
            self._announced.clear()
            return letters

    def shut(self) -> None:
        """Await no more headers."""
        with self._lock:
            opening, self._opening = self._opening, None
            if opening is not None:
                opening.Cancel()
                opening.Wait()
                opening.Free()
