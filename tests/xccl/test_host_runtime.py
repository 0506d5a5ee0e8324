"""Host memory as a device: the order of streams and events."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.order import await_true
from xccl_comm.host_runtime import HOST_STREAM, HostRuntime


@pytest.fixture
def runtime() -> HostRuntime:
    return HostRuntime()


@pytest.fixture
def streams(runtime: HostRuntime) -> Iterator[list[int]]:
    made = [runtime.create_stream(0) for _ in range(2)]
    yield made
    for stream in made:
        runtime.destroy_stream(stream)
    assert not [t for t in threading.enumerate() if t.name.startswith("unicoll-host-stream")]


def appending(seen: list[str], word: str, fine: bool = True) -> Callable[[], bool]:
    def append() -> bool:
        seen.append(word)
        return fine

    return append


def holding(runtime: HostRuntime, stream: int) -> threading.Event:
    """Keep a stream busy until the event is set."""
    gate = threading.Event()
    runtime.stream(stream).put(lambda: gate.wait(30))
    return gate


def test_a_stream_waits_for_an_event_of_another(runtime: HostRuntime, streams: list[int]) -> None:
    seen: list[str] = []
    event, (one, two) = runtime.create_event(0), streams
    gate = holding(runtime, one)
    runtime.stream(one).put(appending(seen, "one"))
    runtime.record(event, one)
    runtime.wait_event(two, event)
    runtime.stream(two).put(appending(seen, "two"))
    assert not runtime.event_done(event)
    assert not runtime.stream_done(two)
    gate.set()
    await_true(lambda: runtime.stream_done(two))
    assert runtime.event_done(event)
    assert seen == ["one", "two"]


def test_a_stream_waits_for_the_recording_that_was_the_last_then(
    runtime: HostRuntime, streams: list[int]
) -> None:
    event, (one, two) = runtime.create_event(0), streams
    runtime.record(event, HOST_STREAM)
    runtime.wait_event(two, event)
    gate = holding(runtime, one)
    runtime.record(event, one)
    await_true(lambda: runtime.stream_done(two))
    assert not runtime.event_done(event)
    gate.set()
    await_true(lambda: runtime.event_done(event))


def test_nothing_that_follows_a_failure_is_done(runtime: HostRuntime, streams: list[int]) -> None:
    seen: list[str] = []
    event, (one, _) = runtime.create_event(0), streams
    for word in ("fails", "follows"):
        runtime.stream(one).put(appending(seen, word, fine=False))
    runtime.record(event, one)
    await_true(lambda: runtime.stream(one).failed)
    runtime.stream(one).close()
    assert seen == ["fails"]
    assert not runtime.event_done(event)
    assert not runtime.stream_done(one)


def test_copies_are_in_the_order_of_their_stream(runtime: HostRuntime, streams: list[int]) -> None:
    one, _ = streams
    source, middle, to = (runtime.allocate(0, 8) for _ in range(3))
    ctypes.memmove(source, b"unicoll!", 8)
    runtime.copy(middle, source, 8, one)
    runtime.copy(to, middle, 8, one)
    await_true(lambda: runtime.stream_done(one))
    assert ctypes.string_at(to, 8) == b"unicoll!"
    for ptr in (source, middle, to):
        runtime.free(ptr)
