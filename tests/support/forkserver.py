"""A process that has imported NumPy and the library and forks ranks: a rank starts in 10 ms instead of 350 ms.

The test process starts one fork server per set of modules when the first rank needs it, and requests processes over a
socket. The fork server ends when that socket closes. A forked rank has its own session, environment, working directory,
module search path, standard output and standard error, like a new interpreter, except that all forks share the hash
seed of str, and that an interpreter releases all objects when it ends. Therefore some ranks still run in a new
interpreter (see :class:`ranks.ProcessJob`).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tests.support import worker
from unicoll.testing.ranks import die_with_parent

_LENGTH = struct.Struct("=i")
_START_S = 60.0
_DESCRIPTORS = 4
"""Descriptors of a request: the rank's pipe, standard output, standard error, and the pipe for its exit code."""


class Forked:
    """A process made by a fork server, with the needed part of the interface of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, -n for signal n; raises TimeoutExpired if the process does not end in ``timeout`` seconds."""
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._ended, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
            code = os.read(self._ended, _LENGTH.size)
            os.close(self._ended)
            # without a code it was killed with the fork server
            self.returncode = _LENGTH.unpack(code)[0] if code else -signal.SIGKILL
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL if the process is running."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal if the process is running."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The client of a fork server, in the test process; ``warnings`` is the value of ``-W`` for it and its forks."""

    def __init__(self, modules: Sequence[str], warnings: str, env: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from tests.support import forkserver;"
            f" forkserver.serve({theirs.fileno()}, {list(modules)!r})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", warnings, "-c", program],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket.settimeout(_START_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, pipe: int, stderr: int, env: Mapping[str, str], arguments: tuple[Any, ...]) -> Forked:
        """Fork a process that calls ``worker.work(pipe, *arguments)`` and exits, in this environment."""
        return self._fork((pipe, 1, stderr), env, worker.work, arguments)

    def run(
        self, script: str, words: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int
    ) -> Forked:
        """Fork a process that runs a script as ``__main__``, with these arguments, and exits."""
        return self._fork((stdout, stdout, stderr), env, _run_script, (script, *words))

    def _fork(
        self, descriptors: tuple[int, int, int], env: Mapping[str, str], function: Any, arguments: Any
    ) -> Forked:
        """Fork a process that calls ``function(first of descriptors, *arguments)``; the others are its output."""
        request = pickle.dumps((dict(env), os.getcwd(), sys.path, function, arguments))
        ended, theirs = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [_LENGTH.pack(len(request))], [*descriptors, theirs])
                self._socket.sendall(request)
                reply = self._socket.recv(_LENGTH.size, socket.MSG_WAITALL)
            if len(reply) < _LENGTH.size:
                raise RuntimeError("the fork server has ended; its standard error has the reason")
        except BaseException:
            os.close(ended)
            raise
        finally:
            os.close(theirs)
        return Forked(_LENGTH.unpack(reply)[0], ended)

    def close(self, owner: int) -> None:
        """End the fork server and its forks; does nothing in a process other than the owner."""
        if os.getpid() == owner:
            self._socket.close()
            self._process.wait()


_servers: dict[tuple[int, tuple[str, ...], str], ForkServer] = {}


def server(modules: Sequence[str], warnings: str, env: Mapping[str, str]) -> ForkServer:
    """The fork server of this process for these modules; starts it if necessary."""
    key = (os.getpid(), tuple(modules), warnings)
    if key not in _servers:
        _servers[key] = ForkServer(modules, warnings, env)
        atexit.register(_servers[key].close, os.getpid())
    return _servers[key]


@lru_cache(maxsize=1)
def is_supported() -> bool:
    """True if fork servers are supported: they need process descriptors (pidfd), which older kernels lack."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def running() -> set[int]:
    """Process ids of the fork servers of this process."""
    return {server.pid for (owner, *_), server in _servers.items() if owner == os.getpid()}


# --- in the fork server ---------------------------------------------------------------------------------------


def serve(descriptor: int, modules: Sequence[str]) -> None:
    """Main loop of a fork server. In a fork it returns when the rank's work is done."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=descriptor)
    forks: dict[int, tuple[int, int]] = {}  # process descriptor -> (process id, pipe for its exit code)
    poller = select.poll()
    poller.register(requests, select.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if ready != descriptor:
                poller.unregister(ready)
                _report(*forks.pop(ready))
                os.close(ready)
                continue
            head, received, *_ = socket.recv_fds(requests, _LENGTH.size, _DESCRIPTORS)
            if not head:
                os._exit(0)
            request = requests.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL)
            pid = os.fork()
            if pid == 0:
                requests.close()
                for process, (_, ended) in forks.items():
                    os.close(process)
                    os.close(ended)
                _work(received, request)
                return
            for fd in received[:3]:
                os.close(fd)
            process = os.pidfd_open(pid)
            forks[process] = pid, received[3]
            poller.register(process, select.POLLIN)
            requests.sendall(_LENGTH.pack(pid))


def _report(pid: int, ended: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.write(ended, _LENGTH.pack(code))
    except BrokenPipeError:  # the reader has closed the pipe
        pass
    os.close(ended)


def _work(received: Sequence[int], request: bytes) -> None:
    """Main function of a fork: set up the process like a new interpreter, then run the worker."""
    pipe, output, errors, ended = received
    os.setsid()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for fd in (output, errors, ended):
        os.close(fd)
    env, directory, path, function, arguments = pickle.loads(request)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    sys.path[:] = path
    tempfile.tempdir = None
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    _exit(function(pipe, *arguments) or 0)


def _run_script(unused: int, script: str, *words: str) -> int:
    os.close(unused)
    die_with_parent()
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _exit(code: int) -> None:
    """End a fork as an interpreter ends, but without the release of all objects, which takes as long as the start."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
