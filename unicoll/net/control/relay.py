"""The relay of the control plane: a server to which every process is connected.

It detects deaths: a process that dies closes its connection, and the relay informs all others. It
is in rank 0 and, after rank 0 has ended, in another process (:mod:`unicoll.net.control.standby`).
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from unicoll.net.control.clock import ClockOffset
from unicoll.net.control.deadlock_detector import DeadlockDetector
from unicoll.net.wire.authenticated_server import Client
from unicoll.net.wire.channel import keep_alive
from unicoll.net.wire.framed_server import MAX_FRAME, FrameServer, frame
from unicoll.net.wire.interfaces import in_zone_of
from unicoll.net.wire.records import TamperedError
from unicoll.process.formatting import printable_line
from unicoll.process.interrupts import Changes

Departure = tuple[int, str, str]
"""A rank that has ended, a sentence on how it ended, and "left", "failed" or "died" (it did not
leave the job)."""

_MAX_DEPARTURES = 40
_MAX_CHARACTERS = 2000
"""Departures in one message, and characters of each: they fit a frame even if JSON escapes every
character."""

_MAX_WARNINGS = 1000
"""Calls whose last warning is remembered."""

_WAIT_ERRORS = ("OperationTimeoutError", "RankLostError", "DeadlockError")
"""Errors of groups whose cause may be a call of a rank that is not in the group."""
_NOTICE_INTERVAL_S = 60.0
"""Shortest time between two such failures of which a rank outside of the group is notified."""

_CHECK_S = 0.1
"""Shortest time between checks of ranks that have not connected to a relay that replaces another
one."""


class PeerInfo(NamedTuple):
    """A process, from its hello.

    ``address`` and ``port`` are where it would host the relay. ``host_id`` is equal in processes on
    one host only; it is random if the host is unknown, and with UNICOLL_TRANSPORT=tcp.
    """

    host: str
    pid: int
    address: str = ""
    port: int = 0
    allows_pickle: bool = False
    host_id: str = ""


class Takeover(NamedTuple):
    """The initial state of a relay that replaces another one.

    Attributes:
        listener: the listening socket for the other ranks' connections.
        store: address and port of the store that replaces the job's store, or None if that still
            exists.
        departures: of the ranks that have ended.
        expected: the ranks that have yet to connect.
        how: how those of them have left the job whose processes have ended; None if they died.
    """

    listener: socket.socket
    store: tuple[str, int] | None
    departures: list[Departure]
    expected: dict[int, PeerInfo]
    how: str | None = None


def departure_of(rank: int, process: str, how: str | None) -> Departure:
    """The departure of a process that has left the job, ``how`` says how or is "", or that has died
    if it is None.

    ``process`` describes it for messages.
    """
    if how is None:
        return rank, f"{process} died: its process ended without leaving the job", "died"
    return rank, f"{process} has left the job{how and f': {how}'}", "left"


@dataclass
class _Member:
    """One connected process, from its hello message."""

    rank: int
    info: PeerInfo
    goodbye: dict[str, str] | None = None

    def describe(self) -> str:
        """The process for messages."""
        return f"rank {self.rank} (host {self.info.host}, pid {self.info.pid})"

    def departure(self, error: Exception | None) -> Departure:
        """How the process ended."""
        name = self.describe()
        if isinstance(error, TamperedError):
            return self.rank, f"{name} was disconnected: {error.strerror}", "died"
        if self.goodbye is not None and self.goodbye["error"]:
            return self.rank, f"{name} ended with {self.goodbye['error']}", "failed"
        return departure_of(
            self.rank, name, self.goodbye["how"] if self.goodbye is not None else None
        )


class _Warnings:
    """Lets one rank of those that wait in a call log a warning, so that a large job does not log
    one for each rank."""

    def __init__(self) -> None:
        # For each call the time of its last warning, and its age then.
        self._granted: dict[tuple[str, int], tuple[float, float]] = {}

    def grant(self, call: str, seq: int, age: float) -> bool:
        """True if the call has waited twice as long as at its last warning.

        The ranks enter a call at different times, so ages are compared with ages, not with the time
        since the warning.

        Args:
            call: group and operation.
            seq: sequence number of the call; 0 for messages: one that began after the last warning
                is another message.
            age: seconds for which the rank that asks has waited.
        """
        now = time.monotonic()
        at, last = self._granted.get((call, seq), (now, 0.0))
        if age < 2 * last and (seq or now - age < at):
            return False
        # The call is inserted anew, so the dict is in the order of the warnings, and the oldest are
        # forgotten.
        self._granted.pop((call, seq), None)
        self._granted[call, seq] = now, age
        while len(self._granted) > _MAX_WARNINGS:
            del self._granted[next(iter(self._granted))]
        return True


class Relay(FrameServer):
    """Forwards messages between the processes, and announces departures to all of them.

    Args:
        takeover: the initial state of a relay that replaces another one; None for the job's first
            relay.
        host_timeout: seconds after which the host of a process counts as down if it does not
            answer; None is no limit.
    """

    # Ranks that leave at about the same time as this process still send their goodbyes to this
    # relay, and look for no other one.
    linger = 0.2

    def __init__(
        self,
        size: int,
        key: bytes,
        host: str,
        rank: int = 0,
        takeover: Takeover | None = None,
        host_timeout: float | None = None,
    ) -> None:
        listener = takeover.listener if takeover is not None else None
        super().__init__([host], key, b"control", "unicoll-relay", rank, listener)
        self._takeover = takeover
        self._host_timeout = host_timeout
        self._check_time = time.monotonic() + _CHECK_S
        self._size = size
        self._connected: dict[int, Client] = {}
        self._members: dict[int, _Member] = {}
        # The first failure of each group.
        self._failures: dict[str, dict[str, Any]] = {}
        # For each rank the time of its last notice of one of _WAIT_ERRORS.
        self._notified_at: dict[int, float] = {}
        # Departures that are not announced yet. The thread sends them together, before its next
        # wait and before any message that it forwards.
        self._unannounced: list[Departure] = []
        self._deadlocks = DeadlockDetector(
            size,
            lambda rank, message: self._send_all((rank,), message),
            self._fail,
            lambda rank: self._members[rank].describe(),
            self._failures.__contains__,
        )
        self._warnings = _Warnings()
        self._initializing = set(range(size)) - {rank}
        self._initialized_changed = Changes()
        # The thread uses all of the above, so it starts last.
        self.start()

    def connected(self) -> list[int]:
        """The ranks that have joined; any thread."""
        # The relay's thread may change the dict meanwhile; this copies it in one step of C.
        return sorted(self._connected)

    def await_initialized(self, timeout: float) -> None:
        """Wait until all other ranks have said that they are initialized, or have ended; any
        thread."""
        self._initialized_changed.wait_for(lambda: not self._initializing, timeout)

    def authenticated(self, client: Client) -> None:
        super().authenticated(client)
        if self._host_timeout is not None:
            keep_alive(client.sock, self._host_timeout)

    def handle(self, client: Client, message: dict[str, Any]) -> None:
        kind = message["t"]
        # The other messages need the member that the hello names.
        if client.state is None and kind != "hello":
            raise ValueError(f"{kind!r} before 'hello'")
        if kind == "hello":
            rank, host, pid = (
                int(message["rank"]),
                printable_line(message["host"], 64),
                int(message["pid"]),
            )
            address, port = (
                printable_line(message.get("address", ""), 64),
                int(message.get("port", 0)),
            )
            host_id = printable_line(message.get("host_id", ""), 64)
            info = PeerInfo(host, pid, address, port, message.get("pickle") is True, host_id)
            self._register(client, _Member(rank, info))
        elif kind == "joined":
            self.send(client, {"t": "joined", "ranks": self.connected()})
        elif kind == "initialized":
            self._initialized(client.state.rank)
        elif kind == "bye":
            # The departure is announced when the connection ends.
            client.state.goodbye = {
                name: printable_line(message[name] or "", _MAX_CHARACTERS)
                for name in ("error", "how")
            }
        elif kind == "fail":
            self._fail(message["group"], message["members"], message["error"])
        elif kind == "ping" and self._takeover is None:
            # Only rank 0's relay replies, since all offsets are to the clock of rank 0.
            self.send(client, ClockOffset.reply(message))
        elif kind in ("waiting", "confirmed"):
            self._deadlocks.handle(client.state.rank, message)
        elif kind == "stalled":
            if self._warnings.grant(
                str(message["call"]), int(message["seq"]), float(message["age"])
            ):
                self.send(client, message)
        elif kind in ("ask", "tell", "calls"):
            self._forward(message["to"], message)

    def _initialized(self, rank: int) -> None:
        with self._initialized_changed.lock:
            self._initializing.discard(rank)
        self._initialized_changed.notify_all()

    def _fail(self, group: str, members: Sequence[int], error: dict[str, Any]) -> None:
        # All ranks raise the first failure of a group.
        if group not in self._failures:
            failure = {"t": "fail", "group": group, "members": list(members), "error": error}
            self._failures[group] = failure
            others = self._others(members) if error["type"] in _WAIT_ERRORS else []
            self._forward([*members, *others], failure)

    def _others(self, members: Sequence[int]) -> list[int]:
        """The ranks outside of a group that are notified of its failure, in addition to its
        members."""
        now, inside = time.monotonic(), set(members)
        others = [
            rank
            for rank in self._connected
            if rank not in inside
            and now - self._notified_at.get(rank, -_NOTICE_INTERVAL_S) >= _NOTICE_INTERVAL_S
        ]
        # The members have the failure itself, so they count as notified, too.
        self._notified_at.update(dict.fromkeys([*members, *others], now))
        return others

    def _register(self, client: Client, member: _Member) -> None:
        # The hello only claims a rank; client.rank is the one that the handshake has proved.
        if not 0 <= member.rank < self._size or member.rank != client.rank:
            raise ValueError(f"rank {member.rank} of {self._size} from rank {client.rank}")
        # A second process with this rank and the key, for example of another job, does not take the
        # place of one that is connected.
        if member.rank in self._connected:
            raise ValueError(f"{self._members[member.rank].describe()} is connected already")
        client.state = member
        self._connected[member.rank] = client
        self._members[member.rank] = member
        # After a takeover all ranks have the list of processes already.
        if self._takeover is not None:
            self._send_state(client, member.rank, self._takeover)
        elif len(self._members) == self._size:
            peers = [self._members[r].info for r in range(self._size)]
            self._forward(
                range(self._size), {"t": "ready", "peers": peers, "job": secrets.token_hex(8)}
            )

    def _send_state(self, client: Client, rank: int, takeover: Takeover) -> None:
        """What the last relay may not have sent to a process that connects to this one, which
        replaces it."""
        takeover.expected.pop(rank, None)
        departures = takeover.departures
        for start in range(0, len(departures), _MAX_DEPARTURES):
            self.send(client, {"t": "gone", "ranks": departures[start : start + _MAX_DEPARTURES]})
        # These are failures that other ranks have announced to this relay before this rank was
        # connected.
        for failure in self._failures.values():
            if rank in failure["members"]:
                self.send(client, failure)
        # The state comes last: the process reads until it, and then lets its threads use this
        # relay.
        self.send(client, {"t": "state", "store": takeover.store})

    def _check_expected(self, takeover: Takeover) -> None:
        """Detect expected ranks that have ended: the kernel accepts connections only while the
        process is alive."""
        start = time.monotonic()
        for rank, info in list(takeover.expected.items()):
            try:
                host = in_zone_of(self.addresses[0][0], info.address)
                # Only the kernel answers: a process that hosts no relay accepts nothing there.
                socket.create_connection((host, info.port), 1.0).close()
            except ConnectionRefusedError:
                del takeover.expected[rank]
                self._unannounced.append(
                    departure_of(rank, _Member(rank, info).describe(), takeover.how)
                )
            except OSError:
                # The process may be alive but overloaded.
                continue
        # A host that does not answer takes the whole second: messages are forwarded for as long as
        # checks have taken.
        end = time.monotonic()
        self._check_time = end + max(_CHECK_S, end - start)

    def _forward(self, ranks: Any, message: dict[str, Any]) -> None:
        # Departures that were noticed before a message arrive before it.
        self._announce_departures()
        self._send_all(ranks, message)

    def _send_all(self, ranks: Any, message: dict[str, Any]) -> None:
        # The message is encoded once for all ranks: the list of processes is long, and goes to each
        # of them.
        data = frame(message)
        # Each receiver would end its connection at such a frame. The error ends only that of the
        # sender.
        if len(data) > MAX_FRAME:
            raise ValueError(f"a message of {len(data)} bytes, which other ranks would refuse")
        for rank in ranks:
            client = self._connected.get(rank)
            if client is not None:
                self._send(client, data)

    def disconnected(self, client: Client) -> None:
        member = client.state
        if member is None or self._connected.get(member.rank) is not client:
            return
        del self._connected[member.rank]
        # Rank 0 does not wait for a rank that has ended.
        self._initialized(member.rank)
        self._deadlocks.forget(member.rank)
        # The departure is not sent from here: this may be in the middle of a message to all ranks.
        self._unannounced.append(member.departure(client.error))

    def wait_seconds(self) -> float | None:
        """Announces the departures since the last wait together."""
        missing = self._takeover is not None and bool(self._takeover.expected)
        if self._takeover is not None and missing and time.monotonic() >= self._check_time:
            self._check_expected(self._takeover)
        self._announce_departures()
        waits = [
            super().wait_seconds(),
            self._deadlocks.wait_seconds(),
            _CHECK_S if missing else None,
        ]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def tick(self) -> None:
        self._deadlocks.tick()

    def _announce_departures(self) -> None:
        # A send may find that another connection has ended, which appends to the list, and removes
        # a rank from the connected ones.
        while self._unannounced:
            ranks, self._unannounced = (
                self._unannounced[:_MAX_DEPARTURES],
                self._unannounced[_MAX_DEPARTURES:],
            )
            if self._takeover is not None:
                # Ranks that connect to this relay later get these, too.
                self._takeover.departures.extend(ranks)
            self._send_all(list(self._connected), {"t": "gone", "ranks": ranks})
