"""The doctor's report: probes, hints and exit status, in one process and in the ranks of a job."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import python
from tests.support.ranks import ROOT, environment
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import DeviceFacts
from unicoll.doctor import hints, host, output, pairs, probes, software
from unicoll.doctor.pairs import LARGE, RankPair

SECTIONS = [*software.PROBES, *host.PROBES]
STAND_IN = "__version__ = '2.99.0'\nclass version:\n    cuda = None\n"
HERE = Path(__file__).parent


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A directory at the start of the module path, with a torch module that imports quickly."""
    (tmp_path / "torch.py").write_text(STAND_IN)
    return tmp_path


def run(modules: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(modules), str(ROOT)])
    return python(*command, cwd=modules, **{"PYTHONPATH": path} | variables)


def doctor(modules: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command without a launcher; its standard error must be empty."""
    deadline = () if "--deadline" in arguments else ("--deadline", "30")
    done = run(modules, "-m", "unicoll.doctor", *deadline, *arguments, **variables)
    assert done.stderr == ""
    return done


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_status"] == done.returncode
    worst = max((hints.LEVELS.index(h["level"]) for h in report["hints"]), default=0)
    assert worst <= done.returncode
    return report


def hint_texts(report: dict[str, Any], level: str, about: str) -> list[str]:
    return [
        f"{h['text']} -> {h['do']}" for h in report["hints"] if (h["level"], h["about"]) == (level, about)
    ]


# --- without a launcher -----------------------------------------------------------------------------------------------


def test_the_report_has_every_section_and_the_choice(modules: Path) -> None:
    done = doctor(modules)
    lines = done.stdout.splitlines()
    labels = [line.split()[0] for line in lines if line[:1].strip()]
    assert [name for name in SECTIONS if name != "choice"] == [name for name in labels if name in SECTIONS]
    assert any("cpu: unicoll (gloo): the default for CPU arrays" in line for line in lines)
    assert re.search(r"^torch +2\.99\.0, built without CUDA$", done.stdout, re.M)
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 70


def test_json(modules: Path) -> None:
    report = found(doctor(modules, "--json"))
    assert set(report) == {"layout", "unicoll", "host", "sections", "hints", "exit_status"}
    assert report["layout"] == output.LAYOUT
    assert list(report["sections"]) == SECTIONS
    assert report["sections"]["choice"]["chosen"]["cpu"] == {
        "backend": "gloo",
        "why": "the default for CPU arrays",
    }
    assert report["sections"]["torch"] == {
        "installed": True,
        "version": "2.99.0",
        "cuda": None,
        "nccl": [],
        "lines": ["2.99.0, built without CUDA"],
    }
    assert {"name", "up", "loopback", "speed", "addresses"} == set(
        report["sections"]["network"]["interfaces"][0]
    )


def test_what_is_wrong_is_in_the_report(modules: Path) -> None:
    (modules / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (modules / "cupy.py").write_text("raise RuntimeError('planted\\nin two lines')")
    library = modules / "libnccl.so"
    library.write_text("not a library")
    variables = {"UNICOLL_TRANSPROT": "tcp", "UNICOLL_CHANNEL": "wax", "UNICOLL_SECRET": "s" * 40}
    variables |= {"UNICOLL_NCCL_LIBRARY": str(library), "RANK": "4", "WORLD_SIZE": "2"}
    report = found(doctor(modules, "--json", **variables))
    assert report["exit_status"] == 2
    sections = report["sections"]
    assert sections["torch"]["problem"] == "import torch ended the process by SIGSEGV"
    problem = "RuntimeError: planted in two lines"
    assert sections["cupy"] == {"installed": True, "lines": [problem], "problem": problem}
    assert hint_texts(report, "error", "cupy") == [f"{problem} -> reinstall it, or remove it"]
    chosen = sections["choice"]["chosen"]
    assert (chosen["cpu"]["backend"], chosen["cuda"]["backend"]) == ("gloo", None)
    for reason in (sections["nccl"]["reason"], chosen["cuda"]["why"]):
        assert "UNICOLL_NCCL_LIBRARY" in reason
    launcher, channel = hint_texts(report, "error", "environment")
    assert "RANK=4 must be less than WORLD_SIZE=2" in launcher
    assert channel == "UNICOLL_CHANNEL=wax is none of plain, mac, tls -> set it to a valid value, or unset it"
    assert hint_texts(report, "warning", "environment") == [
        "UNICOLL_TRANSPROT is not a variable of unicoll and has no effect -> did you mean UNICOLL_TRANSPORT?"
    ]
    assert sections["environment"]["variables"]["UNICOLL_SECRET"] == "(set)"
    assert "s" * 40 not in json.dumps(report)


@pytest.mark.every(n=0)
def test_a_module_that_hangs_is_killed(modules: Path) -> None:
    (modules / "cupy.py").write_text(
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(__file__).with_name('pids').write_text(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(600)\n"
    )
    done = doctor(modules, "--deadline", "6", "--json")
    text = "import cupy did not finish within 6 s"
    report = found(done)
    assert report["sections"]["cupy"] == {"installed": True, "unfinished": 6.0, "lines": [text]}
    assert hint_texts(report, "warning", "cupy") == [
        f"{text} -> run again with --deadline 60; if it still does not finish, it hangs"
    ]
    assert report["sections"]["choice"]["chosen"]["cpu"]["backend"] == "gloo"
    for pid in (modules / "pids").read_text().split():
        assert not alive(int(pid))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_invalid_deadline_is_refused(modules: Path) -> None:
    done = run(modules, "-m", "unicoll.doctor", "--deadline", "0")
    assert done.returncode == 2
    assert "--deadline" in done.stderr


def test_dev_shm_that_is_missing_or_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHM", str(tmp_path / "nothing"))
    facts = probes.run_probes({"memory": host.PROBES["memory"]}, 30)["memory"]
    assert facts["shm_problem"] == "No such file or directory"
    assert facts["lines"][1] == f"{tmp_path / 'nothing'}: No such file or directory"
    monkeypatch.setattr(host, "SHM", str(tmp_path))
    monkeypatch.setattr(host.os, "access", lambda *a: False)
    facts = probes.run_probes({"memory": host.PROBES["memory"]}, 30)["memory"]
    assert facts["lines"][1].endswith("cannot be written by this user")
    assert [h.level for h in hints.hints(healthy() | {"memory": facts})] == ["warning"]


# --- simulated devices ------------------------------------------------------------------------------------


class Devices:
    """Three devices; the first two can access each other's memory."""

    description = "CUDA 12.8 driver"

    def device_count(self) -> int:
        return 3

    def facts(self, device: int) -> DeviceFacts:
        return DeviceFacts("NVIDIA H200", f"GPU-{device}", f"0000:{device}b:00.0", 139 << 30, (9, 0))

    def peer_access(self, device: int, other: int) -> tuple[bool, bool]:
        return {device, other} == {0, 1}, False


def test_devices_and_peer_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus, vendor, kind in (
        ("0", "0x10de", "0x030200"),
        ("1", "0x10de", "0x060400"),
        ("2", "0x8086", "0x030000"),
    ):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "vendor").write_text(f"{vendor}\n")
        (tmp_path / bus / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(software, "PCI", str(tmp_path))
    monkeypatch.setitem(runtimes._installed, "cuda", Devices())
    facts = probes.run_probes({"cuda": software.PROBES["cuda"]}, 30)["cuda"]
    assert facts["on_bus"] == 1
    assert facts["reaches"] == [[True, True, False], [True, True, False], [False, False, True]]
    assert facts["lines"] == [
        "CUDA 12.8 driver: 3 devices",
        "cuda:0 NVIDIA H200, 139 GiB, capability 9.0, 0000:0b:00.0",
        "cuda:1 NVIDIA H200, 139 GiB, capability 9.0, 0000:1b:00.0",
        "cuda:2 NVIDIA H200, 139 GiB, capability 9.0, 0000:2b:00.0",
        "peers: no direct access between 2 and 0, 2 and 1",
    ]


def test_a_torch_for_gpus_and_its_nccl(modules: Path) -> None:
    (modules / "torch.py").write_text(
        "__version__ = '2.99.0+cu128'\n"
        "class version: cuda = '12.8'\n"
        "class cuda:\n"
        "    device_count = staticmethod(lambda: 2)\n"
        "    class nccl: version = staticmethod(lambda: (2, 27, 5))\n"
        "class distributed: is_nccl_available = staticmethod(lambda: True)\n"
    )
    (modules / "cupy.py").write_text(
        "__version__ = '13.6.0'\n"
        "class cuda:\n"
        "    class runtime:\n"
        "        runtimeGetVersion = staticmethod(lambda: 12080)\n"
        "        @staticmethod\n"
        "        def getDeviceCount(): raise RuntimeError('cudaErrorInsufficientDriver')\n"
    )
    sections = found(doctor(modules, "--json"))["sections"]
    assert sections["torch"]["lines"] == ["2.99.0+cu128, built for CUDA 12.8, 2 devices, NCCL 2.27.5"]
    assert sections["torch"]["nccl_version"] == "2.27.5"
    assert sections["cupy"]["lines"] == ["13.6.0, CUDA 12.8", "RuntimeError: cudaErrorInsufficientDriver"]


def test_rocm_is_named(modules: Path) -> None:
    (modules / "torch.py").write_text(
        "__version__ = '2.99.0+rocm6.4'\n"
        "class version: cuda, hip = None, '6.4.43482'\n"
        "class cuda:\n"
        "    device_count = staticmethod(lambda: 2)\n"
        "    class nccl: version = staticmethod(lambda: (2, 22, 3))\n"
        "class distributed: is_nccl_available = staticmethod(lambda: True)\n"
    )
    (modules / "cupy.py").write_text(
        "__version__ = '14.0.0'\n"
        "class cuda:\n"
        "    class runtime:\n"
        "        is_hip = True\n"
        "        runtimeGetVersion = staticmethod(lambda: 60443482)\n"
        "        getDeviceCount = staticmethod(lambda: 2)\n"
    )
    sections = found(doctor(modules, "--json"))["sections"]
    assert sections["torch"]["lines"] == ["2.99.0+rocm6.4, built for ROCm 6.4.43482, 2 devices, NCCL 2.22.3"]
    assert sections["cupy"]["lines"] == ["14.0.0, ROCm 6.4, 2 devices"]


# --- hints --------------------------------------------------------------------------------------------------------


def healthy() -> dict[str, Any]:
    """The facts of a host with two GPUs that needs no hints."""
    eth0 = {"name": "eth0", "up": True, "loopback": False, "speed": 100000, "addresses": ["10.0.0.1"]}
    return copy.deepcopy(
        {
            "python": {},
            "numpy": {},
            "choice": {},
            "cupy": {"installed": False},
            "torch": {
                "installed": True,
                "version": "2.9.0",
                "cuda": "12.8",
                "devices": 2,
                "nccl": ["/t/libnccl.so.2"],
                "nccl_version": "2.27.5",
            },
            "cuda": {"driver": "CUDA 12.8 driver", "on_bus": 2, "devices": [{}, {}]},
            "nccl": {"library": "NCCL 2.27.5 (/t/libnccl.so.2)", "version": "2.27.5"},
            "mpi": {
                "installed": True,
                "reason": None,
                "family": "open mpi",
                "library": "Open MPI 5.0.11",
                "mpirun": "/usr/bin/mpirun",
                "mpirun_family": "open mpi",
                "mpirun_version": "5.0.3",
            },
            "network": {"interfaces": [eth0], "infiniband": ["mlx5_0 port 1: 4: ACTIVE"]},
            "memory": {"shm": 32 << 30, "shm_free": 31 << 30, "shm_problem": None},
            "limits": {
                "files": {"soft": 1024, "hard": 1 << 20},
                "locked": {"soft": None, "hard": None},
                "cores": 8,
            },
            "clocks": {"synchronized": True},
            "environment": {
                "launcher": "slurm",
                "ranks": 16,
                "local": 8,
                "several_hosts": True,
                "secret": "UNICOLL_SECRET",
                "problems": [],
                "unknown": {},
            },
        }
    )


def test_a_healthy_host_has_no_hints() -> None:
    sections = healthy()
    assert hints.hints(sections) == []
    assert hints.status([]) == 0
    sections["environment"] |= {"secret": None, "trusted": True}  # a store that others cannot reach
    assert hints.hints(sections) == []
    sections["environment"] |= {"several_hosts": False, "trusted": False}
    sections["clocks"]["synchronized"] = False
    sections["network"]["interfaces"] = []
    assert [h.level for h in hints.hints(sections)] == ["note"]


@pytest.mark.parametrize(
    ("section", "changes", "level", "text"),
    [
        ("memory", {"shm": 64 << 20}, "warning", "/dev/shm has 64 MiB"),
        ("memory", {"shm_free": 1 << 20}, "warning", "/dev/shm has 1 MiB free"),
        (
            "memory",
            {"shm": None, "shm_problem": "No such file or directory"},
            "warning",
            "/dev/shm: No such file",
        ),
        ("limits", {"files": {"soft": 256, "hard": 256}}, "warning", "at most 256 open files"),
        (
            "limits",
            {"locked": {"soft": 65536, "hard": 65536}},
            "warning",
            "only 64 KiB of memory can be locked",
        ),
        ("limits", {"cores": 4}, "note", "8 ranks share 4 cores"),
        ("network", {"interfaces": []}, "error", "only the loopback interface is up"),
        ("clocks", {"synchronized": False}, "warning", "clock is not synchronised"),
        ("environment", {"secret": None}, "warning", "several hosts without a secret"),
        ("torch", {"cuda": None}, "warning", "2 GPUs are present, but torch was built without CUDA"),
        ("torch", {"devices": 0}, "warning", "torch finds no device, but the driver has 2"),
        ("torch cupy", {"installed": False}, "note", "neither CuPy nor torch"),
        ("torch nccl", {"nccl_version": "2.21.5"}, "warning", "there are two versions of NCCL"),
        (
            "torch nccl",
            {"nccl": ["/a/libnccl.so.2", "/b/libnccl.so.2"]},
            "warning",
            "torch loads two copies of NCCL",
        ),
        ("nccl", {"reason": "libnccl.so.2 cannot be used"}, "warning", "libnccl.so.2 cannot be used"),
        (
            "cuda",
            {"devices": [], "reason": "NVIDIA's driver cannot be loaded"},
            "warning",
            "2 GPUs are on the PCI bus",
        ),
        ("mpi", {"mpirun_family": "mpich", "mpirun_version": "4.2.0"}, "warning", "belongs to mpich 4.2.0"),
        ("mpi", {"mpirun_version": "4.1.2"}, "warning", "belongs to open mpi 4.1.2"),
        ("mpi", {"reason": "mpi4py finds no MPI library"}, "warning", "mpi4py finds no MPI library"),
        ("mpi", {"problem": "MPI does not start", "lines": []}, "error", "MPI does not start"),
        ("numpy", {"unfinished": 4.0, "lines": ["it did not end"]}, "warning", "it did not end"),
    ],
)
def test_each_fault_gives_one_hint(section: str, changes: dict[str, Any], level: str, text: str) -> None:
    """``section`` names the section that changes and, if different, the section of the hint."""
    sections = healthy()
    sections[section.split()[0]] |= changes
    (hint,) = hints.hints(sections)
    assert (hint.level, hint.about) == (level, section.split()[-1])
    assert text in hint.text
    assert hint.do
    assert hints.status([hint]) == hints.LEVELS.index(level)


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("mpirun (Open MPI) 5.0.11 Report bugs to", "open mpi"),
        ("Open MPI 4.1.2", "open mpi"),
        ("HYDRA build details: Version: 4.2.0", "mpich"),
        ("MPICH 5.0.2", "mpich"),
        ("Slurm", ""),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "intel"),
    ],
)
def test_mpi_families(text: str, family: str) -> None:
    assert software.mpi_family(text) == family


# --- pairs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 10))
def test_rounds_contain_every_pair_once(size: int) -> None:
    all_rounds = list(pairs.rounds(size))
    for one_round in all_rounds:
        members = [rank for pair in one_round for rank in pair]
        assert len(members) == len(set(members))
    everything = sorted(pair for one_round in all_rounds for pair in one_round)
    assert everything == [(a, b) for a in range(size) for b in range(a + 1, size)]
    assert len(all_rounds) == size - 1 + size % 2


def measured(low: int, high: int, latency: float = 10e-6, transfer: float = 1e-3) -> RankPair:
    return RankPair(low, high, latency, transfer)


def test_a_pair_is_compared_with_those_of_its_kind() -> None:
    hosts = ["a", "a", "a", "b", "b", "b"]
    every = [
        measured(low, high) if hosts[low] == hosts[high] else measured(low, high, 50e-6, 40e-3)
        for low in range(6)
        for high in range(low + 1, 6)
    ]
    summary = pairs.summarize(every, hosts)
    assert summary.medians == {"within a host": (10e-6, 1e-3), "between hosts": (50e-6, 40e-3)}
    assert (summary.slow, summary.broken, summary.checked) == ([], [], 15)
    every[0].transfer = 40e-3  # as fast as between hosts, and slow for one host
    ((pair, why),) = pairs.summarize(every, hosts).slow
    assert pair is every[0]
    assert why == "0.105 GB/s, 40.0 times less than the median within a host (4.19 GB/s)"


def test_small_differences_and_single_pairs_are_not_slow() -> None:
    every = [measured(0, 1), measured(0, 2), measured(1, 2), measured(0, 3, 40e-6), measured(1, 3, 1e-3)]
    ((pair, why),) = pairs.summarize(every, ["a"] * 4).slow
    assert (pair.low, pair.high) == (1, 3)
    assert why == "1000.0 us for a small message, 100.0 times the median within a host (10.0 us)"
    assert pairs.summarize([measured(0, 1, 1.0, 60.0)], ["a", "a"]).slow == []


def test_reports_of_a_pair_are_merged() -> None:
    lower, upper = (
        RankPair(0, 1, 3e-6, 2e-3, ["a byte"]),
        RankPair(0, 1, None, None, ["another byte", "a byte"]),
    )
    again = RankPair(0, 1, 2e-6, 4e-3)
    (pair,) = pairs.merge([again], pairs.merge([lower, upper], {})).values()
    assert pair == RankPair(0, 1, 2e-6, 2e-3, ["a byte", "another byte"])
    assert pair.bandwidth == LARGE / 2e-3


# --- in the ranks of a job ------------------------------------------------------------------------------------------


def ranks(modules: Path, faults: str, *arguments: str, size: int = 4) -> subprocess.CompletedProcess[str]:
    program = str(HERE / "doctor_program.py")
    launch = ("-m", "unicoll.run", "--nproc-per-node", str(size), "--no-prefix", "--grace", "10")
    return run(modules, *launch, program, faults, *arguments)


def test_healthy_ranks_and_one_with_another_variable(modules: Path) -> None:
    done = ranks(modules, "variable:2")
    out = done.stdout
    assert done.returncode == 0 or "warning" in out, done
    assert "all 6 pairs are ok, all bytes were correct (median within a host" in out
    assert out.count("\nnumpy") == 1
    different = out.partition("differences between ranks:")[2].partition("\npairs")[0]
    assert re.search(r"environment +ranks 0, 1, 3: unicoll: 4 ranks", different)
    assert re.search(
        r"rank 2: unicoll: 4 ranks, 4 on this host.*NCCL_DEBUG=INFO", " ".join(different.split())
    )
    assert "gloo" in out.partition("init_process_group() chose")[2]
    assert "\nbroken" not in out
    assert "\nslow" not in out


@pytest.mark.every(n=0)
def test_only_the_slow_and_the_corrupting_pair_are_reported(modules: Path) -> None:
    done = ranks(modules, "slow:1-2,corrupt:0-3", "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == report["exit_status"] == 2
    pair_data = report["pairs"]
    assert pair_data["checked"] == 6
    assert [pair["ranks"] for pair in pair_data["slow"]] == [[1, 2]]
    assert "times the median within a host" in pair_data["slow"][0]["why"]
    assert pair_data["broken"] == [
        {
            "ranks": [0, 3],
            "errors": [f"1 of {LARGE} bytes from rank 0 to rank 3 were wrong, first byte 12345"],
        }
    ]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]
    assert all(rank["interface"] == "lo 127.0.0.1" for rank in report["ranks"])
    assert report["sections"]["torch"]["version"] == "2.99.0"
    assert report["differences"] == {}


@pytest.mark.every(n=0)
def test_a_pair_that_loses_a_message_is_reported(modules: Path) -> None:
    done = ranks(modules, "lost:1-2", "--deadline", "8")
    assert done.returncode == 2, done
    assert "5 of 6 pairs are ok" in done.stdout
    broken = " ".join(done.stdout.partition("\nbroken")[2].split())
    assert broken.startswith("rank 1 (host")
    assert "OperationTimeoutError: recv" in broken
    assert done.stdout.count("\nbroken") == 1


def test_ranks_with_torchruns_variables(modules: Path, port: int) -> None:
    """With torchrun's variables: the store at MASTER_PORT belongs to torchrun's agent."""
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-m", "unicoll.doctor", "--json"]
    path = os.pathsep.join([str(modules), str(ROOT)])
    started = [
        subprocess.Popen(
            command,
            cwd=modules,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment({"PYTHONPATH": path, "RANK": rank, "LOCAL_RANK": rank} | shared),
        )
        for rank in "01"
    ]
    (out, err), (other_out, other_err) = (process.communicate(timeout=300) for process in started)
    assert (err, other_out, other_err) == ("", "", "")
    report = json.loads(out)
    assert "torchrun: 2 ranks, 2 on this host" in report["sections"]["environment"]["lines"]
    assert report["pairs"]["checked"] == 1
    assert report["pairs"]["broken"] == []
    assert [process.returncode for process in started] == [report["exit_status"], 0]


def test_a_rank_that_dies_is_named(modules: Path) -> None:
    done = ranks(modules, "dies:1", size=3)
    assert done.returncode != 0
    assert re.search(r"unicoll\.doctor: rank 0 .*RankLostError: .*rank 1 \(.*exit code 3", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.every(n=0)
def test_an_absent_rank_is_named(modules: Path) -> None:
    done = ranks(modules, "absent:1", "--deadline", "2", size=2)
    assert done.returncode != 0
    assert re.search(r"unicoll\.doctor: rank 0 .*TimeoutError: .*rank 1", done.stderr)
    assert "Traceback" not in done.stderr
