"""The connections for backends of third parties that only move bytes, with a stand-in for the backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from unicoll.backend import Context, MemberConnections
from unicoll.errors import AuthenticationError
from unicoll.net.records import TamperedError


def test_data_that_were_altered_fail_the_group_and_name_the_sender() -> None:
    """The thread that read them ended, and receives waited until their deadline."""
    job: Any = SimpleNamespace(rank=0, size=3, control=None)
    errors: list[Any] = []
    backend: Any = SimpleNamespace(context=Context(job, "g", (0,), 60.0), abort=errors.append)
    connections = MemberConnections(backend, lambda peer, read: None)
    backend.context = Context(job, "g", (0, 2), 60.0)

    def altered(peer: int, read: Any) -> None:
        raise TamperedError("a record")

    connections._receive = altered
    connections._read(1, SimpleNamespace())  # type: ignore[arg-type]
    (error,) = errors
    assert isinstance(error, AuthenticationError)
    assert error.rank == 2
    assert "rank 2: the integrity check of its connection failed" in str(error)
