"""The frames of other threads can be walked along while these run, whatever the garbage collector does."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from tests.support.forks import in_fork
from tests.support.programs import python
from unicoll.process import thread_frames as module
from unicoll.process.thread_frames import ThreadFrames

PROGRAM = """
import gc, random, sys, threading, time
from unicoll.process.thread_frames import ThreadFrames

SECONDS, FRAMES, PATIENCE_S = 2.0, 100, 30.0
walker = threading.get_ident()
kind = type(sys._getframe())

def release_the_interpreter(phase, info):  # as finalizers may, that close files
    if threading.get_ident() == walker:
        time.sleep(1e-5)

def function(locals):  # the sizes of frames differ, so that memory is used again for something else
    names = "; ".join(f"v{i} = [depth]" for i in range(locals))
    body = f"def call(depth, path):\\n {names}\\n if depth: return functions[path[depth]](depth - 1, path)\\n"
    exec(body, space := {"functions": functions})
    return space["call"]

functions = []
functions += [function(3 * k + 1) for k in range(12)]

def work():
    order = random.Random(0)
    paths = [[order.randrange(12) for _ in range(16)] for _ in range(200)]
    while True:
        for i, path in enumerate(paths):
            functions[i % 12](i % 14, path)

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
gc.callbacks.append(release_the_interpreter)
gc.set_threshold(5)
began = time.monotonic()
walked = 0
while (took := time.monotonic() - began) < SECONDS or (walked <= FRAMES and took < PATIENCE_S):
    with ThreadFrames() as frames:
        del frames[walker]
        for frame in frames.values():
            while frame is not None:
                assert type(frame) is kind, frame
                walked += 1
                frame = frame.f_back
        del frames
    kept = [[] for _ in range(10)]
gc.callbacks.clear()
print(walked)
sys.stdout.flush()
import os
os._exit(0)
"""


def test_frames_of_running_threads() -> None:
    """Without the pause of the collector Python 3.11 crashes within a second, or finds objects that are no frames."""
    done = python("-X", "faulthandler", "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_the_own_thread() -> None:
    with ThreadFrames() as frames:
        assert frames[threading.get_ident()] is sys._getframe()
        del frames


def test_the_collector_is_as_before() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with ThreadFrames() as outer, ThreadFrames() as inner:
                assert threading.get_ident() in outer
                assert threading.get_ident() in inner
                assert gc.isenabled() == (enabled and not module._PAUSES)
                del outer, inner
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


@pytest.mark.skipif(not module._PAUSES, reason="the collector is paused in Python 3.11 only")
def test_a_child_of_a_fork_collects() -> None:
    with ThreadFrames() as frames:
        del frames
        assert in_fork(gc.isenabled) == 0
