"""A job of torchrun's elastic agents, ``--nnodes 1:2``: workers and nodes are killed, and a node is added."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launcher.launching import environment, wait_until
from tests.support.ranks import reserved_port

pytestmark = [pytest.mark.torch, pytest.mark.every(n=0)]
torch = pytest.importorskip("torch")

PROGRAM = """
import os, sys, time
from pathlib import Path

if sys.argv[1] == "unicoll":
    import numpy as np, unicoll as dist
    dist.init_process_group()
    one = lambda: np.ones(1)
else:
    import torch, torch.distributed as dist, unicoll.torch_plugin
    dist.init_process_group("unicoll")
    one = lambda: torch.ones(1)
total = one()
dist.all_reduce(total)
size, first = int(total[0]), one() * (os.getpid() if os.environ["RANK"] == "0" else 0)
dist.all_reduce(first)
assert size == int(os.environ["WORLD_SIZE"])
Path(f"up.{size}.{int(first[0])}.{os.getpid()}").write_text(os.environ["AGENT"])
while total[0]:
    total = one() * (not Path("stop").exists())
    dist.all_reduce(total, op=dist.ReduceOp.MIN)
    time.sleep(0.02)
dist.destroy_process_group()
print("ended", size, flush=True)
"""


class Agents:
    """torchrun's agents of a job with two workers on each node, all on this host."""

    def __init__(self, folder: Path, port: int, program: str) -> None:
        self._folder = folder
        self._port = port
        self._program = program
        self._seen: set[str] = set()  # attempts
        self._deadline = time.monotonic() + 240
        self.agents: list[subprocess.Popen[bytes]] = []
        (folder / "program.py").write_text(PROGRAM)

    def start(self) -> None:
        number = len(self.agents)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=3"]
        command += ["--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}"]
        # the defaults are 30, 5 and 3
        conf = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10"
        # With the store that its agents share by default, torchrun cannot add a node (docs/launch.md).
        env = environment(AGENT=str(number), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        with (
            (self._folder / f"out{number}").open("wb") as out,
            (self._folder / f"err{number}").open("wb") as err,
        ):
            words = [*command, conf, "program.py", self._program]
            self.agents.append(subprocess.Popen(words, cwd=self._folder, env=env, stdout=out, stderr=err))

    def listen(self) -> bool:
        """True if an agent serves the endpoint."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def up(self, size: int) -> dict[int, int]:
        """The workers of a new attempt of this size, as pid: agent, once all have met."""
        while True:
            assert any(agent.poll() is None for agent in self.agents), self.errors()
            attempts: dict[str, dict[int, int]] = {}
            for path in self._folder.glob("up.*"):
                _, number, attempt, pid = path.name.split(".")
                if attempt not in self._seen and int(number) == size and (text := path.read_text()):
                    attempts.setdefault(attempt, {})[int(pid)] = int(text)
            for workers in attempts.values():
                if len(workers) == size:
                    self._seen |= {path.name.split(".")[2] for path in self._folder.glob("up.*")}
                    return workers
            assert time.monotonic() < self._deadline, self.errors()
            time.sleep(0.05)

    def stop(self) -> list[int]:
        """End the workers; the exit codes of the agents that run."""
        running = [agent for agent in self.agents if agent.poll() is None]
        (self._folder / "stop").touch()
        return [agent.wait(timeout=180) for agent in running]

    def errors(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("err*")))

    def close(self) -> None:
        """Kill the agents, and the workers, which outlive them."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if (process / "cwd").samefile(self._folder):
                    os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture(params=["unicoll", "torch"])
def agents(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agents]:
    with reserved_port() as port:
        made = Agents(tmp_path, port, request.param)
        yield made
        made.close()


def test_workers_restart_and_the_number_of_nodes_changes(agents: Agents) -> None:
    agents.start()
    wait_until(agents.listen)  # a job of torchrun ends with the agent that serves the endpoint
    agents.start()
    first = agents.up(4)
    os.kill(next(iter(first)), signal.SIGKILL)
    second = agents.up(4)
    assert not first.keys() & second.keys()  # all workers were started again
    agents.agents[1].kill()
    for pid, agent in second.items():
        if agent == 1:
            os.kill(pid, signal.SIGKILL)
    agents.up(2)
    agents.start()
    agents.up(4)
    assert agents.stop() == [0, 0], agents.errors()
    assert "RankLostError" in agents.errors()
