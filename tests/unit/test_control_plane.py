"""The control plane when the process of its relay ends: clients in this process, in place of the ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from tests.support.order import await_true
from unicoll.errors import OperationTimeoutError, RankLostError
from unicoll.net.control.client import ControlClient
from unicoll.net.stores.hash import HashStore

KEY = bytes(range(32))


@contextmanager
def joined(size: int) -> Iterator[list[ControlClient]]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))
    clients = [ControlClient(rank, size, KEY, "127.0.0.1") for rank in range(size)]
    threads = [threading.Thread(target=client.start, args=(store, 30.0)) for client in clients]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield clients
    finally:
        for client in clients:
            client.close()


def end(client: ControlClient) -> None:
    """End the client of rank 0 as the kernel does when its process is killed."""
    relay, client._relay = client._relay, None
    assert relay is not None
    client._closed = True
    client._standby.close()
    relay.close()


def test_joining_without_rank_0_ends_in_time() -> None:
    """Whatever the timeout of the store, which may be the user's."""
    client = ControlClient(1, 2, KEY, "127.0.0.1")
    try:
        with pytest.raises(OperationTimeoutError, match="rank 0 has not joined"):
            client.start(HashStore(), 0.2)
    finally:
        client.close()


def test_messages_wait_until_a_new_relay_knows_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    with joined(3) as clients:
        stop = threading.Event()

        def announce(client: ControlClient) -> None:
            lost = RankLostError("rank 0 died", rank=0)
            while not stop.is_set():
                client.send({"t": "fail", "group": "none", "members": [], "error": {"type": str(lost)}})

        threads = [threading.Thread(target=announce, args=(c,)) for c in clients[1:] for _ in range(3)]
        for thread in threads:
            thread.start()
        end(clients[0])
        await_true(lambda: [c._relay_rank for c in clients[1:]] == [1, 1])
        stop.set()
        for thread in threads:
            thread.join()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_a_failure_announced_without_a_relay_reaches_all_members(delay: float) -> None:
    """Also those that connect to the new relay after the rank that announces it."""
    with joined(4) as clients:
        connect = clients[3]._connect_to_new_relay

        def late(*args: Any) -> Any:
            time.sleep(0.3)
            return connect(*args)

        clients[3]._connect_to_new_relay = late  # type: ignore[method-assign]
        end(clients[0])
        assert clients[2].await_departure(0, 30) is not None
        time.sleep(delay)
        clients[2].announce_failure("pair", [2, 3], RankLostError("rank 0 died", rank=0))
        await_true(lambda: isinstance(clients[3].group_failure("pair"), RankLostError))
        assert clients[1].group_failure("pair") is None


def test_another_rank_hosts_the_relay_after_rank_0_has_left() -> None:
    """Ranks that leave while there is no relay have left, and ranks that die afterwards have died."""
    with joined(5) as clients:
        clients[0].close()
        assert clients[1].await_departure(0, 30) is not None
        for rank in (1, 3):
            clients[rank].close()
        await_true(lambda: [c._relay_rank for c in (clients[2], clients[4])] == [2, 2])
        assert clients[4].await_departure(3, 30) is not None
        assert clients[4].left == {0, 1, 3}
        assert clients[4].died == set()
        clients[4]._closed = True
        clients[4]._connection.interrupt()
        assert clients[2].await_departure(4, 30) is not None
        assert clients[2].died == {4}


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.005, 0.02])
def test_a_client_closes_while_it_connects_to_a_new_relay(
    delay: float, capfd: pytest.CaptureFixture[str]
) -> None:
    with joined(3) as clients:
        end(clients[0])
        time.sleep(delay)
        clients[2].close()
        reason = clients[1].await_departure(2, 30)
        assert reason is not None
        assert "rank 2" in reason
    assert capfd.readouterr().err == ""
