"""Questions that may hang or crash, each in a forked child with a deadline; all at the same time.

A question is a generator of facts, dictionaries that can be written as JSON. What it gave before it hung or crashed
counts. The fact ``at`` says what is being tried, for the words about a question that does not end.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

__all__ = ["Facts", "Probe", "ask"]

Facts = dict[str, Any]
Probe = Callable[[], Iterator[Facts]]

_PR_SET_PDEATHSIG = 1
_REAP_S = 0.3


def ask(probes: Mapping[str, Probe], deadline: float) -> dict[str, Facts]:
    """The facts of each probe, after ``deadline`` seconds at most.

    Beside its own facts a section has ``unfinished``, the deadline in seconds, where the probe did not end in time,
    and ``problem`` where it failed: the exception, or the signal that ended the child. ``lines`` is always there.
    """
    end = time.monotonic() + deadline
    children: dict[str, tuple[int, int]] = {}
    try:
        for name, probe in probes.items():
            children[name] = _fork(probe)
        raw, ended = _read({pipe: name for name, (_, pipe) in children.items()}, end)
    finally:
        statuses = {name: _reap(pid, pipe) for name, (pid, pipe) in children.items()}
    return {name: _facts(raw[name], name in ended, statuses[name], deadline) for name in probes}


def _fork(probe: Probe) -> tuple[int, int]:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # NumPy's threads have their own handlers for forks, and no other library has started any.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(probe, writing)
    os.close(writing)
    return pid, reading


def _answer(probe: Probe, pipe: int) -> NoReturn:
    """In the child: write the facts, one line of JSON each, and leave without the parent's handlers."""
    try:
        os.setpgid(0, 0)  # so that what the probe starts ends with it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # libraries write there
            os.dup2(nowhere, standard)
        warnings.simplefilter("ignore")
        try:
            for facts in probe():
                _write(pipe, facts)
        except BaseException as e:
            text = " ".join(str(e).split())
            _write(pipe, {"problem": f"{type(e).__name__}: {text}" if text else type(e).__name__})
    finally:
        os._exit(0)


def _write(pipe: int, facts: Facts) -> None:
    data = json.dumps(facts, default=str).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]


def _read(names: Mapping[int, str], end: float) -> tuple[dict[str, bytes], set[str]]:
    """What came from each pipe until ``end``, and which of them were closed by then."""
    raw = dict.fromkeys(names.values(), b"")
    ended: set[str] = set()
    with selectors.DefaultSelector() as selector:
        for pipe in names:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                raw[names[key.fd]] += data
                if not data:
                    selector.unregister(key.fd)
                    ended.add(names[key.fd])
    return raw, ended


def _reap(pid: int, pipe: int) -> int:
    """End a child and all that it has started; its exit status, negative for a signal.

    A child in a call of a driver that cannot be interrupted does not even end by SIGKILL: it is left.
    """
    os.close(pipe)
    for kill in (os.killpg, os.kill):  # the group may not have been made yet
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    patience = time.monotonic() + _REAP_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() >= patience:
            return -signal.SIGKILL
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


def _facts(raw: bytes, ended: bool, status: int, deadline: float) -> Facts:
    facts: Facts = {"lines": []}
    complete = raw[: raw.rfind(b"\n") + 1]
    for line in complete.splitlines():
        facts |= json.loads(line)
    at = facts.pop("at", "")
    if not ended:
        facts["unfinished"] = deadline
        facts["lines"] = [*facts["lines"], f"{at or 'this question'} did not end within {deadline:g} s"]
    elif status < 0 and status != -signal.SIGKILL:
        facts["problem"] = f"{at or 'this question'} ended the process by {signal.Signals(-status).name}"
    if "problem" in facts:
        facts["lines"] = [*facts["lines"], facts["problem"]]
    return facts
