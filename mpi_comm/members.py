"""Which of MPI's processes are the job's ranks, and communicators made of some of them."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from unicoll.backend import Context, Job
from unicoll.errors import BackendUnavailableError, CollectiveMismatchError

from .aware import Awareness, agreed
from .runtime import Runtime, runtime

__all__ = ["Members", "members_of", "publish"]

_TOKEN = 16


def publish(job: Job) -> None:
    """Say which of MPI's processes this rank is, which cores it may use, and whether MPI takes pointers to a GPU here.

    Raises:
        BackendUnavailableError: MPI does not know the other processes.
    """
    mpi = runtime()
    mpi.jobs.add(job)
    mpi.patience = max(mpi.patience, job.timeout)
    if job.size == 1:
        return
    if mpi.size < job.size:
        raise BackendUnavailableError(
            f"backend 'mpi': the job has {job.size} processes, but MPI knows {mpi.size}"
            f"{' (each process is an MPI world of its own)' if mpi.size == 1 else ''}: start them with"
            f" `mpirun -n {job.size} python script.py` or with srun and the --mpi that the library was built for,"
            " or take backend='gloo'"
        )
    facts = {
        "rank": mpi.rank, "cores": sorted(os.sched_getaffinity(0)), "polls": mpi.polls, "owned": mpi.owner is not None,
        "cuda": [mpi.cuda.direct, mpi.cuda.why],
    }  # fmt: skip
    job.store.set(f"mpi/{job.rank}", json.dumps(facts))


class Members:
    """The job's ranks as processes of MPI's world.

    Args:
        job: all of whose ranks have called :func:`publish`, or will.
    """

    def __init__(self, job: Job) -> None:
        self.mpi: Runtime = runtime()
        self._job = job
        self.mpi.members.add(self)
        facts: list[dict[str, Any]] = [
            {"rank": self.mpi.rank, "cores": [0], "polls": True, "owned": False, "cuda": [False, "one rank"]}
        ]
        if job.size > 1:
            facts = [json.loads(text) for text in job.store.multi_get([f"mpi/{r}" for r in range(job.size)])]
        self._places: list[int] = [fact["rank"] for fact in facts]
        self._cores: list[list[int]] = [fact["cores"] for fact in facts]
        self._polls = any(fact["polls"] for fact in facts)
        self._cuda = [Awareness(*fact["cuda"]) for fact in facts]
        self.owned = any(fact["owned"] for fact in facts)
        """Whether on some rank one thread makes all calls of MPI, so that none may block."""
        if len(set(self._places)) != job.size:
            raise BackendUnavailableError(
                "backend 'mpi': several ranks are the same process of MPI's world: they were started by several"
                " mpirun, or each alone; start all with one mpirun or srun, or take backend='gloo'"
            )

    def note_the_dead(self) -> None:
        """MPI is not to wait for processes that have died."""
        control = self._job.control
        if control is not None:
            for rank in set(control.departed) - control.left:
                self.mpi.lost[self._places[rank]] = control.departed[rank]

    def crowded(self, context: Context) -> bool:
        """Whether a host runs more ranks of the group than it has cores for them; equal on all members."""
        control = context.job.control
        if control is None or not control.peers:
            return False
        hosts: dict[str, list[int]] = {}
        for r in context.ranks:
            hosts.setdefault(control.peers[r].host, []).append(r)
        return any(
            len(ranks) > len({core for r in ranks for core in self._cores[r]}) for ranks in hosts.values()
        )

    def blocks(self, context: Context) -> bool:
        """Whether the group uses MPI's blocking collectives. Blocking and nonblocking ones do not match each other,
        so this is equal on all members."""
        return not self._polls and not self.crowded(context)

    def cuda(self, context: Context) -> Awareness:
        """Whether the group hands pointers to a GPU's memory to MPI: equal on all members. And why."""
        return agreed(context.ranks, self._cuda, context.job.rank)

    def communicator(self, context: Context, finish: Callable[[Any], None]) -> Any:
        """A communicator of the group's members, in its order; collective over them.

        They call each other first, each waiting with ``finish`` (which keeps the deadline), since making a
        communicator cannot be given up once begun.
        """
        mpi = self.mpi
        parent = mpi.parent(time.monotonic() + context.timeout)
        places = [self._places[r] for r in context.ranks]
        with mpi.making:
            self._call_roll(parent, places, context, finish)
            if places == list(range(mpi.size)):
                comm, copied = mpi.call(parent.Idup)
                finish(copied)  # without spinning for ranks that have no core just now, as Split does
            elif len(places) == mpi.size:
                comm = mpi.call(parent.Split, 0, context.rank)
            else:
                comm = mpi.call(self._of_some, parent, places, _number(context.name, 32767))
            mpi.call(comm.Set_errhandler, mpi.MPI.ERRORS_RETURN)
        return comm

    @staticmethod
    def _of_some(parent: Any, places: Sequence[int], tag: int) -> Any:
        everyone = parent.Get_group()
        some = everyone.Incl(places)
        try:
            return parent.Create_group(some, tag)
        finally:
            some.Free()
            everyone.Free()

    def _call_roll(
        self, parent: Any, places: Sequence[int], context: Context, finish: Callable[[Any], None]
    ) -> None:
        """Every member hears, directly or through others, from every other: dissemination in log2 n rounds."""
        mpi = self.mpi
        byte = mpi.MPI.BYTE
        half = mpi.largest_tag // 2
        tag = half + _number(context.name, half)
        mine = _number(repr((context.name, context.ranks)), 1 << 32).to_bytes(_TOKEN, "little")
        distance = 1
        while distance < context.size:
            to = places[(context.rank + distance) % context.size]
            frm = (context.rank - distance) % context.size
            heard = bytearray(_TOKEN)
            coming = mpi.call(parent.Irecv, [heard, byte], places[frm], tag)
            going = mpi.call(parent.Isend, [mine, byte], to, tag)
            finish(coming)
            finish(going)
            if heard != mine:
                raise CollectiveMismatchError(
                    f"{context.who(frm)} makes another group than this rank does (here: {context.name!r} of ranks"
                    f" {list(context.ranks)}): all members must make their groups in the same order",
                    group=context.name,
                )
            distance *= 2

    def close(self) -> None:
        """The job is over; communicators belong to its groups."""
        self.note_the_dead()


def members_of(job: Job) -> Members:
    """The job's, made at the first call; after :func:`publish` on all its ranks."""
    found: Members = job.shared("mpi", lambda: Members(job))
    return found


def _number(text: str, below: int) -> int:
    return zlib.crc32(text.encode()) % below
