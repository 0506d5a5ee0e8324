"""barrier and monitored_barrier, with torch.distributed's argument names, order and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unicoll.api import world
from unicoll.api.arguments import documented
from unicoll.net.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.backend.work import Work
    from unicoll.group.process_group import ProcessGroup


@documented("barrier")
def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Return when every rank has called it.

    Args:
        device_ids: accepted because torch.distributed has it; the group knows its devices.
    """
    pg = world.resolve(group)
    if pg is None:
        return None
    return pg.barrier(async_op=async_op, timeout=timeout)


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """A blocking barrier whose timeout error names the missing ranks.

    Args:
        group: the process group; None means the default one.
        timeout: how long to wait (timedelta, or seconds); None takes the group's.
        wait_all_ranks: wait the whole time and name all missing ranks, not the first one only.

    Raises:
        OperationTimeoutError: on every rank that arrived; names the missing ranks.
        RankLostError: a member of the group died.
        NotInitializedError: there is no default group.
    """
    pg = world.resolve(group)
    if pg is not None:
        pg.monitored_barrier(timeout=timeout, wait_all_ranks=wait_all_ranks)
