"""Finding and killing a job's processes, so that none outlives the job.

A job's processes are identified in two ways. Each worker leads its own session and process group,
and has the job's random token in the environment variable UNICOLL_JOB, which its descendants
inherit even if they leave the session. A launch inside a launch appends its token, so that the
outer job still identifies all of its processes. A process that should outlive the job removes
UNICOLL_JOB from its environment and leaves the worker's session.

This file is also run by its path, as the guard: a process that outlives a launcher killed by
SIGKILL.

    python process_cleanup.py TOKEN SCRATCH_DIRECTORY     (the second may be empty)

It reads lines from standard input: ``+PID`` is the leader of a worker's session, ``-PID`` means
that the worker has been reaped and nothing of its session is left, ``done`` means that the launcher
has cleaned up. At the end of input without ``done`` it kills the job and removes the scratch
directory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection

JOB_VARIABLE = "UNICOLL_JOB"


def members(token: str, leaders: Collection[int]) -> list[int]:
    """Pids of the job's running processes, from /proc, without this process and other users'
    processes."""
    marker = token.encode()
    own_pid = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own_pid:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command name is in parentheses and may contain any character, also
                # parentheses.
                state, _parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
            # A worker stays a zombie until it is reaped; as a member it would be killed in vain
            # until the deadline.
            if state in (b"Z", b"X"):
                continue
            # A process in a worker's session is a member also if it has removed the variable.
            if int(session) not in leaders:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if marker not in file.read():
                        continue
        except (OSError, ValueError):
            # The process has ended, or is another user's.
            continue
        found.append(int(name))
    return found


def kill_group(leader: int, number: int) -> None:
    """Send a signal to the process group of ``leader``; an empty group is not an error."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        pass


def kill_process(pid: int, number: int) -> None:
    """Send a signal to a process; it may have ended."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def kill_members(token: str, leaders: Collection[int], seconds: float) -> list[int]:
    """SIGKILL the job's processes until none is left, for at most ``seconds``; returns the
    remaining ones."""
    deadline = time.monotonic() + seconds
    # A process may start another one between the search and its signal, so the search is repeated
    # until it finds none.
    while left := members(token, leaders):
        for pid in left:
            kill_process(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return []


class Guard:
    """The launcher's side: starts the guard process and sends it the workers' sessions."""

    def __init__(self, token: str, scratch: str = "") -> None:
        # The guard process itself does not need this module, and does not load it.
        import subprocess

        self._timeout = subprocess.TimeoutExpired
        # The variable is that of an enclosing job. With it the guard would be a process of that
        # job, which may be killed before it has removed the directory.
        environment = {k: v for k, v in os.environ.items() if k != JOB_VARIABLE}
        # The end of its input tells the guard that the launcher has ended: workers do not inherit
        # the write end, which is not inheritable. In a session of its own it gets no signal that is
        # sent to the launcher's group.
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
        """Add a worker's session, by its leader."""
        self._send(f"+{leader}\n")

    def forget(self, leader: int) -> None:
        """Remove a worker's session, before its pid may be that of another process."""
        self._send(f"-{leader}\n")

    def stop(self) -> None:
        """End the guard process once the job is cleaned up."""
        self._send("done\n")
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

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            # The guard was killed. The workers still die with the launcher, by the signal of the
            # kernel that worker_main.py requests.
            pass


def _main(token: str, scratch: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # It ends with its launcher, not before.
        signal.signal(number, signal.SIG_IGN)
    leaders: set[int] = set()
    for line in sys.stdin:
        if line == "done\n":
            return
        (leaders.add if line[0] == "+" else leaders.discard)(int(line[1:]))
    # The launcher has just died, so these pids cannot have been reused yet.
    for leader in leaders:
        kill_group(leader, signal.SIGKILL)
    kill_members(token, leaders, 30.0)
    if scratch:
        import shutil

        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
