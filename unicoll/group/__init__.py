"""One process group: its members, its operations, and the choice of a backend for each array.

The package is also a public name: ``unicoll.group.WORLD`` is the default process group, or None
before init_process_group, which sets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicoll.group.process_group import ProcessGroup

WORLD: ProcessGroup | None = None
