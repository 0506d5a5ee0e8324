"""An NCCL for tests over the simulated device, between local processes.

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
from collections.abc import Callable, Sequence
from functools import partial

from nccl_comm.library.errors import IN_PROGRESS
from nccl_comm.library.structs import UNIQUE_ID_BYTES
from tests.simulated_nccl.calls import Refused, Slot, function
from tests.simulated_nccl.communicators import Communicator, Result
from tests.simulated_nccl.network import Address
from tests.simulated_nccl.operations import Operations
from tests.simulated_nccl.thread_rules import Kind
from unicoll.device_collectives.interface import SUCCESS, Config, HandleSlot

__all__ = ["Result", "SimulatedNccl", "Slot"]

_UNIQUE = 16


class SimulatedNccl(Operations):
    """One process's NCCL.

    Args:
        simulation: the simulated device.
        version: NCCL's version number; functions of later versions are missing.
        prompt: whether non-blocking communicators launch kernels at once, and not only when they are polled.

    Attributes:
        machine: its ``mismatches`` lists operations that differ between ranks.
        active_calls: the threads in NCCL.
    """

    def close(self) -> None:
        """End the network's threads and close its sockets; communicators left over are stopped."""
        for comm in self.communicators:
            comm.leave()
        self.network.close()

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

    @function("ncclCommSplit", Kind.USE, Slot)
    def comm_split(self, comm: int, color: int | None, key: int, config: Config) -> tuple[int, Slot]:
        parent, slot = self._usable(comm), Slot()
        self._idle("ncclCommSplit", parent)
        child = None if color is None else Communicator(self.machine, -1, -1, parent.device, config)
        parent.split(child, color, key, self._child_writer(child, slot))
        return self._begun_child(parent, child, slot), slot

    @function("ncclCommShrink", Kind.USE, Slot)
    def comm_shrink(
        self, comm: int, excluded: Sequence[int], config: Config, abort: bool
    ) -> tuple[int, Slot]:
        parent, slot = self._existing(comm) if abort else self._usable(comm), Slot()
        if parent.error != SUCCESS:  # NCCL never resets it, and checks it with the abort flag, too
            raise Refused(parent.error, "the communicator has an asynchronous error")
        survivors = [r for r in range(parent.size) if r not in set(excluded)]
        if parent.rank in excluded or not set(excluded) <= set(range(parent.size)) or not excluded:
            raise Refused(Result.INVALID_ARGUMENT, f"rank {parent.rank} excludes {list(excluded)}")
        if abort:
            parent.stop()
        else:
            self._idle("ncclCommShrink without abort", parent)
        child = Communicator(self.machine, -1, -1, parent.device, config)
        parent.shrink(child, survivors, self._child_writer(child, slot))
        return self._begun_child(parent, child, slot), slot

    def _child_writer(self, child: Communicator | None, slot: Slot) -> Callable[[], None]:
        """A function that writes a child's handle; a blocking call writes it only when it succeeds."""
        if child is None or child.config.blocking:
            return lambda: None
        return self._writer(slot, partial(self._add, child))

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

    @function("ncclCommGetUniqueId", Kind.USE, bytes)
    def comm_unique_id(self, comm: int) -> tuple[int, bytes]:
        return SUCCESS, self._growth(self._usable(comm), "ncclCommGetUniqueId")

    def _growth(self, comm: Communicator, what: str) -> bytes:
        """The id of a communicator's next growth, equal on its ranks without messages."""
        self._idle(what, comm)
        name, token = comm.addresses[0]
        digest = hashlib.sha256(f"{comm.key}/grown-{comm.growths}".encode()).digest()
        return (digest[:_UNIQUE] + token + name.encode()).ljust(UNIQUE_ID_BYTES, b"\xff")

    @function("ncclCommGrow", Kind.USE, Slot)
    def comm_grow(
        self,
        comm: int,
        size: int,
        unique_id: bytes | None,
        rank: int,
        config: Config,
        slot: HandleSlot | None = None,
    ) -> tuple[int, HandleSlot]:
        slot, device = slot or Slot(), max(0, self._simulation.cuda.current_device())
        if comm:
            parent = self._usable(comm)
            next_id = self._growth(parent, "ncclCommGrow")
            if rank != -1 or size <= parent.size or unique_id not in (None, next_id):
                raise Refused(Result.INVALID_ARGUMENT, f"rank {rank} of {parent.size} grows to {size}")
            parent.growths += 1
            device, rank, unique_id = parent.device, parent.rank, next_id
        if unique_id is None or not 0 <= rank < size:
            raise Refused(Result.INVALID_ARGUMENT, f"rank {rank} of {size} joins a communicator")
        child = Communicator(self.machine, size, rank, device, config)
        self._join(child, [unique_id])
        slot.value = self._add(child)
        return self._begun(child), slot

    @function("ncclCommGetAsyncError", Kind.QUERY, int)
    def comm_state(self, comm: int) -> tuple[int, int]:
        return SUCCESS, self._existing(comm).poll()

    @function("ncclCommFinalize", Kind.USE)
    def comm_finalize(self, comm: int) -> int:
        found = self._usable(comm)
        if found.revoked or found.finalizing:
            raise Refused(Result.INVALID_ARGUMENT, "the communicator has been revoked or finalized")
        found.finalizing = True
        if not found.config.blocking:
            return IN_PROGRESS
        self._finish(found, "ncclCommFinalize")
        return SUCCESS

    @function("ncclCommDestroy", Kind.END)
    def comm_destroy(self, comm: int) -> int:
        found = self._existing(comm) if self._existing(comm).error else self._usable(comm)
        if found.windows or found.buffers:
            self._simulation.scheduler.fault(
                "a communicator was destroyed before its memory was deregistered"
            )
        self._finish(found, "ncclCommDestroy")
        found.leave()
        self._forget(comm)
        return SUCCESS

    @staticmethod
    def _finish(comm: Communicator, call: str) -> None:
        """Block the host until the work of a communicator is done, and no graph uses it."""
        comm.await_work(call)
        comm.await_graphs()

    def comm_abort(self, comm: int) -> int:
        """Stop at once; free the communicator, in a group call at its end."""
        if self._group.depth:
            self._group.ends.append(partial(self._free_stopped, comm))
            return self._stop(comm)
        return self._stop_and_free(comm)

    @function("ncclCommAbort", Kind.QUERY)
    def _stop(self, comm: int) -> int:
        self._existing(comm).leave()
        return SUCCESS

    @function("ncclCommAbort", Kind.END)
    def _stop_and_free(self, comm: int) -> int:
        self._existing(comm).leave()
        return self._free(comm)

    @function("ncclCommAbort", Kind.END)
    def _free_stopped(self, comm: int) -> int:
        return self._free(comm)

    def _free(self, comm: int) -> int:
        found = self._existing(comm)
        # after a revoke or a finalize NCCL waits for nothing before it frees the memory
        ended = self._simulation.scheduler.trapped
        if not found.revoked and not found.finalizing and not ended:
            self._finish(found, "ncclCommAbort")
        self._forget(comm)
        return SUCCESS

    @function("ncclCommRevoke", Kind.QUERY)
    def comm_revoke(self, comm: int) -> int:
        found = self._existing(comm)
        if found.revoked or found.finalizing:
            raise Refused(Result.INVALID_ARGUMENT, "the communicator has been revoked or finalized")
        found.revoke()
        return SUCCESS if found.config.blocking else IN_PROGRESS
