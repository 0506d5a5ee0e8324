"""Who moves the messages of a group: whoever waits for one of them, or else a thread that sleeps in ``epoll``."""

from __future__ import annotations

import select
import threading
import time
from queue import SimpleQueue
from typing import Protocol

from unicoll.errors import OperationTimeoutError

from .letters import Bell, Letter

__all__ = ["Driver", "Room"]

_TICK_S = 0.1
_EVENTS = 64
_FAIR = 64
"""Every so many times, whoever waits for one connection looks at all."""


class Room(Protocol):
    """What is driven."""

    def pending(self) -> bool:
        """Whether anything is left to be moved."""

    def dial(self) -> None:
        """Make the connections that sends wait for; on the thread, because it may take long."""

    def spin(self, letter: Letter) -> bool:
        """Look at the one connection that matters to a letter a few times; whether anything came."""

    def serve(self, descriptor: int, event: int) -> None:
        """Something can be moved on a connection."""

    def look_around(self, now: float) -> None:
        """Ten times a second: deadlines, and members that are gone."""

    def announce(self) -> None:
        """Tell what has ended."""


class Driver:
    """Sees to it that exactly one thread drives while anything is pending.

    Args:
        room: what is driven.
        spins: looks at the connections before sleeping on them; 0 where ranks outnumber cores.

    Attributes:
        poll: the connections are registered here.
    """

    def __init__(self, room: Room, spins: int) -> None:
        self.poll = select.epoll()
        self._spins = spins
        self._room = room
        self._bell = Bell()
        self.poll.register(self._bell.descriptor, select.EPOLLIN)
        self._driving = threading.Lock()
        self._driver = 0  # the thread that holds it
        self._lock = threading.Lock()
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._awake = False  # whether the thread will look whether anything is pending
        self._wanted = 0  # threads that want to drive in place of the thread
        self._closed = False
        self._looked = 0.0
        self._turns = 0

    def until_done(self, letter: Letter) -> None:
        """Move everybody's messages until ``letter`` is done, unless another caller does that already."""
        completion = letter.completion
        me = threading.get_ident()
        try:
            while not completion.done():
                if self._driver == me:  # in a callback of an operation that this thread has just ended
                    self._turn(letter)
                elif self._acquire():
                    self._drive(letter, me)
                else:
                    try:
                        completion.wait(_TICK_S)
                    except OperationTimeoutError:
                        continue  # not done in this tick; if the operation itself timed out, its caller raises that
        finally:
            if self._room.pending():
                self.wake_thread()

    def _drive(self, letter: Letter, me: int) -> None:
        self._driver = me
        try:
            while not letter.completion.done():
                self._turn(letter)
        finally:
            self._driver = 0
            self._driving.release()

    def _acquire(self) -> bool:
        """Become the driver, unless another caller is; the thread steps back."""
        if self._driving.acquire(blocking=False):
            return True
        thread = self._thread
        if thread is None or self._driver != thread.ident:
            return False
        self._wanted += 1
        try:
            self._bell.ring()
            return self._driving.acquire(timeout=_TICK_S)
        finally:
            self._wanted -= 1

    def wake_thread(self) -> None:
        """See to it that somebody drives while anything is pending."""
        with self._lock:
            if self._awake or self._closed:
                return
            self._awake = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="unicoll-messages", daemon=True)
                self._thread.start()
        self._go.put(True)

    def _work(self) -> None:
        while self._go.get():
            while True:
                self._room.dial()
                with self._lock:
                    if self._closed or self._wanted or not self._room.pending():
                        self._awake = False
                        break
                if not self._driving.acquire(timeout=_TICK_S):
                    continue
                self._driver = threading.get_ident()
                try:
                    if self._room.pending():  # not done by another thread meanwhile
                        self._turn()
                finally:
                    self._driver = 0
                    self._driving.release()

    def _turn(self, letter: Letter | None = None) -> None:
        """Move what can be moved, waiting for it for a tick at most; ``letter`` is what the caller waits for."""
        self._turns += 1
        fair = self._turns % _FAIR == 0  # the one connection may never be quiet, and others wait, too
        if letter is None or fair or not self._room.spin(letter):
            for descriptor, event in self._events(letter):
                if descriptor == self._bell.descriptor:
                    self._bell.hush()
                else:
                    self._room.serve(descriptor, event)
        now = time.monotonic()
        if now - self._looked >= _TICK_S:
            self._looked = now
            self._room.look_around(now)
        self._room.announce()

    def _events(self, letter: Letter | None) -> list[tuple[int, int]]:
        """What can be moved; for a receive from anyone after looking at all connections a few times."""
        if letter is not None and letter.call.peer < 0:
            for _ in range(self._spins):
                if events := self.poll.poll(0, _EVENTS):
                    return events
        return self.poll.poll(_TICK_S, _EVENTS)

    def ring(self) -> None:
        """Whoever drives is to look again at what it waits for."""
        self._bell.ring()

    def close(self) -> None:
        """End the thread and give everything back, once nothing is pending any more; idempotent."""
        self._closed = True
        self._bell.ring()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._go.put(False)
            thread.join(2.0)
        mine = self._driver == threading.get_ident()  # closed in a callback
        if mine or self._driving.acquire(timeout=2.0):
            self._bell.close()
            self.poll.close()
            if not mine:
                self._driving.release()
