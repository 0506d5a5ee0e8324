"""An NCCL for tests: :class:`nccl_comm.api.Nccl` over the simulated device, between processes of one machine.

It keeps NCCL's rules where breaking them would hang, corrupt or kill a real program: kernels run on streams, in order
and all together within a group; what the ranks call must match, or they hang; a communicator that is not blocking has
to be polled before anything else is done with it; its kernels reach their streams only then. The rules were read off
NCCL's sources (2.18 to 2.30).

    nccl = SimulatedNccl(simulation, version=23007)
    nccl_comm.library.install(nccl)
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Sequence
from functools import partial

from simulated_calls import Refused, Slot
from simulated_comm import Communicator, Result
from simulated_cuda import Simulation
from simulated_network import Address
from simulated_one_sided import OneSided
from simulated_threads import Kind

from nccl_comm.api import IN_PROGRESS, SUCCESS, UNIQUE_ID_BYTES, Config

__all__ = ["Result", "SimulatedNccl", "Slot"]

_UNIQUE = 16


class SimulatedNccl(OneSided):
    """One process's NCCL.

    Args:
        simulation: whose device memory and streams it works on.
        version: as NCCL codes it; functions are there from the version on that brought them.
        prompt: whether non-blocking communicators launch kernels at once, and not only when they are polled.

    Attributes:
        machine: ``mute`` makes this rank one that never comes; ``remote_errors`` turns the death of a rank into
            the asynchronous error "remote error" on the others, who otherwise hang; while ``stuck`` is set operations
            do not come back, or stay in progress, as when a rank is missing that NCCL connects to within them;
            ``mismatches`` has what the ranks disagreed on.
        hang_aborts: while set, ncclCommAbort does not return.
        visits: which threads are in NCCL; ``visits.strict`` makes it a fault where NCCL does not allow that.
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
        """Break all connections, as a death does; the others' control plane knows nothing of it yet."""
        for comm in self.communicators:
            comm.vanish()

    # --- communicators ---

    def unique_id(self) -> tuple[int, bytes]:
        name, token = self.network.address
        said = secrets.token_bytes(_UNIQUE) + token + name.encode()
        return SUCCESS, said.ljust(UNIQUE_ID_BYTES, b"\xff")

    def comm_init(self, size: int, unique_ids: Sequence[bytes], rank: int, config: Config) -> tuple[int, Slot]:
        if len(unique_ids) > 1:
            self._needs("ncclCommInitRankScalable")
        slot, unique_id = Slot(), unique_ids[0]
        if not 0 <= rank < size or {len(one) for one in unique_ids} != {UNIQUE_ID_BYTES} or len(unique_ids) > size:
            self._last_error = f"rank {rank} of {size}, {len(unique_ids)} ids, the first of {len(unique_id)} bytes"
            return Result.INVALID_ARGUMENT, slot
        device = max(0, self._simulation.cuda.current_device())
        comm = Communicator(self.machine, size, rank, device, config)
        self._meet(comm, unique_ids)
        slot.value = self._made(comm)
        return self._settle(comm), slot

    @staticmethod
    def _meet(comm: Communicator, unique_ids: Sequence[bytes]) -> None:
        """Join the other ranks where the first id says, by all ids: they hang if those are not equal on all ranks."""
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
                parent.split(child, color, key, self._writer(slot, partial(self._made, child)))
            return self._settle(parent, child)

        return self._visit("ncclCommSplit", Kind.USE, comm, split), slot

    def comm_shrink(
        self, comm: int, excluded: Sequence[int], config: Config, abort: bool
    ) -> tuple[int, Slot]:
        self._needs("ncclCommShrink")
        slot = Slot()

        def shrink() -> int:
            parent = self._known(comm) if abort else self._usable(comm)
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
            parent.shrink(child, survivors, self._writer(slot, partial(self._made, child)))
            return self._settle(parent, child)

        return self._visit("ncclCommShrink", Kind.USE, comm, shrink), slot

    def _idle(self, call: str, comm: Communicator) -> None:
        """What the documentation wants of a communicator, lest the ranks lock each other out."""
        for op in comm.unfinished():
            self._simulation.scheduler.fault(f"{call} before {op} has run")

    def comm_unique_id(self, comm: int) -> tuple[int, bytes]:
        self._needs("ncclCommGetUniqueId")
        made = [b""]

        def make() -> int:
            made[0] = self._growth(self._usable(comm), "ncclCommGetUniqueId")
            return SUCCESS

        return self._visit("ncclCommGetUniqueId", Kind.USE, comm, make), made[0]

    def _growth(self, comm: Communicator, what: str) -> bytes:
        """The id of a communicator's next growth, which its ranks know without being told."""
        if comm.unfinished():
            self._simulation.scheduler.fault(f"{what} while the communicator has work")
        name, token = comm.addresses[0]
        digest = hashlib.sha256(f"{comm.key}/grown-{comm.growths}".encode()).digest()
        return (digest[:_UNIQUE] + token + name.encode()).ljust(UNIQUE_ID_BYTES, b"\xff")

    def comm_grow(
        self, comm: int, size: int, unique_id: bytes | None, rank: int, config: Config
    ) -> tuple[int, Slot]:
        self._needs("ncclCommGrow")
        slot = Slot()

        def grow() -> int:
            device, me, given = max(0, self._simulation.cuda.current_device()), rank, unique_id
            if comm:
                parent = self._usable(comm)
                known = self._growth(parent, "ncclCommGrow")
                if rank != -1 or size <= parent.size or unique_id not in (None, known):
                    raise Refused(Result.INVALID_ARGUMENT, f"rank {rank} of {parent.size} grows to {size}")
                parent.growths += 1
                device, me, given = parent.device, parent.rank, known
            if given is None or not 0 <= me < size:
                raise Refused(Result.INVALID_ARGUMENT, f"rank {me} of {size} comes to a communicator")
            child = Communicator(self.machine, size, me, device, config)
            self._meet(child, [given])
            slot.value = self._made(child)
            return self._settle(child)

        return self._visit("ncclCommGrow", Kind.USE, comm, grow), slot

    def comm_state(self, comm: int) -> tuple[int, int]:
        state = [SUCCESS]

        def ask() -> int:
            state[0] = self._known(comm).poll()
            return SUCCESS

        return self._visit("ncclCommGetAsyncError", Kind.ASK, comm, ask), state[0]

    def comm_finalize(self, comm: int) -> int:
        self._needs("ncclCommFinalize")

        def finalize() -> int:
            found = self._usable(comm)
            if found.revoked or found.finalizing:
                raise Refused(Result.INVALID_ARGUMENT, "the communicator has been revoked or finalized")
            found.finalizing = True
            if found.config.blocking:
                self._finish(found)
                return SUCCESS
            return IN_PROGRESS

        return self._visit("ncclCommFinalize", Kind.USE, comm, finalize)

    def comm_destroy(self, comm: int) -> int:
        def destroy() -> int:
            found = self._known(comm) if self._known(comm).error else self._usable(comm)
            if found.windows or found.buffers:
                self._simulation.scheduler.fault("a communicator was destroyed before its memory was deregistered")
            self._finish(found)
            found.leave()
            self._forget(comm)
            return SUCCESS

        return self._visit("ncclCommDestroy", Kind.END, comm, destroy)

    def _finish(self, comm: Communicator) -> None:
        """Block the host until the work of a communicator has been done, and no graph needs it."""
        scheduler = self._simulation.scheduler
        for op in comm.unfinished():
            scheduler.wait_for(op, f"{op}", "destroy")
        with scheduler.changed:
            while comm.graphs:
                scheduler.changed.wait()

    def comm_abort(self, comm: int) -> int:
        def abort() -> int:
            found = self._known(comm)
            while self.hang_aborts.is_set():
                threading.Event().wait(0.01)
            found.leave()
            self._forget(comm)
            return SUCCESS

        return self._visit("ncclCommAbort", Kind.END, comm, abort)

    def comm_revoke(self, comm: int) -> int:
        self._needs("ncclCommRevoke")

        def revoke() -> int:
            found = self._known(comm)
            if found.revoked or found.finalizing:
                raise Refused(Result.INVALID_ARGUMENT, "the communicator has been revoked or finalized")
            found.revoke()
            return SUCCESS if found.config.blocking else IN_PROGRESS

        return self._visit("ncclCommRevoke", Kind.ASK, comm, revoke)
