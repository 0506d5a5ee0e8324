"""Compression of all_reduce: which calls have it, and which refuse it.

The option of a group applies to the calls that can be compressed; the others do not change. The option of a call is
refused for a call that cannot be compressed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unicoll.arrays.types import COMPRESSED
from unicoll.backend.call import Call
from unicoll.backend.ops import OPS
from unicoll.errors import DistArgumentError

if TYPE_CHECKING:
    from unicoll.group.backends import GroupBackends
    from unicoll.group.call_settings import CallSettings

_ALL_REDUCE = OPS["all_reduce"]


def compress(call: Call, settings: CallSettings, backends: GroupBackends) -> None:
    """Set the compression of a new call.

    Raises:
        DistArgumentError: the option of the call does not suit it.
    """
    asked = settings.options.compression if settings.options is not None else None
    compression = settings.compression if asked is None else asked
    if compression in ("", "none"):
        return
    suits = (
        call.op is _ALL_REDUCE
        and call.reduce is not None
        and call.reduce.name in ("SUM", "AVG")
        and call.inputs[0].dtype.name in COMPRESSED
    )
    if suits:
        backend = backends.for_device(call.inputs[0].device.type)
        if backend is None or backend.caps.compresses:  # None is refused later
            call.compression = compression
        elif asked is not None:
            raise DistArgumentError(
                f"{call.describe()}: compression={asked!r}: backend {backend.name} compresses nothing",
                op=call.op.name,
            )
    elif asked is not None:
        raise DistArgumentError(
            f"{call.describe()}: compression={asked!r} needs an all_reduce by SUM or AVG of {' or '.join(COMPRESSED)}",
            op=call.op.name,
        )
