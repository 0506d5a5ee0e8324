"""Point-to-point messages of a group: matched by (peer, tag) in order, with a shelf for the unexpected.

Senders dial; receivers wait to be called. Whoever waits drives: the waiting thread takes what comes from any of the
group's message connections, so two ranks that send to each other before either receives do not lock up, however large
the messages. Asynchronous operations that nobody waits for are driven by a thread that sleeps in ``epoll``.

A blocking receive first looks at its sender's connection a few times (not at all where ranks outnumber cores), then
sleeps on all of them. A small blocking send is one system call.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque

from unicoll.backend import Call, Context
from unicoll.channel import Connection, TamperedError
from unicoll.errors import (
    DistError,
    DistNetworkError,
    RankLostError,
)
from unicoll.work import HostCompletion

from .driver import Driver
from .endpoint import MESSAGES, Endpoint
from .letters import Letter, Message
from .lines import Line
from .matching import Sorter
from .nodes import Wish, wish
from .ring import SHARED_FROM
from .undelivered import lost, misfit, tampered, too_late

__all__ = ["Mailroom"]

_INBOX = 1 << 16
_PULLS = 16
"""How often one connection is read before the others have a turn."""


class Mailroom:
    """One group's point-to-point traffic.

    Args:
        context: the group.
        endpoint: this process's listener.
        spins: looks at a connection before sleeping; 0 where ranks outnumber cores.
    """

    def __init__(self, context: Context, endpoint: Endpoint, spins: int = 0) -> None:
        self._context = context
        self._endpoint = endpoint
        self._spins = spins
        self._share = wish() is not Wish.TCP
        self._lock = threading.RLock()
        self._lines: list[Line | None] = [None] * context.size
        self._open: dict[int, Line] = {}  # by descriptor
        self._sorter = Sorter(context.size)
        self._to_dial: deque[Letter] = deque()
        self._ended: deque[tuple[Letter, BaseException | None]] = deque()  # to be told once the lock is free
        # letters of connections that are over, and how these ended
        self._broken: deque[tuple[int, list[Letter], Exception | None]] = deque()
        self._error: DistError | None = None
        self._inbox = memoryview(bytearray(_INBOX))
        self._driver = Driver(self, spins)
        self._closed = False
        endpoint.listen(context.name, MESSAGES, self._arrived)

    # --- the operations ---------------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Send or receive, and return when the array may be used again."""
        if call.inputs and self._send_at_once(call):
            return
        letter = Letter(call, None)
        try:
            self._accept(letter)
            if not letter.completion.done():
                if self._to_dial:
                    self._driver.wake_thread()
                self._driver.until_done(letter)
        except BaseException:
            if not letter.completion.done():  # interrupted: nobody waits for it any more
                self._withdraw(letter)
            raise
        letter.completion.wait(None)

    def post(self, call: Call) -> HostCompletion:
        """Send or receive in the background."""
        letter = Letter(call, self._driver.until_done)
        try:
            self._accept(letter)
        except BaseException:
            if not letter.completion.done():  # the caller does not get to know it
                self._withdraw(letter)
            raise
        if not letter.completion.done():
            self._driver.wake_thread()
        return letter.completion

    def _send_at_once(self, call: Call) -> bool:
        """A message in one system call, if it is small and nothing is before it."""
        line = self._lines[call.peer]
        if line is None or self._error is not None:
            return False
        with self._lock:
            if (self._to_dial and self._awaits_call(call.peer)) or line.over or not line.send_at_once(call):
                return False
        if line.blocked:
            self._driver.wake_thread()
        return True

    def _accept(self, letter: Letter) -> None:
        if self._error is not None:
            raise self._error
        call = letter.call
        sends_now = bool(call.inputs) and not letter.background
        if sends_now and self._lines[call.peer] is None and not self._awaits_call(call.peer):
            self._dial(letter)
        with self._lock:
            if self._error is not None:
                raise self._error
            if not call.inputs:
                message = self._sorter.expect(letter)
                if message is not None:
                    self._claim(letter, message)
            else:
                self._queue(letter)
        self.announce()

    def _awaits_call(self, peer: int) -> bool:
        with self._lock:
            return any(letter.call.peer == peer for letter in self._to_dial)

    def _queue(self, letter: Letter) -> None:
        """A send takes its place behind earlier ones, those that wait for the connection too."""
        line = self._lines[letter.call.peer]
        if line is not None and line.asked and len(letter.view) >= SHARED_FROM:
            self._pull(line)  # the answer may be there
        if line is None or line.over or self._awaits_call(letter.call.peer):
            self._to_dial.append(letter)
            return
        line.outbox.append(letter)
        if len(line.outbox) == 1:
            line.flush()

    def _claim(self, letter: Letter, message: Message) -> None:
        """Give a new receive the message that was there for it, or what there is of it."""
        if not message.fits(letter):
            message.claimed = letter
        else:
            message.give(letter)
        if message.got == message.size:
            self.complete(letter.call.source, message)

    # --- being driven (see Room) -------------------------------------------------------------------------------------

    def pending(self) -> bool:
        if self._sorter.posted or self._to_dial:
            return True
        return any(line.busy for line in self._open.copy().values())

    def spin(self, letter: Letter) -> bool:
        peer = letter.call.peer
        line = self._lines[peer] if peer >= 0 else None
        if line is None:
            return False
        lock, pull, inbox = self._lock, line.pull, self._inbox
        for _ in range(self._spins):
            with lock:
                if line.over:
                    return True
                try:
                    pull(inbox)
                except BlockingIOError:
                    continue
                except (OSError, EOFError) as error:
                    self._hang_up(peer, error)
            return True
        return False

    def serve(self, descriptor: int, event: int) -> None:
        with self._lock:
            line = self._open.get(descriptor)
            if line is None:
                return
            if event & select.EPOLLOUT:
                line.flush()
            if event & ~select.EPOLLOUT:
                for _ in range(_PULLS):
                    if not self._pull(line) or line.message is None or line.over:
                        break

    def _pull(self, line: Line) -> bool:
        """Take what has come from a member; False if that is nothing."""
        try:
            line.pull(self._inbox)
        except BlockingIOError:
            return False
        except (OSError, EOFError) as error:
            self._hang_up(line.peer, error)
        return True

    def look_around(self, now: float) -> None:
        control = self._context.job.control
        departed = control.departed if control is not None else {}
        died = [
            r for r in self._context.ranks if control is not None and r in departed and r not in control.left
        ]
        with self._lock:
            letters = [*self._sorter.posted, *(n for line in self._open.values() for n in line.outbox)]
            letters += [n for n in map(_receiver, self._open.values()) if n is not None]
        for letter in letters:
            peer = letter.call.peer
            if peer >= 0:
                rank = self._context.ranks[peer]
                if rank in departed and self._lines[peer] is None:
                    self._end(letter, lost(self._context, letter.call, rank, departed[rank]))
            elif died and letter.call.source < 0:
                self._end(letter, lost(self._context, letter.call, died[0], departed[died[0]]))
            if now >= letter.deadline and not letter.completion.done():
                self._time_out(letter)

    # --- connections ----------------------------------------------------------------------------------------------

    def _arrived(self, global_rank: int, sock: Connection) -> None:
        peer = self._context.ranks.index(global_rank)
        with self._lock:
            if self._closed or self._lines[peer] is not None:
                return
            line = self._lines[peer] = Line(self, peer, sock, self._driver.poll, self._share)
            self._open[line.number] = line

    def _dial(self, letter: Letter) -> None:
        peer = letter.call.peer
        rank = self._context.ranks[peer]

        def check() -> None:
            if self._error is not None:
                raise self._error
            if time.monotonic() >= letter.deadline:
                raise too_late(self._context, letter, begun=False)

        try:
            sock = self._endpoint.connect((self._context.name, MESSAGES, rank), check)
        except RankLostError as e:
            raise lost(self._context, letter.call, rank, str(e)) from e
        self._arrived(rank, sock)

    def dial(self) -> None:
        while self._to_dial:
            self._dial_next()

    def _dial_next(self) -> None:
        with self._lock:
            if not self._to_dial:
                return
            letter = self._to_dial[0]
        error: BaseException | None = None
        if self._lines[letter.call.peer] is None:
            try:
                self._dial(letter)
            except BaseException as e:
                error = e
        with self._lock:
            if not self._to_dial or self._to_dial[0] is not letter:
                return  # aborted meanwhile
            line = self._lines[letter.call.peer]
            if error is not None:
                self._to_dial.popleft()
                self._ended.append((letter, error))
            elif line is not None:
                self._to_dial.popleft()
                line.outbox.append(letter)
                if len(line.outbox) == 1:
                    line.flush()
        self.announce()

    # --- what lines ask and tell (under the lock) -------------------------------------------------------------------

    def deliver(self, peer: int, tag: int, code: int, body: memoryview) -> bool:
        """A whole message has come: hand it to its receive, if one waits that it fits."""
        letter = self._sorter.first(peer, tag)
        if letter is None or len(letter.view) != len(body) or letter.call.outputs[0].dtype.code != code:
            return False
        self._sorter.take(letter, peer)
        letter.view[:] = body
        letter.call.write_back()
        self._finish(letter)
        return True

    def begin(self, peer: int, message: Message) -> None:
        """A header has come: find out whose message this is."""
        letter = self._sorter.first(peer, message.tag)
        if letter is not None and message.fits(letter):
            self._sorter.take(letter, peer)
            message.letter = letter
            message.view = letter.view
            return
        message.store()  # if it fails, the receive still waits, and ends with the connection
        if letter is not None:
            self._sorter.take(letter, peer)
            message.claimed = letter
        else:
            self._sorter.shelve(peer, message)

    def complete(self, peer: int, message: Message) -> None:
        """All of a message has come: its receive, if there is one by now, is over."""
        if message.letter is not None:
            message.letter.call.write_back()
            self._finish(message.letter)
        elif message.claimed is not None:
            self._finish(message.claimed, misfit(self._context, message.claimed.call, message))

    def sent(self, letter: Letter) -> None:
        """All of it has left."""
        self._finish(letter)

    def who(self, peer: int) -> str:
        """A member in words."""
        return self._context.who(peer)

    # --- ends -----------------------------------------------------------------------------------------------------

    def _finish(self, letter: Letter, error: BaseException | None = None) -> None:
        if letter.background:
            self._ended.append((letter, error))  # users' callbacks are not for under the lock
        else:
            letter.completion.finish(error)

    def announce(self) -> None:
        """Tell what has ended; without the lock."""
        while self._ended or self._broken:
            try:
                while self._ended:
                    letter, error = self._ended.popleft()
                    letter.completion.finish(error)
                peer, letters, why = self._broken.popleft()
            except IndexError:  # another thread was faster
                return
            self._blame(peer, letters, why)

    def _hang_up(self, peer: int, error: Exception | None = None) -> None:
        """The connection to a member is over: everything that needs it fails."""
        line = self._lines[peer]
        if line is None:
            return
        self._lines[peer] = None
        del self._open[line.number]
        line.close()
        self._endpoint.forget((self._context.name, MESSAGES, self._context.ranks[peer]))
        letters = [*line.outbox, *self._sorter.withdraw_all(peer)]
        receiver = _receiver(line)
        if receiver is not None:
            letters.append(receiver)
        if line.message is not None:
            self._sorter.forget(peer, line.message)
        if letters:
            self._broken.append((peer, letters, error))

    def _blame(self, peer: int, letters: list[Letter], error: Exception | None) -> None:
        """End the letters of a connection that is over with the reason for it."""
        letters = [letter for letter in letters if not letter.completion.done()]
        if not letters:
            return
        rank = self._context.ranks[peer]
        if isinstance(error, TamperedError):
            for letter in letters:
                letter.completion.finish(self._error or tampered(self._context, letter.call, rank, error))
            return
        control = self._context.job.control
        why = f"{self._context.who(peer)} closed its connection"
        if control is not None and self._error is None:
            culprit = control.culprit(rank, self._context.ranks, 0.5)
            if culprit is not None:
                rank, why = culprit, control.departed[culprit]
        for letter in letters:
            letter.completion.finish(self._error or lost(self._context, letter.call, rank, why))

    def _end(self, letter: Letter, error: BaseException) -> None:
        with self._lock:
            self._sorter.withdraw(letter)
        letter.completion.finish(error)

    def _time_out(self, letter: Letter) -> None:
        begun = self._withdraw(letter)
        letter.completion.finish(too_late(self._context, letter, begun))

    def _withdraw(self, letter: Letter) -> bool:
        """Nobody wants a send or receive any more; whether part of it had moved already."""
        with self._lock:
            for line in self._open.values():
                begun = letter.begun and letter in line.outbox
                if begun or _receiver(line) is letter:  # half a message cannot be taken back
                    self._hang_up(line.peer)
                    return True
            self._sorter.withdraw(letter)
            for queue in (self._to_dial, *(line.outbox for line in self._open.values())):
                if letter in queue:
                    queue.remove(letter)
            return False

    def abort(self, error: DistError) -> None:
        """Make everything pending, and everything later, raise ``error``."""
        with self._lock:
            self._error = self._error or error
            for letter in (*self._sorter.withdraw_all(), *self._to_dial):
                self._ended.append((letter, self._error))
            self._to_dial.clear()
            for peer in range(len(self._lines)):
                self._hang_up(peer)
        self.announce()
        self._driver.ring()

    def close(self, timeout: float) -> None:
        """Send what is still to be sent, within ``timeout`` seconds, and give everything back; idempotent."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._unsent():
            time.sleep(0.005)
        self.abort(DistNetworkError(f"group {self._context.name!r} was closed", group=self._context.name))
        with self._lock:
            self._closed = True
        self._driver.close()

    def _unsent(self) -> bool:
        with self._lock:
            return any(line.unsent for line in self._open.values())


def _receiver(line: Line) -> Letter | None:
    """The receive that a half-arrived message belongs to."""
    message = line.message
    return None if message is None else message.letter or message.claimed
