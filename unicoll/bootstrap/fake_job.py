"""The start of a job of the backend ``fake``: one process, as any rank of any world size."""

from __future__ import annotations

import os
from collections.abc import Mapping

from unicoll.bootstrap.rendezvous import Rendezvous, members, parse_init_method
from unicoll.net.stores import HashStore, PrefixStore
from unicoll.net.wire.secret import Secret, new_key

override: str | None = None
"""Name of the backend of ``init_process_group``, whatever the program asks for; None for the
program's own. For ``python -m unicoll.trace.summary``."""


def rendezvous(
    init_method: str | None, rank: int, world_size: int, environ: Mapping[str, str] = os.environ
) -> Rendezvous:
    """Rank and world size as :func:`unicoll.bootstrap.rendezvous.rendezvous` finds them; a store in
    this process."""
    notes: list[str] = []
    url = parse_init_method(init_method if init_method is not None else "env://")
    this_rank, size, launched = members(url, rank, world_size, environ, notes)
    store = HashStore()
    notes.append("store: in this process, which communicates with no other one")
    return Rendezvous(
        store=PrefixStore("fake", store),
        root=store,
        rank=this_rank,
        world_size=size,
        secret=Secret(new_key(), "none"),
        trusted=True,
        listen_addresses=["127.0.0.1"],
        launched=launched,
        notes=notes,
        _close=store.close,
        fake=True,
    )
