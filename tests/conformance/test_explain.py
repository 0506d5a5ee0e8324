"""explain(): rank, store, secret, interface and backend, each with its source, under every kind of launcher."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import unicoll as dist
from tests.support.ranks import ROOT, environment, reserved_port
from unicoll.process.formatting import backend_text

PROGRAM = str(Path(__file__).with_name("explaining.py"))
SIZE = 2
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

Report = dict[str, Any]


def surroundings(**extra: str) -> dict[str, str]:
    found = environment({"PYTHONPATH": str(ROOT), **extra})
    if "UNICOLL_SOCKET_IFNAME" not in extra:
        found.pop("UNICOLL_SOCKET_IFNAME")
    return found


def collect(processes: list[subprocess.Popen[str]]) -> list[Report]:
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    reports: list[Report] = [json.loads(line) for out, _ in outputs for line in out.splitlines()]
    return sorted(reports, key=lambda report: int(report["rank"]))


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def by_hand(variables: list[dict[str, str]]) -> list[Report]:
    """One process for each set of variables, as an MPI launcher or Slurm would start them."""
    return collect([start([PROGRAM], surroundings(**each)) for each in variables])


def lines(report: Report, when: str = "after") -> dict[str, str]:
    """The explanation's lines by what stands before the first colon; "rank" for the first."""
    found = {}
    for line in report[when].splitlines():
        name, _, rest = line.partition(": ")
        found["rank" if name.startswith("rank ") else name] = line if name.startswith("rank ") else rest
    return found


def check(reports: list[Report], name: str, source: str, backend_reason: str) -> None:
    """What holds under every launcher; ``source`` has {rank} in the place of the rank."""
    assert [report["rank"] for report in reports] == list(range(SIZE))
    for rank, report in enumerate(reports):
        for when in ("before", "after"):
            said = lines(report, when)["rank"]
            assert said.startswith(f"rank {rank} of {SIZE}: from ")
            assert source.format(rank=rank) in said
            assert said.endswith(f"({name})")
        assert report["before"].startswith("not initialised\n")
        for backend in ("gloo", "mpi", "nccl"):
            assert f"\nbackend '{backend}'" in report["before"]
        before, after = lines(report, "before"), lines(report)
        assert set(before) >= {"rank", "store", "secret", "interface"}
        assert set(after) >= {"rank", "store", "secret", "interface", "cpu arrays"}
        assert after["secret"].startswith(before["secret"])
        assert after["interface"] == before["interface"]
        assert after["cpu arrays"].startswith(f"backend {backend_text(report['backend'])}: ")
        assert backend_reason in after["cpu arrays"]
        assert report["at the end"] == report["before"]


def test_under_our_launcher() -> None:
    command = ["-m", "unicoll.run", "--nproc-per-node", str(SIZE), "--no-prefix", PROGRAM]
    reports = collect([start(command, surroundings())])
    check(reports, "unicoll", "RANK={rank}, WORLD_SIZE=2", "the default for CPU arrays")
    after = lines(reports[1])
    assert after["store"].startswith("tcp://127.0.0.1:")
    assert after["store"].endswith("(UNICOLL_STORE), hosted by the launcher")
    assert after["secret"] == "UNICOLL_SECRET"
    assert after["interface"].startswith("127.0.0.1: ")
    assert "loopback" in after["interface"]


@pytest.mark.every(n=0)
@needs_torch
def test_under_torchrun() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE), PROGRAM]
    reports = collect([start(command, surroundings())])
    check(reports, "torchrun", "RANK={rank}, WORLD_SIZE=2", "the default for CPU arrays")
    after = lines(reports[1])
    assert "MASTER_ADDR" in after["store"]
    assert "torchrun's agent uses that port itself" in after["store"]
    assert after["store"].endswith("hosted by rank 0")
    assert after["secret"].startswith("none was given; rank 0 made a key")


MPI_REASON = "backend='gloo'" if dist.is_mpi_available() else "started this process, but backend 'mpi'"
FAKES = {
    "openmpi": (
        {
            "OMPI_COMM_WORLD_RANK": "{rank}",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_RANK": "{rank}",
            "PMIX_NAMESPACE": "prterun-test@1",
        },
        "OMPI_COMM_WORLD_RANK={rank}, OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_LOCAL_RANK={rank}",
    ),
    "slurm": (
        {
            "SLURM_PROCID": "{rank}",
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": "{rank}",
            "SLURM_TASKS_PER_NODE": "2",
            "SLURM_NODEID": "0",
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_NODELIST": "localhost",
        },
        "SLURM_PROCID={rank}, SLURM_NTASKS=2",
    ),
    "mpich": (
        {
            "PMI_RANK": "{rank}",
            "PMI_SIZE": "2",
            "MPI_LOCALRANKID": "{rank}",
            "MPI_LOCALNRANKS": "2",
            "PMI_PORT": "localhost:1",
        },
        "PMI_RANK={rank}, PMI_SIZE=2",
    ),
}


@pytest.mark.every(n=3)
@pytest.mark.parametrize("name", FAKES)
def test_under_mpi_launchers_and_slurm(name: str) -> None:
    variables, source = FAKES[name]
    with reserved_port() as port:
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        reports = by_hand(
            [{**{k: v.format(rank=rank) for k, v in variables.items()}, **master} for rank in range(SIZE)]
        )
    check(reports, name, source, MPI_REASON)
    for report in reports:
        after = lines(report)
        assert after["store"].startswith(f"tcp://127.0.0.1:{master['MASTER_PORT']} (")
        assert "MASTER_ADDR" in after["store"]
        assert after["store"].endswith("hosted by rank 0")


def test_started_by_hand_with_a_secret_file_and_an_interface(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of sufficient length for a test")
    secret.chmod(0o600)
    with reserved_port() as port:
        common = {
            "WORLD_SIZE": str(SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "UNICOLL_SECRET_FILE": str(secret),
            "UNICOLL_SOCKET_IFNAME": "lo",
        }
        reports = by_hand([{**common, "RANK": str(rank)} for rank in range(SIZE)])
    check(reports, "environment", "RANK={rank}, WORLD_SIZE=2", "the default for CPU arrays")
    for report in reports:
        after = lines(report)
        assert after["secret"] == f"UNICOLL_SECRET_FILE={secret}"
        assert after["interface"] == "127.0.0.1: UNICOLL_SOCKET_IFNAME=lo (lo 127.0.0.1)"
        assert secret.read_text() not in report["after"]


def asked(source: str, **variables: str) -> str:
    """What one process that does not join prints."""
    program = f"import unicoll as dist\n{source}"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=surroundings(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_no_launcher() -> None:
    said = asked("print(dist.explain())")
    assert said.startswith("not initialised\nno launcher: ")
    assert "\nbackend 'gloo': available\n" in said


def test_one_process_alone() -> None:
    said = asked("dist.init_process_group(rank=0, world_size=1)\nprint(dist.explain())")
    assert said.startswith("rank 0 of 1: from arguments\n")
    assert "store: in this process, which is the only one\n" in said
    assert "cpu arrays: backend unicoll (gloo): the default for CPU arrays\n" in said


def test_arguments_win_over_the_launcher_and_it_is_said() -> None:
    said = asked(
        "dist.init_process_group('gloo', rank=0, world_size=1)\nprint(dist.explain())",
        RANK="3",
        WORLD_SIZE="4",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    assert said.startswith("rank 0 of 1: from arguments\n")
    assert "different from the launcher: rank 3 of 4, from RANK=3, WORLD_SIZE=4 (environment)\n" in said
    assert "cpu arrays: backend unicoll (gloo): backend='gloo'\n" in said


def test_a_broken_environment_is_explained_too() -> None:
    said = asked("print(dist.explain())", RANK="first", WORLD_SIZE="4")
    assert said.startswith("not initialised\n")
    assert "RANK" in said
    assert "first" in said


def test_half_an_environment_is_explained_too() -> None:
    said = asked("print(dist.explain())", SLURM_PROCID="0", SLURM_NTASKS="4")
    assert "SLURM_STEP_ID is not: not started by srun" in said
