"""The launchers of a job on several nodes: which ranks each of them starts, and what they tell each
other.

The launcher on the endpoint's host, or that of node 0, serves a store at the endpoint; the others
connect to it. When all have arrived they form a round: each gets a node rank, and they are
connected by a control plane of their own (:mod:`unicoll.net.control`), which shows at once that a
launcher has ended. A round lasts for any number of attempts. If a launcher dies, the others form
another round, in which it takes part if it is started again.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from unicoll.errors import (
    AuthenticationError,
    DistArgumentError,
    DistError,
    DistNetworkError,
    OperationTimeoutError,
    QueueEmptyError,
    RankLostError,
    StoreTimeoutError,
)
from unicoll.net.control.client import ControlClient, ControlSettings
from unicoll.net.control.join_warnings import warn_while_waiting
from unicoll.net.objects.received_json import check, foreign_value, from_store, parse
from unicoll.net.stores import PrefixStore, Store, TCPStore
from unicoll.net.stores.signed import SignedStore
from unicoll.net.wire import interfaces
from unicoll.net.wire.authenticated_server import describe_refusals
from unicoll.net.wire.handshake import NoAnswerError
from unicoll.net.wire.secret import find_secret
from unicoll.process import logs
from unicoll.process.formatting import printable_line
from unicoll.process.timeouts import seconds_left
from unicoll.run.args import LaunchOptions
from unicoll.run.failure import first_line
from unicoll.run.job import LocalJob, job_environment
from unicoll.run.nodes import Cause, FailureElsewhere, NodeEnd, Nodes, Placement
from unicoll.run.output import Console
from unicoll.run.signals import SignalQueue

log = logs.logger("run")

_HOST_TIMEOUT_S = 15.0
"""Seconds after which a host that does not answer counts as down; as long as for torchrun's
agents."""
_CONNECT_S = 8.0
"""Seconds in which launchers that have all arrived connect to each other; after that they form
another round."""
_POLL_S = 0.2
"""Seconds between checks for other launchers' keys and departures."""
_PAUSE_S = 0.05
"""Seconds between retries."""
_STORE_S = 30.0
"""Seconds for which the store may refuse requests before its launcher counts as lost."""
_SAY_S = 0.8
"""Seconds until the launcher says what it waits for when workers have ended."""
_LEAVE_S = 5.0
"""Seconds that the launcher with the store waits at its end for the others to leave."""
_LAST = 1e18
"""A time after those of all failures, in seconds."""
_CAUSE = (str, int, [str], bool, float)
"""A :class:`Cause` in JSON."""
_FINAL = "end"
"""The operation in the announcement of a launcher that ends, so that the attempt is not
repeated."""


class _Node(NamedTuple):
    """A launcher that has arrived.

    Attributes:
        token: random text of the launcher.
        rank: the node rank of --node-rank, or that of the last round; -1 if neither.
        is_fixed: True if --node-rank gave the rank.
    """

    token: str
    host: str
    pid: int
    nproc: int
    nnodes: int
    run_id: str
    max_restarts: int
    rank: int
    is_fixed: bool

    @classmethod
    def parse(cls, record: Sequence[Any], size: int) -> _Node:
        """The node of a list; ValueError if it is none of a job of ``size`` nodes."""
        check(record, (str, str, int, int, int, str, int, int, bool))
        node = cls(*record)
        if node.nnodes == size and not -1 <= node.rank < size:
            raise ValueError(f"node rank {node.rank}")
        return node._replace(host=printable_line(node.host), run_id=printable_line(node.run_id))

    def describe(self) -> str:
        return f"host {self.host} (launcher pid {self.pid})"


class SeveralNodes(Nodes):
    """The nodes of a job on several ones."""

    def __init__(self, options: LaunchOptions, console: Console, signals: SignalQueue) -> None:
        assert options.master_port is not None
        self._options = options
        self._console = console
        self._signals = signals
        self._secret = find_secret()
        # The address at which the other launchers reach this one.
        self._address = ""
        self._endpoint = interfaces.join_hostport(options.master_addr, options.master_port)
        self._values = f"value of the launchers at {self._endpoint}"
        self._size = options.nnodes
        self._rank = -1 if options.node_rank is None else options.node_rank
        self._token = secrets.token_hex(8)
        self._root: TCPStore | None = None
        # Random text of the launcher that serves the store; another text is that of another store,
        # whose rounds begin again.
        self._server = b""
        self._serves = False
        self._round = 0
        self._nodes: list[_Node] = []
        self._control: ControlClient | None = None
        # The store of the round.
        self._store: Store | None = None
        self._exchanges = 0
        self._attempt = ""
        self._job: LocalJob | None = None
        self._workers_store: TCPStore | None = None
        # True once the attempt has ended on all nodes.
        self._agreed = False
        # True once this node's workers have succeeded, and the others can see that.
        self._has_succeeded = False
        self._next_poll = 0.0
        # Time since when the store has refused requests; None if it answers.
        self._store_failed: float | None = None
        self._waits_for = ""
        # Errors that were shown in this start of an attempt; each is shown once, however often it
        # is repeated.
        self._shown: set[str] = set()

    # --- attempts ---------------------------------------------------------------------------------

    def start(self, attempt: int, first_cause: Cause | None) -> Placement:
        deadline = time.monotonic() + self._options.join_timeout
        self._shown.clear()
        describe = warn_while_waiting("launch", lambda: self._waits_for, self._console.log)
        with self._signals.exit_on_signal(), describe:
            while True:
                try:
                    if self._has_ended():
                        # A launcher that has ended in order does not come back. A DistError is not
                        # tried again below.
                        raise DistError(self._lost())
                    if self._control is None or self._lost():
                        self._form_round(deadline)
                    return self._place(attempt, first_cause, deadline)
                # Any launcher may die in the middle of this, also while a round is formed
                # (RankLostError is a DistNetworkError). The next round waits for another one in its
                # place.
                except (DistNetworkError, OperationTimeoutError, StoreTimeoutError) as error:
                    if _is_refusal(error) or time.monotonic() >= deadline:
                        raise
                    if str(error) not in self._shown:
                        self._shown.add(str(error))
                        self._console.log(str(error))
                    self._leave_round()
                    time.sleep(_PAUSE_S)

    def _place(self, attempt: int, first_cause: Cause | None, deadline: float) -> Placement:
        self._waits_for = "the other nodes to begin the attempt"
        self._agreed, self._has_succeeded, self._store_failed = False, False, None
        nprocs = [node.nproc for node in self._nodes]
        host, ports = self._options.master_addr, [0, 0]
        if self._rank == 0:
            interfaces.require_descriptors(sum(nprocs), f"the store of {sum(nprocs)} workers")
            try:
                self._job = job = LocalJob(os.environ, None, host, self._secret)
            except DistNetworkError as error:
                raise DistError(str(error)) from error
            ports = [job.store.port, job.master_port]
        own = {
            "attempt": attempt,
            "first": [] if first_cause is None else [first_cause],
            "ports": ports,
        }
        starts = self._exchange(
            own, deadline, {"attempt": int, "first": [_CAUSE], "ports": (int, int)}
        )
        # A launcher that was started later than the others begins with a smaller number, and does
        # not know the first failure.
        attempt = max(start["attempt"] for start in starts)
        causes = [_of_another_node(_received(each)) for start in starts for each in start["first"]]
        port, master_port = starts[0]["ports"]
        # Nothing else of another node is put in the workers' environment: without a secret the
        # values may be anyone's.
        environment = job_environment(interfaces.join_hostport(host, port), master_port)
        self._attempt = f"attempt {attempt}"
        store: Store
        if self._job is not None:
            store = self._job.store
        else:
            try:
                store = self._workers_store = TCPStore(
                    host, port, secret=self._secret, timeout=_CONNECT_S
                )
            except (DistNetworkError, StoreTimeoutError) as error:
                # With node 0 its stores are lost, and start() forms another round. Any other reason
                # ends the launch.
                if self._lost():
                    raise
                raise DistError(f"the workers' store: {error}") from error
        first_rank = sum(nprocs[: self._rank])
        # All launchers that know a first failure have agreed on it, so any of them is the right
        # one.
        first_cause = next(iter(causes), None)
        return Placement(
            attempt, self._rank, first_rank, sum(nprocs), environment, store, first_cause
        )

    def announce(self, what: str, final: bool = False) -> None:
        if self._control is not None and not self._agreed:
            op = _FINAL if final else None
            error = DistError(
                f"{self._describe(self._rank)}: {first_line(what)}", rank=self._rank, op=op
            )
            with self.telling():
                self._control.announce_failure(self._attempt, range(self._size), error)

    def telling(self) -> AbstractContextManager[None]:
        return self._saying(f"{self._describe(0)} to answer")

    def _saying(self, what: str) -> AbstractContextManager[None]:
        """A block in which the launcher soon says what it waits for."""
        return warn_while_waiting("launch", lambda: what, self._console.log, also_after=_SAY_S)

    def failure(self) -> FailureElsewhere | None:
        announced = self._announced()
        if announced is not None:
            # This launcher has announced the failure of its own worker, and handles it.
            if announced.rank == self._rank:
                return None
            return FailureElsewhere(printable_line(announced), announced.op == _FINAL)
        if self._store_failed is not None and time.monotonic() > self._store_failed + _STORE_S:
            return FailureElsewhere(f"the store of {self._describe(0)} does not answer", True)
        return FailureElsewhere(lost, True) if (lost := self._lost()) else None

    def succeeded(self) -> bool:
        if self._has_succeeded and time.monotonic() < self._next_poll:
            return False
        self._next_poll = time.monotonic() + _POLL_S
        return not self._lost() and self._all_succeeded()

    def _all_succeeded(self) -> bool:
        """Store that this node's workers have succeeded, and look for the other nodes."""
        assert self._store is not None
        try:
            if not self._has_succeeded:
                self._store.set(f"{self._attempt} succeeded/{self._rank}", b"1")
                self._has_succeeded = True
            found = self._store.check(
                [f"{self._attempt} succeeded/{rank}" for rank in range(self._size)]
            )
            self._store_failed = None
        except DistError:
            self._store_failed = self._store_failed or time.monotonic()
            return False
        return found

    def agree(self, end: NodeEnd) -> NodeEnd:
        others = [self._describe(rank) for rank in range(self._size) if rank != self._rank]
        text = others[0] if len(others) == 1 else f"the other {len(others)} nodes"
        with self._signals.exit_on_signal(), self._saying(f"{text} to end the attempt"):
            return self._agree(end)

    def _agree(self, end: NodeEnd) -> NodeEnd:
        options = self._options
        # The workers of another node may take the grace period and the shutdown timeout to end.
        deadline = time.monotonic() + options.grace + options.shutdown_timeout + 2 * _CONNECT_S
        ends, lost = [], ""
        own = [] if end.cause is None else [self._on_clock_of_node_0(end.cause)]
        try:
            mine, kind = (
                {"causes": own, "may_restart": end.may_restart},
                {"causes": [_CAUSE], "may_restart": bool},
            )
            ends = self._exchange(mine, deadline, kind)
        except DistError as error:
            lost = self._lost() or str(error)
        # Also without the answers of all nodes: from here on nothing is announced for this attempt.
        self._agreed = True
        # Only after the exchange: workers of other nodes use node 0's store until they have ended.
        self._close_job()
        # Once the workers of all nodes have succeeded, the loss of a launcher is no failure.
        if self._has_succeeded and self._all_succeeded():
            return NodeEnd(None, False)
        announced = self._announced()
        if announced is not None and announced.op == _FINAL:
            return NodeEnd(_plain_cause(printable_line(announced)), False)
        causes = [(self._rank, cause) for cause in own]
        for rank, each in enumerate(ends):
            if rank != self._rank:
                causes += [(rank, _of_another_node(_received(cause))) for cause in each["causes"]]
        if announced is not None and not causes:
            lost = printable_line(announced)
        if lost := lost or ("" if causes else self._lost()):
            causes.append((-1, _plain_cause(lost)))
        if not causes:
            return NodeEnd(None, False)
        first = announced.rank if announced is not None else None
        # Nodes that have all records find the same cause: first those that are no consequence, then
        # that of the node whose announcement came first, then by time.
        _, cause = min(
            causes, key=lambda each: (each[1].consequence, each[0] != first, each[1].time)
        )
        may_restart = end.may_restart and not self._has_ended()
        return NodeEnd(cause, may_restart and all(each["may_restart"] for each in ends))

    def _on_clock_of_node_0(self, cause: Cause) -> Cause:
        """The cause with its time on the clock of node 0, so that all nodes find the same one to be
        the first."""
        offset = self._control.measure_clock() if self._control is not None else None
        return cause._replace(time=_LAST if offset is None else cause.time + offset.seconds)

    def close(self) -> None:
        self._close_job()
        control, self._control = self._control, None
        if control is not None:
            # The others may still read from the store, which ends with this process.
            deadline = time.monotonic() + _LEAVE_S
            while self._serves and self._agreed and len(control.departed) < self._size - 1:
                if time.monotonic() >= deadline:
                    break
                time.sleep(_PAUSE_S)
            control.close()
        self._close_root()

    def _close_job(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()
        store, self._workers_store = self._workers_store, None
        if store is not None:
            store.close()

    # --- between the launchers --------------------------------------------------------------------

    def _describe(self, rank: int) -> str:
        node = self._nodes[rank]
        return f"node {rank} (host {node.host}, launcher pid {node.pid})"

    def _announced(self) -> DistError | None:
        """The first failure of the attempt that a launcher has announced."""
        return self._control.group_failure(self._attempt) if self._control is not None else None

    def _lost(self) -> str:
        """A launcher that has died or ended, in words; "" if none has."""
        if (control := self._control) is None:
            return ""
        ranks = [rank for rank in [*control.departed] if rank != self._rank]
        for rank in ranks:
            if rank in control.died:
                return f"{self._describe(rank)} has died, or its host is down"
        if not ranks:
            return ""
        how = "has ended" if ranks[0] in control.left else "has left to form a new round"
        return f"{self._describe(ranks[0])} {how}"

    def _has_ended(self) -> bool:
        """True if a launcher has ended by itself, and none has died: none is expected in its
        place."""
        control = self._control
        return control is not None and not control.died and bool(control.left - {self._rank})

    def _exchange(
        self, record: Mapping[str, Any], deadline: float, kind: Any
    ) -> list[dict[str, Any]]:
        """The records of all nodes, which are of a kind as for
        :func:`unicoll.net.objects.received_json.parse`.

        RankLostError or OperationTimeoutError names a node that does not send its own.
        """
        assert self._store is not None
        if self._control is not None and self._rank and 0 in self._control.died:
            # The store of a launcher that has died would not answer for seconds.
            raise RankLostError(self._lost())
        # The launchers of a round make the same exchanges in one order, so a number names each.
        self._exchanges += 1
        keys = [f"exchange/{self._exchanges}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(record))
        while True:
            # Read before the keys: a launcher that ends in order has stored its record and has seen
            # all others, so it is lost only if a key is missing afterwards.
            lost = self._lost()
            if _have(self._store, keys):
                break
            if lost:
                raise RankLostError(lost)
            if time.monotonic() >= deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if missing:
                    raise OperationTimeoutError(
                        f"no answer from {', '.join(map(self._describe, missing))}"
                    )
        return [from_store(self._values, each, kind) for each in self._store.multi_get(keys)]

    # --- rounds -----------------------------------------------------------------------------------

    def _form_round(self, deadline: float) -> None:
        """Wait until the launchers of all nodes have arrived, and connect to them."""
        if lost := self._lost():
            self._leave_round()
            seconds = seconds_left(deadline)
            self._console.log(f"{lost}; waiting up to {seconds:.0f} s for a replacement launcher")
        root = self._root or self._open_root(deadline)
        options = self._options
        job = options.nproc, options.nnodes, options.run_id, options.max_restarts
        token, place = self._token, (self._rank, options.node_rank is not None)
        own = _Node(token, socket.gethostname(), os.getpid(), *job, *place)
        number = self._round + 1 if self._serves else self._await_round(root, deadline)
        store = PrefixStore(f"round/{number}", root)
        if self._serves:
            self._round = number
            root.set("round", str(number))
            self._assign(store, own, deadline)
        else:
            store.queue_push("arrivals", json.dumps(own))
            # Only once the arrival is stored: after an error this launcher tries the same round
            # again.
            self._round = number
        while not _have(store, [f"rank/{token}"]):
            if (reason := store.try_get(f"refused/{token}")) is not None:
                raise DistArgumentError(printable_line(reason.decode(errors="replace"), 2000))
            if self._number_of_round(root) != self._round:
                raise RankLostError(
                    f"another round was formed at {self._endpoint} without this launcher"
                )
            self._wait(f"the other launchers at {self._endpoint}", deadline)
        try:
            found = parse(store.get("nodes"), {"nodes": [list], "key": str})
            rank = int(store.get(f"rank/{token}"))
            nodes = [_Node.parse(node, self._size) for node in found["nodes"]]
            if len(nodes) != self._size or not 0 <= rank < self._size:
                raise ValueError(f"rank {rank} of {len(nodes)} nodes")
            self._rank, self._nodes, round_key = rank, nodes, bytes.fromhex(found["key"])
        except ValueError as error:
            raise foreign_value(self._values, error) from error
        self._connect(PrefixStore("launchers", store), round_key, deadline)

    def _connect(self, store: PrefixStore, round_key: bytes, deadline: float) -> None:
        """Connect to the launchers of the round. ``round_key`` is its key if the job has no
        secret."""
        text = f"launchers of round {self._round} of {self._server.decode()}"
        # A launcher that is still in an earlier round, or in one of another store, has another key.
        key = hmac.digest(self._secret.key or round_key, text.encode(), "sha256")
        self._store = SignedStore(store, key)
        self._exchanges = 0
        settings = ControlSettings(name="launch", host_timeout=_HOST_TIMEOUT_S)
        control = ControlClient(self._rank, self._size, key, self._address, settings)
        self._control = control
        try:
            control.start(self._store, min(_CONNECT_S, seconds_left(deadline, 0.1)), self._endpoint)
        except OperationTimeoutError as error:
            missing = ", ".join(map(self._describe, error.missing or [0]))
            raise OperationTimeoutError(
                f"not connected to the other launchers: {missing}"
            ) from error
        except RankLostError as error:
            raise RankLostError(self._lost() or str(error)) from error
        except DistNetworkError as error:
            if _is_refusal(error):
                raise
            raise DistNetworkError(f"{self._describe(0)}: {error}") from error

    def _assign(self, store: Store, own: _Node, deadline: float) -> None:
        """Store the launchers of the round in the order of their node ranks, once all have
        arrived."""
        # This launcher is node 0, because it serves the workers' store, too.
        nodes = [own._replace(rank=0, is_fixed=True)]
        while len(nodes) < self._size:
            try:
                node = _Node.parse(
                    parse(store.queue_pop("arrivals", block=False), list), self._size
                )
            except ValueError:
                self._console.log(
                    f"ignored a message at {self._endpoint} that is not from a launcher of this"
                    " version"
                )
                continue
            except QueueEmptyError:
                missing = (
                    f"{self._size - len(nodes)} of {self._size} nodes to connect to"
                    f" {self._endpoint}"
                )
                self._wait(
                    f"{missing}; connected: {', '.join(node.describe() for node in nodes)}",
                    deadline,
                )
                time.sleep(_PAUSE_S)
                continue
            if node.token in [one.token for one in nodes]:
                # The launcher has pushed it again, because the first push may have been lost.
                continue
            if reason := self._refusal(nodes[0], node):
                store.set(f"refused/{node.token}", reason)
                self._console.log(f"{node.describe()} is refused: {reason}")
                continue
            for one in nodes[1:]:
                # The earlier launcher with this node rank may have died, so the later one takes its
                # place.
                if node.is_fixed and one.is_fixed and one.rank == node.rank:
                    nodes.remove(one)
                    store.set(
                        f"refused/{one.token}",
                        f"{node.describe()} has --node-rank {node.rank}, too",
                    )
            nodes.append(node)
        # Node ranks that were given come first; a node keeps that of the last round if it is still
        # free.
        chosen: dict[int, _Node] = {}
        for node in sorted(nodes, key=lambda node: not node.is_fixed):
            if node.rank >= 0:
                chosen.setdefault(node.rank, node)
        others = iter([node for node in nodes if node not in chosen.values()])
        order = [chosen[rank] if rank in chosen else next(others) for rank in range(self._size)]
        # Without a secret this key is no secret either, but it separates the rounds.
        round_key = "" if self._secret.key else secrets.token_hex(32)
        # Before the ranks: a launcher that has found its rank reads this list.
        store.set("nodes", json.dumps({"nodes": order, "key": round_key}))
        store.multi_set(
            [f"rank/{node.token}" for node in order], [str(rank) for rank in range(self._size)]
        )

    def _refusal(self, own: _Node, other: _Node) -> str:
        """Why another launcher cannot take part; "" if it can."""
        for flag, mine, given in (
            ("--nnodes", own.nnodes, other.nnodes),
            ("--rdzv-id", own.run_id, other.run_id),
            ("--max-restarts", own.max_restarts, other.max_restarts),
        ):
            if given != mine:
                return f"{flag} is {mine} on {own.describe()} and {given} on {other.describe()}"
        if other.is_fixed and other.rank == 0:
            return f"node 0 is {own.describe()}, which serves {self._endpoint}"
        return ""

    def _wait(self, what: str, deadline: float) -> None:
        """Note what this launcher waits for; OperationTimeoutError after the deadline."""
        self._waits_for = what
        if time.monotonic() >= deadline:
            limit = self._options.join_timeout
            raise OperationTimeoutError(f"waited {limit:g} s for {what}{describe_refusals()}")

    def _await_round(self, root: TCPStore, deadline: float) -> int:
        """The next round of the launcher with the store."""
        while True:
            if (number := self._number_of_round(root)) > self._round:
                return number
            self._wait(
                f"a free node rank at {self._endpoint}: all {self._size} nodes are connected",
                deadline,
            )
            time.sleep(_PAUSE_S)

    def _number_of_round(self, root: TCPStore) -> int:
        """The number of the round that is or was formed last; 0 if there is none."""
        try:
            return int(root.try_get("round") or 0)
        except ValueError as error:
            raise foreign_value(self._values, error) from error

    def _leave_round(self) -> None:
        self._close_job()
        control, self._control = self._control, None
        # Node 0 may have ended, and its store with it. The next round begins with a new connection
        # to the launcher that serves the store then.
        store_is_lost = not self._serves and (control is None or 0 in control.departed)
        self._store = None
        if control is not None:
            # The error has the others count this launcher as failed. Without it they would take it
            # for one that has ended, and would not wait for it (_has_ended).
            control.close(DistError("it left to form a new round"))
        if store_is_lost:
            self._close_root()

    # --- the store at the endpoint ----------------------------------------------------------------

    def _open_root(self, deadline: float) -> TCPStore:
        """Serve the store at the endpoint, or connect to it; DistError if this host has no address
        for the others."""
        host, asked = self._options.master_addr, self._options.node_rank

        def say(text: str) -> None:
            self._waits_for = f"node 0: {host} has no address yet"
            self._console.log(text)

        try:
            choose = partial(interfaces.listen_addresses, host)
            self._address = interfaces.once_resolved(host, choose, deadline, say).addresses[0]
        except DistNetworkError as error:
            raise DistError(str(error)) from None
        self._waits_for = ""
        while True:
            if asked == 0 or (asked is None and interfaces.is_local_address(host)):
                try:
                    return self._serve_root()
                except DistNetworkError as error:
                    if asked == 0:
                        raise DistError(str(error)) from None
                    # The port is in use, perhaps by another launcher of this host, which serves the
                    # store then.
            try:
                return self._connect_to_root(min(seconds_left(deadline, 0.001), 1.0))
            except (DistNetworkError, StoreTimeoutError) as error:
                if _is_refusal(error):
                    raise
                what = (
                    f"node 0 to listen on {self._endpoint}: the launcher on that host, or the one"
                    " with --node-rank 0"
                )
                self._wait(f"{what} ({error})", deadline)
            time.sleep(_PAUSE_S)

    def _serve_root(self) -> TCPStore:
        host, port = self._options.master_addr, self._options.master_port
        assert port is not None
        self._root = root = TCPStore(
            host, port, is_master=True, wait_for_workers=False, secret=self._secret
        )
        self._serves = True
        self._server, self._round = secrets.token_hex(8).encode(), 0
        root.set("server", self._server)
        return root

    def _connect_to_root(self, seconds: float) -> TCPStore:
        host, port = self._options.master_addr, self._options.master_port
        assert port is not None
        self._serves = False
        root = TCPStore(host, port, timeout=seconds, wait_for_workers=False, secret=self._secret)
        try:
            if (server := root.get("server")) != self._server:
                # Another launcher serves the store now, and its rounds begin with number 1.
                self._server, self._round = server, 0
            root.set_timeout(timedelta(seconds=_CONNECT_S))
        except BaseException:
            root.close()
            raise
        self._root = root
        return root

    def _close_root(self) -> None:
        root, self._root = self._root, None
        if root is not None:
            root.close()


def _plain_cause(text: str) -> Cause:
    """The cause that is no worker's failure."""
    return Cause(text, 1, [f"  {text}"], False, _LAST)


def _received(packed: Sequence[Any]) -> Cause:
    """The cause that another launcher has sent."""
    summary, exit_code, entry, consequence, when = packed
    return Cause(
        printable_line(summary), exit_code, [*map(printable_line, entry)], consequence, when
    )


def _of_another_node(cause: Cause) -> Cause:
    """The cause for the report of another node, which does not show its traceback."""
    return cause._replace(entry=[line.removesuffix(" (above)") for line in cause.entry])


def _is_refusal(error: Exception) -> bool:
    """True if trying again does not help: the other side has another secret."""
    return isinstance(error, AuthenticationError) and not isinstance(error, NoAnswerError)


def _have(store: Store, keys: Sequence[str]) -> bool:
    """True if all keys have a value within a moment."""
    with suppress(StoreTimeoutError):
        store.wait([*keys], timedelta(seconds=_POLL_S))
        return True
    return False
