"""``--numa-binding``: which CPUs a worker is bound to, on machines described in files as in sysfs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from unicoll.run.args import parse
from unicoll.run.cpu_affinity import BINDINGS, cpu_affinity, gpu_addresses


def machine(sysfs: Path, nodes: list[str], gpus: dict[str, int], threads: int = 1, cache: int = 2) -> str:
    """Two NUMA nodes for each socket; core i has the CPUs i and, with two threads, i + 16; a cache for each 2 CPUs."""

    def write(path: str, text: str) -> None:
        (sysfs / path).parent.mkdir(parents=True, exist_ok=True)
        (sysfs / path).write_text(text + "\n")

    write("devices/system/node/online", f"0-{len(nodes) - 1}")
    for node, cpus in enumerate(nodes):
        write(f"devices/system/node/node{node}/cpulist", cpus)
        for part in filter(None, cpus.split(",")):
            first, _, last = part.partition("-")
            for cpu in range(int(first), int(last or first) + 1):
                folder = f"devices/system/cpu/cpu{cpu}"
                core = cpu % 16
                siblings = f"{core},{core + 16}" if threads == 2 else str(cpu)
                write(f"{folder}/topology/physical_package_id", str(node // 2))
                write(f"{folder}/topology/thread_siblings_list", siblings)
                write(f"{folder}/cache/index0/level", "1")
                write(f"{folder}/cache/index0/type", "Data")
                write(f"{folder}/cache/index0/shared_cpu_list", siblings)
                write(f"{folder}/cache/index3/level", "3")
                write(f"{folder}/cache/index3/type", "Unified")
                start = cpu - cpu % cache
                write(f"{folder}/cache/index3/shared_cpu_list", f"{start}-{start + cache - 1}")
                write(f"{folder}/cache/index9/level", "9")
                write(f"{folder}/cache/index9/type", "Instruction")
    for address, node in gpus.items():
        write(f"bus/pci/devices/{address}/numa_node", str(node))
    return str(sysfs)


FOUR = ["0-3", "4-7", "8-11", "12-15"]
GPUS = {"0000:3b:00.0": 1, "0000:3c:00.0": 1, "0000:b1:00.0": 3}


@pytest.mark.parametrize(
    ("binding", "nproc", "gpus", "expected"),
    [
        ("node", 3, GPUS, ["4-7", "4-7", "12-15"]),
        ("node", 4, GPUS, ["4-7", "4-7", "12-15", "4-7"]),
        ("socket", 3, GPUS, ["0-7", "0-7", "8-15"]),
        ("exclusive", 3, GPUS, ["4-5", "6-7", "12-15"]),
        ("exclusive", 1, GPUS, ["4-5"]),  # the other GPU's part stays free
        ("exclusive", 4, GPUS, ["4-5", "6-6", "12-15", "7-7"]),
        ("core-complex", 3, GPUS, ["4-5", "6-7", "12-13"]),
        ("node", 2, {}, ["0-3", "8-11"]),
        ("node", 8, {}, ["0-3", "0-3", "4-7", "4-7", "8-11", "8-11", "12-15", "12-15"]),
        ("exclusive", 8, {}, ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11", "12-13", "14-15"]),
        ("node", 1, {"0000:01:00.0": -1}, ["0-3"]),
    ],
)
def test_bindings(
    tmp_path: Path, binding: str, nproc: int, gpus: dict[str, int], expected: list[str]
) -> None:
    sysfs = machine(tmp_path, FOUR, gpus)
    found = cpu_affinity(binding, nproc, list(gpus), sysfs, range(16))
    assert [f"{min(cpus)}-{max(cpus)}" for cpus in found.values()] == expected
    assert list(found) == list(range(nproc))
    assert all(len(cpus) == max(cpus) - min(cpus) + 1 for cpus in found.values())


def test_cores_are_not_split_and_other_cpus_are_not_used(tmp_path: Path) -> None:
    allowed = {0, 1, 2, 16, 17, 18}
    halves = cpu_affinity("exclusive", 2, [], machine(tmp_path, ["0-3,16-19"], {}, threads=2), allowed)
    assert halves == {0: {0, 1, 16, 17}, 1: {2, 18}}


@pytest.mark.parametrize(
    ("binding", "allowed", "gpus", "words"),
    [
        ("exclusive", {0, 1}, {}, "NUMA node 0 has 2 cores for 3 workers"),
        ("node", {0}, {"0000:01:00.0": 1}, "this process may use no CPU of NUMA node 1"),
        ("node", {0}, {"0000:01:00.0": 7}, "this process may use no CPU of NUMA node 7"),
    ],
)
def test_errors(tmp_path: Path, binding: str, allowed: set[int], gpus: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cpu_affinity(binding, 3, list(gpus), machine(tmp_path, FOUR, gpus), allowed)


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_kernel_without_the_description(tmp_path: Path, binding: str) -> None:
    with pytest.raises(ValueError, match=r"^--numa-binding: .*/node/online: No such file"):
        cpu_affinity(binding, 1, [], str(tmp_path), {0})


LEVEL_ZERO = """
#include <stdint.h>
struct properties { int32_t type; void *next; uint32_t domain, bus, device, function; int64_t speed[2]; };
int zeInit(uint32_t flags) { return flags == 1 ? 0 : 1; }
int zeDriverGet(uint32_t *count, void **drivers) {
    *count = 1;
    if (drivers) drivers[0] = (void *)0x100;
    return 0;
}
int zeDeviceGet(void *driver, uint32_t *count, void **devices) {
    *count = 2;
    if (devices) for (int i = 0; i < 2; i++) devices[i] = (char *)driver + i;
    return 0;
}
int zeDevicePciGetPropertiesExt(void *device, struct properties *found) {
    if (found->type != 0x10008) return 1;
    found->domain = 0;
    found->bus = 0x18 + (uint32_t)((uintptr_t)device - 0x100);
    found->device = 0;
    found->function = 1;
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_level_zero_lists_intels_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "ze.c"
    source.write_text(LEVEL_ZERO)
    library = tmp_path / "libze_loader.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    gpu_addresses.cache_clear()
    try:
        assert gpu_addresses("Level Zero") == ["0000:18:00.1", "0000:19:00.1"]
        (tmp_path / "work.py").touch()
        assert parse(["--nproc-per-node", "xpu", str(tmp_path / "work.py")]).nproc == 2
    finally:
        gpu_addresses.cache_clear()
