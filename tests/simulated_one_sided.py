"""Puts, signals and waits for signals of the simulated NCCL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from simulated_calls import Refused
from simulated_comm import Communicator, Result
from simulated_operations import Operations
from simulated_threads import Kind

from nccl_comm.api import IN_PROGRESS, SUCCESS

__all__ = ["OneSided"]


class OneSided(Operations):
    """What one rank alone calls; the memory of both sides is in symmetric windows, numbered alike on all ranks."""

    def put_signal(
        self, send: int, count: int, dtype: int, peer: int, window: int, offset: int, signal_index: int, context: int,
        flags: int, comm: int, stream: int,
    ) -> int:  # fmt: skip
        def prepare(found: Communicator) -> Callable[[], None]:
            if window not in found.windows:
                raise Refused(Result.INVALID_ARGUMENT, f"no window {window:#x}")
            reads = self._range(found, "put", send, count * self._element(dtype))
            if not any(s <= send and send + reads[1] <= s + n for s, n in found.windows.values()):
                raise Refused(Result.INVALID_ARGUMENT, "srcWinHost is not in a valid symmetric window")
            number, on = list(found.windows).index(window), self._stream(found, stream)
            return lambda: found.put(on, peer, number, offset, reads)

        return self._alone("ncclPutSignal", comm, (signal_index, context, flags), [peer], prepare)

    def signal(self, peer: int, signal_index: int, context: int, flags: int, comm: int, stream: int) -> int:
        def prepare(found: Communicator) -> Callable[[], None]:
            on = self._stream(found, stream)
            return lambda: found.put(on, peer, 0, 0, (0, 0))

        return self._alone("ncclSignal", comm, (signal_index, context, flags), [peer], prepare)

    def wait_signal(self, signals: Sequence[tuple[int, int]], comm: int, stream: int) -> int:
        def prepare(found: Communicator) -> Callable[[], None]:
            on, wanted = self._stream(found, stream), Counter(dict(signals))
            if not wanted or min(wanted.values()) <= 0:
                raise Refused(Result.INVALID_ARGUMENT, f"invalid opCnt in {signals}")
            return lambda: found.wait_signal(on, wanted)

        return self._alone("ncclWaitSignal", comm, (), [peer for peer, _ in signals], prepare)

    def _alone(
        self, name: str, comm: int, zeros: Sequence[int], peers: Sequence[int],
        prepare: Callable[[Communicator], Callable[[], None]],
    ) -> int:  # fmt: skip
        """Check a call, and put it on its stream now or when somebody polls."""
        self._needs(name)

        def check() -> int:
            found = self._usable(comm, poison=True)
            if any(zeros) or not all(0 <= peer < found.size for peer in peers):
                raise Refused(Result.INVALID_ARGUMENT, f"{name}: {tuple(zeros)} are not 0, or no such ranks: {peers}")
            found.put_off(prepare(found))
            return SUCCESS if found.config.blocking else IN_PROGRESS

        return self._visit(name, Kind.ISSUE, comm, check)
