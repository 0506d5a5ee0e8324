"""Point-to-point messages of a group: matched by (peer, tag) in order, with a queue for the unexpected.

MPI's tags are short and its receives match blindly, so a message begins with a header of its own: our tag, element
type and size. Small messages travel with it; of large ones the header announces a tag of MPI's under which the data
follows, received straight into the array that it fits. One receive from any source is kept open for headers.

Whoever waits drives. What nobody waits for is driven by a thread, which naps between its looks.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any

import numpy as np

from unicoll.backend import Call, Context
from unicoll.errors import (
    DistBackendError,
    DistError,
    GroupAbortedError,
    MessageMismatchError,
    OperationTimeoutError,
)
from unicoll.kernels import Flat
from unicoll.observe import inquest
from unicoll.types import DTYPES
from unicoll.work import HostCompletion

from .letters import Letter, Message, all_done
from .team import HEADER_TAG, PAYLOAD_TAGS, Team

__all__ = ["Mailroom"]

_HEADER = struct.Struct("<qqqq")
_PACK = _HEADER.pack
"""Our tag, dtype code, bytes of payload, MPI's tag of the payload (0 if it is in the same message)."""
_BOX = 4096
"""Bytes of the longest message that travels with its header."""
_CHUNK = 1 << 30
"""Bytes of payload to one message of MPI's: counts stay far below 2^31."""
_NAMES = {d.code: d.name for d in DTYPES}
_PATIENCE_S = 0.002
"""How long an announced payload waits for the array that it is to go to."""
_TICK_S = 0.1
_GRACE_S = 0.5
_SPINS = 2000
_EAGER_S = 0.005
_SHORTEST_S, _LONGEST_S = 2e-5, 5e-4


class Mailroom:
    """One group's point-to-point traffic, over its team's communicator."""

    def __init__(self, context: Context, team: Team) -> None:
        self._context = context
        self._team = team
        self._mpi = team.mpi
        self._byte = team.mpi.MPI.BYTE
        self._lock = threading.RLock()
        self._driving = threading.Lock()
        self._posted: list[Letter] = []  # receives without a message
        self._sending: list[Letter] = []
        self._coming: list[Message] = []  # payloads on their way
        self._announced: list[Message] = []  # payloads that nobody has asked for yet
        self._queues: list[deque[Message]] = [deque() for _ in range(context.size)]
        self._serials = [0] * context.size
        self._arrivals = 0
        self._span = team.mpi.largest_tag // 2 - PAYLOAD_TAGS
        self._box = bytearray(_HEADER.size + _BOX)
        self._opening: Any = None  # the receive that is open for headers
        self._status: Any = None
        self._error: DistError | None = None
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._looked = 0.0
        self._missed: dict[int, float] = {}

    # --- the operations ---------------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Send or receive, and return when the array may be used again."""
        if call.inputs and self._mpi.owner is None and self._error is None:
            buffer = call.inputs[0]
            if buffer.nbytes <= _BOX:
                self._send_small(call, buffer.flat, buffer.dtype.code, buffer.nbytes)
                return
        letter = self._accept(call)
        if not letter.completion.done():
            self._drive(letter)
        letter.completion.wait(None)

    def post(self, call: Call) -> HostCompletion:
        """Send or receive in the background."""
        letter = self._accept(call)
        if not letter.completion.done():
            self._wake_thread()
        return letter.completion

    def _accept(self, call: Call) -> Letter:
        if self._error is not None:
            raise self._error.with_traceback(None)
        letter = Letter(call)
        if self._mpi.owner is None:
            self._take(letter)
        else:
            self._mpi.owner.call(self._take, letter)
        return letter

    def _take(self, letter: Letter) -> None:
        """Begin a send or receive; like everything that takes the lock and calls MPI, on a thread that may."""
        with self._lock:
            if letter.call.op.name == "send":
                self._send(letter)
                return
            if self._opening is None:
                self._open()
            if not self._claim(letter):
                self._posted.append(letter)

    def _send_small(self, call: Call, flat: Any, code: int, size: int) -> None:
        """A message that leaves with its header, at once as a rule."""
        packed = _PACK(call.tag, code, size, 0) + flat.tobytes()
        request = self._team.comm.Isend([packed, self._byte], call.peer, HEADER_TAG)
        if request.Test():
            return
        letter = Letter(call)
        letter.requests.append(request)
        with self._lock:
            self._sending.append(letter)
        self._drive(letter)
        letter.completion.wait(None)

    def _send(self, letter: Letter) -> None:
        comm, byte, call = self._team.comm, self._mpi.MPI.BYTE, letter.call
        size, peer = letter.view.size, call.peer
        code = call.inputs[0].dtype.code
        if size <= _BOX:
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

    # --- driving ---------------------------------------------------------------------------------------------------

    def _drive(self, letter: Letter) -> None:
        """Move everybody's messages until ``letter`` is done, unless another thread does that already."""
        try:
            self._wait_for(letter.completion)
        except BaseException as e:  # an interruption; its message is for whoever asks next
            if not letter.completion.done():
                self._end(letter, e)
            raise

    def _wait_for(self, completion: HostCompletion) -> None:
        while not completion.done():
            if self._driving.acquire(blocking=False):
                try:
                    self._turn_until(completion)
                finally:
                    self._driving.release()
                    self._wake_thread()
            else:
                try:
                    completion.wait(_TICK_S)
                except OperationTimeoutError:
                    if completion.done():
                        raise

    def _turn_until(self, completion: HostCompletion) -> None:
        if not self._team.crowded:
            for _ in range(_SPINS):
                self._turn()
                if completion.done():
                    return
        self._turn_patiently(completion.done)

    def _turn_patiently(self, done: Any) -> None:
        nap, eager = _SHORTEST_S, time.monotonic() + _EAGER_S
        while not done():
            if self._turn() or self._moving():
                nap, eager = _SHORTEST_S, time.monotonic() + _EAGER_S
            now = time.monotonic()
            if now < eager:
                if self._team.crowded:
                    os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(1.2 * nap, _LONGEST_S)
            if now - self._looked >= _TICK_S:
                self._looked = now
                self._look_around(now)

    def _moving(self) -> bool:
        """Whether payload is on its way in: then MPI wants to be called often."""
        return bool(self._coming)

    def _pending(self) -> bool:
        return bool(self._posted or self._sending or self._coming or self._announced)

    def _wake_thread(self) -> None:
        """See to it that somebody drives while anything is pending."""
        if self._pending() and not self._closed:
            with self._lock:
                if self._thread is None:
                    name = f"unicoll-{self._context.name}-messages"
                    self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                    self._thread.start()
            self._go.put(True)

    def _work(self) -> None:
        while self._go.get():
            while self._pending() and not self._closed:
                if self._driving.acquire(timeout=_TICK_S):
                    try:
                        self._turn_patiently(lambda: self._closed or not self._pending())
                    finally:
                        self._driving.release()

    def _turn(self) -> bool:
        """Look once at everything; whether anything has come to its end."""
        if self._mpi.owner is not None:
            return bool(self._mpi.owner.call(self._look))
        return self._look()

    def _look(self) -> bool:
        with self._lock:
            if self._error is not None:
                return False
            try:
                moved = self._opening is not None and self._look_at_headers()
                if self._coming or self._announced:
                    moved |= self._look_at_payloads()
                if self._sending:
                    moved |= self._look_at_sends()
                return moved
            except self._mpi.MPI.Exception as e:
                self._failed(e)
                return False

    def _failed(self, cause: BaseException) -> None:
        """MPI failed, in whichever message: none of them can be relied on."""
        peer = self._team.await_the_news()
        if peer is not None:
            rank = self._context.ranks[peer]
            for letter in self._letters():
                letter.completion.finish(self._lost(letter.call, rank))
        name = self._context.name
        self.abort(DistBackendError(f"MPI failed in a message of group {name!r}: {cause}", group=name))

    def _letters(self) -> list[Letter]:
        """All sends and receives that are not done."""
        coming = [m.letter for m in self._coming if m.letter is not None]
        return [*self._posted, *self._sending, *coming]

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

    # --- headers (under the lock) -----------------------------------------------------------------------------------

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
                letter.view[:] = message.data
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

    # --- what goes wrong ----------------------------------------------------------------------------------------

    def _look_around(self, now: float) -> None:
        """Deadlines, and peers that are gone."""
        if self._team.error is not None:
            self.abort(self._team.error)
            return
        with self._lock:
            letters = self._letters()
        died = self._died()
        for letter in letters:
            if letter.completion.done():
                continue
            peer = letter.call.peer if letter.call.peer >= 0 else letter.call.source
            if peer >= 0:
                if self._gone(peer, now):
                    self._end(letter, self._lost(letter.call, self._context.ranks[peer]))
            elif died is not None:
                self._end(letter, self._lost(letter.call, died))
            if now >= letter.deadline:
                self._time_out(letter)

    def _died(self) -> int | None:
        control = self._context.job.control
        if control is None:
            return None
        return next((r for r in self._context.ranks if r in control.departed and r not in control.left), None)

    def _gone(self, peer: int, now: float) -> bool:
        """Whether a member is gone, and for so long that nothing of it is still on its way."""
        control, rank = self._context.job.control, self._context.ranks[peer]
        if control is None or rank not in control.departed:
            return False
        return now - self._missed.setdefault(peer, now) > _GRACE_S

    def _lost(self, call: Call, rank: int) -> DistError:
        control = self._context.job.control
        assert control is not None
        return inquest.lost(self._context, call, self._context.ranks.index(rank), control.departed[rank])

    def _time_out(self, letter: Letter) -> None:
        call = letter.call
        who = self._context.who(call.peer) if call.peer >= 0 else "no rank"
        begun = letter.begun or bool(letter.requests)
        state = "has not taken part"
        if begun:
            state = "has not taken all of it; MPI keeps the array until it has, or until the job ends"
        self._end(
            letter,
            OperationTimeoutError(
                f"{call.describe()} on group {self._context.name!r} timed out after {call.timeout:g} s: {who} {state}",
                group=self._context.name,
                op=call.op.name,
            ),
        )

    def _end(self, letter: Letter, error: BaseException) -> None:
        with self._lock:
            if letter in self._posted:
                self._posted.remove(letter)
            if letter in self._sending:
                self._sending.remove(letter)
                self._mpi.left_behind.append((letter.requests, letter.view))
            for message in [m for m in self._coming if m.letter is letter]:
                message.letter = None  # it is received all the same, and then nobody's
        letter.completion.finish(error)

    # --- ends -----------------------------------------------------------------------------------------------------

    def abort(self, error: DistError) -> None:
        """Make everything pending, and everything later, raise ``error``."""
        with self._lock:
            self._error = self._error or error
            letters = self._letters()
            self._posted.clear()
            self._leave_behind()
        for letter in letters:
            letter.completion.finish(error)

    def _leave_behind(self) -> None:
        for letter in self._sending:
            self._mpi.left_behind.append((letter.requests, letter.view))
        for message in self._coming:
            self._mpi.left_behind.append((message.requests, message.data))
        self._sending.clear()
        self._coming.clear()
        self._announced.clear()

    def close(self, timeout: float) -> bool:
        """Send what is still to be sent, within ``timeout`` seconds; whether nothing is left in the communicator."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._sending and self._error is None:
            time.sleep(0.001)
        clean = not self._sending and not self._coming and self._error is None
        self.abort(GroupAbortedError(f"group {self._context.name!r} was closed", group=self._context.name))
        self._closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._go.put(False)
            thread.join(2.0)
        self._mpi.call(self._shut)
        return clean

    def _shut(self) -> None:
        with self._lock:
            opening, self._opening = self._opening, None
            if opening is not None:
                opening.Cancel()
                opening.Wait()
                opening.Free()
