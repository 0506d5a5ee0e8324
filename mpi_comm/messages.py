"""Point-to-point operations of a group, over :mod:`mpi_comm.matching`: who drives them, deadlines, and ends.

Whoever waits drives. What nobody waits for is driven by a thread, which naps between its looks.
"""

from __future__ import annotations

import os
import threading
import time
from queue import SimpleQueue
from typing import Any

from unicoll.backend import Call, Context
from unicoll.errors import DistBackendError, DistError, GroupAbortedError, OperationTimeoutError
from unicoll.observe import inquest
from unicoll.work import HostCompletion

from .letters import Letter
from .matching import BOX, PACK, Matching
from .team import HEADER_TAG, Team

__all__ = ["Mailroom"]

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
        self._matching = Matching(context, team)
        self._driving = threading.Lock()
        self._making = threading.Lock()
        self._error: DistError | None = None
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._looked = 0.0
        self._missed: dict[int, float] = {}

    # --- the operations ------------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Send or receive, and return when the array may be used again."""
        if call.inputs and self._mpi.owner is None and self._error is None:
            buffer = call.inputs[0]
            if buffer.nbytes <= BOX:
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
            self._matching.take(letter)
        else:
            self._mpi.owner.call(self._matching.take, letter)
        if self._error is not None:  # it came between the first line and here
            self._end(letter, self._error)
        return letter

    def _send_small(self, call: Call, flat: Any, code: int, size: int) -> None:
        """A message that leaves with its header, at once as a rule."""
        packed = PACK(call.tag, code, size, 0) + flat.tobytes()
        request = self._team.comm.Isend([packed, self._byte], call.peer, HEADER_TAG)
        if request.Test():
            return
        letter = Letter(call)
        letter.requests.append(request)
        self._matching.add_send(letter)
        self._drive(letter)
        letter.completion.wait(None)

    # --- driving -------------------------------------------------------------------------------------------------

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
                    continue  # not done in this tick; if the operation itself timed out, its caller raises that

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
            if self._turn() or self._matching.receiving():
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

    def _wake_thread(self) -> None:
        """See to it that somebody drives while anything is pending."""
        if self._matching.pending() and not self._closed:
            with self._making:
                if self._thread is None:
                    name = f"unicoll-{self._context.name}-messages"
                    self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                    self._thread.start()
            self._go.put(True)

    def _work(self) -> None:
        while self._go.get():
            while self._matching.pending() and not self._closed:
                if self._driving.acquire(timeout=_TICK_S):
                    try:
                        self._turn_patiently(lambda: self._closed or not self._matching.pending())
                    finally:
                        self._driving.release()

    def _turn(self) -> bool:
        """Look once at everything; whether anything has come to its end."""
        if self._mpi.owner is not None:
            return bool(self._mpi.owner.call(self._look))
        return self._look()

    def _look(self) -> bool:
        if self._error is not None:
            return False
        try:
            return self._matching.look()
        except self._mpi.MPI.Exception as e:
            self._failed(e)
            return False

    # --- what goes wrong -----------------------------------------------------------------------------------------

    def _failed(self, cause: BaseException) -> None:
        """MPI failed, in whichever message: none of them can be relied on."""
        peer = self._team.await_the_news()
        if peer is not None:
            rank = self._context.ranks[peer]
            for letter in self._matching.letters():
                letter.completion.finish(self._lost(letter.call, rank))
        name = self._context.name
        self.abort(DistBackendError(f"MPI failed in a message of group {name!r}: {cause}", group=name))

    def _look_around(self, now: float) -> None:
        """Deadlines, and peers that are gone."""
        error = self._team.error or self._error
        if error is not None:
            self.abort(error)
            return
        letters = self._matching.letters()
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
        self._matching.withdraw(letter)
        letter.completion.finish(error)

    # --- ends ----------------------------------------------------------------------------------------------------

    def abort(self, error: DistError) -> None:
        """Make everything pending, and everything later, raise ``error``."""
        self._error = self._error or error
        for letter in self._matching.give_up():
            letter.completion.finish(error)

    def close(self, timeout: float) -> bool:
        """Send what is still to be sent, within ``timeout`` seconds; whether nothing is left in the communicator."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._matching.sending() and self._error is None:
            time.sleep(0.001)
        clean = not (self._matching.sending() or self._matching.receiving() or self._error is not None)
        self.abort(GroupAbortedError(f"group {self._context.name!r} was closed", group=self._context.name))
        self._closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._go.put(False)
            thread.join(2.0)
        self._mpi.call(self._matching.shut)
        return clean
