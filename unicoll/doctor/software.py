"""Probes of libraries and devices, and of the choice of backends by init_process_group()."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from unicoll.devices import runtimes
from unicoll.doctor.host import launched_or_none
from unicoll.doctor.probes import Facts, Probe
from unicoll.errors import BackendUnavailableError
from unicoll.group import backend_choice, registry
from unicoll.process.formatting import backend_text
from unicoll.run.mpirun import mpirun, mpirun_path

MAPS = "/proc/self/maps"
PCI = "/sys/bus/pci/devices"

_NVIDIA, _INTEL, _DISPLAY = "0x10de", "0x8086", "0x03"
_DISTRIBUTIONS = {"cupy": ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")}
_STARTED_BY_MPI = re.compile(
    r"OMPI_COMM_|PMI|MPI_LOCAL|SLURM_|PALS_|HYDRA_|MV2_COMM_|PRTE_LAUNCHED"
)
_START_MPI = (
    "from unicoll.group import registry\n"
    "world = registry.mpi_world(3600)\n"
    "print('unicoll:', world.library, world.cuda, sep='\\t')"
)


def _python() -> Iterator[Facts]:
    version, path = platform.python_version(), sys.executable
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    name = platform.python_implementation()
    yield {
        "version": version,
        "path": path,
        "system": system,
        "lines": [f"{name} {version}, {path}", system],
    }


def _numpy() -> Iterator[Facts]:
    import numpy

    yield {"version": numpy.__version__, "path": numpy.__file__, "lines": [numpy.__version__]}


def _importable(name: str) -> Generator[Facts, None, bool]:
    """Facts about a package before its import, and whether it is installed; also the version in its
    metadata."""
    installed = importlib.util.find_spec(name) is not None
    yield {"installed": installed, "lines": [] if installed else ["not installed"]}
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield {"version": version, "lines": [version] if installed else ["not installed"]}
    yield {"at": f"import {name}"}
    return installed


def _torch() -> Iterator[Facts]:
    if not (yield from _importable("torch")):
        return
    torch: Any = importlib.import_module("torch")
    version, cuda = str(torch.__version__), torch.version.cuda
    hip, xpu = getattr(torch.version, "hip", None), getattr(torch.version, "xpu", None)
    built = (
        f"for CUDA {cuda}"
        if cuda
        else f"for ROCm {hip}"
        if hip
        else "for XPU"
        if xpu
        else "without CUDA"
    )
    line, cuda = f"{version}, built {built}", cuda or hip
    yield {
        "version": version,
        "cuda": cuda,
        "nccl": _mapped_nccl(),
        "lines": [line],
        "at": "torch.cuda",
    }
    if not cuda:
        return
    count = torch.cuda.device_count()
    line += f", {count} device{'' if count == 1 else 's'}"
    nccl = (
        ".".join(map(str, torch.cuda.nccl.version()))
        if torch.distributed.is_nccl_available()
        else None
    )
    yield {
        "devices": count,
        "nccl_version": nccl,
        "lines": [f"{line}, NCCL {nccl}" if nccl else line],
    }


def _cupy() -> Iterator[Facts]:
    if not (yield from _importable("cupy")):
        return
    cupy: Any = importlib.import_module("cupy")
    yield {
        "version": str(cupy.__version__),
        "lines": [str(cupy.__version__)],
        "at": "CuPy's CUDA runtime",
    }
    runtime = cupy.cuda.runtime.runtimeGetVersion()
    if getattr(cupy.cuda.runtime, "is_hip", False):
        name, built = "ROCm", f"{runtime // 10000000}.{runtime // 100000 % 100}"
    else:
        name, built = "CUDA", f"{runtime // 1000}.{runtime % 1000 // 10}"
    line = f"{cupy.__version__}, {name} {built}"
    yield {"cuda": built, "lines": [line]}
    devices = cupy.cuda.runtime.getDeviceCount()
    yield {"devices": devices, "lines": [f"{line}, {devices} device{'' if devices == 1 else 's'}"]}


def _mapped_nccl() -> list[str]:
    """Paths of the NCCL libraries (RCCL's on AMD's GPUs) that are mapped into this process."""
    lines = Path(MAPS).read_text(errors="replace").splitlines()
    return sorted(
        {line[line.index("/") :] for line in lines if re.search(r"/lib[nr]ccl\.so", line)}
    )


def _gpus(device_type: str, vendor: str, driver: str) -> Iterator[Facts]:
    yield {"on_bus": _on_bus(vendor), "at": driver}
    reason = runtimes.reason_against(device_type)
    if reason is not None:
        yield {"devices": [], "reason": reason, "lines": [reason]}
        return
    runtime = runtimes.runtime(device_type)
    count = runtime.device_count()
    lines = [f"{runtime.description}: {count} device{'' if count == 1 else 's'}"]
    found = []
    for device in range(count):
        facts = runtime.facts(device)
        capability = ".".join(map(str, facts.capability))
        known = [facts.name, f"{facts.memory / 2**30:.0f} GiB"]
        known += [f"capability {capability}", facts.bus] if facts.bus else []
        lines.append(f"{device_type}:{device} {', '.join(known)}")
        found.append(
            {"name": facts.name, "memory": facts.memory, "capability": capability, "bus": facts.bus}
        )
    yield {
        "driver": runtime.description,
        "devices": found,
        "lines": lines,
        "at": "access between devices",
    }
    access = [[i == j or runtime.peer_access(i, j)[0] for j in range(count)] for i in range(count)]
    yield {"reaches": access, "lines": [*lines, *_peers(access)]}


def _peers(access: list[list[bool]]) -> list[str]:
    if len(access) < 2:
        return []
    unreachable = [
        f"{i} and {j}"
        for i in range(len(access))
        for j in range(i)
        if not (access[i][j] and access[j][i])
    ]
    if not unreachable:
        return ["peers: every device can access every other's memory"]
    if len(unreachable) == len(access) * (len(access) - 1) // 2:
        return ["peers: no device can access another's memory; data are copied through host memory"]
    return [f"peers: no direct access between {', '.join(unreachable)}"]


def _on_bus(vendor_id: str) -> int:
    """Number of a vendor's GPUs on the PCI bus, with or without a driver."""
    found = 0
    for device in Path(PCI).glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        found += vendor.startswith(vendor_id) and kind.startswith(_DISPLAY)
    return found


def _nccl() -> Iterator[Facts]:
    yield {"at": "loading NCCL"}
    try:
        library = registry.load("nccl").library()
    except BackendUnavailableError as e:
        yield {"library": None, "reason": str(e), "lines": [str(e)]}
        return
    yield {"library": library, "version": version_in(library), "lines": [library]}


def version_in(text: str) -> str:
    """The first version number in a text; "" if there is none."""
    found = re.search(r"\d+(\.\d+)+", text)
    return found.group() if found else ""


def mpi_family(text: str) -> str:
    """The MPI implementation of a version text of a library or of mpirun; "" if unknown."""
    lower = text.lower()
    for name in ("open mpi", "openrte", "prrte", "intel", "mvapich", "mpich", "hydra"):
        if name in lower:
            return {"openrte": "open mpi", "prrte": "open mpi", "hydra": "mpich"}.get(name, name)
    return ""


def _mpi() -> Iterator[Facts]:
    """The MPI library; without a launcher, MPI is initialised in a separate process."""
    installed = importlib.util.find_spec("mpi4py") is not None
    yield {"installed": installed, "at": "loading MPI"}
    reason = registry.reason_against("mpi")
    if reason is not None:
        yield {"reason": reason, "lines": [reason if installed else "mpi4py is not installed"]}
        return
    yield {"reason": None, "lines": ["mpi4py and an MPI library are installed"]}
    if (program := mpirun()) is not None:
        yield {"at": f"{program} --version"}
        variables = {**os.environ, **mpirun_path(program)}
        done = subprocess.run(
            [program, "--version"], env=variables, capture_output=True, text=True, check=False
        )
        output = " ".join((done.stdout or done.stderr).split())
        # PRRTE, the launcher of Open MPI 5, has different version numbers.
        number = "" if "PRRTE" in output and "Open MPI" not in output else version_in(output)
        yield {"mpirun": program, "mpirun_family": mpi_family(output), "mpirun_version": number}
    if launched_or_none() is not None:
        return
    yield {"at": "MPI_Init"}
    clean = {k: v for k, v in os.environ.items() if not _STARTED_BY_MPI.match(k)}
    # Without mpirun, Open MPI does not remove its shared memory.
    clean["OMPI_MCA_btl"] = "self"
    # The program gets this process's path: packages may be on it only, as with python -m in a checkout; -c adds the
    # working directory.
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{_START_MPI}"]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    result = [line for line in done.stdout.splitlines() if line.startswith("unicoll:\t")]
    if not result:
        errors = done.stderr.strip().splitlines()
        yield {
            "problem": (
                f"MPI_Init failed: {errors[-1] if errors else f'exit status {done.returncode}'}"
            )
        }
        return
    _, version, cuda = result[-1].split("\t")
    output = version if program is None else f"{version}; mpirun is {program}"
    lines = [output, f"arrays on a GPU: {cuda}"]
    yield {"library": version, "family": mpi_family(version), "cuda": cuda, "lines": lines}


def _choice() -> Iterator[Facts]:
    """The result of :func:`unicoll.group.backend_choice.choose` for each kind of device."""
    yield {"at": "the choice of backends"}
    launched = launched_or_none()
    choices = backend_choice.choose(None, launched is not None and launched.started_by_mpi)
    chosen: dict[str, Facts] = {c.device: {"backend": c.name, "why": c.why} for c in choices}
    lines = [f"{c.device}: {backend_text(c.name)}: {c.why}" for c in choices]
    if "cuda" not in chosen:
        why = registry.reason_against("nccl")
        chosen["cuda"] = {"backend": None, "why": why}
        lines.append(f"cuda: none: {why}")
    yield {"chosen": chosen, "lines": lines}
    backends: dict[str, str] = {}
    for name in registry.backend_names():
        yield {"at": f"backend {name!r}"}
        backends[name] = registry.status_line(name)
    yield {"backends": backends}
    if launched is None and registry.reason_against("mpi") is None:
        host = backend_choice.choose(None, True)[0]
        lines.append(f"{host.device}, under mpirun on several hosts: {host.name}: {host.why}")
        yield {"under_mpirun": {"backend": host.name, "why": host.why}, "lines": lines}


PROBES: dict[str, Probe] = {
    "python": _python,
    "numpy": _numpy,
    "cupy": _cupy,
    "torch": _torch,
    "cuda": partial(_gpus, "cuda", _NVIDIA, "NVIDIA's driver"),
    "nccl": _nccl,
    "xpu": partial(_gpus, "xpu", _INTEL, "Intel's driver"),
    "mpi": _mpi,
    "choice": _choice,
}
"""The probes, in the order of the report."""
