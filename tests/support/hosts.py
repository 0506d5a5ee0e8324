"""Several hosts on one machine: network namespaces connected by two switches, with IPv4 and IPv6.

Host k has the interfaces lan0 (10.77.0.k, fd77::k, fe80::k) and lan1 (10.78.0.k, fd78::k, fe80::k), an unconnected
one, "apart", and a bridge for containers, docker0, with the same address on both.
Needs root and ``ip``; the tests that use the fixture are skipped otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of the hosts' interfaces lan0."""
_FILTERS = "50"
NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


class Hosts:
    """Two hosts and the namespace of the switches between them; :meth:`close` removes all of them."""

    def __init__(self) -> None:
        self.names = [f"unicoll-{os.getpid()}-{k}" for k in range(3)]  # index 0: the switches
        # `ip netns exec` shows the files of these directories in place of those in /etc
        self._etc = [Path("/etc/netns", name) for name in self.names[1:]]
        self._running: list[subprocess.Popen[str]] = []

    def build(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        switches, *hosts = self.names
        for lan in range(2):
            ip("-n", switches, "link", "add", f"switch{lan}", "type", "bridge", "forward_delay", "0")
            ip("-n", switches, "link", "set", f"switch{lan}", "up")
            for k, host in enumerate(hosts, start=1):
                self._cable(f"port{lan}{k}", host, f"lan{lan}")
                ip("-n", switches, "link", "set", f"port{lan}{k}", "master", f"switch{lan}")
                self.switch_on(lan, k)
        for k, host in enumerate(hosts, start=1):
            self._cable(f"loose{k}", host, "apart")
            self._address(host, "apart", f"10.99.{k}.1/24", f"fd99:{k}::1/64")
            ip("-n", host, "link", "add", "docker0", "type", "bridge")
            # rules for packets to this host come before this one only if it is not the first
            ip("-n", host, "rule", "add", "pref", "100", "lookup", "local")
            ip("-n", host, "rule", "del", "pref", "0")
            self._address(host, "docker0", "172.17.0.1/16")
            # it has a carrier while a container runs
            ip("-n", host, "link", "add", "outside", "type", "veth", "peer", "name", "inside")
            ip("-n", host, "link", "set", "outside", "master", "docker0", "up")
            ip("-n", host, "link", "set", "inside", "up")

    def _cable(self, port: str, host: str, interface: str) -> None:
        switches = self.names[0]
        ip("-n", switches, "link", "add", port, "type", "veth", "peer", "name", interface, "netns", host)
        ip("-n", host, "link", "set", interface, "addrgenmode", "none")
        ip("-n", switches, "link", "set", port, "up")

    def _address(self, host: str, interface: str, *addresses: str) -> None:
        for address in addresses:
            # without nodad an IPv6 address is unusable for its first second
            flags = ["nodad"] if ":" in address else []
            ip("-n", host, "address", "replace", address, "dev", interface, *flags)
        ip("-n", host, "link", "set", interface, "up")

    def unplug(self, lan: int, host: int) -> None:
        ip("-n", self.names[0], "link", "set", f"port{lan}{host}", "down")

    def drop(self, lan: int, host: int) -> None:
        """Let the switch drop what it receives from a host, which still has a link, until :meth:`plug`."""
        ip("-n", self.names[0], "link", "set", f"port{lan}{host}", "nomaster")

    def plug(self, lan: int, host: int) -> None:
        ip("-n", self.names[0], "link", "set", f"port{lan}{host}", "master", f"switch{lan}")
        ip("-n", self.names[0], "link", "set", f"port{lan}{host}", "up")

    def filter(self, first: int, last: int) -> None:
        """Drop TCP packets between the hosts whose ports both are in a range, until :meth:`restore`.

        Connections to a port outside are not concerned: their other port is in the kernel's range for clients.
        """
        ports = f"{first}-{last}"
        for host, lan in itertools.product(self.names[1:], ("lan0", "lan1")):
            drop = ("ipproto", "tcp", "sport", ports, "dport", ports, "blackhole")
            ip("-n", host, "rule", "add", "pref", _FILTERS, "iif", lan, *drop)

    def _remove_filters(self) -> None:
        for host in self.names[1:]:
            with contextlib.suppress(subprocess.CalledProcessError):
                while True:
                    ip("-n", host, "rule", "del", "pref", _FILTERS)

    def limit(self, lan: int, host: int, *discipline: str) -> None:
        """Set the queueing discipline of what a host receives, until :meth:`restore`."""
        tc = ("tc", "qdisc", "replace", "dev", f"port{lan}{host}", "root", *discipline)
        ip("netns", "exec", self.names[0], *tc)

    def switch_off(self, lan: int, host: int) -> None:
        """Set a host's interface down; IPv6 addresses are lost until :meth:`switch_on`."""
        ip("-n", self.names[host], "link", "set", f"lan{lan}", "down")

    def loopback(self, host: int, state: str) -> None:
        """Set a host's loopback interface "up" or "down"."""
        ip("-n", self.names[host], "link", "set", "lo", state)

    def switch_on(self, lan: int, host: int) -> None:
        addresses = f"10.{77 + lan}.0.{host}/24", f"fd{77 + lan}::{host}/64", f"fe80::{host}/64"
        self._address(self.names[host], f"lan{lan}", *addresses)

    def own_names(self, *names: str) -> None:
        """Let commands on the hosts resolve no names but these: of host 1, 2. Until :meth:`restore`."""
        for etc in self._etc:
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("127.0.0.1 localhost\n")
            (etc / "resolv.conf").write_text("")
        for host, name in enumerate(names, start=1):
            self.add_name(name, host)

    def add_name(self, name: str, host: int) -> None:
        """After :meth:`own_names`, also for the commands that run."""
        for etc in self._etc:
            with (etc / "hosts").open("a") as file:
                file.write(f"{ADDRESSES[host - 1]} {name}\n")

    def _remove_names(self) -> None:
        for etc in self._etc:
            shutil.rmtree(etc, ignore_errors=True)
        with contextlib.suppress(OSError):  # others use it
            self._etc[0].parent.rmdir()

    def on(self, host: int, *command: str) -> list[str]:
        """The words that run a command on a host (1 or 2) under its own host name."""
        enter = ("ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", NAMED)
        return [*enter, f"host{host}", *command]

    def write_agent(self, path: Path) -> None:
        """Write a program that runs a command on a host as ssh does: ``agent [options] 10.77.0.HOST command ...``."""
        lines = ["#!/bin/sh", 'while [ "${1#-}" != "$1" ]; do shift; done', "address=$1", "shift"]
        for host in (1, 2):
            words = shlex.join(self.on(host, "sh", "-c"))
            lines.append(f'[ "$address" != {ADDRESSES[host - 1]} ] || exec {words} "$*"')
        path.write_text("\n".join([*lines, 'echo "no host $address" >&2', "exit 255", ""]))
        path.chmod(0o755)

    def start(self, host: int, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        """Start a command on a host (1 or 2)."""
        process = subprocess.Popen(
            self.on(host, *command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def stop(self) -> None:
        """End what runs on the hosts, also the processes that it has started."""
        for host in self.names[1:]:
            pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, timeout=30)
            for pid in map(int, pids.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._running:
            process.kill()
            process.communicate()
        self._running.clear()

    def close(self) -> None:
        self.stop()
        self._remove_names()
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)

    def restore(self) -> None:
        """End what runs, and undo what a test did to the links."""
        self.stop()
        self._remove_names()
        self._remove_filters()
        for host in (1, 2):
            self.loopback(host, "up")
        for lan, host in itertools.product((0, 1), (1, 2)):
            self.plug(lan, host)
            self.limit(lan, host, "noqueue")
            self.switch_on(lan, host)


@pytest.fixture(scope="module")
def built_hosts() -> Iterator[Hosts]:
    """Two hosts for a module; its tests are skipped where they cannot be built."""
    made = Hosts()
    try:
        try:
            made.build()
            subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            pytest.skip(f"cannot create network namespaces: {reason}")
        yield made
    finally:
        made.close()


@pytest.fixture
def hosts(built_hosts: Hosts) -> Iterator[Hosts]:
    """The two hosts for a test, which may change their links and leave processes."""
    yield built_hosts
    built_hosts.restore()
