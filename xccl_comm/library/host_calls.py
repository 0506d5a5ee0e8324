"""oneCCL with its plug-in for the CPU: calls on host memory, which the thread of a stream makes.

The plug-in does not wait for group calls: what is called between onecclGroupStart and
onecclGroupEnd returns before it is done, and nothing tells its end. So the collectives of a group
call are called one after another here, and its messages to and from each rank by one thread per
rank and direction.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from ctypes import byref, c_int
from functools import partial
from typing import Any, NamedTuple

from unicoll.arrays.types import DType, Reduction
from unicoll.device_collectives.interface import (
    AVG,
    SUCCESS,
    SUM,
    Config,
    HandleSlot,
    NativeReduction,
)
from xccl_comm.host_runtime import HostRuntime
from xccl_comm.library.bindings import DIRECT, SYMBOLS, OneCCL, defaults

_SETTINGS = {
    # Without it the variables of mpiexec would have oneCCL start MPI.
    "CCL_ATL_TRANSPORT": "ofi",
    # Without it threads that wait use a whole core each: an all_reduce of 2 ranks on 2 cores took
    # seconds.
    "CCL_YIELD": "sleep",
}
"""Environment variables of oneCCL, which reads them when the first id or communicator is made."""
_COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
_HAS = frozenset((*_COLLECTIVES, "send", "recv", "unique_id", "comm_init", "comm_split"))
"""The methods whose function the plug-in has, of those that :meth:`HostOneCCL.has` is asked for."""


class _Message(NamedTuple):
    """A send or receive of a group call, of bytes."""

    sends: bool
    peer: int
    ptr: int
    nbytes: int
    call: Callable[[], int]


class _Group(threading.local):
    """The calling thread's group call: its calls by communicator and stream."""

    depth = 0

    def __init__(self) -> None:
        self.calls: dict[tuple[int, int], list[Callable[[], int] | _Message]] = defaultdict(list)


class HostOneCCL(OneCCL):
    """oneCCL on host memory; a stream is one of :attr:`runtime`.

    A call that fails stops its stream, and its code is the communicator's state from then on.
    """

    device_type = "cpu"
    direct = frozenset(DIRECT) - {
        *_COLLECTIVES,
        "send",
        "recv",
        "group_start",
        "group_end",
        "comm_destroy",
    }

    def __init__(self, library: Any, path: str) -> None:
        super().__init__(library, path)
        self.runtime = HostRuntime()
        self._group = _Group()
        self._failures: dict[int, tuple[int, str]] = {}
        self._ranks: dict[int, int] = {}
        for name in _COLLECTIVES:
            setattr(self, name, partial(self._collective, getattr(self._c, name)))

    def has(self, method: str) -> bool:
        return method in _HAS and super().has(method)

    def needed(self, method: str) -> str:
        if method not in SYMBOLS:
            return super().needed(method)
        return f"oneCCL's plug-in for GPUs; this is the one for the CPU ({self!r})"

    def reduction(
        self, dtype: DType, reduction: Reduction, capability: tuple[int, int] | None = None
    ) -> NativeReduction | None:
        found = super().reduction(dtype, reduction, capability)
        if found is None or found.has_factor:
            return None
        # The plug-in has no averages. The backend divides the sum.
        return found._replace(op=SUM) if found.op == AVG else found

    def unique_id(self) -> tuple[int, bytes]:
        with defaults(_SETTINGS):
            return super().unique_id()

    def comm_init(
        self, size: int, unique_ids: Sequence[bytes], rank: int, config: Config, slot: Any = None
    ) -> tuple[int, HandleSlot]:
        with defaults(_SETTINGS):
            return super().comm_init(size, unique_ids, rank, config, slot)

    def comm_state(self, comm: int) -> tuple[int, int]:
        return SUCCESS, self._failures.get(comm, (SUCCESS, ""))[0]

    def last_error(self, comm: int = 0) -> str:
        return self._failures[comm][1] if comm in self._failures else super().last_error(comm)

    def comm_destroy(self, comm: int) -> int:
        self._failures.pop(comm, None)
        self._ranks.pop(comm, None)
        code: int = self._c.comm_destroy(comm)
        return code

    # --- operations ---

    def _collective(self, function: Callable[..., int], *arguments: int) -> int:
        *given, comm, stream = arguments
        return self._add(comm, stream, partial(function, *given, comm, None))

    def send(self, send: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        call = partial(self._c.send, send, count, dtype, peer, comm, None)
        return self._add(comm, stream, _Message(True, peer, send, count, call))

    def recv(self, recv: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        call = partial(self._c.recv, recv, count, dtype, peer, comm, None)
        return self._add(comm, stream, _Message(False, peer, recv, count, call))

    def group_start(self) -> int:
        self._group.depth += 1
        return SUCCESS

    def group_end(self) -> int:
        group = self._group
        # Communicator.grouped also ends a group whose beginning an exception has interrupted before
        # the number was increased.
        group.depth = max(0, group.depth - 1)
        if group.depth == 0:
            # The calls are taken first, so that an exception below leaves none to the next group of
            # this thread.
            calls, group.calls = group.calls, defaultdict(list)
            for (comm, stream), together in calls.items():
                self._enqueue(comm, stream, together)
        return SUCCESS

    def _add(self, comm: int, stream: int, call: Callable[[], int] | _Message) -> int:
        if self._group.depth:
            self._group.calls[comm, stream].append(call)
        else:
            self._enqueue(comm, stream, [call])
        return SUCCESS

    def _enqueue(self, comm: int, stream: int, calls: list[Callable[[], int] | _Message]) -> None:
        self.runtime.stream(stream).put(partial(self._run, comm, calls))

    # --- on the thread of a stream ---

    def _run(self, comm: int, calls: list[Callable[[], int] | _Message]) -> bool:
        """Make the calls of a group; False if one has failed."""
        messages = [call for call in calls if isinstance(call, _Message)]
        for call in calls:
            if not isinstance(call, _Message) and not self._make(comm, call):
                return False
        return not messages or self._exchange(comm, messages)

    def _exchange(self, comm: int, messages: list[_Message]) -> bool:
        own = self._rank(comm)
        to_self = [m for m in messages if m.peer == own]
        received = (m for m in to_self if not m.sends)
        for sent, to in zip((m for m in to_self if m.sends), received, strict=True):
            ctypes.memmove(to.ptr, sent.ptr, min(sent.nbytes, to.nbytes))
        lists: dict[tuple[bool, int], list[_Message]] = defaultdict(list)
        for message in messages:
            if message.peer != own:
                lists[message.sends, message.peer].append(message)
        fine: list[bool] = []

        def make(some: list[_Message]) -> None:
            fine.append(all(self._make(comm, message.call) for message in some))

        # A send or receive of the plug-in returns when its peer has made the matching call, so
        # messages with different peers, and in both directions, must not wait for each other.
        first, *others = lists.values() or [[]]
        threads = [threading.Thread(target=make, args=(some,), daemon=True) for some in others]
        for thread in threads:
            thread.start()
        make(first)
        for thread in threads:
            thread.join()
        return all(fine)

    def _make(self, comm: int, call: Callable[[], int]) -> bool:
        code = call()
        if code:
            # The first failure is kept: later ones may follow from it.
            self._failures.setdefault(comm, (code, super().last_error(comm)))
        return code == SUCCESS

    def _rank(self, comm: int) -> int:
        if comm not in self._ranks:
            rank = c_int()
            self._c.comm_rank(comm, byref(rank))
            self._ranks[comm] = rank.value
        return self._ranks[comm]
