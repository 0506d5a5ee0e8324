"""Rendezvous of real processes: by address, file, store and launcher; and the errors."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.launching import LaunchFolder, environment
from tests.support.order import await_true
from tests.support.ranks import reserved_port
from unicoll.backend import Job
from unicoll.bootstrap import launchers, rendezvous_protocol, store_locations
from unicoll.bootstrap.enter import join
from unicoll.bootstrap.rendezvous import Rendezvous
from unicoll.bootstrap.rendezvous import meet as meet_others
from unicoll.bootstrap.resolve import JoinRequest, resolve
from unicoll.bootstrap.store_locations import register_rendezvous_handler
from unicoll.errors import (
    AuthenticationError,
    BackendUnavailableError,
    DistArgumentError,
    DistError,
    DistNetworkError,
    DistStoreError,
    RankLostError,
    StoreTimeoutError,
)
from unicoll.net.control import join_warnings
from unicoll.net.stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from unicoll.net.stores.base import Value
from unicoll.net.wire.secret import Key, Secret

SECRET = {"UNICOLL_SECRET": "a secret of the tests, long enough"}
OTHER_SECRET = {"UNICOLL_SECRET": "quite another one, long enough too"}


def rendezvous(
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    store: Any = None,
    timeout: float = 300.0,
    environ: Mapping[str, str] | None = None,
) -> Rendezvous:
    """The first two steps of joining a job of the CPU backend."""
    request = JoinRequest("gloo", init_method, rank, world_size, store, join_timeout=timeout)
    return meet_others(resolve(request, environ=environ), request, time.monotonic() + timeout)


def request(rank: int, world_size: int = 2, timeout: float = 30.0, **asked: Any) -> JoinRequest:
    return JoinRequest(
        "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        join_timeout=timeout,
        makes_group=False,
        **asked,
    )


def summary(found: Rendezvous) -> dict[str, Any]:
    """Wait in the store for all ranks, so that none leaves early; then the values of this rank."""
    found.store.set(f"here/{found.rank}", "yes")
    found.store.wait([f"here/{rank}" for rank in range(found.world_size)], timedelta(seconds=30))
    return {
        "rank": found.rank,
        "world_size": found.world_size,
        "key": found.secret.key,
        "source": found.secret.source,
        "trusted": found.trusted,
        "listen": found.listen_addresses,
        "notes": found.notes,
    }


def take_part(rounds: int = 1, delay: float = 0.0, **arguments: Any) -> dict[str, Any]:
    """The rendezvous of one process, repeated ``rounds`` times; the summary of the last one."""
    time.sleep(delay)
    arguments.setdefault("environ", {})
    arguments.setdefault("timeout", 30.0)
    keys = []
    for _ in range(rounds):
        found = rendezvous(**arguments)
        try:
            results = summary(found)
        finally:
            found.close()
        keys.append(results["key"])
    return results | {"keys": keys}


def take_part_with_store(where: str, **members: int) -> dict[str, Any]:
    """As :func:`take_part` with a store as argument: of a file, or of a server if ``where`` has a port."""
    host, _, port = where.rpartition(":")
    store: Store = TCPStore(host, int(port), wait_for_workers=False) if port.isdigit() else FileStore(where)
    try:
        return take_part(store=store, **members)
    finally:
        store.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as workers:
        list(workers.map(time.sleep, [0.5] * 3))  # all three start now, not during the first test
        yield workers


def assert_same_rendezvous(results: list[dict[str, Any]]) -> None:
    assert [one["rank"] for one in results] == list(range(len(results)))
    assert {one["world_size"] for one in results} == {len(results)}
    assert len({one["key"] for one in results}) == 1
    assert len(results[0]["key"]) >= 16
    assert len({one["trusted"] for one in results}) == 1


def meet(
    pool: ProcessPoolExecutor,
    calls: list[dict[str, Any]],
    function: Callable[..., dict[str, Any]] = take_part,
) -> list[dict[str, Any]]:
    """Make calls in a process each; their results, which are those of one rendezvous."""
    results = [each.result(timeout=300) for each in [pool.submit(function, **call) for call in calls]]
    assert_same_rendezvous(results)
    return results


def members(size: int, **arguments: Any) -> list[dict[str, Any]]:
    """The arguments of all ranks, for :func:`meet`."""
    return [{**arguments, "rank": rank, "world_size": size} for rank in range(size)]


# --- by address -----------------------------------------------------------------------------------------------------


def is_free(host: str, port: int) -> bool:
    """True if no server listens on a port of any address of a host."""
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_tcp(pool: ProcessPoolExecutor, host: str, port: int) -> None:
    if host == "[::1]" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    url = f"tcp://{host}:{port}"
    for _ in range(2):  # the workers of the pool, with an earlier rendezvous, get the ranks in any order
        results = meet(pool, members(3, init_method=url))
        assert results[0]["trusted"]
        assert all(len(one["listen"]) == 1 for one in results)
        notes = "\n".join(results[2]["notes"])
        assert "rank 2 of 3: from arguments" in notes
        assert f"store: {url} (init_method), hosted by rank 0" in notes
        assert "secret: none was given" in notes
        # the server ends once it has noticed that its last client has closed its connection
        await_true(lambda: is_free(host.strip("[]"), port))


ENV = {"MASTER_ADDR": "localhost", "MASTER_PORT": "<port>", **SECRET}
FIRST = {name: value for name, value in ENV.items() if name != "MASTER_ADDR"}
ON_ALL_INTERFACES = "MASTER_ADDR is not set on rank 0, which listens on all interfaces"
URL = "tcp://127.0.0.1:<port>"
ADDRESSES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "members in the query": (
        [{"init_method": f"{URL}?world_size=2&use_libuv=0&rank={rank}"} for rank in range(2)],
        "rank 0 of 2",
    ),
    "environment": (
        [{"environ": {**ENV, "WORLD_SIZE": "3", "RANK": str(rank)}} for rank in range(3)],
        "rank 0 of 3: from RANK=0, WORLD_SIZE=3 (environment)",
    ),
    "no launcher": (members(2, environ=ENV), "rank 0 of 2: from arguments"),
    # torch's documentation: WORLD_SIZE and RANK "can be set either here, or in a call to init function"
    "one number in the call": (
        [
            {"environ": {**ENV, "WORLD_SIZE": "3"}, "rank": 0},
            {"environ": {**ENV, "RANK": "1"}, "world_size": 3},
            {"environ": {**ENV, "RANK": "2", "WORLD_SIZE": "3"}},
        ],
        "rank 0 of 3: from arguments, RANK=0, WORLD_SIZE=3 (environment)",
    ),
    "no MASTER_ADDR on rank 0": (
        [{**call, "environ": FIRST if call["rank"] == 0 else ENV} for call in members(2)],
        ON_ALL_INTERFACES,
    ),
    "no MASTER_ADDR and no arguments": (
        [
            {"environ": {**(ENV if rank else FIRST), "RANK": str(rank), "WORLD_SIZE": "2"}}
            for rank in range(2)
        ],
        ON_ALL_INTERFACES,
    ),
    "a late server": (
        [{**call, "delay": 0.0 if call["rank"] else 0.5} for call in members(2, init_method=URL)],
        "hosted by rank 0",
    ),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_address_and_members(pool: ProcessPoolExecutor, name: str, port: int) -> None:
    calls, note = ADDRESSES[name]
    results = meet(pool, json.loads(json.dumps(calls).replace("<port>", str(port))))
    assert note in "\n".join(results[0]["notes"])
    if "environ" in calls[0]:
        assert results[1]["source"] == "UNICOLL_SECRET"
        assert results[1]["key"] != SECRET["UNICOLL_SECRET"].encode()
        assert results[1]["trusted"]


@pytest.mark.parametrize(("where", "secret"), [("tcp", {}), ("tcp", SECRET), ("file", {})])
def test_repeated_rendezvous(
    pool: ProcessPoolExecutor, where: str, secret: dict[str, str], port: int, tmp_path: Path
) -> None:
    """At the same address, or in the same file."""
    url = f"file://{tmp_path}/meet" if where == "file" else f"tcp://127.0.0.1:{port}"
    results = meet(pool, members(3, rounds=8, init_method=url, environ=secret))
    assert results[0]["keys"] == results[1]["keys"] == results[2]["keys"]
    assert len(set(results[0]["keys"])) == 8
    assert not (tmp_path / "meet").exists()


def test_a_world_of_size_1_opens_no_port() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        found = rendezvous(environ=environ | {"MASTER_PORT": str(busy.getsockname()[1])})
    assert (found.rank, found.world_size, found.trusted) == (0, 1, True)
    assert found.listen_addresses[0] == "127.0.0.1"
    assert isinstance(found.root, HashStore)
    found.close()
    found.close()


# --- by file or store -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, 0o600, 0o644])
def test_file(pool: ProcessPoolExecutor, tmp_path: Path, mode: int | None) -> None:
    """One that others can read is not trusted."""
    path = tmp_path / "meet"
    if mode is not None:
        path.touch()
        path.chmod(mode)
    results = meet(pool, members(3, init_method=f"file://{path}"))
    assert f"store: file://{path}" in results[0]["notes"]
    assert results[1]["trusted"] == (mode != 0o644)
    assert any("OPEN" in note for note in results[1]["notes"]) == (mode == 0o644)


def write_leftover_file(path: Path, ranks: int) -> None:
    """Write the file that a crashed job leaves."""
    draft = path.with_name("draft")
    store = FileStore(str(draft))
    record = rendezvous_protocol._publish(
        _UnusedLocation(),
        PrefixStore("unicoll", store),
        rendezvous_protocol.Participant(0, ranks, Secret(b"", "none")),
    )
    for rank in range(1, ranks):
        PrefixStore(f"unicoll/{record.token}", store).set(f"rank/{rank}", "oldhost, pid 1, 0")
    shutil.copy(draft, path)
    store.close()


class _UnusedLocation(rendezvous_protocol.StoreLocation):
    address = "nowhere"

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        raise AssertionError("this location is not opened")

    def private(self) -> bool:
        return True


def test_a_leftover_file_is_ignored(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    write_leftover_file(tmp_path / "meet", 3)
    calls = members(3, init_method=f"file://{tmp_path}/meet")
    meet(pool, [{**call, "delay": 0.0 if call["rank"] else 0.5} for call in calls])


def test_store_arguments(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    path = str(tmp_path / "meet")
    results = meet(pool, members(2, where=path), take_part_with_store)
    assert f"store: file://{path} (given)" in results[0]["notes"]
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as server:
        for _ in range(2):
            results = meet(pool, members(3, where=f"127.0.0.1:{server.port}"), take_part_with_store)
            assert results[0]["trusted"]


def test_hash_store_argument_of_threads() -> None:
    store = HashStore()
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(take_part, **call) for call in members(4, rounds=3, store=store)]
        results = [call.result(60) for call in calls]
    assert_same_rendezvous(results)
    assert results[0]["trusted"]
    assert len(set(results[0]["keys"])) == 3
    assert sum("/rank/" in key for key in store.list_keys()) == 4  # of the last round


MEET = """
import sys
import numpy as np
import unicoll as dist
dist.init_process_group(init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=120)
x = np.ones(1)
dist.all_reduce(x)
print(int(x[0]))
"""
ONLY_RECORD = """
import os, sys
import time
from unicoll.bootstrap.rendezvous import meet
from unicoll.bootstrap.resolve import JoinRequest, resolve
request = JoinRequest("gloo", sys.argv[1], 0, 2)
meet(resolve(request), request, time.monotonic() + 300)
os._exit(0)
"""


@pytest.mark.parametrize("killed", ["after it has stored its port", "before"])
def test_a_store_with_the_record_of_a_job_that_was_killed_while_it_met(tmp_path: Path, killed: str) -> None:
    """Rank 1 of the next job read the dead address once, and failed."""
    path = tmp_path / "meet"

    def start(program: str, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, f"file://{path}", str(rank)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment(), **pipes)

    def written(what: bytes) -> bool:
        return path.exists() and what in path.read_bytes()

    with ExitStack() as at_end:
        first = at_end.enter_context(start(MEET if killed.startswith("after") else ONLY_RECORD, 0))
        await_true(lambda: written(b"/control" if killed.startswith("after") else b"generation"))
        first.kill()
        first.communicate()
        one = at_end.enter_context(start(MEET, 1))
        await_true(lambda: written(b"/rank/1"))
        ended = [each.communicate(timeout=180) for each in (at_end.enter_context(start(MEET, 0)), one)]
    assert [out for out, _ in ended] == ["2\n", "2\n"], ended


class _StoreWhoseRecordIsReplaced(HashStore):
    """Rank 0 takes part again just before rank 1 claims its rank under the first record."""

    again: Rendezvous | None = None

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        if key.endswith("rank/1") and self.again is None:
            self.again = rendezvous(store=self, rank=0, world_size=2, environ={})
        return super().compare_set(key, expected_value, desired_value)


def test_a_record_that_is_replaced_while_a_rank_claims_its_rank() -> None:
    store = _StoreWhoseRecordIsReplaced()
    first, second = (rendezvous(store=store, rank=rank, world_size=2, environ={}) for rank in range(2))
    assert store.again is not None
    assert first.secret.key != second.secret.key == store.again.secret.key
    assert sum("/rank/" in key for key in store.list_keys()) == 2


def test_a_store_argument_stays_open() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=7))
    found = rendezvous(store=store, environ={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert (found.rank, found.world_size) == (0, 1)
    assert found.found.launched is not None
    assert found.found.launched.local_rank == 0
    found.close()
    assert store.timeout == timedelta(seconds=7)
    store.set("still", "open")
    assert store.get("still") == b"open"


# --- by launcher ----------------------------------------------------------------------------------------------------


def openmpi(rank: int, size: int, job: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "PMIX_NAMESPACE": job,
        "PMIX_RANK": str(rank),
    }


def derived_port(job: str) -> int:
    launched = launchers.detect(openmpi(0, 2, job))
    assert launched is not None
    assert launched.master_port is not None
    return launched.master_port


def test_mpirun_on_one_host_needs_no_address(pool: ProcessPoolExecutor) -> None:
    job = f"prterun-test-{os.getpid()}@1"
    results = meet(pool, [{"environ": openmpi(rank, 3, job)} for rank in range(3)])
    assert results[2]["listen"] == ["127.0.0.1"]
    assert any("all ranks are on one host, port from PMIX_NAMESPACE" in note for note in results[2]["notes"])


def test_another_jobs_store_on_the_derived_port_is_skipped(pool: ProcessPoolExecutor) -> None:
    job = f"prterun-test-{os.getpid()}@2"
    # Another job's store, with its own rendezvous, and a program that never replies.
    with (
        TCPStore("127.0.0.1", derived_port(job), is_master=True, wait_for_workers=False) as other,
        socket.create_server(("127.0.0.1", derived_port(job) + 1)),
    ):
        other_job = rendezvous(store=other, rank=0, world_size=2, environ={})
        meet(pool, [{"environ": openmpi(rank, 2, job)} for rank in range(2)])
        other_job.close()


def test_a_store_with_another_programs_record_is_skipped() -> None:
    secret = Secret(b"", "none")
    with (
        TCPStore("127.0.0.1", 0, is_master=True, secret=secret) as other,
        TCPStore("127.0.0.1", 0, is_master=True, secret=secret) as ours,
    ):
        location = store_locations.TCPLocation("127.0.0.1", [other.port, ours.port], "test", secret)
        PrefixStore(location.namespace, other).set("generation", "42")
        record = rendezvous_protocol.JobRecord("token", 2, True, Key())
        PrefixStore(location.namespace, ours).set("generation", record.format())
        found = location.open(1, 2, time.monotonic() + 60)
        assert isinstance(found, TCPStore)
        assert found.port == ours.port
        location.close()


def torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@contextmanager
def reserved_ports(number: int) -> Iterator[int]:
    """The first of consecutive ports, which are all as that of :func:`reserved_port`."""
    while True:
        with ExitStack() as held:
            port = held.enter_context(reserved_port())
            try:
                for offset in range(1, number):
                    other = held.enter_context(socket.socket())
                    other.bind(("127.0.0.1", port + offset))  # fails if another program has reserved it
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            except (OSError, OverflowError):
                continue
            yield port
            return


@pytest.mark.parametrize("busy", [0, 1])
def test_with_torchruns_agent(pool: ProcessPoolExecutor, busy: int) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(reserved_ports(2 + busy))
        for offset in range(1 + busy):
            stack.enter_context(socket.create_server(("127.0.0.1", port + offset)))
        results = meet(pool, [{"environ": torchrun(rank, 2, port), "rounds": 2} for rank in range(2)])
    where = f"tcp://localhost:{port + 1 + busy} (MASTER_ADDR, MASTER_PORT; torchrun's agent"
    assert where in "\n".join(results[1]["notes"])


def test_ports_before_the_last_port() -> None:
    from unicoll.bootstrap.resolve import _ports

    launched = launchers.detect(torchrun(0, 2, 65535))
    assert launched is not None
    assert list(_ports(launched, torchrun(0, 2, 65535))) == list(range(65527, 65535))


def test_the_launchers_store(pool: ProcessPoolExecutor) -> None:
    secret = Secret(SECRET["UNICOLL_SECRET"].encode(), "UNICOLL_SECRET")
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, secret=secret) as store:
        more = {"UNICOLL_LAUNCHER": "1", "UNICOLL_STORE": f"127.0.0.1:{store.port}", **SECRET}
        results = meet(pool, [{"environ": torchrun(r, 3, 1) | more, "rounds": 3} for r in range(3)])
    assert results[0]["trusted"]
    assert any("(UNICOLL_STORE), hosted by the launcher" in note for note in results[0]["notes"])


def test_arguments_have_priority_over_the_launcher(pool: ProcessPoolExecutor, port: int) -> None:
    results = meet(pool, members(2, environ=torchrun(0, 8, port)))
    assert any(note.startswith("different from the launcher: rank 0 of 8") for note in results[1]["notes"])


def test_a_broken_environment_is_ignored_with_complete_arguments() -> None:
    found = rendezvous(rank=0, world_size=1, environ={"RANK": "x", "WORLD_SIZE": "1"})
    assert any("launcher ignored: RANK=x" in note for note in found.notes)
    found.close()


# --- handlers -------------------------------------------------------------------------------------------------------


def test_registered_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_locations, "handlers", handlers := {})
    monkeypatch.setattr("unicoll.bootstrap.resolve.handlers", handlers)
    calls: list[Any] = []

    def handler(url: str, timeout: timedelta, **members: int) -> Iterator[tuple[Store, int, int]]:
        calls.append((url, members, timeout))
        try:
            yield HashStore(), 0, 1
        finally:
            calls.append("closed")

    register_rendezvous_handler("zoo", handler)
    found = rendezvous("zoo://keeper/x?rank=0&world_size=1&colour=red", environ={}, timeout=5)
    assert (found.rank, found.world_size) == (0, 1)
    assert not found.trusted
    url, members, timeout = calls[0]
    assert url == "zoo://keeper/x?rank=0&world_size=1&colour=red"
    assert members == {"rank": 0, "world_size": 1}
    assert timedelta(0) < timeout <= timedelta(seconds=5)
    found.close()
    assert calls[1:] == ["closed"]
    rendezvous("zoo://keeper", environ={}).close()  # the handler determines the members
    for scheme, words in (("zoo", "already"), ("tcp", "already"), ("a:b", "not a URL scheme")):
        with pytest.raises(DistArgumentError, match=words):
            register_rendezvous_handler(scheme, handler)


@pytest.mark.parametrize("answer", [(), (None, 0), (HashStore(), 2, 2)])
def test_a_handler_with_an_invalid_result(monkeypatch: pytest.MonkeyPatch, answer: tuple[Any, ...]) -> None:
    def handler(url: str, **arguments: Any) -> Iterator[Any]:
        yield answer

    monkeypatch.setattr("unicoll.bootstrap.resolve.handlers", {"zoo": handler})
    with pytest.raises(DistArgumentError, match="rendezvous handler of zoo://keeper"):
        rendezvous("zoo://keeper", 0, 2, environ={})


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {},
            "rank and world_size of this process: no launcher.*unirun.*RANK, WORLD_SIZE.*pass rank=",
        ),
        ({"rank": 0}, "world_size of this process: no launcher was recognised"),
        ({"environ": {"RANK": "1"}}, r"\(seen: RANK is set but WORLD_SIZE is not\)"),
        ({"environ": {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}}, "not started by srun"),
        ({"environ": {"RANK": "9", "WORLD_SIZE": "4"}}, "RANK=9 must be less than WORLD_SIZE=4"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not below world_size 2"),
        ({"rank": -2, "world_size": 2}, "rank must be 0 or more, not -2"),
        ({"rank": 0, "world_size": 0}, "world_size must be 1 or more, not 0"),
        ({"rank": "0", "world_size": 2}, "rank must be a whole number, not '0'"),
        ({"rank": True, "world_size": 2}, "rank must be a whole number, not True"),
        ({"rank": 0, "world_size": 2}, "set MASTER_ADDR .* and MASTER_PORT .* on every rank"),
        ({"rank": 1, "world_size": 2, "environ": {"MASTER_PORT": "1"}}, "set MASTER_ADDR .* on every rank"),
        (
            {"rank": 0, "world_size": 2, "environ": {"MASTER_ADDR": "h"}},
            "address for the rendezvous: set MASTER_PORT .* on every rank",
        ),
        ({"environ": {"RANK": "0", "WORLD_SIZE": "2"}}, "set MASTER_ADDR .* and MASTER_PORT"),
        ({"init_method": "zoo://x", "rank": 0, "world_size": 1}, "known are env://, file://, tcp://"),
        ({"init_method": "", "rank": 0, "world_size": 1}, "has no known scheme"),
        ({"init_method": 5, "rank": 0, "world_size": 1}, "must be a string"),
        ({"init_method": "tcp://h", "rank": 0, "world_size": 1}, "write tcp://host:port"),
        ({"init_method": "tcp://h:x", "rank": 0, "world_size": 1}, "tcp://h:x"),
        ({"init_method": "tcp://h:99999", "rank": 0, "world_size": 1}, "tcp://h:99999"),
        ({"init_method": "tcp://[::1:80", "rank": 0, "world_size": 1}, "cannot be read"),
        ({"init_method": "tcp://:80", "rank": 0, "world_size": 1}, "write tcp://host:port"),
        ({"init_method": "tcp://h:80/path", "rank": 0, "world_size": 1}, "write tcp://host:port"),
        ({"init_method": "tcp://h:80?rank=1", "rank": 0, "world_size": 2}, "rank=0 contradicts init_method"),
        ({"init_method": "tcp://h:80?rank=x&world_size=2"}, "rank='x' is not a valid number"),
        ({"init_method": "tcp://h:80?rank=0&size=2"}, "unknown parameter 'size'"),
        ({"init_method": "tcp://h:80?rank=0"}, "world_size of this process: no launcher"),
        ({"init_method": "file:///x"}, "rank and world_size of this process: no launcher"),
        ({"init_method": "file://tmp/x", "rank": 0, "world_size": 1}, "three slashes: file:///"),
        ({"init_method": "file:tmp/x", "rank": 0, "world_size": 1}, "three slashes: file:///"),
        ({"init_method": "file://", "rank": 0, "world_size": 1}, "three slashes"),
        ({"init_method": "file:///tmp/", "rank": 0, "world_size": 1}, "names no file"),
        ({"store": HashStore()}, "no launcher was recognised"),
        ({"store": HashStore(), "init_method": "env://"}, "init_method or store, not both"),
        ({"store": "x", "rank": 0, "world_size": 1}, "store must be a Store, not str"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DistArgumentError, match=message):
        rendezvous(**({"environ": {}} | arguments))


def test_wrong_secret(pool: ProcessPoolExecutor, port: int) -> None:
    first, second = members(2, init_method=f"tcp://127.0.0.1:{port}")
    server = pool.submit(take_part, **first, environ=SECRET, timeout=60.0)
    for environ in (OTHER_SECRET, {}):
        with pytest.raises(AuthenticationError, match="UNICOLL_SECRET"):
            pool.submit(take_part, **second, environ=environ).result(timeout=300)
    right = pool.submit(take_part, **second, environ=SECRET)
    assert_same_rendezvous([server.result(timeout=300), right.result(timeout=300)])


@pytest.mark.parametrize(("first", "second"), [(SECRET, {}), ({}, SECRET)])
def test_one_rank_without_the_secret_in_a_file_rendezvous(
    pool: ProcessPoolExecutor, tmp_path: Path, first: dict[str, str], second: dict[str, str]
) -> None:
    url = f"file://{tmp_path}/meet"
    found = rendezvous(url, 0, 2, environ=first)
    try:
        with pytest.raises(
            AuthenticationError, match=r"rank 1 has (none|one \(UNICOLL_SECRET\)): give every rank"
        ):
            rendezvous(url, 1, 2, environ=second)
    finally:
        found.close()


def test_no_master(tmp_path: Path, port: int) -> None:
    with pytest.raises((DistNetworkError, DistStoreError), match=f"127.0.0.1:{port}"):
        rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, environ={}, timeout=0.5)
    with pytest.raises(StoreTimeoutError, match=r"rank 1 waited .* at file://.*/meet for rank 0.*generation"):
        rendezvous(f"file://{tmp_path}/meet", 1, 2, environ={}, timeout=0.5)
    with pytest.raises(StoreTimeoutError, match=r"rank 1 waited .* at HashStore for rank 0"):
        rendezvous(store=HashStore(), rank=1, world_size=2, environ={}, timeout=0.5)
    with pytest.raises(
        DistNetworkError, match=r"rank 1 found no store of this job at tcp://127\.0\.0\.1:\d+ to"
    ):
        rendezvous(environ=openmpi(1, 2, "prterun-nobody@1"), timeout=0.5)
    with pytest.raises(DistError, match=r"no-such-host\.invalid"):
        rendezvous("tcp://no-such-host.invalid:1", 1, 2, environ={}, timeout=0.5)


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DistError, match=f"127.0.0.1.*{port}"):
            rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, environ={}, timeout=2)


def test_two_processes_with_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_protocol, "STALE_SECONDS", 0.2)
    store = HashStore()
    all_found = [
        rendezvous(store=store, rank=rank, world_size=3, environ={}, timeout=20) for rank in range(2)
    ]
    with pytest.raises(DistStoreError, match=f"rank 1 at HashStore is taken.*pid {os.getpid()}") as caught:
        _without_history(lambda: rendezvous(store=store, rank=1, world_size=3, environ={}, timeout=20))
    assert caught.value.rank == 1
    assert type(caught.value) is DistStoreError
    for found in all_found:
        found.close()


def _without_history(call: Any) -> None:
    """Run ``call`` like a process without an earlier rendezvous."""
    used = list(rendezvous_protocol._used)
    rendezvous_protocol._used.clear()
    try:
        call()
    finally:
        rendezvous_protocol._used.extend(used)


def test_different_world_sizes() -> None:
    store = HashStore()
    found = rendezvous(store=store, rank=0, world_size=2, environ={})
    with pytest.raises(DistArgumentError, match="world_size is 2 on rank 0 and 4 on rank 1"):
        rendezvous(store=store, rank=1, world_size=4, environ={})
    found.close()


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("world_size", "kind", "text"),
    [
        (3, DistArgumentError, "world_size is 2 on rank 0 and 3 on rank 1"),
        (2, BackendUnavailableError, "its library does not start"),
    ],
)
def test_rank_0_does_not_wait_for_a_rank_that_cannot_join(
    world_size: int, kind: type[DistError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(job: Job) -> None:
        if job.rank == 1:
            raise BackendUnavailableError(text)

    monkeypatch.setattr("gloo_fallback.backend.GlooBackend.prepare", prepare)
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        rank_0 = pool.submit(join, request(0, store=store))
        with pytest.raises(kind, match=text):
            join(request(1, world_size, store=store))
        with pytest.raises(RankLostError, match=f"rank 1 .* could not join: {kind.__name__}: {text}"):
            rank_0.result()


@pytest.mark.parametrize("key", [b"", b"a secret of these tests"])
def test_two_processes_with_rank_0_get_an_error_at_once(key: bytes) -> None:
    """Both waited for rank 1, whose connection went to the later one, until their timeouts."""
    store, secret = HashStore(), Secret(Key(key), "the test")
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(join, request(0, store=store, secret=secret)) for _ in range(2)]
        errors = [one.exception() for one in both]
    assert {type(error) for error in errors} == {DistStoreError, RankLostError}
    process = re.escape(f"{socket.gethostname()}, pid {os.getpid()}")
    for error in errors:
        assert re.search(
            f"two processes have joined as rank 0: one on {process}, one on {process}$", str(error)
        )


@pytest.mark.parametrize(
    ("rank", "warning", "error"),
    [
        (
            0,
            " s for rank 1 of 2; the store is at ",
            "1 of 2 ranks have joined; missing: rank 1; the store is at ",
        ),
        (1, " s for rank 0; the store: ", "no store could be reached at "),
    ],
)
def test_ranks_that_do_not_come_are_named_with_the_address(
    rank: int,
    warning: str,
    error: str,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(join_warnings, "FIRST_S", 0.1)
    monkeypatch.setenv("UNICOLL_STALL_WARNING", "1")
    with pytest.raises(DistError, match=error):
        join(request(rank, timeout=3.0, init_method=f"tcp://127.0.0.1:{port}"))
    said = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    assert any(f"{warning}tcp://127.0.0.1:{port}" in line for line in said), said


def test_rank_0_names_the_open_files_that_it_needs(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicoll.net.wire.interfaces.resource.getrlimit", lambda _: (64, 64))
    expected = r"rank 0 of 100 ranks needs \d+ open files in process \d+; its limit is 64 \(ulimit -n\)"
    for store in (None, HashStore()):
        place = f"tcp://127.0.0.1:{port}" if store is None else None
        with pytest.raises(DistError, match=expected):
            join(request(0, 100, init_method=place, store=store))


def test_another_programs_record() -> None:
    store = HashStore()
    PrefixStore("unicoll", store).set("generation", "42")
    with pytest.raises(DistStoreError, match="written by another version of unicoll or by another program"):
        rendezvous(store=store, rank=1, world_size=2, environ={})


def test_a_missing_interface_closes_the_store(port: int) -> None:
    environ = {"UNICOLL_SOCKET_IFNAME": "nosuch"}
    with pytest.raises(DistNetworkError, match="UNICOLL_SOCKET_IFNAME=nosuch"):
        rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, environ=environ)
    rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, environ={}).close()


def test_an_open_store_causes_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "meet"
    path.touch()
    path.chmod(0o666)
    with caplog.at_level("WARNING", "unicoll"):
        rendezvous(f"file://{path}", 0, 2, environ={}).close()
    assert any("is OPEN" in record.getMessage() for record in caplog.records)


# --- a real launcher; torchrun is in test_breakpoint.py --------------------------------------------------------------

PROGRAM = """
from datetime import timedelta
import time
from unicoll.bootstrap.rendezvous import meet
from unicoll.bootstrap.resolve import JoinRequest, resolve
request = JoinRequest(join_timeout=60)
found = meet(resolve(request), request, time.monotonic() + 60)
if found.rank == 0:  # it hosts the store, so it ends last
    found.store.wait([f"here/{rank}" for rank in range(1, found.world_size)], timedelta(seconds=60))
else:
    found.store.set(f"here/{found.rank}", "yes")
print(f"found {found.rank}/{found.world_size} {found.listen_addresses[0]} {found.trusted}", flush=True)
found.close()
"""


@pytest.mark.parametrize("command", ["mpirun", "mpiexec.hydra", "mpiexec"])
def test_under_mpirun(folder: LaunchFolder, command: str) -> None:
    path = shutil.which(command)
    if path is None:
        pytest.skip(f"no {command} here")
    env = {k: v for k, v in environment().items() if not k.startswith(("SLURM_", "PMI"))}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    words = [path, "-n", "2", sys.executable, folder.script(PROGRAM)]
    done = subprocess.run(
        words, cwd=folder.path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"found (\d)/2 127\.0\.0\.1 (?:True|False)", done.stdout)) == ["0", "1"], done
