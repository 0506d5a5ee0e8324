"""recover: a group in place of one that has lost ranks, with the state of a rank that has it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unicoll.api import init, objects, world
from unicoll.errors import (
    AuthenticationError,
    DistArgumentError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GroupAbortedError,
    OperationTimeoutError,
    RankLostError,
)
from unicoll.group.arguments import as_integer
from unicoll.net.control.departures import exit_key
from unicoll.net.wire.handshake import NoAnswerError
from unicoll.parallel.state import State
from unicoll.process import environment, logs
from unicoll.process.formatting import ranks_text
from unicoll.process.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.backend.contract import Job
    from unicoll.bootstrap.recovery_rounds import Member, Round
    from unicoll.bootstrap.resolve import JoinRequest
    from unicoll.group.process_group import ProcessGroup

log = logs.logger("job")

_JOIN_S = 30.0
"""Seconds in which the members of a round join, unless one of them is known to have ended."""
_LATE_ROUNDS = 3
"""Rounds that may begin after the deadline, because a member died while it joined."""
_AGAIN = (DistNetworkError, DistStoreError, GroupAbortedError, OperationTimeoutError)
"""Errors after which the ranks form another round."""

_replaced: list[Job] = []
"""Jobs whose default group was replaced, and in which this process has other groups."""


def recover(
    state: MutableMapping[Any, Any] | None = None,
    *,
    step: int | None = None,
    min_size: int | None = None,
    wait: Timeout = None,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    pg_options: Any = None,
    device_id: Any = None,
) -> ProcessGroup:
    """Join the other ranks, at the start and after one was lost; returns the default group, with
    equal state on all.

    Every process calls it at its start, in place of :func:`init_process_group`, and after an error
    of the default group, such as RankLostError. It returns when all ranks have called it: those
    that were in the group, and the processes that the launcher (``unirun --replace``) has started
    in place of those that ended. Then each has the rank that the launcher gave it::

        state = {"step": 0, "weights": weights}
        group = unicoll.recover(state)
        while state["step"] < steps:
            try:
                gradients = step_of(state)
                group.all_reduce(gradients)
            except (unicoll.RankLostError, unicoll.GroupAbortedError):
                group = unicoll.recover(state)
                continue
            state["weights"] -= rate * gradients
            state["step"] += 1

    All ranks should have the same ``state``. A new process gets that of a rank which was in the
    group. Where those differ in the number of steps, because the last step ended on some ranks
    only, all get the newest. So change the state after the last collective of a step. Each received
    array is compared with its SHA-256 digest.

    The replaced default group is destroyed, as are the other groups with a rank that was lost;
    calls in them raise. The other groups, and the ranks' processes, stay as they are. If another
    rank dies meanwhile, the ranks meet again.

    Args:
        state: a dict of arrays, plain values, and dicts, lists and tuples of these; changed in
            place. Arrays of the same dtype and shape are overwritten, others are replaced: by
            tensors on the current device of the sender's type, by arrays of CuPy, and else by NumPy
            arrays. A bytearray, and what else has only the buffer protocol, is a plain value; a
            memoryview is an array. Arrays of registered families have to be contiguous.
        step: number of steps that ``state`` has; None takes ``state["step"]``, or 0 without it.
        min_size: with fewer ranks than the launcher started, but at least this number, the group is
            made of those that have come when ``wait`` is over. Their ranks are consecutive, in the
            order of the launcher's. None: all are needed.
        wait: how long to wait for all ranks, timedelta or seconds; None is 5 minutes.
        backend, init_method, timeout, world_size, rank, store, pg_options, device_id: as for
            :func:`init_process_group`, and equal on all ranks, also on new ones. The store must
            outlive the lost rank, or be found again by the process in its place: the launcher's, a
            given one, or rank 0's at a fixed port.

    Raises:
        OperationTimeoutError: not all ranks, or less than ``min_size``, came in time; names the
            missing.
        RankLostError: a rank has ended its program without an error, and will not come.
        DistError: ranks that were in the group have different states with the same number of steps;
            or no rank has a complete state any more.
        DistArgumentError, DistTypeError: an argument is wrong; or this job's store ended with the
            lost rank.
        BackendUnavailableError, AuthenticationError, DistStoreError, DistNetworkError: as for
            :func:`init_process_group`.
    """
    own_state = State({} if state is None else state)
    if step is None:
        step = (state or {}).get("step", 0)
    step = as_integer("recover: step", step)
    if min_size is not None and as_integer("recover: min_size", min_size) < 1:
        raise DistArgumentError(f"recover: min_size must be 1 or more, not {min_size}")
    asked = init.request(
        "recover",
        timeout,
        backend=backend,
        init_method=init_method,
        world_size=world_size,
        rank=rank,
        store=store,
        pg_options=pg_options,
        device_id=device_id,
    )
    old = world.current("recover") if world.is_initialized() else None
    if old is not None and _is_of_torch(old.default):
        raise DistArgumentError(
            "recover: torch.distributed.init_process_group has made the default group: call its"
            " destroy_process_group first, and recover() in place of both"
        )
    # It is imported here for the reason in init.request().
    from unicoll.bootstrap import enter, resolve

    found = resolve.resolve(asked)
    recovery = _Recovery(asked, own_state, step, old is not None)
    if found.location.found_again and not (found.fake if old is None else old.fake):
        # Otherwise an earlier call has ended it.
        if old is not None and old.default in old.groups:
            # Ranks that still wait in the old group, because they do not know of the loss, get an
            # error. The job stays: if this call fails, the next one finds its hooks.
            old.close_group(old.default, f"rank {old.rank} calls recover()", stays=True)
        job = recovery.run(world.seconds(wait, init.RENDEZVOUS_S), min_size)
    elif old is None:
        job = enter.join(asked)
        recovery.share(job)
    else:
        raise DistArgumentError(
            "recover: the store of this job does not outlive its ranks: start it by `unirun"
            " --replace`, or pass store= or init_method='tcp://host:port'; shrink_group makes a"
            " group of the remaining ranks"
        )
    _replace_default_group(old, job)
    return job.default  # type: ignore[no-any-return]


class _Recovery:
    """The rounds of one call of :func:`recover`.

    Args:
        request: of the new group.
        state, step: of this process.
        is_member: True if this process was in the group that is replaced.
    """

    # Both are of the class: a later call in this process goes on where an earlier one has failed.
    last_round = 0
    """Number of the last round that this process was in."""
    is_damaged = False
    """True from the beginning of a transfer to this process until it has ended."""

    def __init__(
        self,
        request: JoinRequest,
        state: State,
        step: int,
        is_member: bool,
    ) -> None:
        self._request = request
        self._state = state
        self._step = step
        self._is_member = is_member

    def run(self, wait: float, min_size: int | None) -> Job:
        """Form rounds until the members of one have joined and have the same state."""
        from unicoll.bootstrap.recovery_rounds import form_round
        from unicoll.bootstrap.resolve import resolve

        deadline = time.monotonic() + wait
        late = 0
        while True:
            formed = None
            # Each round has a new location, because the last one was closed.
            found = resolve(self._request)
            try:
                root = found.location.open(found.rank, found.world_size, deadline)
                # A round that begins after the deadline has a limit of its own: the one before it
                # failed while its members joined.
                end = max(deadline, time.monotonic() + _JOIN_S) if late else deadline
                formed = form_round(
                    found, root, self._record(found.rank), self.last_round, end, min_size
                )
                # This comes before the members join: a round that has failed is not entered again.
                _Recovery.last_round = formed.number
                senders = _senders(formed.members)
                job = self._join(formed)
                self._transfer(job, formed.members, senders)
                return job
            except _AGAIN as error:
                late += time.monotonic() > deadline
                # More rounds do not help against missing ranks or a wrong secret. NoAnswerError may
                # come from a server that is shutting down.
                too_few = formed is None and isinstance(
                    error, (OperationTimeoutError, RankLostError)
                )
                refused = isinstance(error, AuthenticationError) and not isinstance(
                    error, NoAnswerError
                )
                if too_few or refused or late > _LATE_ROUNDS:
                    raise
                if formed is not None:
                    # The other members would wait for this one until their limit.
                    formed.give_up()
                log.info("recovery: the ranks meet again: %s", error)
            finally:
                found.location.close(linger=True)

    def share(self, job: Job) -> None:
        """Give all ranks of a job the same state; on an error the job is left."""
        from unicoll.bootstrap.recovery_rounds import Member

        try:
            members: list[Any] = [None] * job.size
            objects.all_gather_object(members, asdict(self._record(job.rank)), job.default)
            members = [Member(**fields) for fields in members]
            senders = _senders(members)
        except BaseException as error:
            job.leave(error)
            # The error's traceback has frames that have the job.
            job.error = None
            raise
        self._transfer(job, members, senders)

    def _record(self, rank: int) -> Member:
        from unicoll.bootstrap.recovery_rounds import Member

        key = exit_key(rank, environment.number("UNICOLL_REPLACEMENT"))
        return Member(rank, self._is_member, self.is_damaged, self._step, self._state.digest(), key)

    def _join(self, formed: Round) -> Job:
        """Join the job of a round."""
        from unicoll.bootstrap.enter import enter
        from unicoll.bootstrap.rendezvous import meet
        from unicoll.bootstrap.resolve import resolve

        found = formed.apply_to(resolve(self._request))
        request = replace(self._request, join_timeout=_JOIN_S)
        with formed.watched(found.location):
            met = meet(found, request, time.monotonic() + _JOIN_S)
            if not found.given_store:
                met.store.set_timeout(timedelta(seconds=init.RENDEZVOUS_S))
            return enter(met, request, time.monotonic() + _JOIN_S)

    def _transfer(self, job: Job, members: Sequence[Member], senders: Mapping[int, int]) -> None:
        """Send or receive the state; on an error the job is left."""
        try:
            if job.rank in senders:
                # From here on the state is a mixture of two, also if the transfer is interrupted:
                # in the next round no rank gets it.
                _Recovery.is_damaged = True
                self._state.receive(job.default, senders[job.rank])
                self._step = members[senders[job.rank]].step
                _Recovery.is_damaged = False
            for receiver, sender in senders.items():
                if sender == job.rank:
                    self._state.send(job.default, receiver)
            # Else a rank could end its program while others still need it.
            job.default.barrier()
            self._is_member = True
        except BaseException as error:
            job.leave(error)
            job.error = None
            raise


def _senders(members: Sequence[Member]) -> dict[int, int]:
    """By rank that needs the state: the rank that sends it."""
    # All ranks compute this from the same list, so they agree without a message.
    complete = [rank for rank, member in enumerate(members) if not member.is_damaged]
    old = [rank for rank in complete if members[rank].is_member]
    if not complete:
        raise DistError(
            "recover: no rank has a complete state: the last one died while it sent its own",
            op="recover",
        )
    # Processes that were not in the group may have any state, which counts only if no rank of the
    # group is left.
    newest = max(members[rank].step for rank in old or complete)
    having = [rank for rank in old or complete if members[rank].step == newest]
    same = [rank for rank in having if members[rank].digest == members[having[0]].digest]
    if old and same != having:
        others = ranks_text(rank for rank in having if rank not in same)
        raise DistError(
            f"recover: the states of {ranks_text(same)} and {others} differ after {newest} steps:"
            " all ranks need the same arrays in their state, changed only after the last"
            " collective of a step, and the number of steps",
            op="recover",
        )
    receivers = [rank for rank in range(len(members)) if rank not in same]
    return {rank: same[i % len(same)] for i, rank in enumerate(receivers)}


def _is_of_torch(group: ProcessGroup) -> bool:
    """True if it is torch's default group."""
    torch = sys.modules.get("torch.distributed")
    return torch is not None and group.wrapper is not None and group.wrapper is torch.group.WORLD


# --- the replaced group ---------------------------------------------------------------------------


def _replace_default_group(old: Job | None, new: Job) -> None:
    """Make the group of a new job the default group, and leave the jobs in which this process has
    no group any more."""
    from unicoll.group.call_hooks import add_to_job

    # Hooks that were added for all groups of the job stay.
    for hook in old.hooks if old is not None else ():
        add_to_job(new, hook)
    init.enter_world(new, init.follow_profiler)
    _replaced.extend([old] if old is not None else [])
    for job in [*_replaced]:
        for group in [*job.groups]:
            if job.control is not None and (
                job.control.group_failure(group.name)
                or job.control.departed.keys() & {*group.ranks}
            ):
                job.close_group(group, f"rank {job.rank} calls recover()", stays=True)
        if not job.groups:
            _replaced.remove(job)
            job.leave()
