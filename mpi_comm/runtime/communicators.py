"""The mapping of the job's ranks to processes of MPI_COMM_WORLD, and communicators of subsets of
them."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from mpi_comm.runtime.cuda_aware import CudaAwareness, group_awareness
from mpi_comm.runtime.init_finalize import Runtime, runtime
from unicoll.backend import Context, Job
from unicoll.backend.operation_errors import announce
from unicoll.errors import (
    BackendUnavailableError,
    CollectiveMismatchError,
    DistBackendError,
    DistError,
)
from unicoll.net.objects.received_json import from_store

_TOKEN = 16
_PROCESS = {
    "rank": int,
    "cores": [int],
    **dict.fromkeys(("prefers_nonblocking", "single_threaded"), bool),
    "cuda": (bool, str),
}


def publish(job: Job) -> None:
    """Store this rank's rank in MPI_COMM_WORLD, cores, thread level and CUDA-awareness, for the
    other ranks.

    Raises:
        BackendUnavailableError: MPI_COMM_WORLD has fewer processes than the job.
    """
    mpi = runtime()
    mpi.jobs.add(job)
    mpi.exit_timeout = max(mpi.exit_timeout, job.timeout)
    if job.size == 1:
        return
    if mpi.size < job.size:
        raise BackendUnavailableError(
            f"backend 'mpi': the job has {job.size} processes, but MPI's world has"
            f" {mpi.size}{' (each process is a world of its own)' if mpi.size == 1 else ''}: start"
            f" them with `mpirun -n {job.size} python script.py` or with srun and the --mpi that"
            " the library was built for, or use backend='gloo'"
        )
    info = {
        "rank": mpi.rank,
        "cores": sorted(os.sched_getaffinity(0)),
        "prefers_nonblocking": mpi.prefers_nonblocking,
        "single_threaded": mpi.mpi_thread is not None,
        "cuda": [mpi.cuda.direct, mpi.cuda.reason],
    }
    job.store.set(f"mpi/{job.rank}", json.dumps(info))


class WorldRanks:
    """The job's ranks as processes of MPI_COMM_WORLD.

    Args:
        job: the job; all its ranks call :func:`publish`.

    Attributes:
        mpi: MPI in this process.
        single_threaded: True if on some rank one thread makes all MPI calls, so that no call may
            block.
    """

    def __init__(self, job: Job) -> None:
        self.mpi: Runtime = runtime()
        self._job = job
        self.mpi.world_ranks.add(self)
        info: list[dict[str, Any]] = [
            {
                "rank": self.mpi.rank,
                "cores": [0],
                "prefers_nonblocking": True,
                "single_threaded": False,
                "cuda": [False, "one rank"],
            }
        ]
        if job.size > 1:
            keys = [f"mpi/{rank}" for rank in range(job.size)]
            info = [
                from_store(*found, _PROCESS)
                for found in zip(keys, job.store.multi_get(keys), strict=True)
            ]
        self._processes: list[int] = [entry["rank"] for entry in info]
        self._cores: list[list[int]] = [entry["cores"] for entry in info]
        self._nonblocking = any(entry["prefers_nonblocking"] for entry in info)
        self._cuda = [CudaAwareness(*entry["cuda"]) for entry in info]
        self.single_threaded = any(entry["single_threaded"] for entry in info)
        if len(set(self._processes)) != job.size:
            raise BackendUnavailableError(
                "backend 'mpi': several ranks are the same process of MPI's world: they were"
                " started by several mpirun, or each alone; start all with one mpirun or srun, or"
                " use backend='gloo'"
            )

    def record_departed(self) -> None:
        """Record the processes that have died, so that MPI is not finalized with them."""
        control = self._job.control
        # A process that has left takes part in the barrier at exit. One that has died does not, and
        # MPI_Finalize would wait for it.
        if control is not None:
            for rank in set(control.departed) - control.left:
                self.mpi.lost[self._processes[rank]] = control.departed[rank]

    def oversubscribed(self, context: Context) -> bool:
        """True if a host runs more ranks of the group than cores that they may use; equal on all
        ranks of the group."""
        control = context.job.control
        if control is None or not control.peers:
            return False
        hosts: dict[str, list[int]] = {}
        for r in context.ranks:
            hosts.setdefault(control.peers[r].host, []).append(r)
        return any(
            len(ranks) > len({core for r in ranks for core in self._cores[r]})
            for ranks in hosts.values()
        )

    def uses_blocking(self, context: Context) -> bool:
        """True if the group uses MPI's blocking collectives.

        Blocking and nonblocking collectives do not match each other, so this is equal on all ranks
        of the group.
        """
        return not self._nonblocking and not self.oversubscribed(context)

    def cuda(self, context: Context) -> CudaAwareness:
        """CUDA-awareness of the group: ``direct`` is equal on all its ranks."""
        return group_awareness(context.ranks, self._cuda, context.job.rank)

    def communicator(self, context: Context, wait: Callable[[Any], None]) -> Any:
        """An MPI communicator of the group's ranks, in group order; collective over them.

        Communicator creation cannot be cancelled, so the ranks first check that all have called
        this. ``wait`` waits for a request, with a deadline. MPI matches the creations by all
        processes in their order: if one is interrupted behind the check, there can be no more of
        them.
        """
        mpi = self.mpi
        # This is outside of the lock, which parent() takes itself.
        parent = mpi.parent(time.monotonic() + context.timeout)
        processes = [self._processes[r] for r in context.ranks]
        # MPI matches only creations over all processes by their order; those of other groups have a
        # tag.
        in_order = len(processes) == mpi.size
        with mpi.creation_lock:
            if mpi.interrupted_creation and in_order:
                error = DistBackendError(
                    f"group {context.name!r}: MPI can create no more communicators of all"
                    " processes, because the creation of that of group"
                    f" {mpi.interrupted_creation!r} was interrupted",
                    group=context.name,
                )
                # A rank that the failure of that group reached before the end of its check does not
                # know this. It would wait in the check of this group, so it is told.
                raise announce(context, error)
            try:
                self._check_members(parent, processes, context, wait)
            except DistError:
                raise
            except BaseException:
                # A signal's handler has raised. The other ranks may have passed the check, and
                # create the communicator without this one.
                if in_order:
                    mpi.interrupted_creation = context.name
                raise
            # Set before the creation and cleared behind it, so that it stays set after an exception
            # or a timeout in between, whatever the other ranks did.
            if in_order:
                mpi.interrupted_creation = context.name
            if processes == list(range(mpi.size)):
                comm, copied = mpi.call(parent.Idup)
                # Split() would poll without a pause, which is slow with more ranks than cores, and
                # has no deadline.
                wait(copied)
            elif in_order:
                # The group has another order of the processes, which Idup() cannot make. Split()
                # blocks, but all ranks have passed the check.
                comm = mpi.call(parent.Split, 0, context.rank)
            else:
                comm = mpi.call(
                    self._create_subgroup, parent, processes, _hash(context.name, 32767)
                )
            if in_order:
                mpi.interrupted_creation = ""
            # By MPI's default an error ends the processes and raises nothing.
            mpi.call(comm.Set_errhandler, mpi.MPI.ERRORS_RETURN)
        return comm

    @staticmethod
    def _create_subgroup(parent: Any, processes: Sequence[int], tag: int) -> Any:
        world_group = parent.Get_group()
        subgroup = world_group.Incl(processes)
        try:
            return parent.Create_group(subgroup, tag)
        finally:
            subgroup.Free()
            world_group.Free()

    def _check_members(
        self, parent: Any, processes: Sequence[int], context: Context, wait: Callable[[Any], None]
    ) -> None:
        """Check that all ranks create the same group: a dissemination barrier of log2 n rounds that
        carries a token."""
        mpi = self.mpi
        byte = mpi.MPI.BYTE
        # The store over MPI uses the lower half of the tags in the same communicator.
        half = mpi.largest_tag // 2
        tag = half + _hash(context.name, half)
        token = _hash(repr((context.name, context.ranks)), 1 << 32).to_bytes(_TOKEN, "little")
        distance = 1
        while distance < context.size:
            dest = processes[(context.rank + distance) % context.size]
            source = (context.rank - distance) % context.size
            received = bytearray(_TOKEN)
            receive = mpi.call(parent.Irecv, [received, byte], processes[source], tag)
            send = mpi.call(parent.Isend, [token, byte], dest, tag)
            wait(receive)
            wait(send)
            if received != token:
                raise CollectiveMismatchError(
                    f"{context.who(source)} creates another group than this rank ({context.name!r}"
                    f" of ranks {list(context.ranks)}): all ranks must create their groups in the"
                    " same order",
                    group=context.name,
                )
            distance *= 2

    def close(self) -> None:
        """End of the job; the communicators are freed by its groups."""
        self.record_departed()


def world_ranks_of(job: Job) -> WorldRanks:
    """The job's :class:`WorldRanks`, created at the first call; waits until all ranks have called
    :func:`publish`."""
    found: WorldRanks = job.shared("mpi", lambda: WorldRanks(job))
    return found


def _hash(text: str, below: int) -> int:
    return zlib.crc32(text.encode()) % below
