"""The relay of the control plane: one thread in rank 0 that every process is connected to."""

from __future__ import annotations

from typing import Any

from ..channel import TamperedError
from ..frames import MAX_FRAME, Client, FrameServer, frame

__all__ = ["Relay"]

_AT_ONCE = 40
_LONGEST = 2000
"""Departures in one message, and characters of each: as many fit a frame, however JSON writes them."""


class _Member:
    """What the relay knows of one process."""

    def __init__(self, rank: int, host: str, pid: int) -> None:
        self.rank = rank
        self.host = host
        self.pid = pid
        self.goodbye: dict[str, str] | None = None

    def departure(self, error: Exception | None) -> tuple[int, str, str]:
        """Its rank, how it ended in words, and in one word: "left", "failed" or "died" (without a goodbye)."""
        name = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        if isinstance(error, TamperedError):
            return self.rank, f"{name} is cut off: {error.strerror}", "died"
        if self.goodbye is None:
            return self.rank, f"{name} died: its process ended without leaving the job", "died"
        if self.goodbye["error"]:
            return self.rank, f"{name} ended with {self.goodbye['error']}", "failed"
        how = f": {self.goodbye['how']}" if self.goodbye["how"] else ""
        return self.rank, f"{name} has left the job{how}", "left"


class Relay(FrameServer):
    """Passes messages between the processes, and tells everyone when one of them goes.

    Args:
        size: number of ranks in the world.
        key: the job's secret key.
        host: address to listen on.
    """

    linger = 0.2

    def __init__(self, size: int, key: bytes, host: str) -> None:
        super().__init__([host], key, b"control", "unicoll-relay", 0)
        self._size = size
        self._online: dict[int, Client] = {}
        self._members: dict[int, _Member] = {}
        self._failed: set[str] = set()
        self._gone: list[tuple[int, str, str]] = []  # departures that the others have not been told of yet
        self.start()

    def handle(self, client: Client, message: dict[str, Any]) -> None:
        kind = message["t"]
        if client.state is None and kind != "hello":
            raise ValueError(f"{kind!r} before 'hello'")
        if kind == "hello":
            self._greet(client, _Member(int(message["rank"]), str(message["host"])[:64], int(message["pid"])))
        elif kind == "joined":
            self.send(client, {"t": "joined", "ranks": sorted(self._online)})
        elif kind == "bye":
            client.state.goodbye = {name: str(message[name] or "")[:_LONGEST] for name in ("error", "how")}
        elif kind == "fail":
            if (
                message["group"] not in self._failed
            ):  # the first failure of a group is the one all ranks raise
                self._failed.add(message["group"])
                self._pass_on(message["members"], message)
        elif kind in ("ask", "tell"):
            self._pass_on(message["to"], message)

    def _greet(self, client: Client, member: _Member) -> None:
        if not 0 <= member.rank < self._size or member.rank != client.rank:
            raise ValueError(f"rank {member.rank} of {self._size} from rank {client.rank}")
        client.state = member
        self._online[member.rank] = client
        self._members[member.rank] = member
        if len(self._members) == self._size:
            peers = [(self._members[r].host, self._members[r].pid) for r in range(self._size)]
            self._pass_on(range(self._size), {"t": "ready", "peers": peers})

    def _pass_on(self, ranks: Any, message: dict[str, Any]) -> None:
        self._tell_who_is_gone()  # nothing overtakes the news
        self._send_all(ranks, message)

    def _send_all(self, ranks: Any, message: dict[str, Any]) -> None:
        data = frame(message)  # encoded once: the list of all processes is long, and goes to all of them
        if len(data) > MAX_FRAME:
            raise ValueError(f"a message of {len(data)} bytes to others, who would refuse it")
        for rank in ranks:
            client = self._online.get(rank)
            if client is not None:
                self._send(client, data)

    def lost(self, client: Client) -> None:
        member = client.state
        if member is None or self._online.get(member.rank) is not client:
            return
        del self._online[member.rank]
        self._gone.append(member.departure(client.error))

    def patience(self) -> float | None:
        """Before the thread sleeps: those who went while it was busy are told of together."""
        self._tell_who_is_gone()
        return super().patience()

    def _tell_who_is_gone(self) -> None:
        while self._gone:  # telling may find more of them
            some, self._gone = self._gone[:_AT_ONCE], self._gone[_AT_ONCE:]
            self._send_all(list(self._online), {"t": "gone", "ranks": some})
