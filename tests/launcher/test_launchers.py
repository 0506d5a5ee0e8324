"""The launcher table: realistic environments for each row, errors, and the address of rank 0."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.launching import environment
from unicoll.bootstrap import enclosing_jobs, launchers
from unicoll.bootstrap.launchers import (
    LaunchInfo,
    detect,
    first_host,
    is_torchelastic_launched,
    near_misses,
)
from unicoll.bootstrap.resolve import JoinRequest, resolve
from unicoll.errors import DistArgumentError
from unicoll.net.stores import HashStore


def env(text: str) -> dict[str, str]:
    """Variables written as words ``name=value``."""
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = env(
    """
    RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=5
    ROLE_WORLD_SIZE=8 MASTER_ADDR=node-a MASTER_PORT=29511 TORCHELASTIC_RUN_ID=none
    TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_USE_AGENT_STORE=True
    """
)
# mpirun -n 2, Open MPI 5.0
OPENMPI_5 = env(
    """
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1
    OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_UNIVERSE_SIZE=2 OMPI_VERSION=5.0.11
    PMIX_HOSTNAME=vm PMIX_NAMESPACE=prterun-vm-5034@1 PMIX_RANK=1 PRTE_LAUNCHED=1
    """
)
PRTERUN = env("PMIX_NAMESPACE=prterun-vm-5072@1 PMIX_RANK=1 PRTE_LAUNCHED=1")
MVAPICH2 = env(
    """
    MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=3 MV2_COMM_WORLD_LOCAL_SIZE=4
    PMI_ID=3 PMI_PORT=vm:41233
    """
)
# srun -n 5 over three nodes, from within sbatch -n 12
SRUN = env(
    """
    SLURM_JOB_ID=22902023 SLURM_JOB_NODELIST=sh04-10n[05-08] SLURM_STEP_ID=2
    SLURM_STEP_NODELIST=sh04-10n[06-08] SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=5
    SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_TASKS_PER_NODE=2(x2),1 SLURM_NTASKS=5 SLURM_NPROCS=5
    SLURM_PROCID=4 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_GTIDS=4
    """
)
SRUN_PMIX = SRUN | env("PMIX_RANK=4 PMIX_NAMESPACE=slurm.pmix.22902023.2 PMIX_VERSION=5.0.3")
# the batch script itself: a single process on the first of four nodes
SBATCH = env(
    """
    SLURM_JOB_ID=200505 SLURM_JOB_NODELIST=gnode[10,20,25,37] SLURM_NTASKS=4 SLURM_NPROCS=4
    SLURM_TASKS_PER_NODE=1(x4) SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
    """
)
# salloc with use_interactive_step
SALLOC_SHELL = SBATCH | env(
    """
    SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NODELIST=gnode10
    SLURM_STEP_TASKS_PER_NODE=1
    """
)
# mpiexec -n 2, MPICH 5.0: no variable is unique to the job
HYDRA = env("MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=11 PMI_HOSTNAME=vm PMI_RANK=1 PMI_SIZE=2")
INTEL = HYDRA | env("I_MPI_HYDRA_UUID=2a150000-91ff-197d-c160-06005c93cd13")
# PALS with PMI: mpiexec on a Cray
CRAY = env(
    """
    PALS_APID=8b0a5f50 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PALS_NODEID=1 PALS_RANKID=3
    PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 PMI_RANK=3 PMI_SIZE=4
    """
)
# jsrun: the PMIx server has the size, too
JSRUN = env(
    """
    JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2
    PMIX_RANK=3 PMIX_NAMESPACE=1
    """
)
# flux run -N2 -n4, in an instance that srun has started
FLUX = SRUN | env(
    """
    FLUX_JOB_ID=f2WbJxQV FLUX_JOB_SIZE=4 FLUX_JOB_NNODES=2 FLUX_TASK_RANK=3 FLUX_TASK_LOCAL_ID=1
    PMI_RANK=3 PMI_SIZE=4 PMI_FD=21
    """
)
# one rank per pod: Kubeflow's trainer, LeaderWorkerSet, an indexed Job
KUBEFLOW = env(
    """
    PET_NNODES=4 PET_NPROC_PER_NODE=1 PET_NODE_RANK=3 PET_MASTER_ADDR=train-node-0-0.train PET_MASTER_PORT=29500
    """
)
LWS = env("LWS_LEADER_ADDRESS=train-0.train.default LWS_GROUP_SIZE=4 LWS_WORKER_INDEX=3")
JOB = env("JOB_COMPLETION_INDEX=3 WORLD_SIZE=4 MASTER_ADDR=train-0.train")
PALS = {name: value for name, value in CRAY.items() if name.startswith("PALS_")}


def found(environ: dict[str, str]) -> LaunchInfo:
    launched = detect(environ)
    assert launched is not None
    return launched


@pytest.mark.parametrize(
    ("environ", "name", "members"),
    [
        (TORCHRUN, "torchrun", (5, 8, 1, 4, 1)),
        (TORCHRUN | {"UNICOLL_LAUNCHER": "1"}, "unicoll", (5, 8, 1, 4, 1)),
        ({"RANK": "1", "WORLD_SIZE": "3"}, "environment", (1, 3, None, None, None)),
        (OPENMPI_5, "openmpi", (1, 2, 1, 2, None)),
        (JSRUN, "jsrun", (3, 4, 1, 2, None)),
        (FLUX, "flux", (3, 4, 1, None, None)),
        (PRTERUN | {"PMIX_SIZE": "2"}, "pmix", (1, 2, None, None, None)),
        (MVAPICH2, "mvapich2", (3, 4, 3, 4, None)),
        (SRUN, "slurm", (4, 5, 0, 1, 2)),
        (SRUN_PMIX, "slurm", (4, 5, 0, 1, 2)),
        (HYDRA, "mpich", (1, 2, 1, 2, None)),
        (INTEL, "intelmpi", (1, 2, 1, 2, None)),
        (CRAY, "mpich", (3, 4, 1, 2, None)),
        (PALS | {"PALS_SIZE": "4"}, "pals", (3, 4, 1, 2, 1)),
        (KUBEFLOW, "kubeflow", (3, 4, 0, 1, 3)),
        (LWS, "leaderworkerset", (3, 4, 0, 1, 3)),
        (JOB, "kubernetes", (3, 4, 0, 1, 3)),
    ],
)
def test_rows(environ: dict[str, str], name: str, members: tuple[int | None, ...]) -> None:
    launched = found(environ)
    assert launched.name == name
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")
    assert tuple(getattr(launched, each) for each in names) == members
    without_mpi = ("torchrun", "unicoll", "environment", "kubeflow", "leaderworkerset", "kubernetes")
    assert launched.started_by_mpi == (name not in without_mpi)


def test_source_names_the_variables_used() -> None:
    assert found(OPENMPI_5).source == (
        "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_LOCAL_RANK=1, "
        "OMPI_COMM_WORLD_LOCAL_SIZE=2"
    )


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (TORCHRUN | SRUN, "torchrun"),  # torchrun inside srun
        (OPENMPI_5 | SRUN, "openmpi"),  # Open MPI's daemons are started by srun
        (OPENMPI_5 | SBATCH, "openmpi"),
        (HYDRA | SRUN, "mpich"),  # Hydra's proxies are started by srun; its ranks inherit their SLURM_PROCID
        (HYDRA | SBATCH, "mpich"),
        (SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5", "PMI_FD": "7"}, "slurm"),  # srun --mpi=pmi2
        ({"RANK": "0"} | OPENMPI_5, "openmpi"),  # an incomplete row lends nothing to the next
        ({"RANK": "0", "WORLD_SIZE": ""} | OPENMPI_5, "openmpi"),
        (TORCHRUN | KUBEFLOW, "torchrun"),
        (OPENMPI_5 | LWS, "openmpi"),  # mpirun in a pod
        (JOB | {"RANK": "3"}, "environment"),
    ],
)
def test_order_of_the_rows(environ: dict[str, str], name: str) -> None:
    assert found(environ).name == name


def test_rows_are_not_combined() -> None:
    launched = found({"RANK": "0", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "9"} | OPENMPI_5)
    assert (launched.rank, launched.local_rank, launched.local_world_size) == (1, 1, 2)


@pytest.mark.parametrize(
    "environ", [{}, PRTERUN | LWS, SBATCH, SALLOC_SHELL, SALLOC_SHELL | {"SLURM_STEP_ID": "batch"}]
)
def test_a_process_without_launcher(environ: dict[str, str]) -> None:
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is set but RANK is not"),
        (SBATCH, "SLURM_STEP_ID is not: not started by srun"),
        (SALLOC_SHELL, "SLURM_STEP_ID=4294967290 is a batch script's or a shell's step"),
        (PRTERUN, "PMIX_RANK is set but PMIX_SIZE is not .*mpirun"),
        (PALS, "PALS_RANKID is set but PALS_SIZE is not"),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "2"}, "PET_NPROC_PER_NODE=2 needs torchrun or unirun"),
        (KUBEFLOW | {"PET_NNODES": "2:4"}, "PET_NNODES=2:4 needs torchrun"),
        ({"JOB_COMPLETION_INDEX": "0"}, "WORLD_SIZE is not .set WORLD_SIZE to the completions of the Job"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE is not"),
    ],
)
def test_near_misses(environ: dict[str, str], message: str) -> None:
    assert detect(environ) is None
    assert re.search(message, "; ".join(near_misses(environ)))
    assert near_misses({"PATH": "/bin"}) == []
    assert len(near_misses(environ)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "one"}, "RANK=one: must be a whole number"),
        ({"RANK": "-1"}, "RANK=-1: must be a whole number"),
        ({"RANK": "8"}, "RANK=8 must be less than WORLD_SIZE=8"),
        ({"WORLD_SIZE": "0"}, "RANK=5 must be less than WORLD_SIZE=0"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be less than LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE=two is neither a number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http"),
    ],
)
def test_errors_have_the_variable(changes: dict[str, str], message: str) -> None:
    with pytest.raises(DistArgumentError, match=re.escape(message)):
        detect(TORCHRUN | changes)


def test_master_from_the_environment() -> None:
    launched = found(TORCHRUN)
    assert (launched.master_addr, launched.master_port, launched.port_fixed) == ("node-a", 29511, True)
    assert launched.master_source == "MASTER_ADDR, MASTER_PORT"
    assert launched.master_hint == ""
    assert found(TORCHRUN | {"MASTER_ADDR": "[fd00::1]"}).master_addr == "fd00::1"


@pytest.mark.parametrize(
    ("environ", "address", "port", "source"),
    [
        (KUBEFLOW, "train-node-0-0.train", 29500, "PET_MASTER_ADDR, PET_MASTER_PORT"),
        (LWS, "train-0.train.default", None, "LWS_LEADER_ADDRESS, port from LWS_LEADER_ADDRESS="),
        (LWS | {"MASTER_PORT": "4000"}, "train-0.train.default", 4000, "LWS_LEADER_ADDRESS, MASTER_PORT"),
        (LWS | {"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1", None, "MASTER_ADDR, port from LWS_LEADER_ADDRESS"),
        (KUBEFLOW | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}, "a", 5, "MASTER_ADDR, MASTER_PORT"),
        (JOB, "train-0.train", None, "MASTER_ADDR, port from MASTER_ADDR=train-0.train"),
    ],
)
def test_master_of_pods(environ: dict[str, str], address: str, port: int | None, source: str) -> None:
    launched = found(environ)
    assert launched.master_addr == address
    assert launched.master_port == port or (port is None and not launched.port_fixed)
    assert launched.master_source.startswith(source)
    assert launched.master_hint == ""


@pytest.mark.parametrize("environ", [OPENMPI_5, MVAPICH2, INTEL])
def test_one_host_uses_loopback_and_the_jobs_port(environ: dict[str, str]) -> None:
    launched = found(environ)
    assert launched.single_host
    assert launched.master_addr == "127.0.0.1"
    assert launched.master_port is not None
    assert 20000 <= launched.master_port < 32000
    assert not launched.port_fixed
    assert launched.master_hint == ""
    assert launched.job


def test_ports_of_jobs_differ_and_ranks_agree() -> None:
    ports = {
        found(OPENMPI_5 | {"PMIX_NAMESPACE": f"prterun-vm-{pid}@1"}).master_port for pid in range(100, 120)
    }
    assert len(ports) == 20
    other_rank = OPENMPI_5 | env("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 PMIX_RANK=0")
    assert found(other_rank).master_port == found(OPENMPI_5).master_port


def test_the_address_of_a_hosts_own_daemon_is_no_id_of_the_job() -> None:
    several = {**MVAPICH2, "MV2_COMM_WORLD_SIZE": "8"}
    assert found(several).job == found({**several, "PMI_PORT": "other:41234"}).job == ""
    assert found(MVAPICH2).job == "PMI_PORT=vm:41233"


def test_slurm_uses_the_steps_first_host() -> None:
    launched = found(SRUN)
    assert launched.master_addr == "sh04-10n06"
    assert launched.master_port == found(SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).master_port
    assert launched.master_port != found(SRUN | {"SLURM_STEP_ID": "3"}).master_port
    assert "SLURM_STEP_NODELIST=sh04-10n[06-08]" in launched.master_source
    assert found(SRUN | {"MASTER_ADDR": "10.0.0.1"}).master_addr == "10.0.0.1"


def test_slurm_on_one_host_uses_loopback() -> None:
    one = {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_LOCALID": "4"}
    assert found(SRUN | one).master_addr == "127.0.0.1"


NO_ADDRESS = "does not set the address of rank 0: set MASTER_ADDR"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "3"}, "set MASTER_ADDR .* and MASTER_PORT .* on every rank"),
        (OPENMPI_5 | {"OMPI_COMM_WORLD_SIZE": "4"}, f"openmpi {NO_ADDRESS}"),
        (HYDRA | {"PMI_SIZE": "4"}, f"mpich {NO_ADDRESS} .* and MASTER_PORT"),
        # rank 0 is on the host that the user's list has first, the node list is sorted
        (SRUN | {"SLURM_DISTRIBUTION": "arbitrary"}, f"slurm {NO_ADDRESS}"),
    ],
)
def test_the_hint_without_an_address_of_rank_0(environ: dict[str, str], message: str) -> None:
    assert re.search(message, found(environ).master_hint)


def test_hydra_jobs_are_distinguished_by_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "ancestors", lambda: [("sh", 12), ("hydra_pmi_proxy", 11), ("bash", 2)])
    assert found(HYDRA).job == "hydra_pmi_proxy=11"
    assert found(HYDRA).master_port is not None
    monkeypatch.setattr(launchers, "ancestors", lambda: [("sh", 12)])
    assert found(HYDRA).master_port is None
    hint = "mpich sets no variable that differs between two jobs on one host: set MASTER_PORT"
    assert hint in found(HYDRA).master_hint


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ancestors() -> None:
    assert launchers.ancestors()[0][1] == os.getppid()


def test_torchelastic() -> None:
    assert is_torchelastic_launched(TORCHRUN)
    assert is_torchelastic_launched({"TORCHELASTIC_RUN_ID": ""})
    assert not is_torchelastic_launched({"RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1", "node1"),
        ("gnode[10,20,25,37]", "gnode10"),
        ("n[08-11],login", "n08"),
        ("r[1-2]c[0,3]-ib", "r1c0-ib"),
        ("a[3],b[3-4]x", "a3"),
        ("a.b-c.example.org , d", "a.b-c.example.org"),
        ("n[1-999999999]x[1-999999999]", "n1x1"),
    ],
)
def test_the_first_host_of_a_list(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", " , ", "n[1-3", "n1-3]", "n[1[2]]", "n[3-1]", "n[a-b]", "n[1-]", "n[]"])
def test_bad_host_lists(text: str) -> None:
    with pytest.raises(DistArgumentError, match="node list"):
        first_host(text)


STALE = env("RANK=0 WORLD_SIZE=1 MASTER_ADDR=other MASTER_PORT=1 UNICOLL_STORE=other:2")


@pytest.mark.parametrize(
    ("environ", "before", "expected"),
    [
        # variables of the shell, or of a worker, in which mpirun was started
        (STALE | OPENMPI_5, [STALE], "openmpi 1 of 2"),
        (TORCHRUN | OPENMPI_5, [TORCHRUN, TORCHRUN], "openmpi 1 of 2"),
        (STALE | INTEL, [STALE], "intelmpi 1 of 2"),
        (STALE | PRTERUN, [STALE], "1 without a size"),
        # torchrun, once on each host of a job
        (TORCHRUN | SRUN, [SRUN, SRUN], "torchrun 5 of 8"),
        (TORCHRUN | OPENMPI_5, [OPENMPI_5], "torchrun 5 of 8"),
        (TORCHRUN | PRTERUN, [PRTERUN], "torchrun 5 of 8"),
        # three launchers; the inner worker has the outer one's rank
        (TORCHRUN | OPENMPI_5, [TORCHRUN | {"LOCAL_RANK": "2"} | OPENMPI_5] * 2, "torchrun 5 of 8"),
        # a script between mpirun and the process
        (STALE | OPENMPI_5, [OPENMPI_5], "environment 0 of 1"),
        # an MPI library's mpirun in a process of another's
        (OPENMPI_5 | CRAY, [OPENMPI_5], "mpich 3 of 4"),
        (OPENMPI_5 | CRAY, [CRAY], "openmpi 1 of 2"),
        # set by the program itself
        (OPENMPI_5 | STALE, None, "environment 0 of 1"),
        # not known: of another host, or another user
        (TORCHRUN | SRUN, [], "torchrun 5 of 8"),
        (env("RANK=0 WORLD_SIZE=2") | OPENMPI_5, [], "environment 0 of 2"),
        (
            STALE | OPENMPI_5,
            [],
            r"RANK=0, WORLD_SIZE=1 contradict OMPI_COMM_WORLD_RANK=1, OMPI_.*_SIZE=2 \(openmpi\)",
        ),
    ],
)
def test_the_innermost_launcher_gives_rank_and_size(
    environ: dict[str, str],
    before: list[dict[str, str]] | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``before``: the environments with which the process's ancestors were started; None: its own lacks the rank."""
    inherited = [environ, *before] if before is not None else [OPENMPI_5]
    monkeypatch.setattr(enclosing_jobs, "_initial_environments", lambda: iter(inherited))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if "contradict" in expected:
        with pytest.raises(DistArgumentError, match=expected):
            detect(environ)
        with pytest.raises(DistArgumentError, match=expected):
            resolve(JoinRequest("gloo"))
        # what the error says
        found = resolve(JoinRequest("gloo", "tcp://127.0.0.1:0", 0, 1))
        assert (found.rank, found.world_size) == (0, 1)
        return
    launched = detect(environ)
    if launched is None:
        assert expected == "1 without a size"
        assert launchers.has_rank_without_size(enclosing_jobs.own_environment(environ))
        return
    assert f"{launched.name} {launched.rank} of {launched.world_size}" == expected
    own_environ = enclosing_jobs.own_environment(environ)
    ignored = [f"{name}={environ[name]}" for name in sorted(environ.keys() - own_environ.keys())]
    notes = resolve(JoinRequest("gloo", store=HashStore()), environ).notes
    about = [note for note in notes if "enclosing" in note]
    expected_notes = [f"variables of an enclosing job are ignored: {', '.join(ignored)}"] if ignored else []
    assert about == expected_notes
    kept = STALE.items() & own_environ.items()
    assert kept == (
        STALE.items() & environ.items() if launched.name in ("environment", "torchrun") else set()
    )


def test_a_dry_run_within_a_rank_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DistArgumentError("it has joined already")

    monkeypatch.setattr(enclosing_jobs, "refuse_subprocess", refuse)
    environ = env("RANK=1 WORLD_SIZE=4 MASTER_ADDR=localhost MASTER_PORT=1")
    found = resolve(JoinRequest("fake"), environ)
    assert (found.rank, found.world_size, found.fake) == (1, 4, True)
    with pytest.raises(DistArgumentError, match="it has joined already"):
        resolve(JoinRequest("gloo"), environ)


def test_the_environment_of_a_process_that_a_launcher_has_started(tmp_path: Path) -> None:
    """``/proc`` has the variables with which a process and its ancestors were started."""
    code = "import unicoll.bootstrap.launchers as l; f = l.detect(); print(f.name, f.rank, f.world_size)"
    inner = [sys.executable, "-c", code]
    start = "import subprocess, sys, os; subprocess.run(sys.argv[1:], env={**os.environ, **%r}, check=True)"
    for outer, name in ((STALE | OPENMPI_5, "openmpi 1 2"), (OPENMPI_5 | STALE, "environment 0 1")):
        first = STALE if name == "openmpi 1 2" else OPENMPI_5
        done = subprocess.run(
            [sys.executable, "-c", start % outer, *inner],
            env={**environment(), **first},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == name
