"""The file of UNICOLL_METRICS_FILE: the counters that the ranks of this node have written, in one
file."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from unicoll.process.files import write_whole
from unicoll.run.nodes import Placement
from unicoll.run.output import Console
from unicoll.run.workers import LogFiles

METRICS_VARIABLE = "UNICOLL_METRICS_FILE"
_INTERVAL_S = 2.0
_LAST_S = 5.0
"""Seconds that the launcher waits at its end for a file system that does not answer."""
_FILE = re.compile(r"\d+\.prom")
_FAMILY = re.compile(rb"(# HELP (\w+) .*\n# TYPE \2 counter\n)((?:\2\{.*\} \S+\n)*)")


class MetricsFile:
    """Rewrites the file until it is closed. With several nodes ``.nodeN`` is inserted before the
    suffix.

    The ranks write their files to the launch's directory: a collector that reads all files of the
    user's directory must not find a sample twice. The variable stays as it is for a job of one rank
    and for a name with ``{rank}``, and if the directory does not exist: the error of the ranks then
    has the name that the user gave.

    Attributes:
        environment: the workers' variable.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        nnodes: int,
        place: Placement,
        logs: LogFiles,
        console: Console,
    ) -> None:
        self.environment: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        path = environ.get(METRICS_VARIABLE, "")
        is_merged = path and "{rank}" not in path and place.world_size > 1
        if not is_merged or not os.path.isdir(os.path.dirname(path) or "."):
            return
        # The nodes may share the directory.
        if nnodes > 1:
            stem, suffix = os.path.splitext(path)
            path = f"{stem}.node{place.node_rank}{suffix}"
        name = f"metrics_{place.attempt}"
        logs.make(name)
        self.environment[METRICS_VARIABLE] = os.path.join(logs.path, name, "{rank}.prom")
        self._path, self._console, self._has_failed = path, console, False
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._folder = os.open(name, flags, dir_fd=logs.folder)
        self._stop = threading.Event()
        # A thread, so that a file system that does not answer stops neither output nor signals.
        self._thread = threading.Thread(target=self._work, name="unicoll-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the file for the last time, after the workers have ended."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join(_LAST_S)
            if self._thread.is_alive():
                self._report(
                    f"{self._path} is not complete: writing takes longer than {_LAST_S:g} s"
                )

    def _work(self) -> None:
        try:
            while not self._stop.wait(_INTERVAL_S):
                self._rewrite()
            self._rewrite()
        finally:
            # The thread closes it: close() may return while the thread still reads from it, and the
            # descriptor's number could become that of another file.
            os.close(self._folder)

    def _rewrite(self) -> None:
        try:
            if texts := list(self._texts()):
                write_whole(self._path, merged(texts), 0o644)
        except OSError as error:
            self._report(f"{self._path} cannot be written: {error.strerror}")

    def _texts(self) -> Iterator[bytes]:
        """The ranks' files, in the order of the ranks."""
        names = filter(_FILE.fullmatch, os.listdir(self._folder))
        for name in sorted(names, key=lambda name: int(name.partition(".")[0])):
            try:
                with open(name, "rb", opener=partial(os.open, dir_fd=self._folder)) as file:
                    text = file.read()
            except OSError as error:
                self._report(f"{name} of the ranks' files cannot be read: {error.strerror}")
                continue
            if _FAMILY.sub(b"", text):
                self._report(f"{name} of the ranks' files is malformed")
            else:
                yield text

    def _report(self, what: str) -> None:
        # It is said once, not every few seconds.
        if not self._has_failed:
            self._has_failed = True
            self._console.log(f"{METRICS_VARIABLE}: {what}")


def merged(texts: Iterable[bytes]) -> bytes:
    """One text of several in Prometheus's text format: the samples of a family follow its
    header."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        for header, _, samples in _FAMILY.findall(text):
            families.setdefault(header, []).append(samples)
    return b"".join(header + b"".join(samples) for header, samples in families.items())
