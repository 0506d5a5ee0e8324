"""Point-to-point messages of a group: matched by (peer, tag) in order, with a queue for the unexpected.

Senders dial; receivers wait to be called. Whoever waits drives: the waiting thread polls all of the group's message
connections, so two ranks that send to each other before either receives do not lock up, however large the messages.
Asynchronous operations that nobody waits for are driven by a thread that sleeps in ``poll``.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from queue import SimpleQueue

from unicoll.backend import Call, Context
from unicoll.errors import (
    DistError,
    DistNetworkError,
    MessageMismatchError,
    OperationTimeoutError,
    RankLostError,
)
from unicoll.types import DTYPES
from unicoll.work import HostCompletion

from . import inquest
from .endpoint import MESSAGES, Endpoint
from .letters import HEADER, JOIN, MAGIC, Bell, Letter, Line, Message

__all__ = ["Mailroom"]

_TICK_S = 0.1
_DONTWAIT = socket.MSG_DONTWAIT
_NAMES = {d.code: d.name for d in DTYPES}


class Mailroom:
    """One group's point-to-point traffic."""

    def __init__(self, context: Context, endpoint: Endpoint) -> None:
        self._context = context
        self._endpoint = endpoint
        self._lock = threading.RLock()
        self._driving = threading.Lock()
        self._lines = [Line(None) for _ in range(context.size)]
        self._posted: list[Letter] = []
        self._to_dial: deque[Letter] = deque()
        self._serial = 0
        self._error: DistError | None = None
        self._poll = select.poll()
        self._peers: dict[int, int] = {}  # descriptor to group rank
        self._bell = Bell()
        self._poll.register(self._bell.descriptor, select.POLLIN)
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._looked = 0.0
        endpoint.listen(context.name, MESSAGES, self._arrived)

    # --- the operations ---------------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        """Send or receive, and return when the array may be used again."""
        letter = self._accept(call, background=False)
        if self._to_dial:
            self._wake_thread()
        self._drive(letter)
        letter.completion.wait(None)

    def post(self, call: Call) -> HostCompletion:
        """Send or receive in the background."""
        letter = self._accept(call, background=True)
        if not letter.completion.done():
            self._wake_thread()
        return letter.completion

    def _accept(self, call: Call, background: bool) -> Letter:
        if self._error is not None:
            raise self._error
        letter = Letter(call)
        if call.op.name == "recv":
            with self._lock:
                if not self._claim(letter):
                    self._posted.append(letter)
            return letter
        line = self._lines[call.peer]
        if line.sock is None and not background and not self._awaits_call(call.peer):
            self._dial(letter)
        with self._lock:
            # behind earlier sends that still wait for the connection: messages to a peer keep their order
            if line.sock is None or self._awaits_call(call.peer):
                self._to_dial.append(letter)
                return letter
            line.outbox.append(letter)
            if len(line.outbox) == 1:
                self._write(call.peer)
        return letter

    def _awaits_call(self, peer: int) -> bool:
        with self._lock:
            return any(letter.call.peer == peer for letter in self._to_dial)

    def _claim(self, letter: Letter) -> bool:
        """Give a new receive the oldest unexpected message that fits it."""
        call = letter.call
        peers = range(len(self._lines)) if call.peer < 0 else (call.peer,)
        found: tuple[int, Message] | None = None
        for peer in peers:
            for message in self._lines[peer].queue:
                if message.tag == call.tag and (found is None or message.serial < found[1].serial):
                    found = (peer, message)
                    break
        if found is None:
            return False
        peer, message = found
        self._lines[peer].queue.remove(message)
        call.source = peer
        if message.got == len(message.view):
            self._deliver(letter, message)
        else:
            message.claimed = letter
        return True

    # --- driving ---------------------------------------------------------------------------------------------------

    def _drive(self, letter: Letter) -> None:
        """Move everybody's messages until ``letter`` is done, unless another thread does that already."""
        completion = letter.completion
        while not completion.done():
            if self._driving.acquire(blocking=False):
                try:
                    while not completion.done():
                        self._turn()
                finally:
                    self._driving.release()
                    self._wake_thread()
            else:
                try:
                    completion.wait(_TICK_S)
                except OperationTimeoutError:
                    if completion.done():
                        raise

    def _pending(self) -> bool:
        return bool(self._posted or self._to_dial or any(n.outbox or n.message for n in self._lines))

    def _wake_thread(self) -> None:
        """See to it that somebody drives while anything is pending."""
        if self._driving.locked():
            self._bell.ring()  # the driver looks again at what is wanted
        if self._pending() and not self._closed:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="unicoll-messages", daemon=True)
                    self._thread.start()
            self._go.put(True)

    def _work(self) -> None:
        while self._go.get():
            while self._to_dial:
                self._dial_next()
            while self._pending() and not self._closed:
                if not self._driving.acquire(timeout=_TICK_S):
                    continue
                try:
                    self._turn()
                finally:
                    self._driving.release()
                while self._to_dial:
                    self._dial_next()

    def _turn(self) -> None:
        """Wait for the connections for a tick at most, and move what can be moved."""
        events = self._poll.poll(_TICK_S * 1000)
        for descriptor, event in events:
            if descriptor == self._bell.descriptor:
                self._bell.hush()
                continue
            with self._lock:
                peer = self._peers.get(descriptor)
                if peer is None:
                    continue
                if event & select.POLLOUT:
                    self._write(peer)
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._read(peer)
        now = time.monotonic()
        if now - self._looked >= _TICK_S:
            self._looked = now
            self._look_around(now)

    def _look_around(self, now: float) -> None:
        """Deadlines, and peers that are gone before they ever called."""
        control = self._context.job.control
        departed = control.departed if control is not None else {}
        died = [
            r for r in self._context.ranks if control is not None and r in departed and r not in control.left
        ]
        with self._lock:
            letters = [*self._posted, *(n for line in self._lines for n in line.outbox)]
        for letter in letters:
            peer = letter.call.peer
            if peer >= 0:
                rank = self._context.ranks[peer]
                if rank in departed and self._lines[peer].sock is None:
                    self._end(letter, self._lost(letter.call, rank, departed[rank]))
            elif died:
                self._end(letter, self._lost(letter.call, died[0], departed[died[0]]))
            if now >= letter.deadline and not letter.completion.done():
                self._time_out(letter)

    # --- connections ----------------------------------------------------------------------------------------------

    def _arrived(self, global_rank: int, sock: socket.socket) -> None:
        peer = self._context.ranks.index(global_rank)
        with self._lock:
            line = self._lines[peer]
            if self._closed or line.sock is not None:
                return
            line.sock = sock
            self._peers[sock.fileno()] = peer
            self._poll.register(sock, select.POLLIN)
        self._bell.ring()

    def _dial(self, letter: Letter) -> None:
        peer = letter.call.peer
        rank = self._context.ranks[peer]

        def check() -> None:
            if self._error is not None:
                raise self._error
            if time.monotonic() >= letter.deadline:
                self._time_out(letter)
                raise letter.completion.exception() or TimeoutError

        try:
            sock = self._endpoint.connect((self._context.name, MESSAGES, rank), check)
        except RankLostError as e:
            raise self._lost(letter.call, rank, str(e)) from e
        self._arrived(rank, sock)

    def _dial_next(self) -> None:
        with self._lock:
            if not self._to_dial:
                return
            letter = self._to_dial[0]
        error: BaseException | None = None
        if self._lines[letter.call.peer].sock is None:
            try:
                self._dial(letter)
            except BaseException as e:
                error = e
        with self._lock:
            if not self._to_dial or self._to_dial[0] is not letter:
                return  # aborted meanwhile
            self._to_dial.popleft()
            if error is not None:
                letter.completion.finish(error)
                return
            line = self._lines[letter.call.peer]
            line.outbox.append(letter)
            if len(line.outbox) == 1:
                self._write(letter.call.peer)

    # --- moving bytes (under the lock) -------------------------------------------------------------------------------

    def _write(self, peer: int) -> None:
        line = self._lines[peer]
        sock = line.sock
        if sock is None:
            return
        try:
            while line.outbox:
                letter = line.outbox[0]
                if letter.offset < 0:
                    header = letter.header()
                    sent = sock.sendmsg([header[letter.offset :], letter.view[:JOIN]], (), _DONTWAIT)
                else:
                    sent = sock.send(letter.view[letter.offset : letter.offset + (1 << 20)], _DONTWAIT)
                letter.offset += sent
                if letter.offset == len(letter.view):
                    line.outbox.popleft()
                    letter.completion.finish()
            self._poll.modify(sock, select.POLLIN)
        except BlockingIOError:
            self._poll.modify(sock, select.POLLIN | select.POLLOUT)
        except OSError:
            self._hang_up(peer)

    def _read(self, peer: int) -> None:
        line = self._lines[peer]
        sock = line.sock
        if sock is None:
            return
        try:
            for _ in range(16):  # then let the others have a turn
                message = line.message
                if message is None:
                    piece = sock.recv(HEADER.size - len(line.header), _DONTWAIT)
                    if not piece:
                        self._hang_up(peer)
                        return
                    line.header += piece
                    if len(line.header) == HEADER.size:
                        self._begin(peer, line)
                    continue
                got = sock.recv_into(message.view[message.got :], 0, _DONTWAIT)
                if not got:
                    self._hang_up(peer)
                    return
                message.got += got
                if message.got == len(message.view):
                    self._complete(line, message)
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up(peer)

    def _begin(self, peer: int, line: Line) -> None:
        """A header has come: find out whose message this is."""
        magic, tag, code, length = HEADER.unpack(line.header)
        line.header.clear()
        if magic != MAGIC:
            self._hang_up(peer)
            return
        self._serial += 1
        message = line.message = Message(tag, code, self._serial)
        for letter in self._posted:
            if letter.call.tag == tag and letter.call.peer in (peer, -1):
                self._posted.remove(letter)
                letter.call.source = peer
                buffer = letter.call.outputs[0]
                if buffer.dtype.code == code and buffer.nbytes == length:
                    message.letter = letter
                    message.view = letter.view
                else:
                    message.claimed = letter
                break
        if message.letter is None:
            message.view = memoryview(bytearray(length))
            if message.claimed is None:
                line.queue.append(message)
        if not length:
            self._complete(line, message)

    def _complete(self, line: Line, message: Message) -> None:
        line.message = None
        if message.letter is not None:
            message.letter.call.write_back()
            message.letter.completion.finish()
        elif message.claimed is not None:
            self._deliver(message.claimed, message)

    def _deliver(self, letter: Letter, message: Message) -> None:
        """Copy a queued message to its receiver, if it fits."""
        call = letter.call
        buffer = call.outputs[0]
        if buffer.dtype.code == message.code and buffer.nbytes == len(message.view):
            letter.view[:] = message.view
            call.write_back()
            letter.completion.finish()
            return
        sender = self._context.who(call.source)
        came = f"{len(message.view)} bytes of {_NAMES.get(message.code, '?')}"
        letter.completion.finish(
            MessageMismatchError(
                f"{call.describe()}: {sender} sent {came}, the array holds {buffer.nbytes} bytes of {buffer.dtype}",
                group=self._context.name,
                rank=self._context.ranks[call.source],
                op=call.op.name,
            )
        )

    # --- ends -----------------------------------------------------------------------------------------------------

    def _hang_up(self, peer: int) -> None:
        """The connection to a member is over: everything that needs it fails."""
        line = self._lines[peer]
        sock, line.sock = line.sock, None
        if sock is None:
            return
        self._peers.pop(sock.fileno(), None)
        try:
            self._poll.unregister(sock)
        except (KeyError, OSError, ValueError):
            pass
        self._endpoint.forget((self._context.name, MESSAGES, self._context.ranks[peer]))
        letters = [*line.outbox, *(n for n in self._posted if n.call.peer == peer)]
        if line.message is not None:
            letters += [n for n in (line.message.letter, line.message.claimed) if n is not None]
        line.outbox.clear()
        if line.message is not None and line.message in line.queue:
            line.queue.remove(line.message)  # the rest of it will never come
        line.message = None
        if not letters:
            return
        rank = self._context.ranks[peer]
        control = self._context.job.control
        why = f"{self._context.who(peer)} closed its connection"
        if control is not None and self._error is None:
            culprit = control.culprit(rank, self._context.ranks, 0.5)
            if culprit is not None:
                rank, why = culprit, control.departed[culprit]
        for letter in letters:
            self._end(letter, self._error or self._lost(letter.call, rank, why))

    def _end(self, letter: Letter, error: BaseException) -> None:
        with self._lock:
            if letter in self._posted:
                self._posted.remove(letter)
        letter.completion.finish(error)

    def _lost(self, call: Call, rank: int, why: str) -> RankLostError:
        return inquest.lost(self._context, call, self._context.ranks.index(rank), why)

    def _time_out(self, letter: Letter) -> None:
        call = letter.call
        with self._lock:
            begun = letter.offset > letter.start or any(
                n.message is not None and letter in (n.message.letter, n.message.claimed) for n in self._lines
            )
        who = self._context.who(call.peer) if call.peer >= 0 else "no rank"
        state = "has moved only part of it" if begun else "has not taken part"
        self._end(
            letter,
            OperationTimeoutError(
                f"{call.describe()} on group {self._context.name!r} timed out after {call.timeout:g} s: {who} {state}",
                group=self._context.name,
                op=call.op.name,
            ),
        )
        if begun:  # half a message cannot be taken back
            with self._lock:
                self._hang_up(call.source if call.inputs == () else call.peer)
        else:
            with self._lock:
                for line in self._lines:
                    if letter in line.outbox:
                        line.outbox.remove(letter)

    def abort(self, error: DistError) -> None:
        """Make everything pending, and everything later, raise ``error``."""
        with self._lock:
            self._error = self._error or error
            letters = [*self._posted, *self._to_dial]
            self._posted.clear()
            self._to_dial.clear()
            for peer in range(len(self._lines)):
                self._hang_up(peer)
        for letter in letters:
            letter.completion.finish(error)
        self._bell.ring()

    def close(self, timeout: float) -> None:
        """Send what is still to be sent, within ``timeout`` seconds, and give everything back."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(n.outbox for n in self._lines):
            time.sleep(0.005)
        self.abort(DistNetworkError(f"group {self._context.name!r} was closed", group=self._context.name))
        self._closed = True
        self._bell.ring()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._go.put(False)
            thread.join(2.0)
        with self._driving:
            self._bell.close()
