"""Runs a function on the workers of a Dask cluster as the ranks of one job.

    from unicoll.integrations.dask import run

    sums = run(client, fn, 0.1, workers=["tcp://10.0.0.1:4001", "tcp://10.0.0.2:4001"])

Each rank is a Dask task that only its worker may execute. Rank 0 serves the job's store, at a free
port of its worker's address. Each rank tells the client by a Dask event that it has started; that
of rank 0 has the address of the store, and the client then submits the tasks of the other ranks.
The job's secret is an argument of the tasks. Whoever can read Dask's connections can read it: use
TLS. Without TLS, whoever reaches the scheduler can execute code on all workers.

While it runs, the client checks twice a second whether the workers are still there. At the first
failure it calls a function in all workers, outside of Dask's tasks, that ends the job there: ranks
that wait for others get an error.

The client holds one ``distributed.Lock`` for each worker, which it takes in the order of the
addresses: runs on common workers follow one another, runs on different workers go on at the same
time, and none waits for another in a cycle. A client that dies does not renew its locks, and the
scheduler releases them after ``distributed.scheduler.locks.lease-timeout`` (30 s). Those of
``distributed.MultiLock`` would remain.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from dask.utils import funcname
from distributed import Client, KilledWorker, Lock, get_worker
from distributed.client import futures_of
from distributed.comm import get_address_host

from unicoll.api import world
from unicoll.api.init import enter_world, join
from unicoll.errors import (
    AuthenticationError,
    DistArgumentError,
    DistError,
    DistNetworkError,
    DistStoreError,
    DistTypeError,
    GroupAbortedError,
    OperationTimeoutError,
    RankLostError,
)
from unicoll.net.stores import TCPStore
from unicoll.net.wire import interfaces
from unicoll.net.wire.secret import KeyText, given_secret, new_key_text
from unicoll.process.timeouts import Timeout, backoff, positive_seconds, seconds_left

if TYPE_CHECKING:
    from unicoll.backend.contract import Job

__all__ = ["run"]

_Call = tuple[Callable[..., Any], list[Any], dict[str, Any]]
"""Function, arguments, arguments by name."""

_NAME = "dask"
"""Name of the jobs."""
_START_S = 300.0
"""Seconds for all ranks to start and join, unless the user gives a limit."""
_LOCK_S = 2.0
"""Seconds of a request for a lock."""
_POLL_S = 0.5
"""Seconds between looks whether all workers are still there."""
_CONNECT_S = (0.5, 8.0)
"""Seconds of the first and the longest attempt to connect to rank 0's store; a failed run does not
interrupt one."""
_END_S = 30.0
"""Seconds that a failed run waits until the function has ended on the other workers."""
_CONSEQUENCES = (DistNetworkError, DistStoreError, GroupAbortedError)
"""Errors that may only report the failure of another rank."""


def run(
    client: Client,
    fn: Callable[..., Any],
    *args: Any,
    workers: Sequence[str] | None = None,
    per_rank: Sequence[Any] | None = None,
    timeout: Timeout = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on workers of a Dask cluster at the same time, as the ranks of
    one job.

    On each worker ``fn`` runs between :func:`unicoll.init_process_group` and
    :func:`unicoll.destroy_process_group`, in one of the worker's threads, and uses the functions of
    unicoll as any program does. unicoll has to be installed on the workers and the scheduler. Each
    worker is a process of its own. Other tasks may run on it at the same time; with one thread per
    worker, ``fn`` waits for tasks that are running, and they for ``fn``.

    Args:
        client: a client that is not asynchronous.
        fn: a function that Dask can send to the workers.
        args, kwargs: its arguments. As in ``Client.submit`` a future in them, also in a list or
            dict, is replaced by its value.
        workers: the addresses of different workers, in the order of the ranks; None means all
            workers, in the order of their addresses.
        per_rank: a value for each rank, which its ``fn`` gets as first argument, before ``args``:
            for example a list with the futures of the partitions that are on this worker, which
            need not be moved then.
        timeout: timedelta or seconds to wait until ``fn`` starts: for other runs on these workers,
            for their threads, and for the ranks to join. None waits for other runs without a limit,
            then 5 minutes.

    Returns:
        What ``fn`` has returned, in the order of the ranks.

    Raises:
        DistArgumentError: the client is asynchronous, there are no such workers, ``per_rank`` has
            another length, two workers are threads of one process, or a worker's process has a
            default process group already.
        DistTypeError: ``fn`` is not callable.
        OperationTimeoutError: ``fn`` could not start within ``timeout``; the message has the worker
            or ranks.
        RankLostError: a worker was lost, for example killed, before the result of its rank arrived.
        DistError: data of the arguments was lost with its worker, and cannot be computed again.
        Exception: what ``fn`` has raised, for the first rank that failed. A note (before Python
            3.11 the cause) has rank and worker. If the other ranks do not end within 30 s it names
            them; they may still run ``fn``.

    After a failure, or Ctrl-C, the other ranks' calls of unicoll raise an error, too.
    """
    if not callable(fn):
        raise DistTypeError(f"run: fn must be a function, not {type(fn).__name__}")
    if client.asynchronous:
        raise DistArgumentError(
            "run: the client is asynchronous; run waits, and needs a client that is not"
        )
    limit = positive_seconds(timeout)
    deadline = None if limit is None else time.monotonic() + limit
    addresses = _addresses(client, workers)
    with ExitStack() as locks:
        for address in sorted(addresses):
            locks.enter_context(_locked(client, address, deadline))
        # Some workers may have been lost while other runs had the locks.
        if workers is None:
            present = client.nthreads(addresses)
            addresses = [address for address in addresses if address in present]
            if not addresses:
                raise DistArgumentError("run: all workers were lost while other runs had them")
        if per_rank is not None and len(per_rank) != len(addresses):
            raise DistArgumentError(
                f"run: per_rank has {len(per_rank)} values for {len(addresses)} workers"
            )
        seconds = _START_S if deadline is None else seconds_left(deadline, 0.001)
        first = [()] * len(addresses) if per_rank is None else [(value,) for value in per_rank]
        return _Run(client, addresses, seconds).execute(
            lambda rank: (fn, [*first[rank], *args], kwargs)
        )


def _addresses(client: Client, workers: Sequence[str] | None) -> list[str]:
    known = client.nthreads()
    if workers is None:
        if not known:
            raise DistArgumentError(
                "run: the cluster has no workers; Client.wait_for_workers waits for them"
            )
        return sorted(known)
    addresses = [workers] if isinstance(workers, str) else list(workers)
    if not addresses or len(set(addresses)) < len(addresses):
        raise DistArgumentError(
            f"run: workers={addresses} are not the addresses of different workers"
        )
    if unknown := [address for address in addresses if address not in known]:
        raise DistArgumentError(
            f"run: workers {unknown} are not in the cluster, which has {sorted(known)}"
        )
    return addresses


@contextmanager
def _locked(client: Client, address: str, deadline: float | None) -> Iterator[None]:
    """The lock of a worker, which one run at a time has."""
    lock = Lock(f"unicoll-{address}", scheduler_rpc=client.scheduler, loop=client.loop)
    try:
        # Requests are short, because the scheduler goes on to serve the one of a client that has
        # ended meanwhile.
        while not lock.acquire(
            timeout=_LOCK_S if deadline is None else min(_LOCK_S, seconds_left(deadline))
        ):
            if deadline is not None and time.monotonic() >= deadline:
                raise OperationTimeoutError(
                    f"run: another run still has worker {address}", op="run"
                )
        try:
            yield
        finally:
            lock.release()
    finally:
        # The lock renews itself by a callback, which keeps it in memory, unless the lease-timeout
        # is "inf".
        if (renewal := getattr(lock, "refresh_callback", None)) is not None:
            client.loop.add_callback(renewal.stop)


@dataclass(frozen=True)
class _Place:
    """The place of a rank in a run, for its task.

    Attributes:
        run: random text that identifies the run.
        workers: their addresses, by rank.
        seconds: limit of the time until all ranks have joined; it has an effect if the client has
            ended.
        store: host and port of rank 0's store; None for rank 0.
    """

    run: str
    rank: int
    workers: tuple[str, ...]
    secret: KeyText
    seconds: float
    store: tuple[str, int] | None = None

    def describe(self, *ranks: int) -> str:
        """This rank, or ``ranks``, with their workers."""
        return ", ".join(
            f"rank {rank} on worker {self.workers[rank]}" for rank in ranks or (self.rank,)
        )


def _topic(place: _Place) -> str:
    """Dask's topic for the starts of ranks; one for each worker, since Dask forgets no topic."""
    return f"unicoll-{place.workers[0]}"


# --- in the client --------------------------------------------------------------------------------


class _Run:
    """The tasks of one run, seen from the client."""

    def __init__(self, client: Client, workers: list[str], seconds: float) -> None:
        self._client = client
        self._place = _Place(
            secrets.token_hex(8), 0, tuple(workers), new_key_text(), seconds + _END_S
        )
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        # The tasks are Dask's futures, by rank.
        self._tasks: dict[int, Any] = {}
        # What the tasks return is fetched as soon as it exists, so that a worker may be lost
        # afterwards.
        self._results: dict[int, Future[Any]] = {}
        # These are ranks that have ended, events of ranks that have started, and None after an
        # answer of a worker. The client's own thread only puts them here. All else is changed by
        # the thread in execute(), and needs no lock.
        self._news: queue.SimpleQueue[int | Mapping[str, Any] | None] = queue.SimpleQueue()
        self._started: set[int] = set()
        self._store: tuple[str, int] | None = None
        # What ranks have raised is in the order in which they have ended.
        self._ended: dict[int, BaseException | None] = {}
        # The worker of these ranks was lost before they ended.
        self._lost: set[int] = set()
        # Dask's futures in the arguments are listed by rank.
        self._data: dict[int, list[Any]] = {}

    def execute(self, call: Callable[[int], _Call]) -> list[Any]:
        """Make the call of each rank on its worker; what they return."""
        ranks = range(len(self._place.workers))
        topic = _topic(self._place)
        with ExitStack() as cleanup:
            # The client keeps this function until the next run, so it refers to no result. It is
            # there before the first task, since Dask forwards no earlier events.
            self._client.subscribe_topic(topic, partial(_receive, self._place.run, self._news))
            cleanup.callback(self._client.unsubscribe_topic, topic)
            cleanup.callback(lambda: self._client.cancel([*self._tasks.values()]))
            try:
                self._submit(self._place, call(0))
                while not self._has_failed() and len(self._ended) < len(ranks):
                    self._await_news()
                    if self._store is not None and len(self._tasks) == 1:
                        for rank in ranks[1:]:
                            self._submit(
                                replace(self._place, rank=rank, store=self._store), call(rank)
                            )
                    self._check_start()
                if self._has_failed():
                    raise self._failure()
                return [self._results[rank].result() for rank in ranks]
            except BaseException as error:
                # If a rank has failed, _failure() has ended the others already. This exception is
                # the client's own, for example that of Ctrl-C.
                if not self._has_failed():
                    running = self._end_others(
                        f"the client has ended the run: {type(error).__name__}: {error}"
                    )
                    self._note_running(error, running)
                raise

    def _submit(self, place: _Place, call: _Call) -> None:
        self._data[place.rank] = futures_of(call)
        if (lost := self._lost_data(place.rank)) is not None:
            raise lost
        self._tasks[place.rank] = task = self._client.submit(
            _run_rank,
            place,
            *call,
            # No other run has this key: Dask takes two tasks with equal keys for one.
            key=(f"{funcname(call[0])}-{place.run}", place.rank),
            workers=[place.workers[place.rank]],
        )
        self._results[place.rank] = result = self._background(_fetch(task))
        result.add_done_callback(lambda _: self._news.put(place.rank))

    def _check_start(self) -> None:
        """OperationTimeoutError if a rank has not started in time."""
        missing = [
            rank for rank in self._tasks if rank not in self._started and rank not in self._ended
        ]
        if missing and not self._has_failed() and time.monotonic() > self._deadline:
            error = OperationTimeoutError(
                f"run: after {self._seconds:.3g} s has not started:"
                f" {self._place.describe(*missing)}; all threads of the worker execute other tasks,"
                " or it is paused",
                op="run",
                rank=missing[0],
            )
            error.missing = missing
            raise error

    def _await_news(self) -> None:
        """Wait a moment for the next rank that starts or ends; if there is none, find lost
        workers."""
        try:
            news = self._news.get(timeout=_POLL_S)
        except queue.Empty:
            rest = {rank: self._place.workers[rank] for rank in self._tasks}
            present = self._client.nthreads([*rest.values()])
            gone = {rank for rank, worker in rest.items() if worker not in present}
            # The result of a rank that has ended is in the client already.
            self._lost |= gone - self._ended.keys()
            for rank in self._data.keys() - self._started - self._ended.keys() - self._lost:
                if (lost := self._lost_data(rank)) is not None:
                    self._ended[rank] = lost
            return
        if isinstance(news, int):
            try:
                error = self._results[news].exception()
            except CancelledError as cancelled:
                error = self._lost_data(news) or cancelled
            if isinstance(error, KilledWorker):
                self._lost.add(news)
            else:
                self._ended[news] = error
        elif news is not None:
            rank = news["rank"]
            if rank in self._started and rank not in self._ended:
                # Another process with the address of its worker executes the task again.
                self._lost.add(rank)
            self._started.add(rank)
            self._store = self._store or (news["store"] and tuple(news["store"]))

    def _lost_data(self, rank: int) -> DistError | None:
        """The error of a rank whose arguments have data that Dask cannot get again; without it the
        task waits."""
        futures = self._data[rank]
        # The scheduler cancels scattered data that is lost, and what depends on it.
        lost = [future.key for future in futures if future.status == "cancelled"]
        waiting = [future.key for future in futures if future.status in ("pending", "lost")]
        if not lost and waiting:
            lost = self._client.run_on_scheduler(_keys_without_worker, keys=waiting)
        if not lost:
            return None
        return DistError(
            f"run: data in the arguments of {self._place.describe(rank)} was lost with its worker,"
            f" or cancelled, and cannot be computed again: {', '.join(map(str, lost))}; scatter it"
            " again, or submit its task without workers="
        )

    def _running(self) -> set[int]:
        """The ranks that have started and not ended, as far as is known."""
        return self._started - self._ended.keys() - self._lost

    def _has_failed(self) -> bool:
        return bool(self._lost) or any(error is not None for error in self._ended.values())

    def _failure(self) -> BaseException:
        """The first failure, once the other ranks have ended."""
        rank, error = self._first_failure()
        running = self._end_others(f"{self._place.describe(rank)}: {type(error).__name__}: {error}")
        if isinstance(error, _CONSEQUENCES):
            # Its cause may be known now.
            rank, error = self._first_failure()
        if rank not in self._lost:
            error.add_note(f"the task of {self._place.describe(rank)} ended with this")
        self._note_running(error, running)
        return error

    def _note_running(self, error: BaseException, running: set[int]) -> None:
        if running:
            error.add_note(
                f"not ended within {_END_S:g} s: {self._place.describe(*sorted(running))}"
            )

    def _first_failure(self) -> tuple[int, BaseException]:
        """The rank that has failed first and its error: a lost one, else one that is not the
        consequence of another."""
        errors = [(rank, error) for rank, error in self._ended.items() if error is not None]
        first = next((one for one in errors if not isinstance(one[1], _CONSEQUENCES)), None)
        if first is None and self._lost:
            lost, *_ = ranks = sorted(self._lost)
            text = (
                f"run: lost before its result had arrived: {self._place.describe(*ranks)}; the"
                " worker was killed, has ended, or has lost its connection to the scheduler, which"
                " it also does if it cannot import unicoll"
            )
            error = RankLostError(text, rank=lost, op="run")
            # One of these may say how the process has ended.
            others = (one for _, one in errors if not isinstance(one, GroupAbortedError))
            error.__cause__ = next(others, None)
            return lost, error
        return first or errors[0]

    def _end_others(self, reason: str) -> set[int]:
        """End the job on all workers, and wait for the ranks that have started; those that do not
        end in time."""
        answers = {
            rank: self._background(self._end(self._place.workers[rank], reason))
            for rank in self._tasks
        }
        # The loop below waits for news, so each answer is put there, too.
        for answer in answers.values():
            answer.add_done_callback(lambda _: self._news.put(None))
        deadline = time.monotonic() + _END_S
        # A worker that has died does not answer for long, but a look at the workers shows that it
        # is lost.
        while self._running() or any(
            not answer.done() for rank, answer in answers.items() if rank not in self._lost
        ):
            if time.monotonic() > deadline:
                break
            self._await_news()
        # The answer of a worker that has died may still be missing.
        for answer in answers.values():
            answer.cancel()
        return self._running()

    async def _end(self, worker: str, reason: str) -> None:
        # There is one call for each worker, because a call for all of them waits for one that has
        # died.
        await self._client.run(_end, self._place.run, reason, workers=[worker], on_error="ignore")

    def _background(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(call, self._client.loop.asyncio_loop)


def _keys_without_worker(keys: list[Any], dask_scheduler: Any) -> list[Any]:
    """Those of the keys that only workers which are gone may compute, or need such a one; called in
    the scheduler."""
    tasks, lost, rest = dask_scheduler.tasks, set(), [(key, key) for key in keys]
    seen = set(rest)
    while rest:
        # The second key is one that the first needs, or the same.
        key, needed = rest.pop()
        task = tasks.get(needed)
        # The client has not sent it yet.
        if task is None:
            continue
        allowed = task.worker_restrictions
        if task.state == "no-worker" and allowed and not allowed & dask_scheduler.workers.keys():
            lost.add(key)
        more = {(key, other.key) for other in task.waiting_on or ()} - seen
        seen |= more
        rest += more
    return sorted(lost, key=str)


def _receive(
    run: str, news: queue.SimpleQueue[Any], event: tuple[float, Mapping[str, Any]]
) -> None:
    """Forward an event of Dask, that a rank of the run has started."""
    _, message = event
    if message["run"] == run:
        news.put(message)


async def _fetch(task: Any) -> Any:
    return await task


# --- on a worker ----------------------------------------------------------------------------------

_changed = threading.Condition()
_member: _Member | None = None
"""This process as a rank."""
_failed: deque[str] = deque(maxlen=1000)
"""Runs that have failed; their tasks do not start any more."""


def _run_rank(
    place: _Place, fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """The task of a rank."""
    with _membership(place) as member:
        try:
            member.join()
            result = fn(*args, **kwargs)
        except BaseException as error:
            try:
                # The others get the error as the reason.
                world.leave(error)
            finally:
                member.close(linger=False)
            raise
        try:
            world.leave()
        finally:
            # Others may still be in the job.
            member.close(linger=True)
        return result


@contextmanager
def _membership(place: _Place) -> Iterator[_Member]:
    """Make this process the rank, once no rank of another run is in it."""
    global _member
    with _changed:
        if _member is not None and _member.place.run == place.run:
            raise DistArgumentError(
                f"{place.describe(_member.place.rank, place.rank)} are threads of one process,"
                " which can be one rank only: start the cluster with a process for each worker, as"
                " LocalCluster(processes=True) does"
            )
        # A run that did not end within _END_S has released its locks, and its function may still be
        # in this process.
        _changed.wait_for(lambda: _member is None or place.run in _failed, place.seconds)
        if place.run in _failed:
            raise GroupAbortedError(f"{place.describe()} did not start, since the run has failed")
        if _member is not None:
            raise OperationTimeoutError(
                f"{place.describe()} did not start: its process executes the function of an"
                " earlier run",
                rank=place.rank,
                op="run",
            )
        if world.is_initialized():
            raise DistArgumentError(
                f"the process of {place.describe()} has a default process group already, from a"
                " call of init_process_group in another task or a preloaded module; call"
                " destroy_process_group there first",
                rank=place.rank,
            )
        _member = member = _Member(place)
    try:
        yield member
    finally:
        with _changed:
            _member = None
            _changed.notify_all()


class _Member:
    """This process as the rank of a run."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self._deadline = time.monotonic() + place.seconds
        self._store: TCPStore | None = None
        self._job: Job | None = None
        # It is the client's reason for ending the run.
        self._reason: str | None = None

    def join(self) -> None:
        """Wait until all ranks have started, and make their group the default group."""
        place = self.place
        try:
            if place.store is not None:
                self._tell_start(None)
            store = self._open_store()
            # Another thread may call end() at any time. The lock makes sure that end() closes this
            # store, or that this rank finds the reason.
            with _changed:
                self._store = store
                self._raise_if_ended()
            if place.store is None:
                self._tell_start((store.host, store.port))
            self._await_ranks(store)
            ranks = len(place.workers)
            # The job has a name, so that variables of the launcher that has started the workers are
            # not used.
            group = join(
                store=store, name=_NAME, rank=place.rank, world_size=ranks, secret=place.secret
            )
            with _changed:
                self._job = group.job
            enter_world(group.job)
            # An end() that came before the job was known has aborted no group.
            self._raise_if_ended()
        except DistError:
            # The error may be only that of a store that end() has closed, or of a group that it has
            # aborted.
            self._raise_if_ended()
            raise

    def _raise_if_ended(self) -> None:
        if self._reason is not None:
            raise GroupAbortedError(self._reason) from None

    def _open_store(self) -> TCPStore:
        """The store, which rank 0 serves at its worker's address."""
        place = self.place
        secret = given_secret(place.secret)
        if place.store is None:
            host = get_address_host(place.workers[0])
            bind = host if interfaces.is_local_address(host) else None
            return TCPStore(
                host, 0, is_master=True, wait_for_workers=False, secret=secret, bind=bind
            )
        limits = backoff(*_CONNECT_S)
        # Nothing interrupts an attempt, so between two of them this rank looks whether the run has
        # failed.
        while True:
            try:
                return TCPStore(
                    *place.store, timeout=next(limits), wait_for_workers=False, secret=secret
                )
            except DistNetworkError as error:
                self._raise_if_ended()
                if isinstance(error, AuthenticationError) or time.monotonic() > self._deadline:
                    raise

    def _tell_start(self, store: tuple[str, int] | None) -> None:
        """Tell the client that this rank has started; rank 0 also where its store is, for the other
        ranks."""
        event = {"run": self.place.run, "rank": self.place.rank, "store": store}
        get_worker().log_event(_topic(self.place), event)

    def _await_ranks(self, store: TCPStore) -> None:
        place = self.place
        keys = [f"started/{rank}" for rank in range(len(place.workers))]
        store.set(keys[place.rank], "")
        store.wait(keys, timedelta(seconds=seconds_left(self._deadline, 0.001)))
        store.set_timeout(timedelta(seconds=_START_S))

    def end(self, reason: str) -> None:
        """From another thread: make this rank's calls, and :meth:`join`, raise an error with the
        reason."""
        with _changed:
            self._reason = reason
            store, job = self._store, self._job
        # This ends a wait of join() in the store.
        if store is not None:
            store.close()
        if job is not None:
            for group in [*job.groups]:
                # The client calls this on all workers, so the other members need no notice.
                group.abort_on_this_rank(GroupAbortedError(reason))

    def close(self, linger: bool) -> None:
        """Close the store; rank 0's may go on until all others have closed theirs."""
        if self._store is not None:
            self._store.close(linger)


async def _end(run: str, reason: str) -> None:
    """End the job of a run that has failed on this worker."""
    # A task that begins later finds its run among the failed ones; one that has begun is the
    # member.
    with _changed:
        member = _member
        _failed.append(run)
        _changed.notify_all()
    if member is not None and member.place.run == run:
        # Closing may block, and this coroutine is on the worker's event loop.
        await asyncio.to_thread(member.end, reason)
