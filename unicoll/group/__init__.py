"""One process group: its members, its calls, and the choice of a backend for each array.

A call of the user is validated and signed here, and handed to a backend; sending is up to that.
Start with ``process_group.py`` and ``dispatcher.py``, then ``backends.py``. The package is also a
public name: ``unicoll.group.WORLD`` is the default process group, or None before
init_process_group, which sets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicoll.group.process_group import ProcessGroup

WORLD: ProcessGroup | None = None
