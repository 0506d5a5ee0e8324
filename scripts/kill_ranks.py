"""Kills random processes of a training, and compares its weights with those of trainings in which
nothing was killed.

    python scripts/kill_ranks.py --kills 200

It trains examples/recover_digits.py on 1, 2, 3 and 4 processes, and then on 4 processes of which it
kills one or two at random times: also processes that start, join the others or receive the weights.
The steps are spread over the kills. It fails unless all weights have the same SHA-256, the launcher
succeeded, only killed processes were replaced, and no process and no file is left.
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
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BOUND_S = 120.0
"""Seconds without progress after which a training counts as hung."""


def work(folder: Path, epochs: int, kills: int) -> None:
    """One process of the training; it tells its progress by the time of a file."""
    sys.path.insert(0, str(ROOT / "examples"))
    from recover_digits import load_digits, train

    import unicoll
    from unicoll.parallel import parameters_digest

    def before_step(group: unicoll.ProcessGroup, step: int, steps: int) -> None:
        (folder / "step").write_text(f"{step}\n")
        due = np.array([not kills])
        while not due[0]:
            time.sleep(0.001)
            due[0] = (folder / "kills").stat().st_size * steps >= (step + 1) * kills
            group.all_reduce(due, unicoll.ReduceOp.MIN)  # notices a kill, too

    network = train(load_digits()[0], epochs, before_step)
    if unicoll.get_rank() == 0:
        print(f"weights: {parameters_digest(network.parameters)}")


class Training:
    """A training under the launcher."""

    def __init__(self, folder: Path, processes: int, epochs: int, kills: int) -> None:
        self.folder = folder
        self.output = folder / "output"
        self.kills = kills
        (folder / "kills").touch()  # a byte for each kill
        command = [sys.executable, "-m", "unicoll.run", "-n", str(processes), "--replace"]
        command += ["--max-restarts", str(kills), "--no-prefix", __file__, "--work", str(folder)]
        with open(self.output, "w") as output:
            self.launcher = subprocess.Popen(
                [*command, "--epochs", str(epochs), "--kills", str(kills)],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def workers(self) -> list[int]:
        """The pids of the processes of the ranks."""
        launcher = self.launcher.pid
        found = []
        for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            try:
                if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(int(pid))
            except OSError:
                pass  # it has ended
        return found

    def kill(self, random: random.Random) -> int:
        """Kill processes at random times; returns how many times two were killed at once."""
        killed: set[int] = set()
        pairs = 0
        while len(killed) < self.kills and self.launcher.poll() is None:
            time.sleep(random.expovariate(2.0))
            pids = sorted({*self.workers()} - killed)
            count = min(random.choice([1, 1, 1, 2]), len(pids), self.kills - len(killed))
            for pid in random.sample(pids, count):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            pairs += count == 2
            with open(self.folder / "kills", "ab") as file:
                file.write(b"." * count)
        return pairs

    def end(self) -> str:
        """Wait for the end of the training; its output. RuntimeError: it hangs."""
        seen, since = "", time.monotonic()
        while self.launcher.poll() is None:
            step = (self.folder / "step").read_text() if (self.folder / "step").exists() else ""
            if step != seen:
                seen, since = step, time.monotonic()
            if time.monotonic() - since > BOUND_S:
                self.launcher.terminate()
                self.launcher.wait()
                raise RuntimeError(
                    f"no progress for {BOUND_S:.0f} s after step {seen}:\n{self.output.read_text()}"
                )
            time.sleep(0.05)
        return self.output.read_text()


def command_line(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text(errors="replace")
    except OSError:
        return ""  # it has ended


def run(processes: int, epochs: int, kills: int, seed: int) -> tuple[str, str]:
    """Train; the digest of the weights, and a line about the run. RuntimeError: it failed, or has
    left something."""
    files = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as name:
        start = time.monotonic()
        training = Training(Path(name), processes, epochs, kills)
        pairs = training.kill(random.Random(seed))
        output = training.end()
        seconds = time.monotonic() - start
        digest = re.search("weights: (.*)", output)
        replaced = output.count("starting a replacement")
        left = [pid for pid in os.listdir("/proc") if pid.isdigit() and name in command_line(pid)]
    problems = [
        (
            f"the launcher's exit code is {training.launcher.returncode}"
            if training.launcher.returncode
            else ""
        ),
        "" if digest else "no weights",
        f"{replaced} replacements for {kills} kills" if replaced != kills else "",
        f"processes {left} are left" if left else "",
        f"files {new} are left in /dev/shm" if (new := set(os.listdir("/dev/shm")) - files) else "",
    ]
    if any(problems) or digest is None:
        raise RuntimeError(f"{'; '.join(filter(None, problems))}:\n{output}")
    text = f"{kills} kills, {pairs} times two at once" if kills else "nothing killed"
    return digest[1], f"{processes} processes, {text}: {seconds:.1f} s, SHA-256 {digest[1][:16]}..."


def main() -> int:
    """Run the trainings; the exit code is 0 if all weights are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument(
        "--processes", type=int, nargs="*", default=[1, 2, 3, 4], help="of trainings without kills"
    )
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.epochs, options.kills)
        return 0
    print(f"seed {options.seed}", flush=True)
    digests = set()
    for processes, kills in [*((each, 0) for each in options.processes), (4, options.kills)]:
        try:
            digest, text = run(processes, options.epochs, kills, options.seed)
        except RuntimeError as error:
            print(f"FAILED: {processes} processes, {kills} kills: {error}")
            return 1
        print(text, flush=True)
        digests.add(digest)
    print("all weights are equal" if len(digests) == 1 else "FAILED: the weights differ")
    return 0 if len(digests) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
