"""The table of launchers: the environment variables from which rank, size and address are read.

Adding a launcher is adding a row to :data:`LAUNCHERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

Environ = Mapping[str, str]


@dataclass(frozen=True)
class LauncherRow:
    """One launcher's variables. Of several alternatives, the first one that is set is used.

    Attributes:
        name: the value of :attr:`unicoll.bootstrap.launchers.LaunchInfo.name`.
        rank, size: both must be set, or the row does not apply.
        local_rank, local_size, node_rank: optional. A size may be a Slurm-style list by node,
            ``"2(x3),1"``.
        marker: a variable that must also be set (to any value), if several launchers share the
            others.
        exclude: returns why the row does not apply although its variables are set; None if it
            applies.
        job: variables that together are equal on all ranks of a job and differ between jobs.
        agents: names of the launcher's own process on each host (as the kernel truncates them: 15
            characters). If no ``job`` variable is set, the process id of that ancestor
            distinguishes the jobs of one host.
        address, port: of rank 0.
        nodelist: the job's hosts, in Slurm's bracket notation; rank 0 runs on the first one.
        reorders: returns True if rank 0 may run on another host of the list.
        one_per_host: True if each rank is the only one of its host.
        mpi: True if MPI is the default backend of host arrays.
        hint: what to do if ``rank`` is set and ``size`` is not.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    marker: str | None = None
    exclude: Callable[[Environ], str | None] | None = None
    job: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    address: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)
    nodelist: tuple[str, ...] = ()
    reorders: Callable[[Environ], bool] | None = None
    one_per_host: bool = False
    mpi: bool = False
    hint: str = ""

    def applies(self, environ: Environ) -> bool:
        """True if the variables have the rank, the marker, and nothing that excludes the row."""
        # Nearly all rows of the table end at the first condition.
        return (
            self.rank in environ
            and first_set((self.rank,), environ) is not None
            and (self.marker is None or self.marker in environ)
            and (self.exclude is None or self.exclude(environ) is None)
        )

    def size_variable(self, environ: Environ) -> str | None:
        """The name of the variable with the size; None if there is none, and the row is
        incomplete."""
        return first_set(self.size, environ)


def first_set(names: tuple[str, ...], environ: Environ) -> str | None:
    """The first of some variables that is set, and not to blanks."""
    for name in names:
        if environ.get(name, "").strip():
            return name
    return None


# Slurm numbers the steps of a job from 0; ids from 0xfffffff0 are reserved: batch script,
# interactive shell, extern.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def _not_a_slurm_task(environ: Environ) -> str | None:
    """Slurm sets SLURM_PROCID=0 and SLURM_NTASKS also for a batch script, which is one process, not
    NTASKS."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step:
        return "SLURM_PROCID is set, but SLURM_STEP_ID is not: not started by srun"
    if not step.isdigit() or int(step) >= _FIRST_RESERVED_STEP:
        return f"SLURM_STEP_ID={step} is a batch script's or a shell's step: not started by srun"
    if "MPI_LOCALRANKID" in environ:
        # Hydra starts one proxy per host with srun, and all ranks of a host inherit the
        # SLURM_PROCID of their proxy.
        return "SLURM_PROCID belongs to the launcher that set MPI_LOCALRANKID"
    return None


def _is_arbitrary(environ: Environ) -> bool:
    """True if srun took the order of the ranks from the user (-m arbitrary); the node list is
    sorted nevertheless."""
    return environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")


def _started_in_a_pod(environ: Environ) -> str | None:
    """mpirun in a pod, whose processes have the pod's variables and one of these, from which MPI
    takes the size."""
    name = next((name for name in ("PMIX_RANK", "PALS_RANKID") if name in environ), None)
    return name and f"{name} was set by an MPI launcher in this pod"


def _not_one_rank_per_pod(environ: Environ) -> str | None:
    """Kubeflow gives each pod the flags of torchrun, which unirun reads, too; with one process a
    pod is a rank."""
    for name in ("PET_NPROC_PER_NODE", "PET_NNODES"):
        text = environ.get(name, "1")
        if not text.isdigit() or (name == "PET_NPROC_PER_NODE" and text != "1"):
            return f"{name}={text} needs torchrun or unirun to start the ranks of each pod"
    return _started_in_a_pod(environ)


def _set_by_slurm(environ: Environ) -> str | None:
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm."):
        return "PMIX_RANK was set by Slurm"
    return None


TORCH_STYLE = LauncherRow(
    "environment",
    rank="RANK",
    size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK", "NODE_RANK"),
)

HYDRA = LauncherRow(
    # MPICH's Hydra, Cray MPICH and Microsoft MPI set these variables of PMI's first version.
    "mpich",
    rank="PMI_RANK",
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    job=("PMI_JOBID", "PALS_APID", "PMI_PORT"),
    agents=("hydra_pmi_proxy", "mpiexec.gforker"),
    mpi=True,
)

# The first complete row is used, so the order says which launcher is the inner one where a process
# has the variables of two. A row with a marker comes before the row with the same variables and no
# marker. Open MPI's comes before Slurm's, because mpirun may start its daemons with srun. Hydra's
# comes after it, because srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE as well; _not_a_slurm_task()
# finds out whether Hydra has set them. The rows of pods are last: torchrun and mpirun may run in a
# pod.
LAUNCHERS: tuple[LauncherRow, ...] = (
    replace(TORCH_STYLE, name="unicoll", marker="UNICOLL_LAUNCHER", job=("TORCHELASTIC_RUN_ID",)),
    replace(
        TORCH_STYLE, name="torchrun", marker="TORCHELASTIC_RUN_ID", job=("TORCHELASTIC_RUN_ID",)
    ),
    TORCH_STYLE,
    LauncherRow(
        # There is no node_rank: OMPI_COMM_WORLD_NODE_RANK is a rank within the node, not the rank
        # of the node.
        "openmpi",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        agents=("mpirun", "prterun", "prted", "orted"),
        mpi=True,
    ),
    LauncherRow(
        # With Spectrum MPI jsrun sets Open MPI's variables, too.
        "jsrun",
        rank="JSM_NAMESPACE_RANK",
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        mpi=True,
    ),
    LauncherRow(
        # This row comes before Slurm's, which may have started Flux itself, and before PMI's, whose
        # variables Flux sets.
        "flux",
        rank="FLUX_TASK_RANK",
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        job=("FLUX_JOB_ID",),
        mpi=True,
    ),
    LauncherRow(
        "pmix",
        rank="PMIX_RANK",
        size=("PMIX_SIZE",),
        local_rank=("PMIX_LOCAL_RANK",),
        local_size=("PMIX_LOCAL_SIZE",),
        exclude=_set_by_slurm,
        job=("PMIX_NAMESPACE",),
        mpi=True,
        hint=(
            "PMIx has the size in its server, not in the environment: start with mpirun, or set"
            " PMIX_SIZE"
        ),
    ),
    LauncherRow(
        "mvapich2",
        rank="MV2_COMM_WORLD_RANK",
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        job=("PMI_PORT",),
        agents=("mpispawn", "hydra_pmi_proxy"),
        mpi=True,
    ),
    LauncherRow(
        "slurm",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        node_rank=("SLURM_NODEID",),
        exclude=_not_a_slurm_task,
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        nodelist=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        reorders=_is_arbitrary,
        mpi=True,
    ),
    replace(HYDRA, name="intelmpi", marker="I_MPI_HYDRA_UUID", job=("I_MPI_HYDRA_UUID",)),
    HYDRA,
    LauncherRow(
        "pals",
        rank="PALS_RANKID",
        size=("PALS_SIZE",),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE",),
        node_rank=("PALS_NODEID",),
        job=("PALS_APID",),
        mpi=True,
        hint="PALS sets the size as PMI_SIZE together with PMI_RANK, or not at all: set PALS_SIZE",
    ),
    LauncherRow(
        "kubeflow",
        rank="PET_NODE_RANK",
        size=("PET_NNODES",),
        node_rank=("PET_NODE_RANK",),
        exclude=_not_one_rank_per_pod,
        job=("PET_MASTER_ADDR",),
        address=("MASTER_ADDR", "PET_MASTER_ADDR"),
        port=("MASTER_PORT", "PET_MASTER_PORT"),
        one_per_host=True,
    ),
    LauncherRow(
        "leaderworkerset",
        rank="LWS_WORKER_INDEX",
        size=("LWS_GROUP_SIZE",),
        node_rank=("LWS_WORKER_INDEX",),
        job=("LWS_LEADER_ADDRESS",),
        address=("MASTER_ADDR", "LWS_LEADER_ADDRESS"),
        exclude=_started_in_a_pod,
        one_per_host=True,
    ),
    LauncherRow(
        # This is a pod of an indexed Job, or of a JobSet with one. MASTER_ADDR, the address of pod
        # 0, differs between jobs.
        "kubernetes",
        rank="JOB_COMPLETION_INDEX",
        size=("WORLD_SIZE",),
        node_rank=("JOB_COMPLETION_INDEX",),
        job=("MASTER_ADDR",),
        exclude=_started_in_a_pod,
        one_per_host=True,
        hint="set WORLD_SIZE to the completions of the Job",
    ),
)
