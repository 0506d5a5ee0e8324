"""A process's client of the control plane.

Every process has one authenticated connection to a relay in rank 0. The connection shows that the
process is alive: when it dies the kernel closes the connection, and the relay informs all ranks.
When rank 0 ends before others, the lowest remaining rank hosts a relay in its place, and a store if
the job's store has ended with rank 0 (:mod:`unicoll.net.control.standby`). Failures of a group are
announced through the relay, which keeps the first one of each group, so that all ranks raise the
same error. Operations that succeed do not use the control plane.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from unicoll.errors import (
    AuthenticationError,
    DistError,
    DistNetworkError,
    OperationTimeoutError,
    RankLostError,
    StoreTimeoutError,
)
from unicoll.net.control.clock import ClockOffset, Offset
from unicoll.net.control.departures import Departures, publish_refusal
from unicoll.net.control.group_failures import GroupFailures
from unicoll.net.control.join_warnings import title, warn_while_waiting
from unicoll.net.control.relay import PeerInfo, Relay, departure_of
from unicoll.net.control.relay_connection import Message, RelayConnection
from unicoll.net.control.reports import Report, Reports
from unicoll.net.control.standby import Standby
from unicoll.net.objects.received_json import from_store
from unicoll.net.wire.authenticated_server import describe_refusals
from unicoll.net.wire.channel import Connection
from unicoll.net.wire.framed_server import read_frame
from unicoll.net.wire.interfaces import (
    FIREWALL_HINT,
    in_zone_of,
    join_hostport,
    require_descriptors,
)
from unicoll.net.wire.records import TamperedError
from unicoll.process import environment, logs
from unicoll.process.formatting import printable_values, ranks_text
from unicoll.process.host_identity import UNKNOWN_HOST, host_id
from unicoll.process.interrupts import Changes, raised_by_handler
from unicoll.process.timeouts import seconds_left

if TYPE_CHECKING:
    from unicoll.net.stores import Store

log = logs.logger("control")

_LEAVE_S = 1.0
"""Seconds for which there is no relay after its process has left the job: the other ranks usually
leave, too."""
_TAKEOVER_S = 30.0
"""Seconds in which the ranks connect to a new relay after the relay's process has ended."""
_REFUSALS_S = 1.0
"""Seconds between rank 0's looks into the store for ranks that cannot join."""
_STALE_CHECK_S = 0.5
"""Seconds between checks whether another rendezvous has begun, while rank 0 does not answer."""
_RETRY_S = 0.02
_REPLY_S = 1.0
"""Seconds to wait for a reply of the relay, or for the end of this process's thread."""


class StaleRendezvousError(DistNetworkError):
    """Rank 0 of an earlier job has left its address in the store, and rank 0 of this job has
    replaced its record."""


class ControlSettings(NamedTuple):
    """How a process takes part in the control plane.

    Attributes:
        store_ends_with_rank_0: True if the job's store may end with rank 0's process.
        allows_pickle: True if this process accepts pickles from the others.
        name: of the job; "" for a job without one.
        host_timeout: seconds after which a host that does not answer counts as down; None is no
            limit.
    """

    store_ends_with_rank_0: bool = False
    allows_pickle: bool = False
    name: str = ""
    host_timeout: float | None = None


_DEFAULTS = ControlSettings()


class ControlClient:
    """This process in the control plane; :meth:`start` joins, :meth:`close` leaves.

    Args:
        address: this host's address, for the relay to listen on.

    Attributes:
        peers: the :class:`PeerInfo` of each rank, once all have joined.
        departed: for each rank that has ended, how it ended.
        left: the departed ranks that left the job without an exception.
        died: the departed ranks that ended without leaving the job.
        loss_listeners: as in :class:`Departures`.
        job_id: random text, equal on all ranks, once all have joined.
        clock: the offset to rank 0's clock.
        failure_listeners: functions that are called with a group's name and error, once for each
            group that fails, before its calls raise the error; also for groups of other ranks whose
            failure the relay announces here.
        await_departure, find_lost_rank: methods of :class:`Departures`.
        group_failure, announce_failure: methods of :class:`GroupFailures`.
        request_reports, collect_reports: methods of :class:`Reports`.
        send: the method of :class:`RelayConnection`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        key: bytes,
        address: str,
        settings: ControlSettings = _DEFAULTS,
    ) -> None:
        store_ends_with_rank_0, allows_pickle, name, host_timeout = settings
        self.rank = rank
        self.size = size
        self._host_timeout = host_timeout
        self.peers: list[PeerInfo] = []
        self.job_id = ""
        self.clock = ClockOffset()
        self._key = key
        self._address = address
        self._allows_pickle = allows_pickle
        self._name, self._title = name, title(name)
        self._op = "join" if name else "init_process_group"
        self._relay: Relay | None = None
        self._connection = RelayConnection(rank, key, host_timeout)
        self.send = self._connection.send
        self._thread: threading.Thread | None = None
        # What this process waits for before it is connected. The thread of the join warnings reads
        # it.
        self._waits_for = "rank 0 to open its control port"
        # Departures, failures and reports share this object: a wait for any of them also ends when
        # the relay has ended, which is a departure.
        self._changed = Changes()
        self._departures = Departures(self._changed)
        self.departed = self._departures.departed
        self.left = self._departures.left
        self.died = self._departures.died
        self.loss_listeners = self._departures.loss_listeners
        self.await_departure = self._departures.await_departure
        self.find_lost_rank = self._departures.find_lost_rank
        self._failures = GroupFailures(self._changed, self.send, self._relay_ended)
        self.failure_listeners = self._failures.failure_listeners
        self.group_failure = self._failures.group_failure
        self.announce_failure = self._failures.announce_failure
        self._reports = Reports(rank, self.departed, self._changed, self.send, self._relay_ended)
        self.request_reports = self._reports.request_reports
        self.collect_reports = self._reports.collect_reports
        self._handlers: dict[str, Callable[[Message], None]] = {}
        self._ready = False
        # True once close() has begun. The end of the connection is then no death of the relay's
        # process, and no new relay is looked for.
        self._closed = False
        # This is set at the end of close() only, so that a close that an exception has interrupted
        # is repeated.
        self._close_done = False
        self._joined: list[int] = []
        # The rank that hosts the relay.
        self._relay_rank = 0
        # False if no rank replaces the relay when its process ends: not all ranks had joined, this
        # connection alone was at fault, or no rank could be reached.
        self._takeover_possible = True
        self._standby = Standby(rank, size, key, address, store_ends_with_rank_0, host_timeout)
        self._store_timeout = timedelta(seconds=300)

    # --- joining and leaving ----------------------------------------------------------------------

    def start(
        self,
        store: Store,
        timeout: float,
        address: str = "",
        replaced: Callable[[], bool] | None = None,
    ) -> None:
        """Join the job; returns when every rank of the world has joined.

        Args:
            address: of the store, for messages.
            replaced: that of :class:`unicoll.bootstrap.rendezvous.Rendezvous`.

        Raises:
            OperationTimeoutError: ranks have not joined within ``timeout`` seconds; the message has
                them.
            RankLostError: a rank died meanwhile.
            StaleRendezvousError: this is an earlier rendezvous, whose rank 0 has ended.
        """
        with warn_while_waiting(self._name, lambda: self._describe_wait(address)):
            self._start(store, timeout, address, replaced)

    def _describe_wait(self, address: str) -> str:
        """What this process waits for before all ranks have joined; "" if rank 0 says it."""
        if self._relay is None:
            return f"{self._waits_for}; the store is at {address}" if self._thread is None else ""
        missing = set(range(self.size)).difference(self._relay.connected())
        return f"{ranks_text(missing)} of {self.size}; the store is at {address}" if missing else ""

    def _start(
        self, store: Store, timeout: float, address: str, replaced: Callable[[], bool] | None
    ) -> None:
        deadline = time.monotonic() + timeout
        self._store_timeout = store.timeout
        # The socket exists before the hello, which carries its port: all ranks get that with the
        # list of processes.
        self._standby.listen()
        if self.rank == 0:
            # Rank 0 fails here, before its address is in the store, and not once ranks have
            # connected.
            require_descriptors(self.size, f"rank 0 of {self.size} ranks")
            self._relay = Relay(
                self.size, self._key, self._address, host_timeout=self._host_timeout
            )
            store.set("control", json.dumps(self._relay.addresses[0]))
        try:
            self._await_control_port(store, deadline, replaced)
        except StoreTimeoutError:
            error = OperationTimeoutError(
                f"{self._title}: after {timeout:g} s rank 0 has not joined", op=self._op
            )
            error.missing = [0]
            raise error from None
        host, port = from_store("control", store.get("control"), (str, int))
        host = in_zone_of(self._address, host)
        self._waits_for = f"an answer from rank 0's control port {join_hostport(host, port)}"
        try:
            sock = self._connect_to_rank_0(store, host, port, deadline)
        except (RankLostError, DistNetworkError) as e:
            # An earlier job may have left its address in a store that is used again. Rank 0 of this
            # job then replaces the record, so the error counts only if it does not. A server with
            # another key is reported at once.
            self._waits_for = (
                f"a new record of rank 0, since {host}:{port} of the last one does not answer"
            )
            if isinstance(e, AuthenticationError) or not _await_replacement(replaced, deadline):
                raise
            raise StaleRendezvousError(str(e)) from e
        self._thread = threading.Thread(
            target=self._receive, args=(sock, self._hello()), name="unicoll-control", daemon=True
        )
        self._connection.start()
        self._thread.start()
        self._await_ranks(store, deadline, timeout, address, replaced)

    def _await_control_port(
        self, store: Store, deadline: float, replaced: Callable[[], bool] | None
    ) -> None:
        """Wait until rank 0 has stored its address; StoreTimeoutError, StaleRendezvousError."""
        while True:
            # The wait has the deadline of this call: the store's own timeout may be the user's. It
            # is cut into short ones while rank 0 may begin another rendezvous.
            left = seconds_left(deadline)
            try:
                store.wait(["control"], left if replaced is None else min(left, _STALE_CHECK_S))
                return
            except StoreTimeoutError:
                if time.monotonic() >= deadline:
                    raise
                if replaced is not None and replaced():
                    raise StaleRendezvousError("rank 0 has begun another rendezvous") from None

    def _connect_to_rank_0(self, store: Store, host: str, port: int, deadline: float) -> Connection:
        try:
            # This is less than rank 0 waits, so rank 0 still reads the reason that is stored below.
            seconds = seconds_left(deadline, 0.1) * 0.9
            return self._connection.connect(host, port, 0, seconds, deadline)
        # A wrong key is a DistNetworkError, too, but no death of rank 0.
        except AuthenticationError:
            raise
        # The connection was made, so the process existed, and has broken in the handshake.
        except DistNetworkError as e:
            reason = f"rank 0 ended while rank {self.rank} joined the job: {e}"
            raise RankLostError(f"{self._title}: {reason}", rank=0, op=self._op) from e
        except OSError as e:
            # The exception of a signal's handler may be an OSError, and says nothing about the
            # network.
            if raised_by_handler(e):
                raise
            error = DistNetworkError(
                f"rank 0's control port {join_hostport(host, port)} cannot be reached: {e}. The"
                " store can be reached, so a firewall may let only some ports through"
                f" ({FIREWALL_HINT}), or the address is in another network (UNICOLL_SOCKET_IFNAME"
                " on rank 0's host selects another interface)"
            )
            # Rank 0 waits for this rank, and without the reason it could only report a missing rank
            # at its deadline.
            with suppress(DistError):
                publish_refusal(store, self.rank, error)
            raise error from e

    def _hello(self) -> Message:
        """The first message on a connection."""
        return {
            "t": "hello",
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "address": self._address,
            "port": self._standby.port,
            "pickle": self._allows_pickle,
            "host_id": _host_id(self._key),
        }

    def _await_ranks(
        self,
        store: Store,
        deadline: float,
        timeout: float,
        address: str,
        replaced: Callable[[], bool] | None,
    ) -> None:
        while not (self._ready or self.departed) and time.monotonic() < deadline:
            # Rank 0 wakes each second to look into the store, since a rank that cannot reach the
            # control port can report that only there.
            left = min(_REFUSALS_S, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._ready or self.departed, left)
            if self.rank == 0 and not self._ready:
                self._departures.read_refusal(store)
                if replaced is not None:
                    replaced()
        if self._ready:
            return
        if self.departed:
            rank, reason = next(iter(self.departed.items()))
            raise RankLostError(f"{self._title}: {reason}", rank=rank, op=self._op)
        # Only the relay knows who has joined. Without a reply all ranks count as missing.
        self.send({"t": "joined"})
        self._changed.wait_for(lambda: bool(self._joined), _REPLY_S)
        missing = sorted(set(range(self.size)) - set(self._joined))
        error = OperationTimeoutError(
            f"{self._title}: after {timeout:g} s {len(self._joined)} of {self.size} ranks have"
            " joined;"
            f" missing: {ranks_text(missing)}{address and f'; the store is at {address}'}"
            f"{describe_refusals()}",
            op=self._op,
        )
        error.missing = missing
        raise error

    def initialized(self, timeout: float) -> None:
        """Tell rank 0 that this rank is initialized; on rank 0 wait until all are, ``timeout``
        seconds at most.

        They need threads of rank 0 until then, and the program may next keep the GIL until all
        ranks have made the same call, as MPI_Init in ``import mpi4py.MPI`` does. So this returns
        once the message is sent.
        """
        if self._relay is None:
            self._connection.send_and_wait({"t": "initialized"}, timeout)
        else:
            self._relay.await_initialized(timeout)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; idempotent. ``error`` is the exception that ended this process, for the
        other ranks.

        SystemExit is not a failure: the program ended, with the exit code if that is known. After
        an exception that has interrupted it, it can be called again.
        """
        if self._close_done:
            return
        self._closed = True
        failure = how = ""
        if isinstance(error, SystemExit):
            how = f"sys.exit({error.code!r})" if error.code else "its program ended"
        elif error is not None:
            failure = f"{type(error).__name__}: {error}".removesuffix(": ")
        # The goodbye goes out before anything is closed: the relay counts a connection that ends
        # without one as a death.
        self._connection.leave({"t": "bye", "error": failure[:2000], "how": how[:2000]}, _REPLY_S)
        # This wakes the control thread if it waits in _await_new_relay().
        with self._changed.lock:
            self._changed.notify_all()
        thread = self._thread
        # The relay closes the connection once it has read the goodbye, which ends the thread.
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(_REPLY_S)
        # The relay closes after that: it announces this rank's departure, and lingers for the
        # goodbyes of ranks that leave at the same time.
        if self._relay is not None:
            self._relay.close()
        # If the relay has not closed the connection in time, this ends the read of the control
        # thread.
        self._connection.interrupt()
        self._standby.close()
        self._close_done = True

    # --- ranks ------------------------------------------------------------------------------------

    def describe(self, rank: int) -> str:
        """A rank for messages: ``rank 2 (host node7, pid 4711)``."""
        if rank < len(self.peers):
            peer = self.peers[rank]
            return f"rank {rank} (host {peer.host}, pid {peer.pid})"
        return f"rank {rank}"

    # --- failures of groups -----------------------------------------------------------------------

    def watch(
        self,
        group: str,
        backend: str,
        on_failure: Callable[[DistError], None],
        report: Callable[[], Report],
    ) -> None:
        """Register a backend of a group.

        ``on_failure`` is called on the control thread when the group fails, ``report`` when another
        rank asks for the state of this one in its calls of the same backend.
        """
        self._reports.add_source(group, backend, report)
        self._failures.watch(group, backend, on_failure)

    def unwatch(self, group: str, backend: str) -> None:
        """This process has closed the backend of the group."""
        self._failures.unwatch(group, backend)
        self._reports.remove_source(group, backend)

    def measure_clock(self) -> Offset | None:
        """Rank 0's clock minus this process's, measured within a fraction of a second; None if it
        never was."""
        return self.clock.measure(self.send)

    # --- messages of other modules ----------------------------------------------------------------

    @property
    def relay_rank(self) -> int:
        """The rank that hosts the relay; another one once that has died."""
        return self._relay_rank

    def handle(self, kind: str, handler: Callable[[Message], None]) -> None:
        """Call ``handler`` on the control thread with each message of a kind from the relay."""
        self._handlers[kind] = handler

    # --- the connection ---------------------------------------------------------------------------

    def _receive(self, sock: Connection, hello: Message) -> None:
        # If the connection has ended already, the first read below meets the error, too, and
        # records the departure.
        with suppress(OSError):
            self._connection.introduce(sock, hello, self._failures.messages)
        current: Connection | None = sock
        while current is not None:
            self._receive_from(current)
            # Other threads have no connection from here on, and their messages are dropped.
            # Failures of groups are not lost: introduce() sends them on the next connection.
            self._connection.disconnect(current)
            if self._closed:
                break
            current = self._await_new_relay()
        if self._closed:
            # A takeover may have gone on when close() stopped waiting for this thread, and have
            # made a relay or a store since.
            self._standby.close()

    def _receive_from(self, sock: Connection) -> None:
        """Handle messages until the connection ends; then the process that hosts the relay has
        ended."""
        reason = "died: its process ended without leaving the job"
        try:
            while True:
                message = read_frame(sock)
                try:
                    self._handle(message)
                except Exception:
                    # Another rank may have sent anything, and this thread must continue to detect
                    # losses and failures.
                    log.warning(
                        "a message of the control plane was ignored: %.200r", message, exc_info=True
                    )
        except TamperedError as error:
            reason = f"was disconnected: {error.strerror}"
            # The relay is alive and the other ranks are still connected to it, so none of them
            # hosts another one.
            self._takeover_possible = False
        # After bytes that are not a frame (ValueError) the stream is out of step, so the connection
        # counts as ended, too.
        except (OSError, EOFError, ValueError):
            pass
        # The relay closes the connection of a process that leaves, which is no death.
        if not self._closed:
            rank = self._relay_rank
            self._departures.record(rank, f"{self.describe(rank)} {reason}", "died")

    # --- another relay ----------------------------------------------------------------------------

    def replacement_store(self) -> Store | None:
        """The store that replaces the job's store, or None if that still exists; waits during a
        takeover."""
        # The control thread makes the connection to the new relay, and would wait for itself.
        if threading.current_thread() is not self._thread:
            self._changed.wait_for(self.relay_settled, _TAKEOVER_S)
        return self._standby.store

    def await_relay_loss(self, ranks: Iterable[int]) -> None:
        """If ``ranks``, which the caller excludes as lost, contain the relay's rank, wait for its
        departure."""
        if self._relay_rank in ranks:
            self.await_departure(self._relay_rank)

    def _relay_ended(self) -> bool:
        return self._relay_rank in self.departed

    def relay_settled(self) -> bool:
        """True unless this process is about to connect to a new relay."""
        # Only threads of calls wait for this. The control thread, which makes that connection,
        # would wait for itself.
        rank = self._relay_rank
        return (
            self._closed
            or not self._takeover_possible
            or not self._ready
            or rank not in self.departed
            or rank in self.left
        )

    def _await_new_relay(self) -> Connection | None:
        """The connection to the relay that replaces the last one; None if no relay replaces it."""
        last = self._relay_rank
        has_left = last in self.left
        with self._changed.lock:
            # Before all ranks have joined, no rank knows the addresses of the others.
            self._takeover_possible = self._takeover_possible and self._ready
        if has_left and self._takeover_possible:
            # After a rank has left in order, the others usually leave, too, and need no relay.
            self._changed.wait_for(lambda: self._closed, _LEAVE_S)
        # This says how a process ended that does not listen any more. While there was no relay
        # nobody could receive its goodbye, so after an orderly departure it counts as one that has
        # left.
        how = f"its process ended after rank {last} had left" if has_left else None
        deadline = time.monotonic() + _TAKEOVER_S
        while self._takeover_possible and not self._closed and time.monotonic() < deadline:
            # All ranks choose the same one if they know the same departures. A rank that knows
            # fewer is refused by the kernel below, and goes on to the next one.
            rank = min(set(range(self.size)) - self.departed.keys(), default=self.rank)
            try:
                if rank == self.rank:
                    self._host_relay(how)
                return self._connect_to_new_relay(rank, self.peers[rank], deadline)
            # A process listens as long as it is in the job, so the kernel refuses only if it has
            # ended or left.
            except ConnectionRefusedError:
                self._departures.record(*departure_of(rank, self.describe(rank), how))
            except Exception as e:
                # Any other error may be temporary. This thread must continue: without it this rank
                # learns of no loss and no failure.
                log.debug("the new relay in rank %d cannot be reached: %r", rank, e)
                time.sleep(_RETRY_S)
        with self._changed.lock:
            # This ends the waits in replacement_store().
            self._takeover_possible = False
            self._changed.notify_all()
        return None

    def _host_relay(self, how: str | None) -> None:
        expected = {r: self.peers[r] for r in range(self.size) if r not in self.departed}
        self._standby.serve(self._departures.all(), expected, how)

    def _connect_to_new_relay(self, rank: int, peer: PeerInfo, deadline: float) -> Connection:
        sock = self._connection.connect(
            in_zone_of(self._address, peer.address), peer.port, rank, _REPLY_S, deadline
        )
        try:
            # The failures go along: the last relay may have ended before it had sent them to all
            # members.
            self._connection.introduce(sock, self._hello(), self._failures.messages)
            # The relay sends what this process lacks, and then its state. All of it is handled
            # before another thread can learn that there is a new relay.
            while (message := read_frame(sock))["t"] != "state":
                self._handle(message)
            if message["store"] is not None:
                address, port = message["store"]
                self._standby.use_store((str(address), int(port)), self._store_timeout)
        # The caller tries again, and the relay refuses a rank that is still connected.
        except BaseException:
            self._connection.disconnect(sock)
            raise
        with self._changed.lock:
            self._relay_rank = rank
            self._changed.notify_all()
        return sock

    def _handle(self, message: Message) -> None:
        kind = message["t"]
        if kind == "ready":
            with self._changed.lock:
                self.peers = [PeerInfo(*printable_values(peer)) for peer in message["peers"]]
                self.job_id = message["job"]
                self._ready = True
                self._changed.notify_all()
            self.send(self.clock.ping())
        elif kind == "pong":
            self.clock.receive(message)
        elif kind == "gone":
            for rank, reason, manner in message["ranks"]:
                self._departures.record(rank, reason, manner)
        elif kind == "fail":
            self._failures.receive(message, self.rank in message["members"])
        elif kind == "ask":
            self._reports.answer(message)
        elif kind == "tell":
            self._reports.receive(message)
        elif kind == "joined":
            with self._changed.lock:
                self._joined = message["ranks"]
                self._changed.notify_all()
        elif (handler := self._handlers.get(kind)) is not None:
            handler(message)


def _await_replacement(replaced: Callable[[], bool] | None, deadline: float) -> bool:
    """True once another rendezvous has begun in the store; False at the deadline, or if the store
    ends."""
    # This runs on the thread that calls init_process_group, before the control thread exists, so
    # the pauses delay nobody else.
    with suppress(DistError):
        while replaced is not None and time.monotonic() < deadline:
            if replaced():
                return True
            time.sleep(_STALE_CHECK_S)
    return False


def _host_id(key: bytes) -> str:
    found = host_id(key)
    # A random identifier equals no other: an unknown host is never taken for another one, and with
    # UNICOLL_TRANSPORT=tcp the ranks of one host count as ranks of different hosts.
    alone = found == UNKNOWN_HOST or environment.choice("UNICOLL_TRANSPORT") == "tcp"
    return (os.urandom(len(found)) if alone else found).hex()
