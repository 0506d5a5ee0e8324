"""Runs the tests on a loaded machine and counts failures by test; see scripts/flaky.

Beside the tests run busy processes and jobs of the library; with ``--pauses`` processes that the
tests have started are stopped for 0.3 to 2.5 s now and then, after which a process goes on that its
test may have stopped, too. Every run has another order of tests and another seed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUSY = "while True: pass"
JOB = """
import numpy as np, unicoll as dist
dist.init_process_group("gloo")
x = np.ones(1 << 20, np.float32)
while True:
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.all_to_all_single(np.empty_like(x), x)
"""


def load(busy: int, jobs: int) -> Iterator[list[str]]:
    """The commands of the processes beside the tests."""
    for _ in range(busy):
        yield [sys.executable, "-c", BUSY]
    for _ in range(jobs):
        yield [
            sys.executable,
            "-m",
            "unicoll.run",
            "--nproc-per-node",
            "2",
            "--no-python",
            sys.executable,
            "-c",
            JOB,
        ]


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    """A process that runs within the block, in a session of its own with all that it starts."""
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, stdin=null, stdout=null, start_new_session=True)
    try:
        yield
        if process.poll() is not None:
            sys.exit(f"{command} has ended")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def workers_of(root: int) -> list[int]:
    """Descendants of a process that are neither pytest nor a process of pytest-xdist."""
    parents: dict[int, int] = {}
    testers = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid = int(status.parent.name)
            parents[pid] = int(status.read_text().rpartition(")")[2].split()[1])
            command = (status.parent / "cmdline").read_bytes()
            if (
                b"\0pytest\0" in command or b"sys.stdin.readline" in command
            ):  # as execnet starts its processes
                testers.add(pid)
    own = {root}
    while more := {child for child, parent in parents.items() if parent in own} - own:
        own |= more
    return [pid for pid in own if pid not in testers and pid != root and parents.get(pid) != root]


def pause(root: int, ended: threading.Event) -> None:
    """Stop processes of the tests for a short time, one after another."""
    while not ended.wait(random.uniform(0.05, 0.5)):
        if not (pids := workers_of(root)):
            continue
        pid = random.choice(pids)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(random.uniform(0.3, 2.5))
            os.kill(pid, signal.SIGCONT)


def one_run(arguments: list[str], pauses: bool) -> Counter[str]:
    """Run the tests once; returns what failed, with "(flaky)" behind the names of tests that passed
    alone."""
    seed = random.randrange(1 << 24)
    variables = {"UNICOLL_TEST_SEED": str(seed), "UNICOLL_TEST_SHORT": "1"}
    order = ["--random-order", f"--random-order-seed={seed}"]
    command = [sys.executable, "scripts/run_tests.py", "-q", *order, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        variables["UNICOLL_TEST_FLAKY"] = folder
        print(f"== the run of seed {seed}", flush=True)
        run = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True
        )
        ended = threading.Event()
        pauser = threading.Thread(target=pause, args=(run.pid, ended))
        if pauses:
            pauser.start()
        try:
            output, _ = run.communicate()
        finally:
            ended.set()
            if pauses:
                pauser.join()
            run.terminate()
        print(output, flush=True)
        flaky = {file.read_text().partition("\n")[0] for file in Path(folder).iterdir()}
    lines: list[str] = re.findall(r"^(?:FAILED|ERROR) (tests/.*)", output, re.MULTILINE)
    failed = {line.partition(" - ")[0] for line in lines} - flaky
    if run.returncode not in (0, 1):
        failed.add(f"the run of seed {seed}: exit status {run.returncode}")
    return Counter([*(f"{test} (flaky)" for test in flaky), *failed])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", type=int, default=2, help="busy processes beside the tests")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="jobs of the library beside the tests, of two ranks each",
    )
    parser.add_argument(
        "--pauses", action="store_true", help="stop processes of the tests now and then"
    )
    flags, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what is running, too
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        for command in load(flags.busy, flags.jobs):
            stack.enter_context(running(command))
        for number in range(1, flags.runs + 1):
            begun = time.monotonic()
            counts += one_run(arguments or ["-n", "3", "--dist", "loadfile"], flags.pauses)
            print(f"== run {number} of {flags.runs}: {time.monotonic() - begun:.0f} s", flush=True)
            for test, count in counts.most_common():
                print(f"{count:4}  {test}", flush=True)
    return 1 if any(not test.endswith("(flaky)") for test in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
