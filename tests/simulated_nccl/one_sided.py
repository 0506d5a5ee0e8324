"""Puts, signals and waits for signals of the simulated NCCL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from nccl_comm.library.interface import IN_PROGRESS, SUCCESS
from tests.simulated_nccl.calls import SET_UP_BY_WINDOWS, Refused
from tests.simulated_nccl.communicators import Communicator, Result
from tests.simulated_nccl.operations import Operations
from tests.simulated_nccl.thread_rules import Kind

__all__ = ["OneSided"]


class OneSided(Operations):
    """One-sided operations; the memory of both sides is in symmetric windows, with the same numbers on all ranks."""

    def put_signal(
        self,
        send: int,
        count: int,
        dtype: int,
        peer: int,
        window: int,
        offset: int,
        signal_index: int,
        context: int,
        flags: int,
        comm: int,
        stream: int,
    ) -> int:
        def prepare(found: Communicator) -> Callable[[], None]:
            if window not in found.windows:
                raise Refused(Result.INVALID_ARGUMENT, f"no window {window:#x}")
            reads = self._range(found, "put", send, count * self._element(dtype))
            if not any(s <= send and send + reads[1] <= s + n for s, n in found.windows.values()):
                raise Refused(Result.INVALID_ARGUMENT, "srcWinHost is not in a valid symmetric window")
            number, on = list(found.windows).index(window), self._stream(found, stream)
            return lambda: found.put(on, peer, number, offset, reads)

        return self._one_sided("ncclPutSignal", comm, (signal_index, context, flags), [peer], prepare)

    def signal(self, peer: int, signal_index: int, context: int, flags: int, comm: int, stream: int) -> int:
        def prepare(found: Communicator) -> Callable[[], None]:
            on = self._stream(found, stream)
            return lambda: found.put(on, peer, 0, 0, (0, 0))

        return self._one_sided("ncclSignal", comm, (signal_index, context, flags), [peer], prepare)

    def wait_signal(self, signals: Sequence[tuple[int, int]], comm: int, stream: int) -> int:
        def prepare(found: Communicator) -> Callable[[], None]:
            on, wanted = self._stream(found, stream), Counter(dict(signals))
            if not wanted or min(wanted.values()) <= 0:
                raise Refused(Result.INVALID_ARGUMENT, f"invalid opCnt in {signals}")
            return lambda: found.wait_signal(on, wanted)

        return self._one_sided("ncclWaitSignal", comm, (), [peer for peer, _ in signals], prepare)

    def _set_up(self, comm: Communicator) -> None:
        """Wait for all ranks in the first operation, as NCCL before 2.31 does."""
        if not comm.one_sided and self._version >= SET_UP_BY_WINDOWS:
            raise Refused(Result.INVALID_USAGE, "no window was registered before")
        if not comm.one_sided:
            comm.one_sided = True
            comm.barrier()
            if comm.config.blocking and (code := comm.wait_ready()) != SUCCESS:
                raise Refused(code, "stopped while it waited for the other ranks")

    def _one_sided(
        self,
        name: str,
        comm: int,
        zeros: Sequence[int],
        peers: Sequence[int],
        prepare: Callable[[Communicator], Callable[[], None]],
    ) -> int:
        """Check a call, and put it on its stream now or at the next poll."""
        self._needs(name)

        def check() -> int:
            found = self._usable(comm, poison=True)
            if any(zeros) or not all(0 <= peer < found.size for peer in peers):
                raise Refused(
                    Result.INVALID_ARGUMENT, f"{name}: {tuple(zeros)} are not 0, or no such ranks: {peers}"
                )
            self._set_up(found)
            found.defer(prepare(found))
            return SUCCESS if found.config.blocking else IN_PROGRESS

        return self._call_on(name, Kind.ISSUE, comm, check)
