"""One job on several nodes, each with its own launcher."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher.launching import LaunchFolder, all_gone, counters, environment, wait_until
from tests.support import selection
from tests.support.hosts import Hosts
from tests.support.ports import listening_ports
from tests.support.ranks import reserved_port
from unicoll.net.stores import PrefixStore, TCPStore

SECRET = "0123456789abcdef0123456789abcdef"
NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
SUMS = """
    import os, sys
    import numpy as np
    import unicoll as dist
    dist.init_process_group()
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
    x = np.ones(1)
    dist.all_reduce(x)
    print(*(os.environ[name] for name in NAMES), int(x[0]), flush=True)
    BODY
    dist.barrier()
    dist.destroy_process_group()
    """
GOES_ON = """
    import os, time
    from pathlib import Path
    import numpy as np
    import unicoll as dist
    name = os.environ["TORCHELASTIC_RESTART_COUNT"] + "." + os.environ["RANK"]
    Path("pid." + name).write_text(f"{os.getpid()}\\n")
    dist.init_process_group()
    x = np.ones(ELEMENTS)
    dist.all_reduce(x)
    Path("up." + name).touch()
    while not x[0] == 0:
        x[:] = not Path("stop").exists()
        dist.all_reduce(x, op=dist.ReduceOp.MIN)
        time.sleep(0.01)
    dist.destroy_process_group()
    """


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        yield number


class Node:
    """A launcher of a job of two nodes."""

    def __init__(self, folder: LaunchFolder, port: int, *words: str, **extra: str) -> None:
        flags = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--no-prefix", *words]
        variables = {"UNICOLL_SECRET": SECRET, **extra}
        self.process = folder.start(*flags, **{name: value for name, value in variables.items() if value})

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        out, err = self.process.communicate(timeout=180)
        return self.process.returncode, out.decode(), err.decode()


def ends(nodes: list[Node]) -> tuple[list[int], list[str], list[str]]:
    codes, outs, errs = zip(*(node.end() for node in nodes), strict=True)
    return [*codes], [*outs], [*errs]


def sums(folder: LaunchFolder, body: str = "") -> str:
    return folder.script(SUMS.replace("NAMES", repr(NAMES)).replace("BODY", body))


def goes_on(folder: LaunchFolder, elements: int = 1) -> str:
    """A job that ends when the file "stop" is there, with an all_reduce of so many float64 again and again."""
    return folder.script(GOES_ON.replace("ELEMENTS", str(elements)))


def pair(folder: LaunchFolder, port: int, *words: str, **extra: str) -> list[Node]:
    return [Node(folder, port, *words, **extra) for _ in range(2)]


def generation(path: Path, size: int = 4) -> int:
    """The number of the last attempt that all ranks have reached; -1 if there is none."""
    found = [path_.name.split(".") for path_ in path.glob("up.*")]
    numbers = {int(attempt) for _, attempt, _ in found}
    whole = [n for n in numbers if sum(int(attempt) == n for _, attempt, _ in found) == size]
    return max(whole, default=-1)


def test_the_same_command_on_each_node(folder: LaunchFolder, port: int) -> None:
    codes, outs, errs = ends(pair(folder, port, "-n", "2", sums(folder)))
    assert (codes, errs) == ([0, 0], ["", ""])
    found = sorted(tuple(map(int, line.split())) for line in "".join(outs).splitlines())
    assert found == [(rank, rank % 2, rank // 2, 4, 2, 2, 4) for rank in range(4)]
    assert [out.count("\n") for out in outs] == [2, 2]


@pytest.mark.every(n=0)
def test_nodes_with_given_ranks_and_different_numbers_of_workers(folder: LaunchFolder, port: int) -> None:
    script = sums(folder)
    nodes = [Node(folder, port, "-n", str(3 - rank), f"--node-rank={rank}", script) for rank in (1, 0)]
    codes, outs, errs = ends(nodes)
    assert (codes, errs) == ([0, 0], ["", ""])
    assert {line.split()[2] for line in outs[0].splitlines()} == {"1"}
    found = sorted(tuple(map(int, line.split())) for line in "".join(outs).splitlines())
    expected = [(0, 0, 0, 5, 3), (1, 1, 0, 5, 3), (2, 2, 0, 5, 3), (3, 0, 1, 5, 2), (4, 1, 1, 5, 2)]
    assert found == [(*each, 2, 5) for each in expected]


def test_each_node_writes_the_counters_of_its_ranks(folder: LaunchFolder, port: int) -> None:
    codes, _, errs = ends(pair(folder, port, "-n", "2", sums(folder), UNICOLL_METRICS_FILE="job.prom"))
    assert (codes, errs) == ([0, 0], ["", ""])
    assert sorted(path.name for path in folder.path.glob("*.prom")) == ["job.node0.prom", "job.node1.prom"]
    for node in range(2):
        found = counters(folder.path / f"job.node{node}.prom")
        calls = {key[1:]: value for key, value in found.items() if key[0] == "calls"}
        assert calls == {(op, 2 * node + i): 1 for op in ("all_reduce", "barrier") for i in range(2)}


@pytest.mark.every(n=0)
def test_all_nodes_restart_their_workers_after_a_failure(folder: LaunchFolder, port: int) -> None:
    script = sums(folder, "if rank == 3 and attempt < 2: raise KeyError(attempt)")
    codes, outs, errs = ends(pair(folder, port, "-n", "2", "--max-restarts=2", script))
    assert codes == [0, 0], errs
    assert [out.count("\n") for out in outs] == [6, 6]
    for err in errs:
        assert "rank 3: KeyError: 0; restarting all 4 workers (restart 1 of 2)" in err
        assert "rank 3: KeyError: 1; restarting all 4 workers (restart 2 of 2)" in err
        assert err.endswith("unicoll.run: restarts: 2; the first failure: rank 3: KeyError: 0\n")
    assert sorted("Traceback" in err and "raise KeyError" in err for err in errs) == [False, True]


def test_every_node_reports_the_root_cause_and_has_its_exit_code(folder: LaunchFolder, port: int) -> None:
    script = sums(folder, "if rank == 3: sys.exit(5)")
    codes, _, errs = ends(pair(folder, port, "-n", "2", "--max-restarts=1", script))
    assert codes == [5, 5]
    for err in errs:
        cause, before = err.partition("Root Cause (first observed failure):")[2].split("First failure before")
        for part in (cause, before):
            assert re.search(r"rank +: 3 \(local_rank: 1\)\n +exitcode +: 5 ", part), err
        assert "  node      : 1\n" in cause


def test_nodes_without_a_secret(folder: LaunchFolder, port: int) -> None:
    codes, outs, errs = ends(pair(folder, port, "-n", "1", sums(folder), UNICOLL_SECRET=""))
    assert codes == [0, 0], errs
    assert sorted(out.split()[0] for out in outs) == ["0", "1"]
    assert all("WARNING: this job has several nodes and no secret" in err for err in errs)


def test_messages_of_strangers_do_not_end_a_launcher(folder: LaunchFolder, port: int) -> None:
    """Without a secret anybody can send them: a number that is no int, or deep nesting, ended it with a traceback."""
    escape = "node7\x1b]0;owned\x07\nunicoll.run: all is well"
    stranger = ["token", escape, 1, 1, 3, "id", 0, -1, False]
    texts = ["[Infinity]", "[" * 100_000, "{}", "[]", json.dumps([*stranger[:2], 1e3, *stranger[3:]])]
    first = Node(folder, port, "--node-rank=0", sums(folder), UNICOLL_SECRET="")
    with TCPStore("127.0.0.1", port, wait_for_workers=False) as root:
        round_ = PrefixStore("round/1", root)
        for text in [*texts, json.dumps(stranger)]:
            round_.queue_push("arrivals", text)
        round_.wait(["refused/token"])
    codes, _, (err, _) = ends([first, Node(folder, port, "--node-rank=1", sums(folder), UNICOLL_SECRET="")])
    assert codes == [0, 0], err
    assert err.count("ignored a message at") == len(texts)
    assert "Traceback" not in err
    assert "\x1b" not in err
    assert not any(line.startswith("unicoll.run: all is well") for line in err.splitlines())


def test_a_node_waits_for_the_workers_of_the_others(folder: LaunchFolder, port: int) -> None:
    script = folder.script(
        """
        import os, sys, time
        if os.environ["GROUP_RANK"] == "1":
            time.sleep(1.0)
            sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
        """
    )
    codes, _, errs = ends(pair(folder, port, "-n", "1", "--max-restarts=1", script))
    assert codes == [0, 0], errs
    assert all("restart 1 of 1" in err for err in errs)


@pytest.mark.every(n=2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_launcher_is_named_and_may_be_started_again(
    folder: LaunchFolder, port: int, victim: int
) -> None:
    script = goes_on(folder)
    words = ["-n", "1", "--max-restarts=1", script]
    nodes = [Node(folder, port, f"--node-rank={rank}", *words) for rank in range(2)]
    wait_until(lambda: generation(folder.path, 2) == 0)
    pid = nodes[victim].process.pid
    nodes[victim].process.kill()
    again = Node(folder, port, f"--node-rank={victim}", *words)
    wait_until(lambda: generation(folder.path, 2) == 1)
    (folder.path / "stop").touch()
    code, _, err = nodes[1 - victim].end()
    assert code == 0, err
    assert f"node {victim} (host " in err
    assert f"launcher pid {pid}) has died, or its host is down; stopping the workers" in err
    assert "waiting up to 600 s for a replacement launcher" in err
    code, _, again_err = again.end()
    assert code == 0, again_err
    assert all(each.endswith(f"pid {pid}) has died, or its host is down\n") for each in (err, again_err))
    wait_until(lambda: all_gone(folder.pids(4)))


@pytest.mark.every(n=0)
@pytest.mark.parametrize("victim", [0, 2])
def test_two_of_three_nodes_wait_for_the_third(folder: LaunchFolder, port: int, victim: int) -> None:
    words = ["--nnodes=3", "-n", "1", "--max-restarts=1", goes_on(folder)]
    nodes = [Node(folder, port, f"--node-rank={rank}", *words) for rank in range(3)]
    wait_until(lambda: generation(folder.path, 3) == 0)
    nodes[victim].process.kill()
    nodes[victim].end()
    nodes[victim] = Node(folder, port, f"--node-rank={victim}", *words)
    wait_until(lambda: generation(folder.path, 3) == 1)
    (folder.path / "stop").touch()
    codes, _, errs = ends(nodes)
    assert codes == [0, 0, 0], errs
    assert all(f"the first failure: node {victim} (host " in err for err in errs), errs


def test_the_later_of_two_launchers_has_their_node_rank(folder: LaunchFolder, port: int) -> None:
    """The earlier one may have died."""
    words = ["--nnodes=3", "-n", "1", sums(folder)]
    nodes = [Node(folder, port, *flags, *words) for flags in ([], ["--node-rank=1"], ["--node-rank=1"])]
    wait_until(lambda: any(node.process.poll() is not None for node in nodes[1:]))
    nodes.append(Node(folder, port, *words))
    codes, _, errs = ends(nodes)
    assert sorted(codes[1:3]) == [0, 1], errs
    assert codes[0] == codes[3] == 0, errs
    assert any("has --node-rank 1, too" in err for err in errs[1:3]), errs


def test_a_signal_ends_a_launcher_that_waits(folder: LaunchFolder, port: int) -> None:
    node = Node(folder, port, "-n", "1", goes_on(folder))
    wait_until(lambda: ("127.0.0.1", port) in listening_ports(node.process.pid))
    node.process.send_signal(signal.SIGINT)
    code, _, err = node.end()
    assert (code, err) == (128 + signal.SIGINT, "unicoll.run: got SIGINT\n")


def test_without_restarts_a_dead_launcher_ends_the_others(folder: LaunchFolder, port: int) -> None:
    nodes = pair(folder, port, "-n", "1", goes_on(folder))
    wait_until(lambda: generation(folder.path, 2) == 0)
    nodes[0].process.kill()
    code, _, err = nodes[1].end()
    assert code == 1
    assert f"launcher pid {nodes[0].process.pid}) has died" in err.partition("Root Cause")[2]
    wait_until(lambda: all_gone(folder.pids(2)))


def test_a_signal_to_one_launcher_ends_the_job(folder: LaunchFolder, port: int) -> None:
    nodes = pair(folder, port, "-n", "1", "--max-restarts=3", goes_on(folder))
    wait_until(lambda: generation(folder.path, 2) == 0)
    nodes[0].process.send_signal(signal.SIGTERM)
    codes, _, errs = ends(nodes)
    assert codes == [128 + signal.SIGTERM, 1], errs
    assert "the launcher got SIGTERM; stopping the workers" in errs[1]
    wait_until(lambda: all_gone(folder.pids(2)))


@pytest.mark.parametrize("how", ["SIGTERM", "killed", "failed"])
def test_workers_that_do_not_notice_the_end_on_another_node_are_stopped(
    folder: LaunchFolder, port: int, how: str
) -> None:
    """At once, unless a worker has failed: then they have the grace period."""
    script = folder.script(
        """
        import os, time
        from pathlib import Path
        rank = os.environ["RANK"]
        Path("pid." + rank).write_text(f"{os.getpid()}\\n")
        while rank == "0" or not Path("fail").exists():
            time.sleep(0.02)
        raise SystemExit(3)
        """
    )
    grace = "0.5" if how == "failed" else "1000"
    nodes = [Node(folder, port, f"--node-rank={k}", "-n", "1", "--grace", grace, script) for k in range(2)]
    wait_until(lambda: len(folder.pids(2)) == 2)
    if how == "failed":
        (folder.path / "fail").touch()
    else:
        nodes[1].process.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    codes, _, errs = ends(nodes)
    assert codes[0] == (3 if how == "failed" else 1), errs
    lines = [line for line in errs[0].splitlines() if "stopping" in line or "the workers have" in line]
    if how == "failed":
        assert re.search(r"rank 1.*; the workers have 0\.5 s to end by themselves$", lines.pop(0)), errs
        assert lines == ["unicoll.run: stopping the workers"]
    else:
        assert re.search("launcher .*; stopping the workers$", lines.pop(0)), errs
        assert not lines
    wait_until(lambda: all_gone(folder.pids(2)))


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (["--node-rank=1"], ["--node-rank=1"], "waited 2 s for node 0 to listen on 127.0.0.1:"),
        (["--node-rank=0"], ["--node-rank=0"], "is in use: another job or program"),
        ([], ["--rdzv-id=other"], r"--rdzv-id is \w+ on host \S+ \(launcher pid \d+\) and \w+ on host"),
        ([], ["--nnodes=3"], r"--nnodes is \w+ on host \S+ \(launcher pid \d+\) and \w+ on host"),
        ([], ["--max-restarts=1"], r"--max-restarts is \w+ on host \S+ \(launcher pid \d+\) and \w+ on host"),
        (
            [],
            ["UNICOLL_SECRET=another-secret-of-32-characters-x"],
            "every process of the job needs the same one",
        ),
        (
            [],
            ["UNICOLL_SECRET=another-secret-of-32-characters-x"],
            r"error: waited 2 s for 1 of 2 nodes.*; refused: \S+ \(refused a client: the two sides have different",
        ),
        (["--rdzv-conf=join_timeout=1"], None, "waited 1 s for 1 of 2 nodes to connect to"),
    ],
)
def test_launchers_that_do_not_fit(
    folder: LaunchFolder, port: int, first: list[str], second: list[str] | None, words: str
) -> None:
    script = folder.script("")
    nodes = []
    for flags in (first, second):
        if flags is not None:
            extra = dict(flag.split("=", 1) for flag in flags if not flag.startswith("-"))
            given = [flag for flag in flags if flag.startswith("-")]
            nodes.append(Node(folder, port, "--rdzv-conf=join_timeout=2", *given, script, **extra))
    codes, _, errs = ends(nodes)
    assert any(codes), errs
    assert any(re.search(words, err) for err in errs), errs
    last = [err.splitlines()[-1] for err, code in zip(errs, codes, strict=True) if code]
    assert all(line.startswith("unicoll.run: error: ") for line in last), errs
    assert not any("Traceback" in err for err in errs), errs


# --- two hosts ------------------------------------------------------------------------------------------------------


class HostJob:
    """A job on two hosts whose launchers are started again when they are killed."""

    def __init__(self, hosts: Hosts, folder: LaunchFolder, *flags: str, elements: int = 1) -> None:
        self._hosts = hosts
        self._path = folder.path
        endpoint = "--rdzv-endpoint=10.77.0.1:29500"
        script = str(folder.path / goes_on(folder, elements))
        command = [sys.executable, "-m", "unicoll.run", "--nnodes=2", "-n", "2", endpoint, *flags, script]
        self._command = ["env", f"--chdir={folder.path}", *command]
        self.launchers: dict[int, subprocess.Popen[str]] = {}
        for host in (1, 2):
            self.start(host)

    def start(self, host: int) -> None:
        env = environment(UNICOLL_SECRET=SECRET)
        self.launchers[host] = self._hosts.start(host, self._command, env)

    def await_generation(self, condition: Callable[[int], bool]) -> int:
        wait_until(lambda: condition(generation(self._path)))
        return generation(self._path)

    def stop(self) -> dict[int, tuple[int, str]]:
        """Let the workers end; exit code and standard error of each launcher."""
        (self._path / "stop").touch()
        errs = {host: launcher.communicate(timeout=180)[1] for host, launcher in self.launchers.items()}
        return {host: (self.launchers[host].returncode, err) for host, err in errs.items()}


@pytest.mark.every(n=0)
def test_random_kills_of_workers_and_launchers(hosts: Hosts, folder: LaunchFolder, seed: int) -> None:
    """After each the next generation runs, and in the end nothing is left."""
    choose = random.Random(seed)
    job = HostJob(hosts, folder, "--max-restarts=1000")
    number = job.await_generation(lambda found: found >= 0)
    times = []
    for _ in range(4 if selection.is_short() else 100):
        time.sleep(choose.uniform(0.0, 0.3))
        victim = choose.choice(["launcher 1", "launcher 2", "worker"])
        began = time.monotonic()
        if victim == "worker":
            rank = choose.randrange(4)
            os.kill(int((folder.path / f"pid.{number}.{rank}").read_text()), signal.SIGKILL)
        else:
            host = int(victim[-1])
            job.launchers[host].kill()
            job.launchers[host].communicate()
            job.start(host)
        last = number
        number = job.await_generation(lambda found, last=last: found > last)
        times.append((time.monotonic() - began, victim))
    print("seconds until the next generation:", *(f"{seconds:.2f} ({who})" for seconds, who in sorted(times)))
    ended = job.stop()
    assert {code for code, _ in ended.values()} == {0}, ended
    assert all("restarts: " in err for _, err in ended.values())
    wait_until(lambda: all_gone([int(path.read_text()) for path in folder.path.glob("pid.*")]))
    for host in (1, 2):
        listening = subprocess.run(
            hosts.on(host, "ss", "-Hltn"), check=True, capture_output=True, text=True, timeout=30
        )
        assert listening.stdout == ""


@pytest.mark.every(n=0)
def test_a_host_that_is_cut_off_is_named_and_comes_back(hosts: Hosts, folder: LaunchFolder) -> None:
    job = HostJob(hosts, folder, "--max-restarts=5")
    number = job.await_generation(lambda found: found >= 0)
    hosts.drop(0, 2)
    time.sleep(25.0)
    hosts.plug(0, 2)
    job.await_generation(lambda found: found > number)
    ended = job.stop()
    assert {code for code, _ in ended.values()} == {0}, ended
    assert "has died, or its host is down" in ended[1][1], ended


@pytest.mark.every(n=0)
def test_a_launcher_says_at_once_that_another_one_does_not_answer(hosts: Hosts, folder: LaunchFolder) -> None:
    job = HostJob(hosts, folder)
    job.await_generation(lambda found: found >= 0)
    hosts.drop(0, 2)
    os.kill(int((folder.path / "pid.0.3").read_text()), signal.SIGKILL)
    launcher = job.launchers[2]
    assert launcher.stderr is not None
    for line in launcher.stderr:  # nothing else before
        assert re.fullmatch(r"unicoll\.run: has waited 1 s for node 0 \(host host1, .*\) to answer\n", line)
        break
    ended = job.stop()
    assert {code for code, _ in ended.values()} == {1, 128 + signal.SIGKILL}, ended


@pytest.mark.every(n=0)
def test_a_job_over_a_slow_link(hosts: Hosts, folder: LaunchFolder) -> None:
    """The link is full for longer than a launcher waits for another's heartbeat, and no node is called dead."""
    for host in (1, 2):
        hosts.limit(0, host, "tbf", "rate", "40mbit", "burst", "32kb", "latency", "400ms")
    job = HostJob(hosts, folder, "--max-restarts=1", elements=1 << 20)
    job.await_generation(lambda found: found == 0)
    time.sleep(25.0)
    os.kill(int((folder.path / "pid.0.3").read_text()), signal.SIGKILL)
    job.await_generation(lambda found: found == 1)
    for code, err in job.stop().values():
        assert (code, "has died" in err) == (0, False), err
        assert "restarts: 1; the first failure: rank 3: Signal 9 (SIGKILL) received by PID" in err
