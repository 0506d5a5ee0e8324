"""``--replace`` and ``unicoll.recover``: a process in place of one that has ended, with a healthy rank's state."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.launcher.launching import BOUND, LaunchFolder, all_gone, counters, environment
from tests.support.ranks import reserved_port

TRAIN = """
    import json, os, signal, sys
    import numpy as np
    import unicoll as dist

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    dying, patch = json.loads(sys.argv[1]), sys.argv[2]
    rank, number = int(os.environ["RANK"]), int(os.environ.get("UNICOLL_REPLACEMENT", 0))
    size = int(os.environ["WORLD_SIZE"])
    first = number == 0
    if patch:  # recovery:_Recovery._join of replacement 1, state:State.send of rank 0
        from importlib import import_module
        where, name, victim = patch.split()
        module, _, kind = where.partition(":")
        if victim == f"{rank}.{number}":
            setattr(getattr(import_module(f"unicoll.parallel.{module}"), kind), name, die)
    weights = np.zeros(1000)
    state = {"step": 0, "weights": [weights], "seen": ["start"]}
    if first:
        state |= {"moments": {7: np.zeros((2, 3), np.float32)}, "sizes": (1, np.zeros(0), None)}
    group = dist.recover(state)
    left = [each for each in range(size) if each not in dying]
    other = dist.new_group(left) if first else None
    losses = []
    while state["step"] < 6:
        if state["step"] == 3 and first and rank in dying:
            die()
        gradient = np.full(1000, rank + 1.0)
        try:
            group.all_reduce(gradient)
        except dist.RankLostError as error:
            losses.append(error.rank)
            group = dist.recover(state)
            assert group is dist.group.WORLD and group.rank() == rank, group
            continue
        state["weights"][0] += gradient
        state["moments"][7] += 1
        state["step"] += 1
        state["seen"].append(state["step"])
    assert state["weights"][0] is weights
    if other is not None and not patch:
        one = np.ones(1)
        dist.all_reduce(one, group=other)
        assert one == len(left), one
        dist.destroy_process_group(other)
    digest = dist.parallel.parameters_digest([weights, state["moments"][7], state["sizes"][1]])
    print(json.dumps([rank, number, losses, digest, state["seen"], group.size(), dist.get_pg_count()]), flush=True)
    dist.destroy_process_group()
    """


def results(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """The line of JSON of each rank, in the order of their ranks."""
    lines = [line.partition(":")[2] for line in done.stdout.splitlines()]
    return sorted(json.loads(line) for line in lines if line.startswith("["))


def check_trained(
    done: subprocess.CompletedProcess[str], replacements: list[int], losses: bool = True
) -> None:
    assert done.returncode == 0, done.stderr
    found = results(done)
    assert [each[:2] for each in found] == [list(pair) for pair in enumerate(replacements)], done.stderr
    seen = ["start", 1, 2, 3, 4, 5, 6]
    for _, number, lost, digest, steps, size, groups in found:
        assert (digest, steps, size, groups) == (found[0][3], seen, len(replacements), 1)
        assert bool(lost) == (number == 0) or not losses
    assert done.stderr.count("starting a replacement") == sum(replacements)


@pytest.mark.every(n=4)
@pytest.mark.parametrize("dying", [[2], [0], [0, 1], [0, 2, 3]], ids=str)
def test_lost_ranks_are_replaced_and_get_the_state(folder: LaunchFolder, dying: list[int]) -> None:
    done = folder.launch("-n", "4", "--replace", folder.script(TRAIN), json.dumps(dying), "")
    check_trained(done, [int(rank in dying) for rank in range(4)])
    for rank in dying:
        assert f"rank {rank}: Signal 9 (SIGKILL) received by PID" in done.stderr


def test_the_counters_of_a_replacement_take_the_place_of_the_lost_ranks(folder: LaunchFolder) -> None:
    done = folder.launch(
        "-n", "3", "--replace", folder.script(TRAIN), "[2]", "", UNICOLL_METRICS_FILE="job.prom"
    )
    check_trained(done, [0, 0, 1])
    assert "METRICS" not in done.stderr
    found = counters(folder.path / "job.prom")
    before, _, after = (found["calls", "all_reduce", rank] for rank in range(3))
    assert before > after >= 3
    assert [path.name for path in folder.path.glob("*.prom")] == ["job.prom"]


@pytest.mark.every(n=3)
@pytest.mark.parametrize(
    ("patch", "replacements"),
    [
        ("recovery:_Recovery _join 2.1", [0, 0, 2]),
        ("state:State receive 2.1", [0, 0, 2]),
        ("state:State send 0.0", [1, 0, 1]),
    ],
)
def test_a_rank_that_dies_in_a_recovery(folder: LaunchFolder, patch: str, replacements: list[int]) -> None:
    done = folder.launch("-n", "3", "--replace", folder.script(TRAIN), "[2]", patch)
    check_trained(done, replacements, losses=False)


@pytest.mark.every(n=0)
def test_all_ranks_are_new(folder: LaunchFolder) -> None:
    """Without a rank that has the state, that with the most steps gives its own to the others, else rank 0."""
    folder.script(
        """
        import os
        import numpy as np
        import unicoll as dist
        rank = int(os.environ["RANK"])
        for steps in ([0, 0, 0], [3, 5, 5]):
            state = {"steps": np.array([rank, steps[rank]])}
            dist.recover(state, step=steps[rank])
            print("[", state["steps"][0], state["steps"][1], "]", sep=",", flush=True)
            dist.destroy_process_group()
        """
    )
    for flags in (["-n", "3"], ["-n", "3", "--replace"]):
        done = folder.launch(*flags, "work.py")
        assert done.returncode == 0, done.stderr
        lines = sorted(line.partition(":")[2] for line in done.stdout.splitlines())
        assert lines == ["[,0,0,]"] * 3 + ["[,1,5,]"] * 3


STEPS = """
    import os, signal
    import numpy as np
    import unicoll as dist
    rank, first = int(os.environ["RANK"]), "UNICOLL_REPLACEMENT" not in os.environ
    state = {"step": 0, "x": np.zeros(3)}
    try:
        if first:
            group = dist.recover(state)
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                group.barrier()
            except dist.RankLostError:
                pass
            state["x"][:] = rank
            state["step"] = STEP
        dist.recover(state)
        print([state["step"], float(state["x"][0])], flush=True)
    except dist.DistError as error:
        print([str(error)], flush=True)
    """


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("4 + rank", "[5, 1.0]"),
        (
            "4",
            "['recover: the states of rank 0 and rank 1 differ after 4 steps: all ranks need the same arrays in their "
            "state, changed only after the last collective of a step, and the number of steps']",
        ),
    ],
)
def test_states_that_differ(folder: LaunchFolder, step: str, expected: str) -> None:
    done = folder.launch("-n", "3", "--replace", folder.script(STEPS.replace("STEP", step)))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[default{rank}]:{expected}" for rank in range(3)]


def test_a_worker_that_always_fails_ends_the_job(folder: LaunchFolder) -> None:
    folder.script("import os\nopen('starts', 'a').write(os.environ['TORCHELASTIC_RESTART_COUNT'])\nexit(3)")
    done = folder.launch("--replace", "--max-restarts=2", "--log-dir=logs", "work.py")
    assert done.returncode == 3
    assert (folder.path / "starts").read_text() == "012"
    assert done.stderr.count("starting a replacement") == 2
    (logs,) = (folder.path / "logs").glob("*/attempt_0")
    assert sorted(path.name for path in logs.iterdir()) == ["0", "0_replacement_1", "0_replacement_2"]
    folder.script("raise KeyError('x')")
    done = folder.launch("--replace", "work.py")
    assert done.returncode == 1
    assert done.stderr.count("starting a replacement") == 10


def test_no_replacement_once_a_worker_has_ended(folder: LaunchFolder) -> None:
    """The others would wait for that worker."""
    folder.script(
        """
        import os, sys
        from pathlib import Path
        import unicoll as dist

        if os.environ["RANK"] == "1":
            Path("pid").write_text(str(os.getpid()))
            os.rename("pid", "pid.1")
            sys.exit()
        while not os.path.exists("pid.1") or ") Z" not in Path(f"/proc/{Path('pid.1').read_text()}/stat").read_text():
            pass
        try:
            dist.recover({})
        except dist.RankLostError as error:
            print(error, error.rank)
            sys.exit(4)
        """
    )
    done = folder.launch("-n", "2", "--replace", "work.py")
    assert done.returncode == 4
    assert done.stdout == "[default0]:recover: rank 1 has ended its program 1\n"
    assert "replacement" not in done.stderr


@pytest.mark.parametrize("clock", ["right", "goes back"])
def test_a_failed_worker_that_does_not_end_is_replaced(folder: LaunchFolder, clock: str) -> None:
    variables = {} if clock == "right" else folder.turn_clock_back()
    folder.script(
        """
        import os, threading, time
        print(os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise KeyError("the first")
        # No rank is replaced once another one has ended: each waits for the other's replacement, as in recover().
        open(f"replaced{os.environ['RANK']}", "w").close()
        while not all(os.path.exists(f"replaced{rank}") for rank in range(2)):
            time.sleep(0.01)
        """
    )
    done = folder.launch("-n", "2", "--replace", "--grace=0.1", "work.py", **variables)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[default{rank}]:{count}" for rank in (0, 1) for count in (0, 1)
    ]
    assert done.stderr.count("KeyError: 'the first'; starting a replacement") == 2


def test_a_replacement_that_does_not_recover(folder: LaunchFolder) -> None:
    folder.script("import os\nimport unicoll\nif 'UNICOLL_REPLACEMENT' not in os.environ:\n    exit(1)\n")
    with open(folder.path / "work.py", "a") as file:
        file.write("unicoll.init_process_group()\n")
    done = folder.launch("-n", "1", "--replace", "--max-restarts=1", "work.py")
    assert done.returncode == 1
    assert (
        "this process replaces a rank that has ended, and joins the others by unicoll.recover(state)"
        in done.stderr
    )


def test_stopping_ends_replacements(folder: LaunchFolder) -> None:
    """A worker that the launcher's signal has ended is not replaced."""
    folder.script(
        "import os, time\nopen(f'pid.{os.environ[\"RANK\"]}', 'w').write(f'{os.getpid()}\\n')\ntime.sleep(600)"
    )
    launcher = folder.start("-n", "2", "--replace", "work.py")
    pids = folder.pids(2)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=BOUND)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert b"replacement" not in err
    assert all_gone(pids)


# --- without the launcher -------------------------------------------------------------------------------------------

ALONE = """
    import json, os, signal, sys
    import numpy as np
    import unicoll as dist
    options = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    state = {"step": 0, "x": np.zeros(3)}
    group = dist.recover(state)
    while state["step"] < 4:
        try:
            if state["step"] == 2 and len(sys.argv) > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            group.barrier()
        except dist.RankLostError:
            group = dist.recover(state, **options)
            continue
        state["step"] += 1
        state["x"] += 1
    print(json.dumps([rank, group.rank(), group.size(), state["x"].tolist()]))
    """


class Ranks:
    """Three processes without a launcher."""

    def __init__(self, folder: LaunchFolder, port: int) -> None:
        self._folder, self._port = folder, port
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        folder.script(ALONE)

    def start(self, rank: int, options: dict[str, Any], *more: str) -> None:
        variables = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
        self.processes[rank] = process = subprocess.Popen(
            [sys.executable, "work.py", json.dumps(options), *more],
            cwd=self._folder.path,
            env=environment(**variables, MASTER_PORT=str(self._port), UNICOLL_SECRET="0123456789abcdef"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._folder.started.append(process)

    def await_death(self, rank: int) -> None:
        process = self.processes.pop(rank)
        process.communicate(timeout=BOUND)
        assert process.returncode == -signal.SIGKILL

    def ends(self) -> list[Any]:
        found = []
        for _, process in sorted(self.processes.items()):
            out, err = process.communicate(timeout=BOUND)
            assert process.returncode == 0, err.decode()
            found.append(json.loads(out))
        return found


@pytest.mark.every(n=2)
@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_started_again_by_another_launcher(folder: LaunchFolder, lost: int) -> None:
    """Rank 0 has the store: the process in its place opens another one at the same port."""
    with reserved_port() as port:
        ranks = Ranks(folder, port)
        for rank in range(3):
            ranks.start(rank, {}, *(["die"] if rank == lost else []))
        ranks.await_death(lost)
        ranks.start(lost, {})
        assert ranks.ends() == [[rank, rank, 3, [4.0] * 3] for rank in range(3)]


def test_a_smaller_group(folder: LaunchFolder) -> None:
    """No process comes in place of rank 1: after ``wait`` the others go on, with consecutive ranks."""
    with reserved_port() as port:
        ranks = Ranks(folder, port)
        for rank in range(3):
            ranks.start(rank, {"min_size": 2, "wait": 5}, *(["die"] if rank == 1 else []))
        ranks.await_death(1)
        assert ranks.ends() == [[0, 0, 2, [4.0] * 3], [2, 1, 2, [4.0] * 3]]
