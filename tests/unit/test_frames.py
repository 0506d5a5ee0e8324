"""A framed server that runs out of descriptors."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.support.programs import python
from tests.support.ranks import ROOT

RELAY = """
import resource, sys, time
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
from unicoll.net.control.relay import Relay
relay = Relay(100, b"k" * 32, "127.0.0.1")
print(relay.addresses[0][1], flush=True)
sys.stdin.readline()
print(time.process_time(), flush=True)
relay.close()
"""


def connect_clients(port: int, count: int, patience: float) -> int:
    """The number of clients, of ``count``, that authenticate; they stay connected until the process ends.

    A client that has not done so after ``patience`` seconds ends the attempts.
    """
    program = f"""
import socket, time
from unicoll.net.wire import channel, framed_server
held, joined = [], 0
for _ in range({count}):
    sock = socket.create_connection(("127.0.0.1", {port}), {patience})
    held.append(sock)
    try:
        where = framed_server.handshake_address("127.0.0.1", {port})
        channel.authenticate(sock, b"k" * 32, b"control", time.monotonic() + {patience}, address=where)
        joined += 1
    except Exception:
        break
time.sleep(0.5)
print(joined)
"""
    done = python("-c", program)
    done.check_returncode()
    return int(done.stdout)


@pytest.mark.every(n=2)
@pytest.mark.parametrize("may_raise", [True, False])
def test_more_clients_than_descriptors(may_raise: bool) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 256:
        pytest.skip("the hard limit of open files is too low")
    relay = subprocess.Popen(
        [sys.executable, "-c", RELAY.format(hard="hard" if may_raise else 64)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with relay:
        assert relay.stdout is not None
        assert relay.stdin is not None
        joined = connect_clients(int(relay.stdout.readline()), 100, 30.0 if may_raise else 4.0)
        relay.stdin.write("\n")
        relay.stdin.flush()
        spent = float(relay.stdout.readline())
        relay.stdin.close()
        assert relay.wait(60) == 0
    if may_raise:
        assert joined == 100
    else:
        assert 10 < joined < 64
        assert spent < 1.5  # it pauses between attempts while clients wait for seconds
