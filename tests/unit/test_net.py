"""Interfaces, addresses, and host:port as text."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicoll.errors import DistArgumentError, DistNetworkError
from unicoll.net.wire import interfaces
from unicoll.net.wire.authenticated_server import listen
from unicoll.net.wire.interfaces import Interface
from unicoll.process import environment
from unicoll.run.job import reserve_port

LO = Interface("lo", socket.AF_INET, "127.0.0.1", "host", True, True)
LO6 = Interface("lo", socket.AF_INET6, "::1", "host", True, True)
ETH0 = Interface("eth0", socket.AF_INET, "10.0.0.5", "global", False, True)
ETH0_6 = Interface("eth0", socket.AF_INET6, "2001:db8::5", "global", False, True)
ETH0_LL = Interface("eth0", socket.AF_INET6, "fe80::5", "link", False, True)
ETH1 = Interface("eth1", socket.AF_INET, "10.1.0.5", "global", False, True)
ETH10 = Interface("eth10", socket.AF_INET, "10.2.0.5", "global", False, True)
IB0 = Interface("ib0", socket.AF_INET, "10.9.0.5", "global", False, True)
DOCKER = Interface("docker0", socket.AF_INET, "172.17.0.1", "global", False, True)
DOWN = Interface("eth9", socket.AF_INET, "10.8.0.5", "global", False, False)
ALL = [LO, ETH0, ETH1, ETH10, DOCKER, IB0, DOWN, LO6, ETH0_6, ETH0_LL]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with the interfaces above; routes leave through eth0."""
    monkeypatch.setattr(interfaces, "interfaces", lambda: list(ALL))
    routes = {socket.AF_INET: "10.0.0.5", socket.AF_INET6: "2001:db8::5"}

    def source(family: int, target: tuple[str, int]) -> str | None:
        return target[0] if interfaces.is_loopback_name(target[0]) else routes[family]

    monkeypatch.setattr(interfaces, "_source_address", source)


def test_interfaces_of_this_host() -> None:
    found = interfaces.interfaces()
    (loopback,) = [i for i in found if i.address == "127.0.0.1"]
    assert (loopback.family, loopback.scope, loopback.is_loopback, loopback.is_up) == (
        socket.AF_INET,
        "host",
        True,
        True,
    )
    assert loopback.network == "127.0.0.0/8"
    assert {i.name for i in found} <= {name for _, name in socket.if_nameindex()}
    for interface in found:
        socket.inet_pton(interface.family, interface.address)
        assert ip_address(interface.address) in ip_network(interface.network)
    assert interfaces._source_address(socket.AF_INET, ("127.0.0.1", 9)) == "127.0.0.1"
    assert interfaces.hostname() == socket.gethostname()


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("eth", ["eth0", "eth1", "eth10", "eth9"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("ib,eth0", ["ib0", "eth0"]),
        ("=ib0,eth1", ["ib0", "eth1"]),
        (" ib , =x", ["ib0"]),
        ("^docker,eth1", ["eth0", "ib0", "eth9"]),
        ("^=eth1,eth9", ["eth0", "eth10", "docker0", "ib0"]),
        ("lo", ["lo"]),
        ("eth0,eth", ["eth0", "eth1", "eth10", "eth9"]),
        ("wlan", []),
    ],
)
def test_nccl_syntax(spec: str, names: list[str]) -> None:
    chosen = interfaces.match_interfaces(spec, ALL)
    assert list(dict.fromkeys(i.name for i in chosen)) == names
    assert len(chosen) == len(set(chosen))


@pytest.mark.parametrize("spec", ["", "^", "=", "^=", " , "])
def test_a_spec_without_names(spec: str) -> None:
    with pytest.raises(DistArgumentError, match="names no network interface"):
        interfaces.match_interfaces(spec, ALL)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("environ", "master", "addresses"),
    [
        ({"UNICOLL_SOCKET_IFNAME": "ib0,eth1"}, "10.0.0.1", ["10.9.0.5", "10.1.0.5", "10.2.0.5"]),
        ({"UNICOLL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "ib0"}, "10.0.0.1", ["10.1.0.5"]),
        ({"GLOO_SOCKET_IFNAME": "ib0,eth1,"}, "10.0.0.1", ["10.9.0.5", "10.1.0.5"]),
        ({"UNICOLL_SOCKET_IFNAME": "eth0"}, "10.0.0.1", ["10.0.0.5"]),
        ({"UNICOLL_SOCKET_IFNAME": "eth0"}, "2001:db8::1", ["2001:db8::5"]),
        ({"UNICOLL_SOCKET_IFNAME": "eth1"}, "2001:db8::1", ["10.1.0.5", "10.2.0.5"]),
        ({"UNICOLL_SOCKET_IFNAME": "lo"}, "10.0.0.1", ["127.0.0.1"]),
        ({"UNICOLL_SOCKET_IFNAME": "eth0"}, "127.0.0.1", ["10.0.0.5"]),
        ({}, "127.0.0.1", ["127.0.0.1"]),
        ({}, "::1", ["::1"]),
        ({}, "10.0.0.1", ["10.0.0.5"]),
        ({}, "2001:db8::1", ["2001:db8::5"]),
        ({}, None, ["10.0.0.5"]),
        ({"UNICOLL_SOCKET_IFNAME": " "}, "10.0.0.1", ["10.0.0.5"]),
    ],
)
def test_listen_addresses(environ: dict[str, str], master: str | None, addresses: list[str]) -> None:
    choice = interfaces.listen_addresses(master, environ)
    assert choice.addresses == addresses
    for variable in ("UNICOLL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if environ.get(variable, "").strip():
            assert variable in choice.reason
            break
    else:
        assert "loopback" in choice.reason or "route" in choice.reason


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"UNICOLL_SOCKET_IFNAME": "wlan"}, "UNICOLL_SOCKET_IFNAME=wlan: no interface that is up matches"),
        (
            {"GLOO_SOCKET_IFNAME": "eth"},
            "GLOO_SOCKET_IFNAME=eth: no interface with an address has the name eth; this",
        ),
        (
            {"GLOO_SOCKET_IFNAME": "eth1,ib9, ib0"},
            "GLOO_SOCKET_IFNAME=.*: no interface with an address has the name ib9; this",
        ),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "no interface that is up matches"),
    ],
)
def test_an_error_without_matching_interface_lists_all(environ: dict[str, str], message: str) -> None:
    with pytest.raises(DistNetworkError, match=message) as caught:
        interfaces.listen_addresses("10.0.0.1", environ)
    assert "eth0 10.0.0.5" in str(caught.value)
    assert "eth9 10.8.0.5 (down)" in str(caught.value)


def test_interfaces_without_carrier_are_used_only_if_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    unplugged = [interface._replace(has_carrier=False) for interface in (ETH0, ETH1)]
    environ = {"UNICOLL_SOCKET_IFNAME": "eth0,eth1"}
    monkeypatch.setattr(interfaces, "interfaces", lambda: [unplugged[0], ETH1])
    assert interfaces.listen_addresses("10.0.0.1", environ).addresses == ["10.1.0.5"]
    monkeypatch.setattr(interfaces, "interfaces", lambda: unplugged)
    assert interfaces.listen_addresses("10.0.0.1", environ).addresses == ["10.0.0.5", "10.1.0.5"]


def test_only_link_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interfaces", lambda: [ETH0_LL])
    environ = {"UNICOLL_SOCKET_IFNAME": "eth0"}
    assert interfaces.listen_addresses("10.0.0.1", environ).addresses == ["fe80::5%eth0"]


@pytest.mark.parametrize(
    ("own", "host", "expected"),
    [
        ("fe80::5%eth0", "fe80::1%ens3", "fe80::1%eth0"),
        ("10.0.0.5", "fe80::1%ens3", "fe80::1%ens3"),
        ("fe80::5%eth0", "10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_zone_of_an_address_is_that_of_this_host(own: str, host: str, expected: str) -> None:
    assert interfaces.in_zone_of(own, host) == expected


def test_bridges_to_containers_come_last_where_nothing_gives_an_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LO, DOCKER, ETH0, ETH1])
    for spec, expected in (("^lo", [ETH0, ETH1, DOCKER]), ("docker,eth1", [DOCKER, ETH1])):
        choice = interfaces.listen_addresses("10.0.0.1", {"UNICOLL_SOCKET_IFNAME": spec})
        assert choice.addresses == [interface.address for interface in expected]


@pytest.mark.usefixtures("host")
def test_own_name_on_loopback_is_not_used_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "resolve", lambda name, port: [(socket.AF_INET, ("127.0.1.1", port))])
    assert interfaces.listen_addresses("myhost", {}).addresses == ["10.0.0.5"]
    assert interfaces.listen_addresses("myhost", {}, single_host=True).addresses == ["127.0.0.1"]


def test_a_host_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_source_address", lambda family, target: None)
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LO, ETH0_LL, DOWN])
    assert interfaces.listen_addresses(None, {}).addresses == ["127.0.0.1"]
    with pytest.raises(
        DistNetworkError, match=r"no route to 192\.0\.2\.1.*there are|no route.*lo 127\.0\.0\.1"
    ):
        interfaces.listen_addresses("192.0.2.1", {})


def test_a_host_without_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_source_address", lambda family, target: None)
    monkeypatch.setattr(interfaces, "interfaces", lambda: [LO, DOWN, DOCKER, ETH0_6, ETH0])
    choice = interfaces.listen_addresses(None, {})
    assert choice.addresses == ["10.0.0.5"]
    assert "eth0" in choice.reason
    assert interfaces.listen_addresses(None, {}, single_host=True).addresses == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("text", "default", "pair"),
    [
        ("host:80", None, ("host", 80)),
        (" 10.0.0.1:0 ", None, ("10.0.0.1", 0)),
        ("[fe80::1%eth0]:1", None, ("fe80::1%eth0", 1)),
        ("host", 7, ("host", 7)),
        ("[::1]", 7, ("::1", 7)),
        ("host:5", 7, ("host", 5)),
    ],
)
def test_split_hostport(text: str, default: int | None, pair: tuple[str, int]) -> None:
    assert interfaces.split_hostport(text, default_port=default) == pair
    if default is None:
        assert interfaces.join_hostport(*pair) == text.strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host", "is not host:port"),
        (":80", "is not host:port"),
        ("host:", "the port must be a number"),
        ("host:x", "the port must be a number"),
        ("host:65536", "the port must be a number"),
        ("host:-1", "the port must be a number"),
        ("::1:80", "write an IPv6 address in brackets"),
        ("[::1:80", "brackets"),
        ("[]:80", "has no host"),
    ],
)
def test_bad_hostport(text: str, message: str) -> None:
    with pytest.raises(DistArgumentError, match=message):
        interfaces.split_hostport(text)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_hostport_round_trip(address: object, port: int) -> None:
    assert interfaces.split_hostport(interfaces.join_hostport(str(address), port)) == (str(address), port)


@pytest.mark.parametrize("host", ["node1", "train-0.train"])
def test_a_name_that_has_no_address_yet_is_resolved_later(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = [socket.gaierror(socket.EAI_NONAME, "unknown"), socket.gaierror(socket.EAI_AGAIN, "later")]
    real = socket.getaddrinfo

    def getaddrinfo(name: str, *args: Any, **options: Any) -> Any:
        assert name == host
        if unknown:
            raise unknown.pop(0)
        return real("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    said: list[str] = []
    found = interfaces.once_resolved(
        host, lambda: interfaces.resolve(host, 7), time.monotonic() + 60, said.append
    )
    assert found == [(socket.AF_INET, ("127.0.0.1", 7))]
    (text,) = said
    assert text.startswith(f"cannot resolve host '{host}': ")


@pytest.mark.parametrize("host", ["300.1.1.1", "fe80::1%no-such-link", "a..b"])
def test_what_is_no_name_is_refused_at_once(host: str) -> None:
    with pytest.raises(DistNetworkError, match="cannot resolve host"):
        interfaces.once_resolved(
            host, lambda: interfaces.resolve(host, 1), time.monotonic() + 60, pytest.fail
        )


def test_a_name_without_an_address_is_an_error_in_the_end() -> None:
    host = "no-such-host.invalid"
    with pytest.raises(DistNetworkError, match="for 0 s: is the name right, and does that host run"):
        interfaces.once_resolved(host, lambda: interfaces.resolve(host, 1), time.monotonic())


def test_loopback_and_local_names() -> None:
    loopback = ("localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")
    for name in loopback:
        assert interfaces.is_loopback_name(name)
        assert interfaces.is_loopback(name)
    for name in ("10.0.0.1", "2001:db8::1", "no-such-host.invalid", "0.0.0.0"):
        assert not interfaces.is_loopback_name(name)
        assert not interfaces.is_loopback(name)
    assert interfaces.is_loopback_name("::ffff:127.0.0.1")
    assert interfaces.is_local_address("127.0.0.1")
    assert not interfaces.is_local_address("203.0.113.77")
    assert not interfaces.is_local_address("no-such-host.invalid")
    with pytest.raises(DistNetworkError, match=r"cannot resolve host 'no-such-host\.invalid'"):
        interfaces.resolve("no-such-host.invalid", 1)


# --- ports ----------------------------------------------------------------------------------------------------------


def test_listeners_take_the_free_ports_of_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as opened:
        taken = opened.enter_context(socket.create_server(("0.0.0.0", 0)))
        reserved = [opened.enter_context(reserve_port()) for _ in range(2)]  # listeners can bind these
        ports = [int(sock.getsockname()[1]) for sock in (reserved[0], taken, reserved[1])]
        monkeypatch.setattr(environment, "port_range", lambda: ports)
        found = {opened.enter_context(listen("0.0.0.0")).getsockname()[1] for _ in range(2)}
        assert found == {ports[0], ports[2]}
        with pytest.raises(
            DistNetworkError, match=rf"no free port at 0\.0\.0\.0: .*={ports[0]}-{ports[2]} are"
        ):
            listen("0.0.0.0")
        with pytest.raises(DistNetworkError, match="no free port"):
            reserve_port(host="10.0.0.1")
        assert opened.enter_context(listen("127.0.0.1")).getsockname()[1] not in ports
        assert opened.enter_context(reserve_port()).getsockname()[1] not in ports


@pytest.mark.parametrize("value", ["5000", "0-10", "20-10", "1-65536", "5000-", "a-b", "-5"])
def test_no_range_of_ports(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("UNICOLL_PORT_RANGE", value)
    with pytest.raises(DistArgumentError, match=f"UNICOLL_PORT_RANGE={value} is not first-last"):
        environment.check()
