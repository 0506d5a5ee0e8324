"""The options of a process group, as torch's backends have them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unicoll.torch_plugin.group import TorchProcessGroup


class GroupOptions:
    """What torch's backends have as ``options``, read by programs: backend, timeout and members of
    a group.

    torch passes a copy of them to ``split_group``, and a program may pass them to ``new_group``;
    they have no effect there.
    """

    def __init__(self, group: TorchProcessGroup) -> None:
        self._group = group

    def __deepcopy__(self, memo: Any) -> GroupOptions:
        return self

    @property
    def backend(self) -> str:
        return self._group.getBackendName()

    @property
    def group_name(self) -> str:
        return self._group.getGroupName()

    @property
    def global_ranks_in_group(self) -> list[int]:
        return list(self._group.unicoll.ranks)

    @property
    def _timeout(self) -> timedelta:
        return self._group.timeout

    @_timeout.setter
    def _timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)
