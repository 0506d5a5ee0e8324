"""The library with NCCL's API that this process uses.

The order of the search: a path in the environment; the library that the process has already mapped
(of ``LD_PRELOAD`` or of an array library: two copies in one process conflict); the folders of its
package and of the system.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from unicoll.device_collectives.interface import CollectiveLibrary
from unicoll.errors import BackendUnavailableError, DistError
from unicoll.process.shared_library import SharedLibrary


class LibraryLocator:
    """Finds and loads one library, once per process; thread-safe.

    Args:
        file: where it is.
        variable: environment variable with a path, the only one that is tried then.
        bind: makes the library of a loaded one and the path of its file; or returns why it cannot
            be used.
        install: how to get the library, for errors.
    """

    def __init__(
        self,
        file: SharedLibrary,
        variable: str,
        bind: Callable[[Any, str], CollectiveLibrary | str],
        install: str,
    ) -> None:
        self.file = file
        self.variable = variable
        self._bind = bind
        self._install = install
        self._lock = threading.Lock()
        self._found: CollectiveLibrary | str | None = None

    def find(self) -> CollectiveLibrary | str:
        """The library of this process, loaded at the first call; or the reason why there is
        none."""
        with self._lock:
            if self._found is None:
                self._found = self.search()
            return self._found

    @property
    def found(self) -> CollectiveLibrary | None:
        """The library, if it has been loaded already."""
        return self._found if not isinstance(self._found, str) else None

    def get(self) -> CollectiveLibrary:
        """The library of this process.

        Raises:
            BackendUnavailableError: there is none; the message gives the reason.
        """
        found = self._found if self._found is not None else self.find()
        if isinstance(found, str):
            raise BackendUnavailableError(found)
        return found

    def use(self, implementation: CollectiveLibrary | None) -> None:
        """Use another implementation in this process; None searches for the library again at the
        next call."""
        with self._lock:
            self._found = implementation

    def search(self) -> CollectiveLibrary | str:
        """Load the library."""
        named = os.environ.get(self.variable)
        if named:
            found = self._load(named)
            return f"{self.variable}: {found}" if isinstance(found, str) else found
        reasons = []
        for path in self.file.candidates():
            found = self._load(path)
            if not isinstance(found, str):
                return found
            reasons.append(found)
        return f"{self.file.names[0]} cannot be used: {'; '.join(reasons)} ({self._install})"

    def _load(self, path: str) -> CollectiveLibrary | str:
        try:
            library = ctypes.CDLL(path)
        except OSError as e:
            return f"{path} cannot be loaded: {e}" if path not in str(e) else str(e)
        try:
            # A path without a folder is looked up by the dynamic linker, which tells what it has
            # loaded.
            return self._bind(library, self.file.loaded_from(library) or path)
        except DistError as e:
            return str(e)
