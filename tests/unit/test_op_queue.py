"""The queue of a group's operations: the thread that executes a call, and the order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.order import await_true
from unicoll.backend.host import op_queue
from unicoll.backend.host.op_queue import OpQueue
from unicoll.calls import work
from unicoll.calls.call import Call
from unicoll.calls.ops import OPS
from unicoll.errors import DistError


def a_call() -> Call:
    return Call(OPS["barrier"], (), (), 10.0)


class Executed:
    """Executes calls by noting their numbers and threads; each waits for ``gate`` first."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.threads: list[threading.Thread] = []
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None

    def __call__(self, call: Call) -> None:
        self.begun.set()
        assert self.gate.wait(30)
        self.seqs.append(call.seq)
        self.threads.append(threading.current_thread())
        if self.error is not None:
            raise self.error


@pytest.fixture
def queue() -> Iterator[OpQueue]:
    made = OpQueue("unicoll-test")
    yield made
    assert made.close(10)


@pytest.fixture
def execute() -> Executed:
    return Executed()


class NoThread:
    """The queue's thread does not take a call within the block: it waits for the queue's lock."""

    def __init__(self, queue: OpQueue) -> None:
        self._queue = queue

    def __enter__(self) -> None:
        self._wake, self._queue._wake_thread = self._queue._wake_thread, lambda: None  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self._queue._wake_thread = self._wake  # type: ignore[method-assign]
        self._queue.resume()


def test_a_waiting_thread_executes_the_next_call_itself(queue: OpQueue, execute: Executed) -> None:
    with NoThread(queue):
        works = [queue.post((a_call(),), execute) for _ in range(3)]
        for work in works:
            work.wait(None)
    assert execute.seqs == [1, 2, 3]
    assert set(execute.threads) == {threading.current_thread()}
    assert not queue.in_background


def test_a_call_is_queued_while_the_one_before_ends(queue: OpQueue, execute: Executed) -> None:
    execute.gate.clear()
    first = threading.Thread(target=queue.run, args=(execute, a_call()), daemon=True)

    class EndsFirst(deque[Any]):
        """The first call ends after the second one has seen it, and before that is in the queue."""

        def append(self, item: Any) -> None:
            execute.gate.set()
            first.join(30)
            super().append(item)

    queue._queue = EndsFirst()
    first.start()
    assert execute.begun.wait(30)
    second = threading.Thread(target=queue.run, args=(execute, a_call()), daemon=True)
    second.start()
    second.join(30)
    assert not second.is_alive()
    assert execute.seqs == [1, 2]


def test_calls_that_nothing_waits_for_are_executed_in_the_background(
    queue: OpQueue, execute: Executed
) -> None:
    works = [queue.post((a_call(),), execute) for _ in range(3)]
    await_true(lambda: all(work.done() for work in works))
    assert execute.seqs == [1, 2, 3]
    assert {thread.name for thread in execute.threads} == {"unicoll-test"}


def test_the_queues_thread_still_looks_after_waiting_threads_have_executed_calls(
    queue: OpQueue, execute: Executed
) -> None:
    for i in range(300):
        work = queue.post((a_call(),), execute)
        if i % 3:
            work.wait(None)
        else:
            work.wait(30.0)  # the queue's thread executes it
            assert execute.threads[-1].name == "unicoll-test"
    assert execute.seqs == [*range(1, 301)]


def test_the_queues_thread_looks_less_often_while_waiting_threads_execute_calls(
    queue: OpQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds
        if len(pauses) <= 8:
            queue._posted += 1

    with monkeypatch.context() as patched:
        patched.setattr(op_queue, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        queue._poll()
    assert pauses[:8] == pytest.approx([1e-4, 2e-4, 4e-4, 8e-4, 1e-3, 1e-3, 1e-3, 1e-3])
    assert sum(pauses[8:]) == pytest.approx(2e-3, abs=1e-3)  # after the last call that was posted


def test_a_waiting_thread_leaves_earlier_calls_and_those_behind_to_the_queues_thread(
    queue: OpQueue, execute: Executed
) -> None:
    with NoThread(queue):
        works = [queue.post((a_call(),), execute) for _ in range(3)]
        works[0].wait(None)  # here
    works[2].wait(None)  # behind the second, which nothing waits for
    queue.run(execute, a_call())
    assert execute.seqs == [1, 2, 3, 4]
    assert execute.threads[0] is threading.current_thread()
    assert execute.threads[1].name == "unicoll-test"


@pytest.mark.parametrize("why", ["callback", "timeout", "on_thread", "running"])
def test_a_waiting_thread_does_not_execute_the_call(why: str, queue: OpQueue, execute: Executed) -> None:
    if why == "running":
        execute.gate.clear()
    work = queue.post((a_call(),), execute, on_thread=why == "on_thread")
    called: list[threading.Thread] = []
    if why == "callback":
        with NoThread(queue):
            work = queue.post((a_call(),), execute)
            work.add_done_callback(lambda: called.append(threading.current_thread()))
    if why == "running":
        assert execute.begun.wait(30)
        threading.Timer(0.05, execute.gate.set).start()
    work.wait(30.0 if why == "timeout" else None)
    assert {thread.name for thread in execute.threads} == {"unicoll-test"}
    if why == "callback":
        await_true(lambda: called)
        assert called == [execute.threads[-1]]


def test_a_call_of_another_thread_during_one_of_a_waiting_thread_is_behind_it(
    queue: OpQueue, execute: Executed
) -> None:
    execute.gate.clear()
    with NoThread(queue):
        work = queue.post((a_call(),), execute)
        waiting = threading.Thread(target=work.wait, args=(None,))
        waiting.start()
        assert execute.begun.wait(30)
        assert queue._running is work
        other = threading.Thread(target=queue.run, args=(execute, a_call()))
        other.start()
        later = queue.post((a_call(),), execute)
        assert not queue.close(0.05)  # a call is being executed
        execute.gate.set()
        waiting.join(30)
    later.wait(30)
    other.join(30)
    assert sorted(execute.seqs) == [1, 2, 3]
    assert execute.seqs[0] == 1
    assert execute.threads[0] is waiting


def test_an_error_is_that_of_its_call_alone(queue: OpQueue, execute: Executed) -> None:
    execute.error = DistError("refused")
    with NoThread(queue):
        work = queue.post((a_call(),), execute)
        behind = queue.post((a_call(),), execute)
        with pytest.raises(DistError, match="refused"):
            work.wait(None)
        assert not behind.done()
        execute.error = None
    behind.wait(None)
    queue.run(execute, a_call())
    assert execute.seqs == [1, 2, 3]


def test_when_the_group_has_failed_the_calls_behind_have_ended_with_the_wait(execute: Executed) -> None:
    queue = OpQueue("unicoll-test", failure=lambda: DistError("failed"))
    execute.error = DistError("the group has failed")
    with NoThread(queue):
        works = [queue.post((a_call(),), execute) for _ in range(3)]
        with pytest.raises(DistError, match="the group has failed"):
            works[0].wait(None)
        assert all(work.exception() is execute.error for work in works)
    assert queue.close(10)


def test_an_interrupt_of_a_waiting_thread_ends_its_call(queue: OpQueue, execute: Executed) -> None:
    execute.error = KeyboardInterrupt()
    with NoThread(queue):
        work = queue.post((a_call(),), execute)
        with pytest.raises(KeyboardInterrupt):
            work.wait(None)
    assert work.done()
    assert work.before_wait is None  # a completion does not keep its group alive
    execute.error = None
    queue.run(execute, a_call())  # the queue still works
    assert execute.seqs == [1, 2]


def test_a_posted_call_cannot_be_withdrawn(queue: OpQueue) -> None:
    taken_back: list[bool] = []
    posted, blocking = a_call(), a_call()
    with NoThread(queue):
        queue.post((posted,), lambda call: taken_back.append(queue.withdraw(call))).wait(None)
    queue.run(lambda call: taken_back.append(queue.withdraw(call)), blocking)
    assert taken_back == [False, True]
    assert queue.sequence == 1


def test_a_timed_call_that_two_threads_end_at_once_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call = a_call()
    call.timed = True
    completion = work.HostCompletion((call,))
    interrupting = [lambda: completion.finish(DistError("aborted"))]

    def clock() -> float:
        """Another thread ends the call while this one reads the clock."""
        if interrupting:
            interrupting.pop()()
        return 0.0

    monkeypatch.setattr(work, "time", SimpleNamespace(perf_counter=clock))
    completion.finish()
    assert completion.done()
    assert isinstance(completion.exception(), DistError)


def behind_another(queue: OpQueue, execute: Executed) -> tuple[threading.Thread, list[BaseException]]:
    """A thread with a call that is queued, and what the call raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            queue.run(execute, a_call())
        except DistError as e:
            raised.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    await_true(lambda: queue._queue)
    return thread, raised


def test_a_queued_call_ends_when_the_group_fails(execute: Executed) -> None:
    """Also if the call before it does not end."""
    failure: list[DistError] = []
    queue = OpQueue("unicoll-test", failure=lambda: failure[0] if failure else None)
    execute.gate.clear()
    first = threading.Thread(target=queue.run, args=(execute, a_call()), daemon=True)
    first.start()
    assert execute.begun.wait(30)
    second, raised = behind_another(queue, execute)
    failure.append(DistError("it failed"))
    second.join(30)
    assert raised == failure
    execute.gate.set()
    first.join(30)
    assert execute.seqs == [1]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_waiting_thread_waits_no_longer_than_the_calls_may_take(
    execute: Executed, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them may take its timeout; then the group fails, with an error that names the one that does not end.

    The first is a posted one, which the queue's thread does not end; the second a blocking one behind it.
    """
    now = [0.0]
    monkeypatch.setattr(op_queue, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    monkeypatch.setattr(op_queue, "_TICK_S", 0.001)
    failures: list[BaseException] = []
    error = DistError("it failed")

    def fail(cause: BaseException) -> BaseException:
        failures.append(cause)
        return error

    queue = OpQueue("unicoll-test", fail)
    execute.gate.clear()
    calls = tuple(a_call() for _ in range(batch))
    posted, raised_by_first = queue.post(calls, execute), []
    assert execute.begun.wait(30)

    def wait() -> None:
        with pytest.raises(DistError) as caught:
            posted.wait(None)
        raised_by_first.append(caught.value)

    first = threading.Thread(target=wait, daemon=True)
    first.start()
    second, raised = behind_another(queue, execute)
    second.join(0.1)
    now[0] = 10.0 * batch + 0.9
    second.join(0.1)
    assert not failures
    now[0] = 10.0 * batch + 1.1
    second.join(30)
    first.join(30)
    assert raised == raised_by_first == [error]
    assert all("barrier" in str(failure) for failure in failures)
    execute.gate.set()
    assert queue.close(10)
