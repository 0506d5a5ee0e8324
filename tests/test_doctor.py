"""The page on this machine: its questions, hints and exit status, alone and as the ranks of a job."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unicoll import settings, streams
from unicoll.doctor import hints, host, page, pairs, probes, software
from unicoll.doctor.pairs import LARGE, Pair
from unicoll.errors import DistArgumentError
from unicoll.streams import DeviceFacts
from unicoll.testing.ranks import ROOT, environment, free_port

SECTIONS = [
    "python", "numpy", "cupy", "torch", "cuda", "nccl", "mpi", "choice", "network", "memory", "limits", "clocks",
    "environment",
]  # fmt: skip
STAND_IN = "__version__ = '2.99.0'\nclass version:\n    cuda = None\n"
HERE = Path(__file__).parent


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A folder that is searched first; its torch imports quickly."""
    (tmp_path / "torch.py").write_text(STAND_IN)
    return tmp_path


def run(modules: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(modules), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command], cwd=modules, env=environment({"PYTHONPATH": path} | variables),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def doctor(modules: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command without a launcher; it never says anything but the page."""
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


def said(report: dict[str, Any], level: str, about: str) -> list[str]:
    return [
        f"{h['text']} -> {h['do']}" for h in report["hints"] if (h["level"], h["about"]) == (level, about)
    ]


# --- alone --------------------------------------------------------------------------------------------------------


def test_the_page_has_every_section_the_choice_and_its_reason(modules: Path) -> None:
    done = doctor(modules)
    lines = done.stdout.splitlines()
    labels = [line.split()[0] for line in lines if line[:1].strip()]
    assert [name for name in SECTIONS if name != "choice"] == [name for name in labels if name in SECTIONS]
    assert any("cpu: gloo: the default for CPU arrays" in line for line in lines)
    assert re.search(r"^torch +2\.99\.0, built without CUDA$", done.stdout, re.M)
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 70


def test_json_has_the_same_as_one_object(modules: Path) -> None:
    report = found(doctor(modules, "--json"))
    assert set(report) == {"layout", "unicoll", "host", "sections", "hints", "exit_status"}
    assert report["layout"] == page.LAYOUT
    assert list(report["sections"]) == SECTIONS
    assert report["sections"]["choice"]["chosen"]["cpu"] == {
        "backend": "gloo",
        "why": "the default for CPU arrays",
    }
    assert report["sections"]["torch"] == {
        "installed": True, "version": "2.99.0", "cuda": None, "nccl": [],
        "lines": ["2.99.0, built without CUDA"],
    }  # fmt: skip
    assert {"name", "up", "loopback", "speed", "addresses"} == set(
        report["sections"]["network"]["interfaces"][0]
    )


def test_a_module_that_raises_at_import_is_a_line(modules: Path) -> None:
    (modules / "torch.py").write_text("raise RuntimeError('planted\\nin two lines')")
    done = doctor(modules)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout
    assert re.search(r"^ +RuntimeError: planted in two lines$", done.stdout, re.M)
    assert re.search(r"^error +torch: RuntimeError: planted in two lines$", done.stdout, re.M)


def test_a_module_that_hangs_is_given_up_and_leaves_nothing(modules: Path) -> None:
    (modules / "cupy.py").write_text(
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(__file__).with_name('pids').write_text(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(600)\n"
    )
    done = doctor(modules, "--deadline", "6", "--json")
    text = "import cupy did not end within 6 s"
    report = found(done)
    assert report["sections"]["cupy"] == {"installed": True, "unfinished": 6.0, "lines": [text]}
    assert said(report, "warning", "cupy") == [
        f"{text} -> run again with --deadline 60: if it does not end then either, it hangs"
    ]
    assert report["sections"]["choice"]["chosen"]["cpu"]["backend"] == "gloo"
    for pid in (modules / "pids").read_text().split():
        assert not alive(int(pid))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_module_that_crashes_is_a_line(modules: Path) -> None:
    (modules / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    report = found(doctor(modules, "--json"))
    assert report["exit_status"] == 2
    assert report["sections"]["torch"]["problem"] == "import torch ended the process by SIGSEGV"


def test_a_library_that_is_no_nccl_is_a_line(modules: Path) -> None:
    (modules / "libnccl.so").write_text("not a library")
    report = found(doctor(modules, "--json", UNICOLL_NCCL_LIBRARY=str(modules / "libnccl.so")))
    assert "UNICOLL_NCCL_LIBRARY" in report["sections"]["nccl"]["reason"]
    assert report["sections"]["choice"]["chosen"]["cuda"]["backend"] is None
    assert "UNICOLL_NCCL_LIBRARY" in report["sections"]["choice"]["chosen"]["cuda"]["why"]


def test_variables_that_are_misspelt_or_refused(modules: Path) -> None:
    report = found(
        doctor(modules, "--json", UNICOLL_TRANSPROT="tcp", UNICOLL_CHANNEL="wax", UNICOLL_SECRET="s" * 40)
    )
    assert report["exit_status"] == 2
    assert said(report, "error", "environment") == [
        "UNICOLL_CHANNEL=wax is none of plain, mac, tls -> set it to a value that is known, or unset it"
    ]
    assert said(report, "warning", "environment") == [
        "UNICOLL_TRANSPROT is no variable of unicoll, and nothing reads it -> UNICOLL_TRANSPORT is meant?"
    ]
    assert report["sections"]["environment"]["variables"]["UNICOLL_SECRET"] == "(set)"
    assert "s" * 40 not in json.dumps(report)


def test_contradictory_launcher_variables_are_a_line(modules: Path) -> None:
    report = found(doctor(modules, "--json", RANK="4", WORLD_SIZE="2"))
    assert report["exit_status"] == 2
    assert "RANK=4 must be less than WORLD_SIZE=2" in said(report, "error", "environment")[0]
    assert report["sections"]["choice"]["chosen"]["cpu"]["backend"] == "gloo"


def test_a_deadline_that_is_none_is_refused(modules: Path) -> None:
    done = run(modules, "-m", "unicoll.doctor", "--deadline", "0")
    assert done.returncode == 2
    assert "--deadline" in done.stderr


def test_every_variable_that_is_read_is_known() -> None:
    known = {*settings.FLAGS, *settings.CHOICES, *settings.NUMBERS, *host.FREE_TEXT}
    read: set[str] = set()
    for package in ("unicoll", "gloo_fallback", "mpi_comm", "nccl_comm"):
        for path in (ROOT / package).rglob("*.py"):
            read |= set(re.findall(r"""["'](UNICOLL_[A-Z][A-Z_]*[A-Z])["']""", path.read_text()))
    assert {name for name in read if not name.startswith("UNICOLL_TEST_")} == known


def test_dev_shm_that_is_missing_or_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHM", str(tmp_path / "nothing"))
    facts = probes.ask({"memory": host.PROBES["memory"]}, 30)["memory"]
    assert facts["shm_problem"] == "No such file or directory"
    assert facts["lines"][1] == f"{tmp_path / 'nothing'}: No such file or directory"
    monkeypatch.setattr(host, "SHM", str(tmp_path))
    monkeypatch.setattr(host.os, "access", lambda *a: False)
    facts = probes.ask({"memory": host.PROBES["memory"]}, 30)["memory"]
    assert facts["lines"][1].endswith("cannot be written by this user")
    assert [h.level for h in hints.hints(healthy() | {"memory": facts})] == ["warning"]


def test_what_a_question_gave_before_it_failed_counts() -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield {"first": 1, "lines": ["begun"]}
        yield {"at": "the second"}
        raise DistArgumentError("planted")

    facts = probes.ask({"one": failing}, 30)["one"]
    assert facts == {
        "first": 1, "lines": ["begun", "DistArgumentError: planted"], "problem": "DistArgumentError: planted"
    }  # fmt: skip


# --- devices, as others see them ------------------------------------------------------------------------------------


class Devices:
    """Three devices, of which the first two reach each other."""

    description = "CUDA 12.8 driver"

    def device_count(self) -> int:
        return 3

    def facts(self, device: int) -> DeviceFacts:
        return DeviceFacts("NVIDIA H200", f"GPU-{device}", f"0000:{device}b:00.0", 139 << 30, (9, 0))

    def reaches(self, device: int, other: int) -> tuple[bool, bool]:
        return {device, other} == {0, 1}, False


def test_devices_and_which_of_them_reach_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus, vendor, kind in (
        ("0", "0x10de", "0x030200"),
        ("1", "0x10de", "0x060400"),
        ("2", "0x8086", "0x030000"),
    ):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "vendor").write_text(f"{vendor}\n")
        (tmp_path / bus / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(software, "PCI", str(tmp_path))
    monkeypatch.setattr(streams, "_installed", Devices())
    facts = probes.ask({"cuda": software.PROBES["cuda"]}, 30)["cuda"]
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


# --- hints --------------------------------------------------------------------------------------------------------


def healthy() -> dict[str, Any]:
    """The facts of a host with two GPUs, of which nothing is to be said."""
    eth0 = {"name": "eth0", "up": True, "loopback": False, "speed": 100000, "addresses": ["10.0.0.1"]}
    return copy.deepcopy({
        "python": {}, "numpy": {}, "choice": {}, "cupy": {"installed": False},
        "torch": {"installed": True, "version": "2.9.0", "cuda": "12.8", "devices": 2, "nccl": ["/t/libnccl.so.2"],
                  "nccl_version": "2.27.5"},
        "cuda": {"driver": "CUDA 12.8 driver", "on_bus": 2, "devices": [{}, {}]},
        "nccl": {"library": "NCCL 2.27.5 (/t/libnccl.so.2)", "version": "2.27.5"},
        "mpi": {"installed": True, "reason": None, "family": "open mpi", "library": "Open MPI 5.0.11",
                "mpirun": "/usr/bin/mpirun", "mpirun_family": "open mpi", "mpirun_version": "5.0.3"},
        "network": {"interfaces": [eth0], "infiniband": ["mlx5_0 port 1: 4: ACTIVE"]},
        "memory": {"shm": 32 << 30, "shm_free": 31 << 30, "shm_problem": None},
        "limits": {"files": {"soft": 1024, "hard": 1 << 20}, "locked": {"soft": None, "hard": None}, "cores": 8},
        "clocks": {"synchronized": True},
        "environment": {"launcher": "slurm", "ranks": 16, "local": 8, "several_hosts": True, "secret": "UNICOLL_SECRET",
                        "problems": [], "unknown": {}},
    })  # fmt: skip


def test_nothing_is_said_of_a_healthy_host() -> None:
    assert hints.hints(healthy()) == []
    assert page.Report(healthy(), []).status == 0


@pytest.mark.parametrize(
    ("section", "changes", "level", "text"),
    [
        ("memory", {"shm": 64 << 20}, "warning", "/dev/shm has 64 MiB"),
        ("memory", {"shm_free": 1 << 20}, "warning", "/dev/shm has 1 MiB left"),
        ("memory", {"shm": None, "shm_problem": "No such file or directory"}, "warning", "/dev/shm: No such file"),
        ("limits", {"files": {"soft": 256, "hard": 256}}, "warning", "at most 256 open files"),
        ("limits", {"locked": {"soft": 65536, "hard": 65536}}, "warning", "only 64 KiB of memory can be locked"),
        ("limits", {"cores": 4}, "note", "8 ranks share 4 cores"),
        ("network", {"interfaces": []}, "error", "only the loopback interface is up"),
        ("clocks", {"synchronized": False}, "warning", "synchronisation of this host's clock"),
        ("environment", {"secret": None}, "warning", "several hosts without a secret"),
        ("torch", {"cuda": None}, "warning", "2 GPUs are here, but torch was built without CUDA"),
        ("torch", {"devices": 0}, "warning", "torch finds no device, but the driver has 2"),
        ("torch cupy", {"installed": False}, "note", "neither CuPy nor torch"),
        ("torch nccl", {"nccl_version": "2.21.5"}, "warning", "there are two versions of NCCL"),
        ("torch nccl", {"nccl": ["/a/libnccl.so.2", "/b/libnccl.so.2"]}, "warning", "torch loads two of NCCL"),
        ("nccl", {"reason": "libnccl.so.2 cannot be used"}, "warning", "libnccl.so.2 cannot be used"),
        ("cuda", {"devices": [], "reason": "NVIDIA's driver is not here"}, "warning", "2 GPUs are on the PCI bus"),
        ("mpi", {"mpirun_family": "mpich", "mpirun_version": "4.2.0"}, "warning", "is of mpich 4.2.0"),
        ("mpi", {"mpirun_version": "4.1.2"}, "warning", "is of open mpi 4.1.2"),
        ("mpi", {"reason": "mpi4py finds no MPI library"}, "warning", "mpi4py finds no MPI library"),
        ("mpi", {"problem": "MPI does not start", "lines": []}, "error", "MPI does not start"),
        ("numpy", {"unfinished": 4.0, "lines": ["it did not end"]}, "warning", "it did not end"),
    ],
)  # fmt: skip
def test_each_fault_gives_its_hint_alone(
    section: str, changes: dict[str, Any], level: str, text: str
) -> None:
    """SECTION is the one that changes and, where it is another, the one that the hint is about."""
    sections = healthy()
    sections[section.split()[0]] |= changes
    (hint,) = hints.hints(sections)
    assert (hint.level, hint.about) == (level, section.split()[-1])
    assert text in hint.text
    assert hint.do
    assert page.Report(sections, [hint]).status == hints.LEVELS.index(level)


def test_what_only_several_hosts_need_is_not_said_of_one() -> None:
    sections = healthy()
    sections["environment"] |= {"several_hosts": False, "secret": None}
    sections["clocks"]["synchronized"] = False
    sections["network"]["interfaces"] = []
    assert [h.level for h in hints.hints(sections)] == ["note"]


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("mpirun (Open MPI) 5.0.11 Report bugs to", "open mpi"), ("Open MPI 4.1.2", "open mpi"),
        ("HYDRA build details: Version: 4.2.0", "mpich"), ("MPICH 5.0.2", "mpich"), ("Slurm", ""),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "intel"),
    ],
)  # fmt: skip
def test_makers_of_mpi(text: str, family: str) -> None:
    assert software.mpi_family(text) == family


# --- pairs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 10))
def test_every_pair_meets_once_in_rounds_of_disjoint_pairs(size: int) -> None:
    meetings = list(pairs.rounds(size))
    for meeting in meetings:
        members = [rank for pair in meeting for rank in pair]
        assert len(members) == len(set(members))
    everything = sorted(pair for meeting in meetings for pair in meeting)
    assert everything == [(a, b) for a in range(size) for b in range(a + 1, size)]
    assert len(meetings) == size - 1 + size % 2


def measured(low: int, high: int, latency: float = 10e-6, transfer: float = 1e-3) -> Pair:
    return Pair(low, high, latency, transfer)


def test_a_pair_is_compared_with_those_of_its_kind() -> None:
    hosts = ["a", "a", "a", "b", "b", "b"]
    every = [
        measured(low, high) if hosts[low] == hosts[high] else measured(low, high, 50e-6, 40e-3)
        for low in range(6)
        for high in range(low + 1, 6)
    ]
    verdict = pairs.judge(every, hosts)
    assert verdict.medians == {"within a host": (10e-6, 1e-3), "between hosts": (50e-6, 40e-3)}
    assert (verdict.slow, verdict.broken, verdict.checked) == ([], [], 15)
    every[0].transfer = 40e-3  # as fast as between hosts, and slow for one host
    ((pair, why),) = pairs.judge(every, hosts).slow
    assert pair is every[0]
    assert why == "0.105 GB/s, 40.0 times less than the median within a host (4.19 GB/s)"


def test_latency_bandwidth_and_trifles() -> None:
    every = [measured(0, 1), measured(0, 2), measured(1, 2), measured(0, 3, 40e-6), measured(1, 3, 1e-3)]
    ((pair, why),) = pairs.judge(every, ["a"] * 4).slow
    assert (pair.low, pair.high) == (1, 3)
    assert why == "1000.0 us for a small message, 100.0 times the median within a host (10.0 us)"


def test_a_pair_of_two_ranks_is_slow_beside_nobody() -> None:
    assert pairs.judge([measured(0, 1, 1.0, 60.0)], ["a", "a"]).slow == []


def test_reports_of_a_pair_are_put_together() -> None:
    lower, upper = Pair(0, 1, 3e-6, 2e-3, ["a byte"]), Pair(0, 1, None, None, ["another byte", "a byte"])
    again = Pair(0, 1, 2e-6, 4e-3)
    (pair,) = pairs.merge([again], pairs.merge([lower, upper], {})).values()
    assert pair == Pair(0, 1, 2e-6, 2e-3, ["a byte", "another byte"])
    assert pair.bandwidth == LARGE / 2e-3


# --- as the ranks of a job ------------------------------------------------------------------------------------------


def ranks(modules: Path, faults: str, *arguments: str, size: int = 4) -> subprocess.CompletedProcess[str]:
    program = str(HERE / "doctor_program.py")
    launch = ("-m", "unicoll.run", "--nproc-per-node", str(size), "--no-prefix", "--grace", "10")
    return run(modules, *launch, program, faults, *arguments)


def test_ranks_that_are_well_and_one_that_differs(modules: Path) -> None:
    done = ranks(modules, "alone:2")
    out = done.stdout
    assert done.returncode == 0 or "warning" in out, done
    assert "all 6 pairs are well, every byte was right (median within a host" in out
    assert out.count("\nnumpy") == 1
    different = out.partition("what differs by rank:")[2].partition("\npairs")[0]
    assert re.search(r"environment +ranks 0-1, 3: unicoll: 4 ranks", different)
    assert re.search(
        r"rank 2: unicoll: 4 ranks, 4 on this host.*NCCL_DEBUG=INFO", " ".join(different.split())
    )
    assert "gloo" in out.partition("init_process_group() chose")[2]
    assert "\nbroken" not in out
    assert "\nslow" not in out


def test_the_slow_and_the_corrupting_pair_are_named_and_nobody_else(modules: Path) -> None:
    done = ranks(modules, "slow:1-2,corrupt:0-3", "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == report["exit_status"] == 2
    about = report["pairs"]
    assert about["checked"] == 6
    assert [pair["ranks"] for pair in about["slow"]] == [[1, 2]]
    assert "times the median within a host" in about["slow"][0]["why"]
    assert about["broken"] == [
        {
            "ranks": [0, 3],
            "errors": [f"1 of {LARGE} bytes from rank 0 to rank 3 came wrong, first byte 12345"],
        }
    ]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]
    assert all(rank["interface"] == "lo 127.0.0.1" for rank in report["ranks"])
    assert report["sections"]["torch"]["version"] == "2.99.0"
    assert report["differences"] == {}


def test_a_pair_whose_message_is_lost_is_named_and_the_others_go_on(modules: Path) -> None:
    done = ranks(modules, "mute:1-2", "--deadline", "8")
    assert done.returncode == 2, done
    assert "5 of 6 pairs are well" in done.stdout
    broken = " ".join(done.stdout.partition("\nbroken")[2].split())
    assert broken.startswith("rank 1 (host")
    assert "OperationTimeoutError: recv" in broken
    assert done.stdout.count("\nbroken") == 1


def test_ranks_that_torchruns_variables_name(modules: Path) -> None:
    """As torchrun starts them: its agent has MASTER_PORT itself."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none",
              "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    command = [sys.executable, "-m", "unicoll.doctor", "--json"]
    path = os.pathsep.join([str(modules), str(ROOT)])
    started = [
        subprocess.Popen(
            command, cwd=modules, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment({"PYTHONPATH": path, "RANK": rank, "LOCAL_RANK": rank} | shared),
        )
        for rank in "01"
    ]  # fmt: skip
    (out, err), (other_out, other_err) = (process.communicate(timeout=120) for process in started)
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


def test_a_rank_that_does_not_come_is_named(modules: Path) -> None:
    done = ranks(modules, "absent:1", "--deadline", "2", size=2)
    assert done.returncode != 0
    assert re.search(r"unicoll\.doctor: rank 0 .*TimeoutError: .*rank 1", done.stderr)
    assert "Traceback" not in done.stderr
