"""Agreement of a group's members before each symmetric window, through the job's store.

ncclCommWindowRegister waits for all ranks without limit, so a rank that is missing, or cannot take
part, has to be found before it. And from 2.28 on NCCL places a window at the first free offset of
an address range, which is also its multicast address. If a window were deregistered earlier on one
rank than on another, the offsets of the next one would differ, and NCCL's kernels would write to
the wrong memory. So the members also agree on the windows that all of them have dropped, and
deregister those before they register the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from unicoll.backend import Context
from unicoll.device_collectives.communicators.agreement import Purpose, gather_and_decide
from unicoll.errors import DistArgumentError


class Extent(NamedTuple):
    """A window's bytes, and where in its allocation it begins."""

    nbytes: int
    offset: int = 0


def agree_on_windows(
    context: Context,
    number: int,
    call: str,
    extents: Sequence[Extent],
    dropped: Sequence[int],
    failure: str,
    deadline: float,
) -> tuple[list[int], str]:
    """Agree on the next windows of a group; all members call this.

    Args:
        number: of the agreement, from 1.
        call: "symmetric_empty" or "register".
        extents: the windows, equal on all members.
        dropped: numbers of the windows that this member has dropped and the device no longer uses.
        failure: why this member cannot register its memory, or "".

    Returns:
        The numbers of the windows that all members have dropped, and a member's failure, with its
        name, or "".

    Raises:
        DistArgumentError: calls or extents differ between the members.
        OperationTimeoutError, RankLostError: as :func:`.agreement.gather_and_decide`.
    """
    prefix, previous = (
        f"{context.backend}/{context.name}/window/{n}" for n in (number, number - 1)
    )
    freed, failed = gather_and_decide(
        context,
        prefix,
        {"call": call, "extents": extents, "dropped": list(dropped), "failure": failure},
        Purpose(f"registering memory ({call})", f"register memory ({call})"),
        deadline,
        partial(_answer, context),
    )
    store = context.job.store
    # Rank 0 has read this member's facts, since it has answered.
    store.delete_key(f"{prefix}/{context.rank}")
    if context.rank == 0:
        # All members have read the answer before this one, since they have published facts for the
        # next agreement. The last answer may not be read yet, so it stays.
        store.delete_key(f"{previous}/answer")
    return freed, failed


def _answer(context: Context, facts: list[dict[str, Any]]) -> tuple[list[int], str]:
    """What rank 0 answers to all members."""
    failed = [f"{context.who(m)}: {f['failure']}" for m, f in enumerate(facts) if f["failure"]]
    if not failed and any(_described(f) != _described(facts[0]) for f in facts):
        calls = "; ".join(
            f"rank {context.ranks[m]} {_described(f)}" for m, f in enumerate(facts[:16])
        )
        raise DistArgumentError(
            f"{facts[0]['call']}: symmetric memory differs between the ranks of group"
            f" {context.name!r}: {calls}",
            group=context.name,
        )
    common = set.intersection(*(set(f["dropped"]) for f in facts))
    return sorted(common), failed[0] if failed else ""


def _described(fact: dict[str, Any]) -> str:
    """A member's call and its windows: ``register of 4096 bytes at 512 of their allocation``."""
    parts = [
        f"{n} bytes" + (f" at {at} of their allocation" if at else "") for n, at in fact["extents"]
    ]
    return f"{fact['call']} of {', '.join(parts)}"
