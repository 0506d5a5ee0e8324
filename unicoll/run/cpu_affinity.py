"""The CPUs that each worker is bound to with ``--numa-binding``, from the kernel's description of
the machine in sysfs.

The modes are torchrun's (``torch.numa.binding.AffinityMode``). A worker belongs to the NUMA node of
its GPU, that with the number of its local rank; on a machine without GPUs the workers are spread
over the nodes in the order of their local ranks.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence

BINDINGS = ("node", "socket", "exclusive", "core-complex")
"""All CPUs of its NUMA node; all of the node's socket; its own cores of the node; one group of
cores with a common last-level cache."""


_PROGRAMS = {
    "CUDA": (
        """
import ctypes
cuda, number, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.create_string_buffer(32)
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0:
    for device in range(number.value):
        cuda.cuDeviceGetPCIBusId(text, len(text), device)
        print(text.value.decode().lower())
"""
    ),
    "HIP": (
        """
from unicoll.devices.cuda import hip_driver
runtime = hip_driver.load()
for device in range(0 if isinstance(runtime, str) else runtime.device_count()):
    print(runtime.facts(device).bus[:-1] + "0")  # the function is the number of a partition, which sysfs has not
"""
    ),
    "Level Zero": (
        """
from ctypes import CDLL, Structure, byref, c_int32, c_int64, c_uint32, c_void_p
class Properties(Structure):  # ze_pci_ext_properties_t
    _fields_ = [("type", c_int32), ("next", c_void_p), ("address", c_uint32 * 4), ("speed", c_int64 * 2)]
def handles(get, *of):
    number = c_uint32(0)
    get(*of, byref(number), None)
    found = (c_void_p * number.value)()
    get(*of, byref(number), found)
    return map(c_void_p, found)
ze = CDLL("libze_loader.so.1")
if ze.zeInit(1) == 0:  # GPUs only
    for driver in handles(ze.zeDriverGet):
        for device in handles(ze.zeDeviceGet, driver):
            found = Properties(0x10008)
            ze.zeDevicePciGetPropertiesExt(device, byref(found))
            print("%04x:%02x:%02x.%x" % tuple(found.address))
"""
    ),
}
"""By driver: a program that prints the PCI addresses of its devices."""
_AMD_KERNEL_DRIVER = "/dev/kfd"


@functools.cache
def gpu_addresses(driver: str = "CUDA") -> list[str]:
    """PCI addresses of the devices of a driver, ``"CUDA"`` or ``"Level Zero"``; empty without the
    driver.

    Without a CUDA device they are those of HIP, on a machine with AMD's. Those under
    CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or ZE_AFFINITY_MASK count. A separate process asks the
    driver. ValueError: it has not replied within 60 s.
    """
    found = _ask(driver, "-I", "-S")
    if not found and driver == "CUDA" and os.path.exists(_AMD_KERNEL_DRIVER):
        return _ask("HIP")
    return found


def _ask(driver: str, *flags: str) -> list[str]:
    # The search path of this process, which lacks the working directory that -c adds.
    program = f"import sys; sys.path[:] = {sys.path!r}\n{_PROGRAMS[driver]}"
    command = [sys.executable, *flags, "-c", program]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the {driver} driver did not reply within 60 s") from None
    return answer.stdout.split() if answer.returncode == 0 else []


def cpu_affinity(
    binding: str,
    nproc: int,
    gpus: Sequence[str],
    sysfs: str = "/sys",
    allowed: Collection[int] | None = None,
) -> dict[int, frozenset[int]]:
    """The CPUs of each local rank.

    Args:
        binding: one of :data:`BINDINGS`.
        gpus: PCI addresses of the GPUs, in the order of the local ranks.
        allowed: the CPUs that may be used; those of this process if None.

    Raises:
        ValueError: the machine is not described in sysfs, or a worker would have no CPU.
    """
    machine = _Machine(sysfs, os.sched_getaffinity(0) if allowed is None else allowed)
    node_numbers = machine.nodes
    if gpus:
        # GPUs without a worker count as neighbours, too: a worker's share does not depend on how
        # many others there are.
        places = [machine.node_of(gpus[i % len(gpus)]) for i in range(max(nproc, len(gpus)))]
    else:
        places = [node_numbers[i * len(node_numbers) // nproc] for i in range(nproc)]
    found = {}
    for local_rank in range(nproc):
        node = places[local_rank]
        if node not in node_numbers:
            raise ValueError(f"--numa-binding: this process may use no CPU of NUMA node {node}")
        if binding == "node":
            cpus = machine.cpus(node)
        elif binding == "socket":
            same = [n for n in node_numbers if machine.socket(n) == machine.socket(node)]
            cpus = frozenset().union(*map(machine.cpus, same))
        else:
            neighbours = [i for i, other in enumerate(places) if other == node]
            cpus = _share(binding, machine, node, neighbours.index(local_rank), len(neighbours))
        found[local_rank] = cpus
    return found


def _share(binding: str, machine: _Machine, node: int, index: int, count: int) -> frozenset[int]:
    """The part of a node for worker ``index`` of the ``count`` that belong to it."""
    if binding == "core-complex":
        groups = _grouped(machine.cpus(node), machine.cache)
        largest_first = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
        return largest_first[index % len(groups)][1]
    cores = [cpus for _first, cpus in sorted(_grouped(machine.cpus(node), machine.core).items())]
    if len(cores) < count:
        raise ValueError(
            f"--numa-binding {binding}: NUMA node {node} has {len(cores)} cores for {count} workers"
        )
    least, more = divmod(len(cores), count)
    start = index * least + min(index, more)
    return frozenset().union(*cores[start : start + least + (index < more)])


def _grouped(cpus: Collection[int], key: Callable[[int], int]) -> Mapping[int, frozenset[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu), set()).add(cpu)
    return {first: frozenset(members) for first, members in groups.items()}


class _Machine:
    """NUMA nodes and caches, as far as ``allowed`` CPUs belong to them."""

    def __init__(self, sysfs: str, allowed: Collection[int]) -> None:
        self._sysfs = sysfs
        self._allowed = frozenset(allowed)
        self.nodes = [n for n in sorted(self._list("devices/system/node/online")) if self.cpus(n)]

    def cpus(self, node: int) -> frozenset[int]:
        return self._list(f"devices/system/node/node{node}/cpulist") & self._allowed

    def node_of(self, gpu: str) -> int:
        """The node of a PCI address; -1, for a machine with one node, is 0."""
        return max(int(self._read(f"bus/pci/devices/{gpu}/numa_node")), 0)

    def socket(self, node: int) -> int:
        return int(
            self._read(f"devices/system/cpu/cpu{min(self.cpus(node))}/topology/physical_package_id")
        )

    def core(self, cpu: int) -> int:
        """The first CPU of the same core."""
        return min(self._list(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))

    def cache(self, cpu: int) -> int:
        """The first CPU with the same last-level cache."""
        folder = f"devices/system/cpu/cpu{cpu}/cache"
        try:
            names = [
                name
                for name in os.listdir(f"{self._sysfs}/{folder}")
                if re.fullmatch(r"index\d+", name)
            ]
        except OSError:
            names = []
        levels = {
            int(self._read(f"{folder}/{name}/level")): name
            for name in names
            if self._read(f"{folder}/{name}/type") != "Instruction"
        }
        if not levels:
            raise ValueError(
                f"--numa-binding core-complex: {self._sysfs}/{folder} describes no cache"
            )
        return min(self._list(f"{folder}/{levels[max(levels)]}/shared_cpu_list"))

    def _list(self, path: str) -> frozenset[int]:
        """The numbers of a list like ``0-3,8``."""
        numbers: set[int] = set()
        for part in filter(None, self._read(path).split(",")):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
        return frozenset(numbers)

    def _read(self, path: str) -> str:
        try:
            with open(f"{self._sysfs}/{path}", encoding="ascii") as file:
                return file.read().strip()
        except OSError as error:
            raise ValueError(f"--numa-binding: {error.filename}: {error.strerror}") from None
