"""Nothing that a job starts outlives it: finding and killing a job's processes.

A job's processes are known by two signs. Each worker leads a session (and a process group) of its own, and
carries the job's random token in the environment variable UNICOLL_JOB, which its descendants inherit even
when they leave the session. A launch inside a launch appends its token, so that the outer job still knows
all of its processes. A process that is meant to stay must drop UNICOLL_JOB from its environment and leave
the worker's session.

This file also runs by itself, by path, as the guard: a process that outlives a launcher killed by SIGKILL.

    python guard.py TOKEN SCRATCH_DIRECTORY     (the second may be empty)

It reads lines from standard input: ``+PID`` names the leader of a worker's session, ``done`` says that the
launcher has cleaned up by itself. At the end of input without ``done`` it kills the job and removes the
scratch directory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection

__all__ = ["JOB_VARIABLE", "Guard", "kill_group", "kill_members", "members"]

JOB_VARIABLE = "UNICOLL_JOB"


def members(token: str, leaders: Collection[int]) -> list[int]:
    """Pids of the job's running processes, from /proc; never this one, nor other users' processes."""
    marker = token.encode()
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == me:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command name is in parentheses and may hold anything; what follows the last one is
                # regular.
                state, _parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
            if state in (b"Z", b"X"):
                continue
            if int(session) not in leaders:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if marker not in file.read():
                        continue
        except (OSError, ValueError):
            continue  # gone meanwhile, or not ours to see
        found.append(int(name))
    return found


def kill_group(leader: int, number: int) -> None:
    """Send a signal to the process group that ``leader`` leads; an empty group is no error."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        pass


def kill_members(token: str, leaders: Collection[int], seconds: float) -> list[int]:
    """SIGKILL the job's processes until none is left, at most so many seconds; returns those still there."""
    deadline = time.monotonic() + seconds
    while left := members(token, leaders):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return []


class Guard:
    """The launcher's side: starts the guard process and tells it whom to watch."""

    def __init__(self, token: str, scratch: str = "") -> None:
        import subprocess  # not needed, and not loaded, in the guard process itself

        self._timeout = subprocess.TimeoutExpired
        environment = {
            k: v for k, v in os.environ.items() if k != JOB_VARIABLE
        }  # not to be taken for a member
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), token, scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )

    def watch(self, leader: int) -> None:
        """Name the leader of a worker's session."""
        self._tell(f"+{leader}\n")

    def dismiss(self) -> None:
        """The job is cleaned up: let the guard go, and reap it."""
        self._tell("done\n")
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass
        try:
            self._process.wait(10)
        except self._timeout:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            pass  # somebody killed the guard; the workers still die with the launcher


def _main(token: str, scratch: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it goes when its launcher goes, not before
    leaders = set()
    for line in sys.stdin:
        if line == "done\n":
            return
        leaders.add(int(line[1:]))
    # The launcher died this instant, so these numbers cannot have been given to other processes yet.
    for leader in leaders:
        kill_group(leader, signal.SIGKILL)
    kill_members(token, leaders, 30.0)
    if scratch:
        import shutil

        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
