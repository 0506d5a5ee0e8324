"""An NCCL for tests: :class:`nccl_comm.library.interface.Nccl` over the simulated device, between local processes.

It applies those rules of NCCL whose violation would hang, corrupt or kill a real program: kernels run on streams, in
order, and together within a group call; the calls of the ranks must match, or they hang; a non-blocking communicator
has to be polled before any other call for it, and its kernels reach their streams only then. The rules are those of
NCCL's sources (2.18 to 2.30).

    nccl = SimulatedNccl(simulation, version=23007)
    nccl_comm.library.locate.install(nccl)
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial

from nccl_comm.library.interface import IN_PROGRESS, SUCCESS, UNIQUE_ID_BYTES, Config, HandleSlot
from tests.simulated_nccl.calls import Refused, Slot
from tests.simulated_nccl.communicators import Communicator, Result
from tests.simulated_nccl.cuda import Simulation
from tests.simulated_nccl.network import Address
from tests.simulated_nccl.one_sided import OneSided
from tests.simulated_nccl.thread_rules import Kind

__all__ = ["Result", "SimulatedNccl", "Slot"]

_UNIQUE = 16


class SimulatedNccl(OneSided):
    """One process's NCCL.

    Args:
        simulation: the simulated device.
        version: NCCL's version number; functions of later versions are missing.
        prompt: whether non-blocking communicators launch kernels at once, and not only when they are polled.

    Attributes:
        machine: with ``mute`` this rank takes part in nothing; without ``remote_errors`` the death of a rank does not
            become the asynchronous error "remote error" on the others, and they hang; while ``stuck`` is set operations
            do not return, or stay in progress, as if NCCL waited within them for a missing rank; ``mismatches`` lists
            operations that differ between ranks.
        hang_aborts: while set, ncclCommAbort does not return.
        active_calls: the threads in NCCL; with ``active_calls.strict`` a violation of NCCL's rules is a fault.
    """

    def __init__(self, simulation: Simulation, version: int = 23007, prompt: bool = False) -> None:
        super().__init__(simulation, version, prompt)
        self.hang_aborts = threading.Event()

    def close(self) -> None:
        """End the network's thread and close its sockets; communicators left over are stopped."""
        for comm in self.communicators:
            comm.leave()
        self.network.close()

    def vanish(self) -> None:
        """Close all connections, as a death does, which the control plane of the others has not noticed."""
        for comm in self.communicators:
            comm.vanish()

    # --- communicators ---

    def unique_id(self) -> tuple[int, bytes]:
        name, token = self.network.address
        unique_id = secrets.token_bytes(_UNIQUE) + token + name.encode()
        return SUCCESS, unique_id.ljust(UNIQUE_ID_BYTES, b"\xff")

    def new_slot(self) -> Slot:
        return Slot()

    def comm_init(
        self,
        size: int,
        unique_ids: Sequence[bytes],
        rank: int,
        config: Config,
        slot: HandleSlot | None = None,
    ) -> tuple[int, HandleSlot]:
        if len(unique_ids) > 1:
            self._needs("ncclCommInitRankScalable")
        slot, unique_id = slot or Slot(), unique_ids[0]
        if (
            not 0 <= rank < size
            or {len(one) for one in unique_ids} != {UNIQUE_ID_BYTES}
            or len(unique_ids) > size
        ):
            self._last_error = (
                f"rank {rank} of {size}, {len(unique_ids)} ids, the first of {len(unique_id)} bytes"
            )
            return Result.INVALID_ARGUMENT, slot
        device = max(0, self._simulation.cuda.current_device())
        comm = Communicator(self.machine, size, rank, device, config)
        self._join(comm, unique_ids)
        slot.value = self._add(comm)
        with self.active_calls.enter("ncclCommInitRankConfig", Kind.USE, comm):
            return self._result(comm), slot

    @staticmethod
    def _join(comm: Communicator, unique_ids: Sequence[bytes]) -> None:
        """Connect at the address in the first id, with a key of all ids: ranks whose ids differ hang."""
        rest = unique_ids[0][_UNIQUE:].rstrip(b"\xff")
        address: Address = (rest[16:].decode(), rest[:16])
        comm.join(address, ".".join(one[:_UNIQUE].hex() for one in unique_ids))

    def comm_split(self, comm: int, color: int | None, key: int, config: Config) -> tuple[int, Slot]:
        self._needs("ncclCommSplit")
        slot = Slot()

        def split() -> int:
            parent = self._usable(comm)
            self._idle("ncclCommSplit", parent)
            child = None if color is None else Communicator(self.machine, -1, -1, parent.device, config)
            if child is None:
                parent.split(None, color, key, lambda: None)
            else:
                parent.split(child, color, key, self._child_writer(child, slot))
            return self._begun_child(parent, child, slot)

        return self._call_on("ncclCommSplit", Kind.USE, comm, split), slot

    def comm_shrink(
        self, comm: int, excluded: Sequence[int], config: Config, abort: bool
    ) -> tuple[int, Slot]:
        self._needs("ncclCommShrink")
        slot = Slot()

        def shrink() -> int:
            parent = self._existing(comm) if abort else self._usable(comm)
            if parent.error != SUCCESS:  # NCCL never resets it, and checks it with the abort flag, too
                raise Refused(parent.error, "the communicator has an asynchronous error")
            survivors = [r for r in range(parent.size) if r not in set(excluded)]
            if parent.rank in excluded or len(survivors) == parent.size:
                raise Refused(Result.INVALID_ARGUMENT, f"rank {parent.rank} excludes {list(excluded)}")
            if not all(0 <= r < parent.size for r in excluded):
                raise Refused(Result.INVALID_ARGUMENT, f"no such ranks: {list(excluded)}")
            if abort:
                parent.stop()
            else:
                self._idle("ncclCommShrink without abort", parent)
            child = Communicator(self.machine, -1, -1, parent.device, config)
            parent.shrink(child, survivors, self._child_writer(child, slot))
            return self._begun_child(parent, child, slot)

        return self._call_on("ncclCommShrink", Kind.USE, comm, shrink), slot

    def _child_writer(self, child: Communicator, slot: Slot) -> Callable[[], None]:
        """A function that writes a child's handle; a blocking call writes it only when it succeeds."""
        return (lambda: None) if child.config.blocking else self._writer(slot, partial(self._add, child))

    def _begun_child(self, parent: Communicator, child: Communicator | None, slot: Slot) -> int:
        code = self._begun(parent, child)
        if child is not None and child.config.blocking:
            if code == SUCCESS:
                slot.value = self._add(child)
            else:
                child.leave()
        return code

    def _idle(self, call: str, comm: Communicator) -> None:
        """Record a fault if a communicator has work, which the documentation forbids since the ranks may deadlock."""
        for op in comm.unfinished():
            self._simulation.scheduler.fault(f"{call} before {op} has run")

    def comm_unique_id(self, comm: int) -> tuple[int, bytes]:
        self._needs("ncclCommGetUniqueId")
        made = [b""]

        def make() -> int:
            made[0] = self._growth(self._usable(comm), "ncclCommGetUniqueId")
            return SUCCESS

        return self._call_on("ncclCommGetUniqueId", Kind.USE, comm, make), made[0]

    def _growth(self, comm: Communicator, what: str) -> bytes:
        """The id of a communicator's next growth, equal on its ranks without messages."""
        if comm.unfinished():
            self._simulation.scheduler.fault(f"{what} while the communicator has work")
        name, token = comm.addresses[0]
        digest = hashlib.sha256(f"{comm.key}/grown-{comm.growths}".encode()).digest()
        return (digest[:_UNIQUE] + token + name.encode()).ljust(UNIQUE_ID_BYTES, b"\xff")

    def comm_grow(
        self,
        comm: int,
        size: int,
        unique_id: bytes | None,
        rank: int,
        config: Config,
        slot: HandleSlot | None = None,
    ) -> tuple[int, HandleSlot]:
        self._needs("ncclCommGrow")
        written = slot or Slot()

        def grow() -> int:
            device, own_rank, own_id = max(0, self._simulation.cuda.current_device()), rank, unique_id
            if comm:
                parent = self._usable(comm)
                next_id = self._growth(parent, "ncclCommGrow")
                if rank != -1 or size <= parent.size or unique_id not in (None, next_id):
                    raise Refused(Result.INVALID_ARGUMENT, f"rank {rank} of {parent.size} grows to {size}")
                parent.growths += 1
                device, own_rank, own_id = parent.device, parent.rank, next_id
            if own_id is None or not 0 <= own_rank < size:
                raise Refused(Result.INVALID_ARGUMENT, f"rank {own_rank} of {size} joins a communicator")
            child = Communicator(self.machine, size, own_rank, device, config)
            self._join(child, [own_id])
            written.value = self._add(child)
            return self._begun(child)

        return self._call_on("ncclCommGrow", Kind.USE, comm, grow), written

    def comm_state(self, comm: int) -> tuple[int, int]:
        state = [SUCCESS]

        def query() -> int:
            state[0] = self._existing(comm).poll()
            return SUCCESS

        return self._call_on("ncclCommGetAsyncError", Kind.QUERY, comm, query), state[0]

    def comm_finalize(self, comm: int) -> int:
        self._needs("ncclCommFinalize")

        def finalize() -> int:
            found = self._usable(comm)
            if found.revoked or found.finalizing:
                raise Refused(Result.INVALID_ARGUMENT, "the communicator has been revoked or finalized")
            found.finalizing = True
            if found.config.blocking:
                self._finish(found, "ncclCommFinalize")
                return SUCCESS
            return IN_PROGRESS

        return self._call_on("ncclCommFinalize", Kind.USE, comm, finalize)

    def comm_destroy(self, comm: int) -> int:
        def destroy() -> int:
            found = self._existing(comm) if self._existing(comm).error else self._usable(comm)
            if found.windows or found.buffers:
                self._simulation.scheduler.fault(
                    "a communicator was destroyed before its memory was deregistered"
                )
            self._finish(found, "ncclCommDestroy")
            found.leave()
            self._forget(comm)
            return SUCCESS

        return self._call_on("ncclCommDestroy", Kind.END, comm, destroy)

    @staticmethod
    def _finish(comm: Communicator, call: str) -> None:
        """Block the host until the work of a communicator is done, and no graph uses it."""
        comm.await_work(call)
        comm.await_graphs()

    def comm_abort(self, comm: int) -> int:
        """Stop at once; free the communicator, in a group call at its end."""

        def stop() -> int:
            while self.hang_aborts.is_set():
                threading.Event().wait(0.01)
            self._existing(comm).leave()
            return SUCCESS

        def free() -> int:
            found = self._existing(comm)
            # after a revoke or a finalize NCCL waits for nothing before it frees the memory
            if not found.revoked and not found.finalizing:
                self._finish(found, "ncclCommAbort")
            self._forget(comm)
            return SUCCESS

        if self._group.depth:
            self._group.ends.append(partial(self._call_on, "ncclCommAbort", Kind.END, comm, free))
            return self._call_on("ncclCommAbort", Kind.QUERY, comm, stop)
        return self._call_on("ncclCommAbort", Kind.END, comm, lambda: stop() or free())

    def comm_revoke(self, comm: int) -> int:
        self._needs("ncclCommRevoke")

        def revoke() -> int:
            found = self._existing(comm)
            if found.revoked or found.finalizing:
                raise Refused(Result.INVALID_ARGUMENT, "the communicator has been revoked or finalized")
            found.revoke()
            return SUCCESS if found.config.blocking else IN_PROGRESS

        return self._call_on("ncclCommRevoke", Kind.QUERY, comm, revoke)
