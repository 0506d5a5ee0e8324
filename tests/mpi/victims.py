"""Jobs of which one rank is killed or stopped while all of them make calls."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from tests.support.ranks import ProcessJob
from tests.support.worker import enter


def check_victim_is_named(
    number: signal.Signals,
    loop: Callable[..., str],
    *args: object,
    env: dict[str, str] | None = None,
    start: Callable[..., ProcessJob] = ProcessJob,
) -> None:
    """Rank 1 of 3 gets a signal while all ranks are in ``loop``; the error texts of the others name it.

    Args:
        number: SIGKILL or SIGSTOP.
        loop: sends a note once calls have begun, and returns type and text of the error of a call.
        args: of ``loop``.
        env: additional environment variables of the ranks.
        start: starts the job, with its size and ``env``.
    """
    expected = "RankLostError" if number == signal.SIGKILL else "OperationTimeoutError"
    with start(3, env=env) as job:
        job.call(enter)
        job.results()
        job.call(loop, *args)
        job.await_notes()
        time.sleep(random.random() / 20)
        job.signal(1, number)
        for outcome in job.collect(30, [0, 2]):
            kind, _, text = outcome.value.partition(": ")
            assert kind == expected, outcome.value
            assert "rank 1" in text, text
            assert f"pid {job.pids[1]}" in text
        if number == signal.SIGSTOP:
            job.signal(1, signal.SIGKILL)
