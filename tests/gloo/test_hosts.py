"""Jobs on two hosts (:mod:`tests.support.hosts`): addresses, interfaces, secrets, lost links."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Hosts
from tests.support.ranks import ROOT, environment

PROGRAMS = str(Path(__file__).with_name("host_programs.py"))
SECRET = {"UNICOLL_SECRET": "the secret that these tests share"}
BOUND = 120.0

_ports = itertools.count(21000)


class FinishedJob:
    """A finished job: the ranks' reports in order, and each host's stderr and exit status."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        outputs = [process.communicate(timeout=BOUND) for process in processes]
        self.stderr = [err for _, err in outputs]
        self.status = [process.returncode for process in processes]
        lines = [line for out, _ in outputs for line in out.splitlines()]
        self.reports: list[dict[str, Any]] = sorted(map(json.loads, lines), key=lambda r: int(r["rank"]))

    def successful_reports(self, ranks: int) -> list[dict[str, Any]]:
        """The reports of a job that succeeded."""
        assert self.status == [0, 0], "".join(self.stderr)
        assert [report["rank"] for report in self.reports] == list(range(ranks))
        return self.reports


def launch(
    hosts: Hosts,
    *program: str,
    master: str = "10.77.0.1",
    per_node: int = 1,
    env: dict[str, str] | None = None,
    env_by_host: tuple[dict[str, str], dict[str, str]] = ({}, {}),
    script: str = PROGRAMS,
) -> list[subprocess.Popen[str]]:
    """Start the same program on both hosts; the master is on the first.

    With one process per host there are no launchers, which would end the job when they lose each other.
    """
    common = environment({"PYTHONPATH": str(ROOT), **(env or {})})
    if "UNICOLL_SOCKET_IFNAME" not in (env or {}):
        del common["UNICOLL_SOCKET_IFNAME"]
    port = str(next(_ports))
    if per_node == 1:
        common |= {"MASTER_ADDR": master, "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        own = [{"RANK": str(k), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for k in range(2)]
        command = [sys.executable, script, *program]
        return [hosts.start(k + 1, command, common | own[k] | env_by_host[k]) for k in range(2)]
    flags = ["--nnodes", "2", "--nproc-per-node", str(per_node), "--master-addr", master]
    flags += ["--master-port", port, "--no-prefix", "--grace", "15"]
    return [
        hosts.start(
            k + 1,
            [sys.executable, "-m", "unicoll.run", *flags, "--node-rank", str(k), script, *program],
            common | env_by_host[k],
        )
        for k in range(2)
    ]


def networks(report: dict[str, Any]) -> set[str]:
    """The networks of a rank's connections, except those to the store."""
    store = report["explained"].partition("store: tcp://")[2].split()[0].rpartition(":")[2]
    found = set()
    for own, own_port, peer, peer_port in report["connections"]:
        if int(store) not in (own_port, peer_port):
            found |= {address[: address.rindex(":" if ":" in address else ".")] for address in (own, peer)}
    return found


@pytest.mark.every(n=0)
@pytest.mark.parametrize(
    ("master", "network"),
    [
        ("10.77.0.1", "10.77.0"),
        ("fd77::1", "fd77:"),
        ("[fd78::1]", "fd78:"),
        ("fe80::1%lan1", "fe80:"),
    ],
)
def test_two_nodes_with_a_static_master(hosts: Hosts, master: str, network: str) -> None:
    job = FinishedJob(launch(hosts, "everything", master=master, per_node=2, env=SECRET))
    for report in job.successful_reports(4):
        assert report["host"] == f"host{report['rank'] // 2 + 1}"
        assert networks(report) == {network}
        assert "secret: UNICOLL_SECRET" in report["explained"]
        assert f"source address of the route to {master.strip('[]')}" in report["explained"]
    assert "WARNING" not in "".join(job.stderr)


@pytest.mark.every(n=10)
@pytest.mark.parametrize(
    ("variable", "spec", "master", "expected"),
    [
        ("UNICOLL_SOCKET_IFNAME", "lan1", "10.77.0.1", {"10.78.0"}),
        ("UNICOLL_SOCKET_IFNAME", "=lan1", "10.77.0.1", {"10.78.0"}),
        ("UNICOLL_SOCKET_IFNAME", "^lan0,apart", "10.77.0.1", {"10.78.0"}),
        ("UNICOLL_SOCKET_IFNAME", "^apart", "10.77.0.1", {"10.77.0", "10.78.0"}),
        ("UNICOLL_SOCKET_IFNAME", "lan1,docker0", "10.77.0.1", {"10.78.0"}),
        ("UNICOLL_SOCKET_IFNAME", "lan1,lan0", "10.77.0.1", {"10.77.0", "10.78.0"}),
        ("UNICOLL_SOCKET_IFNAME", "lan1", "fd77::1", {"fd78:"}),
        ("GLOO_SOCKET_IFNAME", "lan1", "10.77.0.1", {"10.78.0"}),
        ("GLOO_SOCKET_IFNAME", "lan0,lan1", "10.77.0.1", {"10.77.0", "10.78.0"}),
    ],
)
def test_data_uses_the_selected_interface(
    hosts: Hosts, variable: str, spec: str, master: str, expected: set[str]
) -> None:
    job = FinishedJob(launch(hosts, "everything", master=master, env={**SECRET, variable: spec}))
    for report in job.successful_reports(2):
        assert networks(report) == expected
        assert f"{variable}={spec}" in report["explained"]


@pytest.mark.every(n=6)
@pytest.mark.parametrize("down", [(1, 1), (1, 2)])
@pytest.mark.parametrize("how", ["interface", "cable"])
def test_an_interface_that_is_down_on_one_host_is_not_used(
    hosts: Hosts, down: tuple[int, int], how: str
) -> None:
    """The other host tried to reach it, or an address in its network."""
    if how == "interface":
        hosts.switch_off(*down)
    else:
        hosts.unplug(*down)
    env = {**SECRET, "UNICOLL_SOCKET_IFNAME": "lan0,lan1"}
    job = FinishedJob(launch(hosts, "everything", env=env))
    for report in job.successful_reports(2):
        assert networks(report) == {"10.77.0"}


@pytest.mark.every(n=0)
@pytest.mark.parametrize(
    ("compression", "fraction", "error"),
    [("none", 1, 1e-6), ("bfloat16", 1 / 2, 1 / 256), ("int8", 65 / 256, 1 / 254)],
)
@pytest.mark.parametrize(
    ("master", "per_node", "spec"),
    [
        ("10.77.0.1", 1, "lan0,lan1"),
        ("10.77.0.1", 2, "lan0,lan1"),
        ("10.77.0.1", 3, "lan0"),
        ("fd77::1", 2, "lan0"),
    ],
)
def test_a_host_sends_only_the_sum_of_its_ranks_over_all_interfaces(
    hosts: Hosts, master: str, per_node: int, spec: str, compression: str, fraction: float, error: float
) -> None:
    env, ranks = {**SECRET, "UNICOLL_SOCKET_IFNAME": spec}, 2 * per_node
    job = FinishedJob(launch(hosts, "reduce_large", compression, master=master, per_node=per_node, env=env))
    for report in job.successful_reports(ranks):
        if per_node > 1:
            layout = f"2 hosts (ranks: {per_node}, {per_node}), sockets between them"
            assert f"over shared memory within {layout}" in report["explained"]
        lan0, lan1 = report["sent"]["lan0"], report["sent"]["lan1"]
        # a ring of all ranks would send at least 1.5 times the bytes
        assert report["bytes"] * fraction < lan0 + lan1 < 1.2 * report["bytes"] * fraction
        assert 0.8 < lan0 / lan1 < 1.25 if "," in spec else lan1 < 10_000
        assert report["error"] <= 2 * error * ranks * (ranks + 1) / 2


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("env", "error", "words"),
    [
        (
            {**SECRET, "UNICOLL_SOCKET_IFNAME": "ib0"},
            "DistNetworkError",
            ["UNICOLL_SOCKET_IFNAME=ib0: no interface that is up matches", "lan0 10.77.0."],
        ),
        (
            {"UNICOLL_CHANNEL": "tls"},
            "DistArgumentError",
            ["UNICOLL_CHANNEL=tls cannot protect this job", "UNICOLL_SECRET_FILE"],
        ),
    ],
    ids=["missing interface", "protected channel without a secret"],
)
def test_settings_that_cannot_be_met_raise(
    hosts: Hosts, env: dict[str, str], error: str, words: list[str]
) -> None:
    for report in FinishedJob(launch(hosts, "join", env=env)).successful_reports(2):
        assert report["error"] == error, report
        assert all(word in report["message"] for word in words), report


EPHEMERAL = (30000, 65534)
"""With all ports that the kernel gives to clients, and to listeners without UNICOLL_PORT_RANGE."""


def test_a_firewall_is_named_by_both_ranks(hosts: Hosts, tmp_path: Path) -> None:
    """Only the store's port is open."""
    hosts.filter(*EPHEMERAL)
    first, second = FinishedJob(launch(hosts, "join_briefly", str(tmp_path), env=SECRET)).successful_reports(
        2
    )
    words = r"rank 0's control port 10\.77\.0\.1:\d+ cannot be reached: .*a firewall .*UNICOLL_PORT_RANGE=first-last"
    assert second["error"] == "DistNetworkError"
    assert re.match(words, second["message"])
    assert first["error"] == "RankLostError"
    assert re.search(rf"rank 1 \(host host2, pid \d+\) could not join: .*{words}", first["message"])


@pytest.mark.every(n=2)
@pytest.mark.parametrize("per_node", [1, 2])
def test_a_range_of_ports_that_a_firewall_lets_through(hosts: Hosts, per_node: int) -> None:
    hosts.filter(*EPHEMERAL)
    ports = range(25000, 25016)
    env = {**SECRET, "UNICOLL_PORT_RANGE": f"{ports[0]}-{ports[-1]}", "UNICOLL_SOCKET_IFNAME": "lan0,lan1"}
    job = FinishedJob(launch(hosts, "everything", per_node=per_node, env=env))
    for report in job.successful_reports(2 * per_node):
        assert networks(report) == {"10.77.0", "10.78.0"}
        for own, own_port, peer, peer_port in report["connections"]:
            assert {own_port, peer_port} & {*ports} or own == peer or min(own_port, peer_port) < EPHEMERAL[0]


@pytest.mark.every(n=0)
def test_store_listens_only_on_the_master_address(hosts: Hosts, tmp_path: Path) -> None:
    processes = launch(hosts, "lose_the_link", str(tmp_path), "10", env=SECRET)
    wait_for(tmp_path / "ready.0", tmp_path / "ready.1")
    listing = subprocess.run(
        ["ip", "netns", "exec", hosts.names[1], "cat", "/proc/net/tcp", "/proc/net/tcp6"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    listening = {w[1].partition(":")[0] for w in map(str.split, listing.splitlines()) if w[3] == "0A"}
    assert listening == {"01004D0A"}  # 10.77.0.1 in the kernel's format
    hosts.unplug(0, 2)
    FinishedJob(processes)


def test_without_a_secret_warns_and_refuses_pickles(hosts: Hosts) -> None:
    job = FinishedJob(launch(hosts, "exchange_objects"))
    for report in job.successful_reports(2):
        assert report["plain"] == [{"rank": 0}, {"rank": 1}]
        assert report["error"] == "PickleRefusedError"
        assert "UNICOLL_SECRET" in report["message"]
    assert "is OPEN: any process that can reach this host" in job.stderr[0]
    assert "UNICOLL_SECRET" in job.stderr[0]


def test_pickles_are_allowed_with_a_secret(hosts: Hosts) -> None:
    job = FinishedJob(launch(hosts, "exchange_objects", env=SECRET))
    assert all(report["pickled"] for report in job.successful_reports(2))
    assert job.stderr == ["", ""]


LISTEN = """
import select, socket, sys
SO_RCVBUFFORCE = 33
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
marks = [mark.encode() for mark in sys.argv[1:]]
print("listening", flush=True)
found, tail = set(), b""
while packets in select.select([packets, sys.stdin], [], [])[0]:  # until the job has ended
    tail = tail[-200:] + packets.recv(65536)
    found |= {mark for mark in marks if mark in tail}
print(sorted(mark.decode() for mark in found), flush=True)
"""


@pytest.mark.every(n=2)
@pytest.mark.parametrize("channel", ["plain", "mac", "tls"])
def test_only_tls_hides_data_on_the_network(hosts: Hosts, channel: str) -> None:
    """Arrays, messages and store values are readable on the network, except with TLS."""
    marks = ["reduced-by-two-ranks", "sent-to-the-other-rank", "put-into-the-store"]
    switches = ["ip", "netns", "exec", hosts.names[0], sys.executable, "-c", LISTEN, *marks]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(switches, **pipes, text=True) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        job = FinishedJob(launch(hosts, "send_marks", *marks, env={**SECRET, "UNICOLL_CHANNEL": channel}))
        out, err = listener.communicate(timeout=BOUND)
    for report in job.successful_reports(2):
        assert report["arrived"]
        assert (f"connections between hosts: {channel}" in report["explained"]) == (channel != "plain")
    assert out.strip() == str([] if channel == "tls" else sorted(marks)), err


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (SECRET, {"UNICOLL_SECRET": "a different secret"}, "UNICOLL_SECRET"),
        (SECRET, {}, "UNICOLL_SECRET"),
        (
            {**SECRET, "UNICOLL_CHANNEL": "tls"},
            {**SECRET, "UNICOLL_CHANNEL": "mac"},
            "give all processes the same UNICOLL_CHANNEL",
        ),
    ],
    ids=["wrong secret", "no secret", "another protection"],
)
def test_hosts_with_different_settings_raise_authentication_error(
    hosts: Hosts, tmp_path: Path, first: dict[str, str], second: dict[str, str], words: str
) -> None:
    job = FinishedJob(launch(hosts, "join_without_rank_1", str(tmp_path), env_by_host=(first, second)))
    waiting, refused = job.successful_reports(2)
    assert refused["error"] == "AuthenticationError"
    assert words in refused["message"]
    assert waiting["error"] == "OperationTimeoutError"
    assert "missing: rank 1" in waiting["message"]
    assert re.search(
        rf"; refused: 10\.77\.0\.2:\d+ \(refused a client: .*{words}.*\) \d s ago$", waiting["message"]
    )


@pytest.mark.every(n=2)
@pytest.mark.parametrize("count", [10, 4_000_000])
def test_lost_network_link_names_the_missing_rank(hosts: Hosts, tmp_path: Path, count: int) -> None:
    processes = launch(hosts, "lose_the_link", str(tmp_path), str(count), env=SECRET)
    wait_for(tmp_path / "ready.0", tmp_path / "ready.1")
    hosts.unplug(0, 2)
    job = FinishedJob(processes)
    for report in job.successful_reports(2):
        other = 1 - report["rank"]
        assert report["error"] == "OperationTimeoutError"
        assert f"missing: rank {other} (host host{other + 1}, pid " in report["message"]


def test_a_loopback_interface_that_goes_down_is_named(hosts: Hosts, tmp_path: Path) -> None:
    port = str(next(_ports))
    env = environment({"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **SECRET})
    env |= {"UNICOLL_TRANSPORT": "tcp", "WORLD_SIZE": "2"}
    command = [sys.executable, PROGRAMS, "lose_the_link", str(tmp_path), "10"]
    processes = [hosts.start(1, command, {**env, "RANK": str(rank)}) for rank in range(2)]
    wait_for(tmp_path / "ready.0", tmp_path / "ready.1")
    hosts.loopback(1, "down")
    for report in FinishedJob(processes).successful_reports(2):
        assert report["error"] == "OperationTimeoutError"
        assert "sends no report (the loopback interface is down (ip link set lo up))" in report["message"]


@pytest.mark.every(n=0)
def test_a_link_lost_in_the_middle_is_named_by_both_ranks(hosts: Hosts, tmp_path: Path) -> None:
    """The error said only that all ranks had arrived, though one of two links was lost."""
    env = {**SECRET, "UNICOLL_SOCKET_IFNAME": "lan0,lan1"}
    processes = launch(hosts, "lose_the_link", str(tmp_path), str(8 << 20), env=env)
    wait_for(tmp_path / "ready.0", tmp_path / "ready.1")
    hosts.unplug(1, 2)
    lost = re.compile(
        r"connections without an answer: rank [01]: 10\.78\.0\.[12]:\d+ \(lan1\) to rank [01] at 10\.78\.0\.[12]:\d+"
        r" \(lan1\): \d+ packets sent and \d+ times retransmitted, no acknowledgement for \d"
    )
    for report in FinishedJob(processes).successful_reports(2):
        assert report["error"] == "OperationTimeoutError"
        assert lost.search(report["message"]), report["message"]
        assert "lan0" not in report["message"]


@pytest.mark.every(n=2)
@pytest.mark.parametrize("operation", ["all_reduce", "send"])
def test_an_address_that_does_not_answer_is_named(hosts: Hosts, tmp_path: Path, operation: str) -> None:
    """Both interfaces have a link, but nothing passes between them."""
    env = {**SECRET, "UNICOLL_SOCKET_IFNAME": "lan1"}
    processes = launch(hosts, "connect_late", str(tmp_path), operation, env=env)
    wait_for(tmp_path / "ready.0", tmp_path / "ready.1")
    hosts.drop(1, 2)
    (tmp_path / "dropped").touch()
    for report in FinishedJob(processes).successful_reports(2):
        assert report["error"] == "OperationTimeoutError"
        assert re.search(r"no answer from rank [01] at 10\.78\.0\.[12]:\d+ \(lan1\)", report["message"]), (
            report["message"]
        )


def test_unreachable_listener_is_named(hosts: Hosts, tmp_path: Path) -> None:
    job = FinishedJob(launch(hosts, "listen_apart", str(tmp_path), env=SECRET))
    for report in job.successful_reports(2):
        assert report["error"] in ("DistNetworkError", "OperationTimeoutError")
        assert "rank 1 (host host2, pid " in report["message"]
        assert "10.99.2.1" in report["message"]


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + BOUND
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"{files} did not appear"
        time.sleep(0.02)


@pytest.mark.every(n=0)
def test_doctor_names_a_slow_pair_by_host_and_interface(hosts: Hosts) -> None:
    """One of the four pairs between hosts is slow; the faster pairs within hosts do not affect the result."""
    script = str(ROOT / "tests" / "tools" / "doctor_program.py")
    processes = launch(hosts, "slow:1-2", "--json", per_node=2, env=SECRET, script=script)
    (out, err), (other, _) = (process.communicate(timeout=BOUND) for process in processes)
    report = json.loads(out)
    assert other == ""
    assert processes[0].returncode == report["exit_status"] == 1, err
    assert [(r["host"], r["interface"]) for r in report["ranks"]] == [
        *[("host1", "lan0 10.77.0.1")] * 2,
        *[("host2", "lan0 10.77.0.2")] * 2,
    ]
    assert set(report["pairs"]["medians"]) == {"within a host", "between hosts"}
    assert [pair["ranks"] for pair in report["pairs"]["slow"]] == [[1, 2]]
    assert "times the median between hosts" in report["pairs"]["slow"][0]["why"]
    assert report["pairs"]["broken"] == []
