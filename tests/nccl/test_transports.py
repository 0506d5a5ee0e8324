"""NCCL's transports in explain(): the expected ones by hosts and devices, and those of NCCL's log; its RAS."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unicoll as dist
from nccl_comm import ras, transport_report
from nccl_comm.transport_report import VARIABLES, expected, logged, settings
from tests.nccl.nccl_jobs import connect, error_of
from tests.simulated_nccl import arrays
from tests.simulated_nccl.cuda import Simulation
from tests.simulated_nccl.ranks import run
from tests.support.on_ranks import on_ranks
from unicoll.net.wire.interfaces import Interface

NOWHERE = Path("/no/such/folder")


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    made = Simulation(4)
    yield made
    made.close()


def fact(simulation: Simulation, host: str, device: int, **more: str) -> dict[str, Any]:
    """A member on a device that this process sees if the host is "here"."""
    uuid = simulation.cuda.facts(device).uuid if host == "here" else f"GPU-{host}-{device}"
    return {"host": host, "pid": 1, "device": device, "uuid": uuid, **more}


@pytest.fixture
def said(simulation: Simulation) -> Callable[..., str]:
    """The transports expected on rank 0, on device 0 of host "here", for members given as (host, device)."""

    def ask(
        *others: tuple[str, int], devices: Path = NOWHERE, net_name: str | None = None, **environ: str
    ) -> str:
        facts = [fact(simulation, host, device) for host, device in (("here", 0), *others)]
        return expected(0, facts, simulation.cuda, net_name, environ, devices)

    return ask


def infiniband(folder: Path, **devices: str) -> Path:
    """A folder like the kernel's for InfiniBand devices, each with the kind of its link."""
    for name, kind in devices.items():
        port = folder / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(f"{kind}\n")
    return folder


# --- within a host ------------------------------------------------------------------------------------------------


def test_transports_within_a_host_follow_from_the_drivers_answers(
    simulation: Simulation, said: Callable[..., str]
) -> None:
    simulation.cuda.links |= {(0, 2): (True, False), (0, 3): (False, False), (2, 0): (True, False)}
    assert said() == "expected transports: none, there is one rank"
    assert said(("here", 0)) == "expected transports: 1 peer by P2P (the same device)"
    assert said(("here", 1)) == "expected transports: 1 peer by P2P (NVLink)"
    assert said(("here", 1), ("here", 2), ("here", 3)) == (
        "expected transports: 1 peer by P2P (NVLink), 1 peer by P2P (PCIe), 1 peer by shared memory"
    )
    facts = [fact(simulation, "here", device) for device in range(3)]
    assert expected(2, facts, simulation.cuda, None, {}, NOWHERE) == (
        "expected transports: 1 peer by P2P (NVLink), 1 peer by P2P (PCIe)"
    )
    facts[1]["uuid"] = "GPU-of-another-process"
    assert expected(0, facts[:2], simulation.cuda, None, {}, NOWHERE) == (
        "expected transports: 1 peer by P2P where the devices allow it, else shared memory"
    )


def test_amds_devices_are_linked_by_xgmi(
    simulation: Simulation, said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(simulation.cuda), "name", "HIP")
    assert said(("here", 1)) == "expected transports: 1 peer by P2P (xGMI)"


@pytest.mark.parametrize(
    ("environ", "nvlink", "pcie"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "shared memory", "shared memory"),
        ({"NCCL_P2P_DISABLE": "0"}, "P2P (NVLink)", "P2P (PCIe)"),
        ({"NCCL_P2P_LEVEL": "LOC"}, "shared memory", "shared memory"),
        ({"NCCL_P2P_LEVEL": "nvl"}, "P2P (NVLink)", "shared memory"),
        ({"NCCL_P2P_LEVEL": "SYS"}, "P2P (NVLink)", "P2P (PCIe)"),
        ({"NCCL_SHM_DISABLE": "1"}, "P2P (NVLink)", "P2P (PCIe)"),
    ],
)
def test_variables_change_what_is_expected_and_are_named(
    environ: dict[str, str], nvlink: str, pcie: str, simulation: Simulation, said: Callable[..., str]
) -> None:
    simulation.cuda.links[0, 2] = True, False
    ((name, value),) = environ.items()
    assert said(("here", 1), **environ) == f"expected transports: 1 peer by {nvlink} ({name}={value})"
    assert said(("here", 2), **environ) == f"expected transports: 1 peer by {pcie} ({name}={value})"


def test_variables_are_also_read_from_nccls_files(tmp_path: Path) -> None:
    system, user = tmp_path / "nccl.conf", tmp_path / "mine.conf"
    system.write_text("# for all\nNCCL_NET=Socket\nNCCL_P2P_DISABLE = 1\nNCCL_SHM_DISABLE=1\nother words\n")
    user.write_text("NCCL_SHM_DISABLE=0\nNCCL_NET=IB\n")
    environ = {"NCCL_CONF_FILE": str(user), "NCCL_NET": "mine", "HOME": str(tmp_path)}
    assert settings("NCCL", environ, tmp_path) == {
        "NCCL_CONF_FILE": str(user),
        "NCCL_NET": "mine",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "0",
    }
    environ["NCCL_CONF_FILE"] = str(tmp_path)  # no file
    assert settings("RCCL", environ, tmp_path) == {k: v for k, v in environ.items() if k != "HOME"}


def test_all_variables_are_named_once() -> None:
    assert len(set(VARIABLES)) == len(VARIABLES)
    assert all(name.startswith("NCCL_") for name in VARIABLES)


# --- between hosts ------------------------------------------------------------------------------------------------

_MIXED = {"mlx5_1": "InfiniBand", "mlx5_0": "InfiniBand", "mlx5_2": "Ethernet"}
_MANY = {f"mlx5_{i}": "InfiniBand" for i in range(8)}


@pytest.mark.parametrize(
    ("devices", "options", "network"),
    [
        (_MIXED, {}, "(InfiniBand mlx5_0, mlx5_1; RoCE mlx5_2)"),
        (_MANY, {}, "(InfiniBand mlx5_0, mlx5_1, mlx5_2, mlx5_3 and 4 more)"),
        ({}, {}, "(sockets on eth0, eth1)"),
        (_MIXED, {"NCCL_IB_DISABLE": "1"}, "(sockets on eth0, eth1) ("),
        (_MIXED, {"NCCL_NET": "Socket"}, "(sockets on eth0, eth1) ("),
        (_MIXED, {"net_name": "socket"}, "(sockets on eth0, eth1)"),
        ({}, {"NCCL_SOCKET_IFNAME": "=eth9"}, "(sockets on =eth9) ("),
        ({}, {"NCCL_NET": "AWS Libfabric"}, "(AWS Libfabric) ("),
        ({}, {"net_name": "mine", "NCCL_NET": "other"}, "(mine)"),
        ({}, {"NCCL_NET_PLUGIN": "libnccl-net-ofi.so"}, "(plug-in libnccl-net-ofi.so) ("),
        ({}, {"NCCL_NET": "IB"}, "(InfiniBand, without a device on this host"),
    ],
)
def test_hosts_are_counted_and_the_network_named(
    devices: dict[str, str],
    options: dict[str, str],
    network: str,
    said: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, "lo", "docker0", "eth0", "eth1")
    others = [("here", 1), *((host, d) for host in ("there", "yonder") for d in range(4))]
    found = said(*others, devices=infiniband(tmp_path, **devices), **options)
    start = "expected transports: 1 peer by P2P (NVLink), 8 on 2 other hosts by network "
    assert found.startswith(start + network)


def have(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Give this host interfaces; one whose name ends with "!" is down."""
    found = [
        Interface(name.strip("!"), family, "::1", "global", name == "lo", not name.endswith("!"))
        for family in (socket.AF_INET, socket.AF_INET6)
        for name in names
    ]
    monkeypatch.setattr(transport_report, "interfaces", lambda: found)


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (["lo"], "lo"),
        (["lo", "virbr0"], "lo"),
        (["lo", "docker0", "docker1"], "docker0, docker1"),
        (["lo", "docker0", "veth4f21", "virbr0"], "veth4f21"),
        (["lo", "eth0", "veth4f21"], "eth0, veth4f21"),
        (["lo", "eth0", "ib0", "ib1"], "ib0, ib1"),
        (["lo", "eth0", "ib0!"], "eth0"),
        ([], "no interface"),
    ],
)
def test_interfaces_are_those_that_nccl_takes(
    names: list[str], used: str, said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of NCCL 2.30.7's ncclFindInterfaces."""
    have(monkeypatch, *names)
    assert said(("there", 0)).endswith(f"(sockets on {used})")


def test_with_p2p_and_shared_memory_off_a_host_uses_the_network(
    said: Callable[..., str], tmp_path: Path
) -> None:
    devices = infiniband(tmp_path, mlx5_0="InfiniBand")
    found = said(("here", 1), ("there", 0), devices=devices, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    assert found.startswith(
        "expected transports: 1 on this host and 1 on 1 other host by network (InfiniBand mlx5_0) ("
    )


def test_hostid_replaces_the_host_name(simulation: Simulation) -> None:
    facts = [fact(simulation, "here", d, hostid=f"half {d // 2}") for d in range(4)]
    found = expected(1, facts, simulation.cuda, "mine", {}, NOWHERE)
    assert found == "expected transports: 1 peer by P2P (NVLink), 2 on 1 other host by network (mine)"


# --- NCCL's log ---------------------------------------------------------------------------------------------------

_LOG = """\
{host}:{pid}:{pid} [0] NCCL INFO NCCL_P2P_LEVEL set by environment to NVL
{host}:{pid}:4243 [0] NCCL INFO ncclCommInitRankConfig comm 0x55d0 rank 1 nranks 4 cudaDev 0 nvmlDev 0 busId 1000
{host}:{pid}:4243 [0] NCCL INFO Channel 00/02 :    0   1   2   3
{host}:{pid}:4243 [0] NCCL INFO Channel 00/0 : 1[0] -> 2[1] via P2P/CUMEM
{host}:{pid}:4243 [0] NCCL INFO Channel 01/0 : 1[0] -> 2[1] via P2P/CUMEM
{host}:{pid}:4243 [0] NCCL INFO Channel 02/0 : 1[0] -> 0[3] via P2P/CUMEM
[2026-01-02 03:04:05] {host}:{pid}:4243 [0] NCCL INFO Channel 00/0 : 1[0] -> 3[2] via SHM/direct/direct
{host}:{pid}:4243 [0] NCCL INFO Channel 00/0 : 5[4] -> 1[0] [receive] via NET/IB/0(3)/GDRDMA/Shared
{host}:{pid}:4243 [0] NCCL INFO Channel 01/0 : 5[4] -> 1[0] [receive] via NET/IB/1/GDRDMA/Shared
{host}:{pid}:4243 [0] NCCL INFO Channel 00 : 1[1a000] -> 6[1b000] [send] via NET/Socket/0
{host}:{pid}:4243 [0] NCCL INFO Channel 00/0 : 1[0] -> 7[1] via P2P/direct pointer comm 0x55d0 nRanks 08
{host}:{other}:4243 [1] NCCL INFO Channel 00/0 : 2[1] -> 9[1] via P2P/IPC
{host}:{pid}:4243 [0] NCCL INFO Connected all rings
"""


def test_the_log_of_this_process_is_read(tmp_path: Path) -> None:
    name = f"nccl.{socket.gethostname().partition('.')[0]}.{os.getpid()}.%x%"
    text = _LOG.format(host="node7", pid=os.getpid(), other=os.getpid() + 1)
    (tmp_path / name).write_text(text + "\udcff", errors="ignore")
    environ = {"NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p.%x%%"}
    assert logged(environ) == (
        "in NCCL's log: NET/IB/GDRDMA/Shared with 1 rank, NET/Socket with 1 rank, P2P/CUMEM with 2 ranks,"
        " P2P/direct pointer with 1 rank, SHM/direct/direct with 1 rank"
    )
    assert logged({**environ, "NCCL_DEBUG": "WARN"}) == ""
    assert logged({"NCCL_DEBUG": "INFO"}) == ""
    assert logged({}) == ""


def test_other_files_give_no_transports(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name in ("pipe", "empty", "missing", ""):
        assert logged({"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_FILE": str(tmp_path / name)}) == ""


# --- in a job -----------------------------------------------------------------------------------------------------


@on_ranks(4, start=partial(run, bound=True, backend="nccl"))
def test_explain_describes_groups_on_several_hosts(tmp_path: Path) -> None:
    me = dist.get_rank()
    device = f"on cuda:{me} (Simulated GPU); expected transports: 3 peers by P2P (NVLink)"
    assert device in dist.explain()
    os.environ.update({"NCCL_HOSTID": f"host{me // 2}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "sim0"})
    four: Any = dist.new_group(use_local_synchronization=True, device_id=me)
    two: Any = dist.split_group(four, [[0, 1], [2, 3]])
    hosts = "1 peer by P2P (NVLink), 2 on 1 other host by network (sockets on sim0) ("
    assert f"expected transports: {hosts}" in four.describe()
    assert f"NCCL_HOSTID=host{me // 2}" in four.describe()
    assert "NCCL's log" not in four.describe()
    assert two.describe().split("; ")[1].startswith("expected transports: 1 peer by P2P (NVLink) (")
    log = tmp_path / f"{os.getpid()}.log"
    log.write_text(f"node:{os.getpid()}:1 [0] NCCL INFO Channel 00/0 : {me}[0] -> 9[1] via P2P/CUMEM\n")
    os.environ.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/%p.log"})
    # each group's line has it
    assert dist.explain().count("; in NCCL's log: P2P/CUMEM with 1 rank") == 3
    dist.destroy_process_group(two)
    dist.destroy_process_group(four)
    store: Any = dist.group.WORLD.job.store  # type: ignore[union-attr]

    def wait(keys: Any, timeout: float) -> None:
        raise dist.DistStoreError("the store is gone")

    store.wait = wait
    assert "expected transports: not known (the store is gone)" in dist.explain()
    del store.wait


class Ras:
    """NCCL's RAS on a port of its own: answers each request with some bytes, and then closes the connection or not."""

    def __init__(self, answer: bytes, closes: bool = True) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._answer, self._closes = answer, closes
        self.asked: list[bytes] = []
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="simulated RAS", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # it has been closed
            with connection, suppress(ConnectionResetError):  # the client may close it before it has read all
                self.asked.append(connection.recv(100))
                connection.sendall(self._answer)
                if not self._closes:
                    connection.recv(1)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(10)


@pytest.mark.parametrize(
    ("answer", "closes", "said"),
    [
        (b"NCCL version 2.30.7\n\nrank 1 \x1b[1mstuck\n", True, "NCCL version 2.30.7\nrank 1 \\x1b[1mstuck"),
        (b"line\n" * 50, True, "\n".join(["line"] * 40 + ["... and 10 more lines"])),
        (b"begun", False, "begun"),
        (b"", True, ""),
        (b"x" * 100_000, False, "x" * 200),
    ],
)
def test_what_ras_says(answer: bytes, closes: bool, said: str) -> None:
    server = Ras(answer, closes)
    found = ras.status({"NCCL_RAS_ADDR": server.address}, 0.5)
    server.close()
    assert found == said
    assert server.asked == [b"verbose status\n"]


def late() -> str:
    """Rank 1 does not come to an all_reduce before the deadline of the others."""
    connect()
    return (
        ""
        if dist.get_rank() == 1
        else error_of(lambda: dist.all_reduce(arrays.full(2, 1.0), async_op=True, timeout=0.5).synchronize())
    )


@pytest.mark.parametrize(("version", "asks"), [(23007, True), (22304, False)])
def test_the_error_of_a_deadline_has_what_ras_says(version: int, asks: bool) -> None:
    server = Ras(b"rank 1 is at 1\n")
    said = run(2, late, env={"NCCL_RAS_ADDR": server.address, "UNICOLL_LOG_LEVEL": "error"}, version=version)[
        0
    ]
    server.close()
    assert said.startswith("OperationTimeoutError: all_reduce(")
    assert said.endswith("\nNCCL's RAS says:\nrank 1 is at 1") == bool(server.asked) == asks


@pytest.mark.parametrize(
    "environ", [{"NCCL_RAS_ENABLE": "0"}, {"NCCL_RAS_ADDR": "nowhere"}, {"NCCL_RAS_ADDR": "127.0.0.1:1"}]
)
def test_a_ras_that_does_not_answer_is_nothing(environ: dict[str, str]) -> None:
    assert ras.status(environ, 0.5) == ""
