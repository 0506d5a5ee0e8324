"""The control plane: who is alive, which group failed and why, and what a silent rank is doing.

Every process holds one authenticated connection to a relay in rank 0. The connection is the sign of life: when a
process dies the kernel closes it, and the relay tells everyone. Failures of a group are announced through the
relay, which keeps the first one for each group, so that all ranks raise the same error. Nothing here is on the path
of an operation that goes well.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import channel, errors
from ..channel import Connection
from ..errors import (
    AuthenticationError,
    DistError,
    DistNetworkError,
    OperationTimeoutError,
    RankLostError,
)
from ..forks import guard
from ..frames import frame, published, read_frame
from .relay import Relay

if TYPE_CHECKING:
    from ..stores import Store

__all__ = ["Control", "Peer"]

Message = dict[str, Any]
Report = dict[str, Any]

log = logging.getLogger("unicoll")

_ANSWER_S = 1.0
"""How long a report of another rank, or the relay's word on a failure, is waited for."""


class Peer(NamedTuple):
    """A process of the job."""

    host: str
    pid: int


class Control:
    """This process's end of the control plane; :meth:`start` joins, :meth:`close` leaves.

    Args:
        rank, size: of this process in the world.
        key: the job's secret key.
        address: this host's address, for the relay in rank 0 to listen on.
    """

    def __init__(self, rank: int, size: int, key: bytes, address: str) -> None:
        self.rank = rank
        self.size = size
        self.peers: list[Peer] = []
        self.departed: dict[int, str] = {}
        self.left: set[int] = set()  # those of the departed who left the job, without an exception
        self.died: set[int] = set()  # those of the departed who did not say goodbye
        self._key = key
        self._address = address
        self._relay: Relay | None = None
        self._sock: Connection | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._verdicts: dict[str, DistError] = {}
        self._watchers: dict[str, Callable[[DistError], None]] = {}
        self._reports: dict[str, Callable[[], Report]] = {}
        self._asked: dict[int, dict[int, Report]] = {}
        self._questions = 0
        self._ready = False
        self._closing = False
        self._joined: list[int] = []

    # --- joining and leaving ---------------------------------------------------------------------------------

    def start(self, store: Store, timeout: float) -> None:
        """Join the others: returns when every rank of the world has come.

        Raises:
            OperationTimeoutError: naming the ranks that have not come in ``timeout`` seconds.
            RankLostError: a rank died meanwhile.
        """
        deadline = time.monotonic() + timeout
        if self.rank == 0:
            self._relay = Relay(self.size, self._key, self._address)
            store.set("control", json.dumps(self._relay.addresses[0]))
        host, port = json.loads(store.get("control"))
        bare = guard(self._dial(host, port, deadline))
        self._sock = bare
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._sock = sock = channel.authenticate(
                bare, self._key, b"control", deadline, rank=self.rank, server=0, address=published(host, port)
            )[0]
        except AuthenticationError:
            raise
        except DistNetworkError as e:
            why = f"rank 0 ended while rank {self.rank} joined the job: {e}"
            raise RankLostError(f"init_process_group: {why}", rank=0, op="init_process_group") from e
        sock.settimeout(None)
        self._thread = threading.Thread(
            target=self._listen, args=(sock,), name="unicoll-control", daemon=True
        )
        self._thread.start()
        self._send({"t": "hello", "rank": self.rank, "host": socket.gethostname(), "pid": os.getpid()})
        self._await_everybody(deadline, timeout)

    def _dial(self, host: str, port: int, deadline: float) -> socket.socket:
        try:
            return socket.create_connection((host, port), max(0.1, deadline - time.monotonic()))
        except OSError as e:
            raise DistNetworkError(f"rank 0's control port {host}:{port} cannot be reached: {e}") from e

    def _await_everybody(self, deadline: float, timeout: float) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self._ready or self.departed, deadline - time.monotonic())
        if self._ready:
            return
        if self.departed:
            rank, why = next(iter(self.departed.items()))
            raise RankLostError(f"init_process_group: {why}", rank=rank, op="init_process_group")
        assert not done
        self._send({"t": "joined"})
        with self._changed:
            self._changed.wait_for(lambda: bool(self._joined), _ANSWER_S)
        missing = sorted(set(range(self.size)) - set(self._joined))
        raise OperationTimeoutError(
            f"init_process_group: after {timeout:g} s {len(self._joined)} of {self.size} ranks have joined;"
            f" missing: {_ranks(missing)}",
            op="init_process_group",
        )

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; idempotent. With ``error`` the others are told that this process ended with it.

        SystemExit is not a failure: it says that the program ended, and its code where that is known.
        """
        if self._closing:
            return
        self._closing = True
        why = how = ""
        if isinstance(error, SystemExit):
            how = f"sys.exit({error.code!r})" if error.code else "its program ended"
        elif error is not None:
            why = f"{type(error).__name__}: {error}"
        self._send({"t": "bye", "error": why[:2000], "how": how[:2000]})
        sock = self._sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_WR)  # the relay closes its end once it has read everything
            except OSError:
                pass
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ANSWER_S)
        if self._relay is not None:
            self._relay.close()
        if sock is not None:
            sock.close()

    # --- who is there --------------------------------------------------------------------------------------------

    def who(self, rank: int) -> str:
        """A process in words: ``rank 2 (host node7, pid 4711)``."""
        if rank < len(self.peers):
            peer = self.peers[rank]
            return f"rank {rank} (host {peer.host}, pid {peer.pid})"
        return f"rank {rank}"

    def await_departure(self, rank: int, timeout: float = 0.5) -> str | None:
        """Why ``rank`` is gone, waiting a moment for the news; None if it seems to be there."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self.departed, timeout)
            return self.departed.get(rank)

    def culprit(self, peer: int, members: Iterable[int], timeout: float) -> int | None:
        """Who is behind the end of a connection to ``peer``, waiting a moment for the news.

        The peer itself if it is gone; else a member of the group that died, which made the peer give up.
        """
        with self._changed:
            self._changed.wait_for(lambda: peer in self.departed or self._lost(members), timeout)
            if peer in self.departed:
                return peer
            return next(iter(self._lost(members)), None)

    def _lost(self, members: Iterable[int]) -> list[int]:
        return [rank for rank in members if rank in self.departed and rank not in self.left]

    # --- failures of groups -----------------------------------------------------------------------------------

    def watch(
        self, group: str, on_failure: Callable[[DistError], None], report: Callable[[], Report]
    ) -> None:
        """Tell ``on_failure`` (on the control thread) when ``group`` fails; answer questions with ``report()``."""
        with self._changed:
            self._watchers[group] = on_failure
            self._reports[group] = report
            verdict = self._verdicts.get(group)
        if verdict is not None:
            on_failure(verdict)

    def unwatch(self, group: str) -> None:
        """The group is closed here."""
        with self._changed:
            self._watchers.pop(group, None)
            self._reports.pop(group, None)

    def verdict(self, group: str, timeout: float = 0.0) -> DistError | None:
        """The error that ``group`` failed with, waiting ``timeout`` seconds for the news."""
        with self._changed:
            # without rank 0 there is no relay, and no news to wait for
            self._changed.wait_for(lambda: group in self._verdicts or 0 in self.departed, timeout)
            return self._verdicts.get(group)

    def fail(self, group: str, members: Iterable[int], error: DistError) -> DistError:
        """Announce that ``group`` failed; returns the error that all its members are to raise.

        That is the first one that reached the relay; ``error`` itself where the relay cannot be reached.
        """
        self._send({"t": "fail", "group": group, "members": list(members), "error": _pack(error)})
        return self.verdict(group, _ANSWER_S) or error

    def ask(self, group: str, ranks: Iterable[int]) -> dict[int, Report]:
        """What the given ranks report of ``group``; ranks that do not answer within a second are left out."""
        wanted = set(ranks)
        with self._changed:
            self._questions += 1
            question = self._questions
            answers = self._asked[question] = {}
        self._send({"t": "ask", "group": group, "to": sorted(wanted), "from": self.rank, "id": question})
        with self._changed:
            self._changed.wait_for(
                lambda: wanted <= answers.keys() | self.departed.keys() or 0 in self.departed, _ANSWER_S
            )
            return self._asked.pop(question)

    # --- the connection ----------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        sock = self._sock
        if sock is None:
            return
        try:
            with self._sending:
                sock.sendall(frame(message))
        except OSError:
            pass  # the listening thread sees the same and records that rank 0 is gone

    def _listen(self, sock: Connection) -> None:
        why = "died: its process ended without leaving the job"
        try:
            while True:
                message = read_frame(sock)
                try:
                    self._handle(message)
                except Exception:
                    # Another rank may have sent anything. Without this thread no loss and no failure would be noticed.
                    log.warning("a message of the control plane was ignored: %.200r", message, exc_info=True)
        except channel.TamperedError as error:
            why = f"is cut off: {error.strerror}"
        except (OSError, EOFError, ValueError):
            pass
        if not self._closing:
            self._depart(0, f"{self.who(0)} {why}", "died")

    def _handle(self, message: Message) -> None:
        kind = message["t"]
        if kind == "ready":
            with self._changed:
                self.peers = [Peer(*p) for p in message["peers"]]
                self._ready = True
                self._changed.notify_all()
        elif kind == "gone":
            for rank, why, manner in message["ranks"]:
                self._depart(rank, why, manner)
        elif kind == "fail":
            self._on_failure(message["group"], _unpack(message["error"]))
        elif kind == "ask":
            report = self._reports.get(message["group"])
            answer = report() if report is not None else {"unknown": True}
            self._send(
                {
                    "t": "tell",
                    "to": [message["from"]],
                    "from": self.rank,
                    "id": message["id"],
                    "report": answer,
                }
            )
        elif kind == "tell":
            with self._changed:
                if message["id"] in self._asked:
                    self._asked[message["id"]][message["from"]] = message["report"]
                    self._changed.notify_all()
        elif kind == "joined":
            with self._changed:
                self._joined = message["ranks"]
                self._changed.notify_all()

    def _depart(self, rank: int, why: str, manner: str) -> None:
        with self._changed:
            if rank not in self.departed:
                self.departed[rank] = why
                {"left": self.left, "died": self.died}.get(manner, set()).add(rank)
            self._changed.notify_all()

    def _on_failure(self, group: str, error: DistError) -> None:
        with self._changed:
            if group in self._verdicts:
                return
            self._verdicts[group] = error
            self._changed.notify_all()
            watcher = self._watchers.get(group)
        if watcher is not None:
            watcher(error)


_FIELDS = ("group", "rank", "op", "seq", "host", "pid", "missing")


def _pack(error: DistError) -> Message:
    fields = {name: getattr(error, name) for name in _FIELDS if getattr(error, name, None) is not None}
    return {"type": type(error).__name__, "message": str(error), "fields": fields}


def _unpack(packed: Message) -> DistError:
    kind = getattr(errors, packed["type"]) if packed["type"] in errors.__all__ else DistError
    error: DistError = kind(packed["message"])
    for name, value in packed["fields"].items():
        if name in _FIELDS:
            setattr(error, name, value)
    return error


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"
