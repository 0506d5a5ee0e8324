#!/usr/bin/env python3
"""Runs PyTorch's own tests of torch.distributed
(``torch.testing._internal.distributed.distributed_test``) on backends.

    scripts/torch_suite                                        # gloo and unicoll-gloo, 2 and 3
    ranks scripts/torch_suite --backends gloo,unicoll-mpi            # under Open MPI; MPI=mpich in
    front: under MPICH scripts/torch_suite --ranks 2 -k all_to_all --verbose

(``scripts/torch_suite`` creates an environment and runs ``scripts/torch_suite.py`` in it.)

The tests run with the backend name "gloo", so exactly those for Gloo are run; their groups have the
tested backend. torch is imported once: for each test one process per rank is forked, and killed
after ``--limit`` seconds. ``mpirun`` starts a stub per rank, which passes its environment and file
descriptors to the forked process.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
_LOG_CHARACTERS = 4000


# --- forking process ------------------------------------------------------------------------------


def forker(backend: str, size: int, limit: float, names: Sequence[str], folder: str) -> None:
    """Run tests and print one line of JSON per test."""
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(size),
        "INIT_METHOD": "file://",
        "TEMP_DIR": folder,
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ.pop("RANK", None)
    import torch.testing._internal.common_distributed as common
    import torch.testing._internal.distributed.distributed_test as suite

    if backend.startswith("unicoll"):
        import unicoll.torch_plugin  # noqa: F401

        suite.BACKEND = _BackendName(backend)

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        """torch's tests, composed as in its test_distributed_spawn.py."""

    if not names:
        names = sorted(name for name in dir(Tests) if name.startswith("test_"))
    if size > 2:
        os.environ["BACKEND"] = "mpi"  # at run time only a check of the world size reads it
    skips = {skip.exit_code for skip in common.TEST_SKIPS.values()}
    stub = _Stub(size, folder) if "mpi" in backend else None
    for name in names:
        suite.initialize_temp_directories()
        suite.INIT_METHOD = os.environ["INIT_METHOD"]
        suite.Barrier.init()
        began = time.monotonic()
        codes, output = _one_test(Tests, name, size, limit, folder, stub)
        state = _state(codes, skips)
        found = {"name": name, "state": state, "seconds": round(time.monotonic() - began, 2)}
        if state == FAILED:
            found |= {"codes": codes, "output": output}
        print(json.dumps(found), flush=True)
        suite.cleanup_temp_dir()


class _BackendName(str):
    """A backend name that also equals "gloo", for tests that compare it."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def _state(codes: Sequence[int], skips: set[int]) -> str:
    if any(code and code not in skips for code in codes):
        return FAILED
    return SKIPPED if any(codes) else PASSED


def _one_test(
    tests: Any, name: str, size: int, limit: float, folder: str, stub: _Stub | None
) -> tuple[list[int], str]:
    """(exit codes of the ranks, -9 for a killed one; their output)."""
    rendezvous_file = tempfile.mktemp(dir=folder)
    logs = [Path(folder, f"rank{rank}.log") for rank in range(size)]
    for log in logs:
        log.write_bytes(b"")  # a rank that is never started has written nothing
    if stub is None:
        children = [
            _fork(tests, name, rank, rendezvous_file, logs[rank], None, ()) for rank in range(size)
        ]
        codes = _await_all(children, limit)
    else:
        codes = stub.run(
            lambda rank, environ, fds: _fork(
                tests, name, rank, rendezvous_file, logs[rank], environ, fds
            ),
            limit,
        )
    if stub is not None:
        logs.append(Path(folder, "mpirun.log"))
    output = "\n".join(
        f"--- {log.stem}\n{log.read_text(errors='replace')[-_LOG_CHARACTERS:]}" for log in logs
    )
    return codes, output


def _fork(
    tests: Any,
    name: str,
    rank: int,
    rendezvous_file: str,
    log: Path,
    environ: dict[str, str] | None,
    fds: Sequence[int],
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        atexit._clear()  # the exit functions of the forking process must not run in the ranks
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if environ is not None:
            os.environ |= environ
        os.environ["RANK"] = str(rank)
        import torch

        parent_end, child_end = torch.multiprocessing.Pipe()
        try:
            tests._run(rank, name, rendezvous_file, child_end)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        del parent_end
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()  # as at interpreter exit
        os._exit(code)


def _await_all(children: Sequence[int], limit: float) -> list[int]:
    deadline = time.monotonic() + limit
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for pid in children:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
                if codes[pid]:  # the other ranks may wait for it
                    deadline = min(deadline, time.monotonic() + 20)
        if time.monotonic() > deadline:
            for pid in set(children) - codes.keys():
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = -signal.SIGKILL
        time.sleep(0.01)
    return [codes[pid] for pid in children]


class _Stub:
    """mpirun, once per test, with stub programs whose environment forked processes take over."""

    def __init__(self, size: int, folder: str) -> None:
        self._size = size
        self._folder = folder
        self._path = str(Path(folder, "stub"))
        from unicoll.run.mpirun import mpirun, mpirun_variables

        self._mpirun = mpirun() or "mpirun"
        self._variables = mpirun_variables(size) | {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"
        }

    def run(self, fork: Any, limit: float) -> list[int]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._path)
            listener.listen()
            listener.settimeout(30)
            environ = {
                k: v
                for k, v in os.environ.items()
                if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")
            }
            environ |= self._variables | {"STUB_SOCKET": self._path, "TMPDIR": self._folder}
            environ["OMPI_MCA_btl_sm_backing_directory"] = self._folder  # deleted with the folder
            program = [sys.executable, "-S", "-c", _STUB]
            with open(Path(self._folder, "mpirun.log"), "wb") as log:
                launcher = subprocess.Popen(
                    [self._mpirun, "-n", str(self._size), *program],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            callers: dict[int, socket.socket] = {}
            pids: dict[int, int] = {}
            try:
                for _ in range(self._size):
                    caller, _address = listener.accept()
                    environment, fds = _receive(caller)
                    rank = int(environment.get("OMPI_COMM_WORLD_RANK") or environment["PMI_RANK"])
                    callers[rank] = caller
                    for number, fd in zip(_fds_of(environment), fds, strict=True):
                        os.dup2(fd, number)
                    environment.pop("STUB_SOCKET")
                    pids[rank] = fork(rank, environment, fds)
                    for fd in (*fds, *_fds_of(environment)):
                        os.close(fd)
                codes = _await_all([pids[rank] for rank in range(self._size)], limit)
            finally:
                for caller in callers.values():
                    caller.close()
                os.unlink(self._path)
                try:
                    launcher.wait(20)
                except subprocess.TimeoutExpired:
                    launcher.kill()
                    launcher.wait()
        return codes


_STUB = """
import json, os, socket
s = socket.socket(socket.AF_UNIX); s.connect(os.environ["STUB_SOCKET"])
fds = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []
data = json.dumps(dict(os.environ)).encode()
socket.send_fds(s, [len(data).to_bytes(4, "big")], fds)
s.sendall(data)
for fd in fds: os.close(fd)
s.recv(1)
"""


def _fds_of(environ: dict[str, str]) -> list[int]:
    return [int(environ["PMI_FD"])] if "PMI_FD" in environ else []


def _receive(caller: socket.socket) -> tuple[dict[str, str], list[int]]:
    head, fds, _, _ = socket.recv_fds(caller, 4, 4)
    body = caller.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
    found: dict[str, str] = json.loads(body)
    return found, fds


# --- main process ---------------------------------------------------------------------------------


def run(backend: str, size: int, limit: float, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run tests on a backend, all if ``names`` is empty; yields the result of each."""
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        environ = dict(os.environ)
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), environ.get("PYTHONPATH")])
        )
        environ |= {
            "OMP_NUM_THREADS": "1",
            "UNICOLL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        program = [
            sys.executable,
            __file__,
            "--fork",
            backend,
            str(size),
            str(limit),
            folder,
            *names,
        ]
        with subprocess.Popen(program, env=environ, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
        if process.returncode:
            raise RuntimeError(
                f"the runner of {backend} on {size} ranks exited with code {process.returncode}"
            )


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A Markdown table with one row per run: passed, failed, skipped."""
    lines = ["| backend | ranks | passed | failed | skipped |", "|---|---|---|---|---|"]
    for label, tests in results.items():
        backend, _, size = label.partition("/")
        counts = Counter(test["state"] for test in tests.values())
        lines.append(
            f"| {backend} | {size} | {counts[PASSED]} | {counts[FAILED]} | {counts[SKIPPED]} |"
        )
    return "\n".join(lines)


def regressions(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Tests that pass on Gloo and not on another backend: ``"unicoll-gloo/2 test_x: failed"``."""
    found = []
    for label, tests in results.items():
        reference = results.get(f"gloo/{label.partition('/')[2]}", {})
        found += [
            f"{label} {name}: {test['state']}"
            for name, test in tests.items()
            if reference.get(name, {}).get("state") == PASSED and test["state"] != PASSED
        ]
    return found


def main() -> int:
    """The command-line program."""
    if sys.argv[1:2] == ["--fork"]:
        backend, size, limit, folder, *names = sys.argv[2:]
        forker(backend, int(size), float(limit), names, folder)
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backends", default="gloo,unicoll-gloo")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks")
    parser.add_argument("--limit", type=float, default=60.0, help="time limit of a test in seconds")
    parser.add_argument("-k", default="", help="only tests whose name contains this")
    parser.add_argument(
        "--sample", type=int, default=0, help="only this many tests, sampled with the seed"
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--output", help="write results to this file, as JSON")
    parser.add_argument("--verbose", action="store_true", help="show the output of failing tests")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, Any]]] = {}
    names = choose(options.k, options.sample, options.seed)
    for size in map(int, options.ranks.split(",")):
        for backend in options.backends.split(","):
            tests = results[f"{backend}/{size}"] = {}
            for found in run(backend, size, options.limit, names):
                tests[found.pop("name")] = found
                _show(f"{backend}/{size}", list(tests)[-1], found, options.verbose)
    print(f"\n{table(results)}")
    failed = regressions(results)
    print("\n".join(["", "Passed on gloo only:", *failed]) if failed else "")
    if options.output:
        import torch

        facts = {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "cpus": os.cpu_count(),
        }
        Path(options.output).write_text(
            json.dumps({**facts, "results": _short(results)}, indent=1) + "\n"
        )
    return 1 if failed else 0


def choose(part: str, sample: int, seed: int | None) -> list[str]:
    """Names of the selected tests; an empty list for all."""
    if not part and not sample:
        return []
    source = "import os; os.environ |= {'BACKEND': 'gloo', 'WORLD_SIZE': '2', 'TEMP_DIR': '/tmp'};"
    source += (
        "from torch.testing._internal.distributed.distributed_test import DistributedTest as d;"
    )
    source += "print(*sorted(n for n in dir(d._DistTestBase) if n.startswith('test_')))"
    names = subprocess.run(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    names = [name for name in names if part in name]
    if sample:
        seed = random.randrange(1 << 24) if seed is None else seed
        print(f"seed {seed}")
        names = sorted(random.Random(seed).sample(names, min(sample, len(names))))
    return names


def _show(label: str, name: str, found: dict[str, Any], verbose: bool) -> None:
    if found["state"] == SKIPPED:
        return
    print(f"{label:16} {found['seconds']:6.1f} s  {found['state']:8}{name}", flush=True)
    if verbose and found["state"] == FAILED:
        print(found["output"], flush=True)


def _short(results: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, list[str]]]:
    """Names of tests by state, for the output file."""
    return {
        label: {
            state: [name for name, test in tests.items() if test["state"] == state]
            for state in (PASSED, FAILED, SKIPPED)
        }
        for label, tests in results.items()
    }


if __name__ == "__main__":
    sys.exit(main())
