"""Runs probes, which may hang or crash, in parallel in forked child processes with a deadline.

A probe is a generator of facts: dictionaries that can be written as JSON. Facts that it yields
before it hangs or crashes are kept. The fact ``at`` names the current step, for the message about a
probe that does not finish.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn, cast

from unicoll.process.formatting import signal_name

Facts = dict[str, Any]
Probe = Callable[[], Iterator[Facts]]

_PR_SET_PDEATHSIG = 1
_REAP_S = 0.3


def run_probes(probes: Mapping[str, Probe], deadline: float) -> dict[str, Facts]:
    """Run the probes and return the facts of each, after at most ``deadline`` seconds.

    In addition to the probe's facts a section has ``unfinished``, the deadline in seconds, if the
    probe did not finish, and ``problem`` if it failed: the exception, or the signal that ended the
    child. ``lines`` is always present.
    """
    end = time.monotonic() + deadline
    sections: dict[str, Facts] = {name: {"lines": []} for name in probes}
    children: dict[str, tuple[int, Connection]] = {}
    try:
        for name, probe in probes.items():
            children[name] = _fork(probe)
        running = {pipe: name for name, (_, pipe) in children.items()}
        while running and (left := end - time.monotonic()) > 0:
            for pipe in cast(list[Connection], wait(list(running), left)):
                try:
                    sections[running[pipe]] |= json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    del running[pipe]
    finally:
        statuses = {name: _reap(pid, pipe) for name, (pid, pipe) in children.items()}
    for name, facts in sections.items():
        _add_end(facts, name not in running.values(), statuses[name], deadline)
    return sections


def _fork(probe: Probe) -> tuple[int, Connection]:
    reading, writing = Pipe(duplex=False)
    with warnings.catch_warnings():
        # NumPy's threads have fork handlers, and no other library has started threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        reading.close()
        _run_child(probe, writing)
    writing.close()
    return pid, reading


def _run_child(probe: Probe, pipe: Connection) -> NoReturn:
    """In the child: send each fact as JSON and exit without the parent's exit handlers."""
    try:
        # The child has a process group, with which the processes that it starts are killed.
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        # Libraries write to standard error.
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        warnings.simplefilter("ignore")
        try:
            for facts in probe():
                _send(pipe, facts)
        except BaseException as e:
            text = " ".join(str(e).split())
            _send(pipe, {"problem": f"{type(e).__name__}: {text}" if text else type(e).__name__})
    finally:
        os._exit(0)


def _send(pipe: Connection, facts: Facts) -> None:
    pipe.send_bytes(json.dumps(facts, default=str).encode())


def _reap(pid: int, pipe: Connection) -> int:
    """Kill a child and its process group; returns its exit status, negative for a signal.

    A child in an uninterruptible call of a driver does not end by SIGKILL; it is not waited for.
    """
    pipe.close()
    # The process group may not exist yet.
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    deadline = time.monotonic() + _REAP_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() >= deadline:
            return -signal.SIGKILL
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


def _add_end(facts: Facts, ended: bool, status: int, deadline: float) -> None:
    """Add how a probe ended, if it did not finish."""
    at = facts.pop("at", "")
    if not ended:
        facts["unfinished"] = deadline
        facts["lines"] = [
            *facts["lines"],
            f"{at or 'this probe'} did not finish within {deadline:g} s",
        ]
    elif status < 0 and status != -signal.SIGKILL:
        facts["problem"] = f"{at or 'this probe'} ended the process by {signal_name(-status)}"
    if "problem" in facts:
        facts["lines"] = [*facts["lines"], facts["problem"]]
