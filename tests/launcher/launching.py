"""Starts the launcher, ``unirun``, in a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unicoll.process.formatting import ranks_text

ROOT = Path(__file__).resolve().parents[2]
BOUND = 180.0
PYTHONPATH = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
# Whatever runs the tests may have had signals ignored (a shell's background job, nohup), and that is inherited.
INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "[signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)]; "
    "sys.argv[0] = sys.executable; os.execv(sys.executable, sys.argv)"
)


def environment(**extra: str) -> dict[str, str]:
    hidden = ("PET_", "UNICOLL_", "TORCHELASTIC_", "OMP_", "MASTER_", "PYTHON")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *PYTHONPATH]), **extra}


class LaunchFolder:
    """A directory to write worker scripts to and to launch from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[subprocess.Popen[bytes]] = []
        self.flags: list[str] = []

    def script(self, source: str, name: str = "work.py") -> str:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
        return name

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, "-m", "unicoll.run", *self.flags, *arguments],
            cwd=self.path,
            env=environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def launch(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **extra)
        out, err = process.communicate(timeout=BOUND)
        texts = (os.fsdecode(out), os.fsdecode(err))
        return subprocess.CompletedProcess(arguments, process.returncode, *texts)

    def python(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run Python in the folder, without a terminal; ``options`` of subprocess.run."""
        given: dict[str, Any] = {"cwd": self.path, "env": environment(), "text": True, "timeout": BOUND}
        if "stdout" not in options:
            given["capture_output"] = True
        if "input" not in options:
            given["stdin"] = subprocess.DEVNULL
        return subprocess.run([sys.executable, *arguments], check=False, **given | options)

    def turn_clock_back(self) -> dict[str, str]:
        """A variable for processes whose wall clock goes back by an hour each time that it is read."""
        source = """
        import itertools, time
        clock = itertools.count(time.time(), -3600)
        time.time = lambda: next(clock)
        """
        self.script(source, "clock/sitecustomize.py")
        return {"PYTHONPATH": os.pathsep.join([str(self.path / "clock"), environment()["PYTHONPATH"]])}

    def pids(self, number: int) -> list[int]:
        """The pids that so many processes of the job have written to files named ``pid.*``."""
        files: list[Path] = []

        def there() -> bool:
            files[:] = [f for f in self.path.glob("pid.*") if f.read_text().endswith("\n")]
            return len(files) >= number

        wait_until(there)
        return [int(file.read_text()) for file in files]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def counters(file: Path) -> dict[tuple[str, str, int], float]:
    """The sums of a file of counters by name, operation and rank; AssertionError if it is malformed."""
    found: dict[tuple[str, str, int], float] = {}
    families: list[str] = []
    series: list[str] = []
    for line in file.read_text().splitlines():
        if header := re.fullmatch(r"# HELP (\w+) .*", line):
            families.append(header[1])
        elif line != f"# TYPE {families[-1]} counter":
            name = families[-1]
            sample = re.fullmatch(rf'{name}{{op="(\w+)",group="[\w-]+",rank="(\d+)"}} ([\d.e-]+)', line)
            assert sample, line
            key = (name.removeprefix("unicoll_").removesuffix("_total"), sample[1], int(sample[2]))
            found[key] = found.get(key, 0) + float(sample[3])
            series.append(line.rpartition(" ")[0])
    assert len(set(families)) == len(families) == 5
    assert len(set(series)) == len(series)
    return found


def all_gone(pids: list[int]) -> bool:
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return not any(map(runs, pids))


_RANKS = r"ranks? ([\d, -]+)"


def _ranks_in(text: str) -> set[int]:
    ends = [[int(end) for end in span.split("-")] for span in text.split(", ")]
    return {rank for span in ends for rank in range(span[0], span[-1] + 1)}


def with_late_ranks(output: str) -> str:
    """The launcher's output as if no rank had ended late: not "rank 3: the same as rank 0", but 3 beside rank 0."""
    late: dict[int, set[int]] = {}
    for ranks, shown in re.findall(rf"^{_RANKS}: the same as rank (\d+)\n", output, re.M):
        late.setdefault(int(shown), set()).update(_ranks_in(ranks))

    def complete(found: re.Match[str]) -> str:
        ranks = _ranks_in(found[1])
        return ranks_text(ranks.union(*(late[rank] for rank in ranks & late.keys()))) + found[2]

    output = re.sub(rf"^{_RANKS}: the same as rank \d+\n", "", output, flags=re.M)
    return re.sub(rf"^{_RANKS}(:| \(this is)", complete, output, flags=re.M)
