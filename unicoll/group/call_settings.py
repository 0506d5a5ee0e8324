"""What all calls through one ProcessGroup object share: options, default timeout, timing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from unicoll.arrays.types import COMPRESSED, EXACT
from unicoll.calls.call import Call
from unicoll.calls.ops import OPS
from unicoll.calls.options import CallOptions
from unicoll.calls.reduce_ops import is_defined
from unicoll.errors import DistArgumentError
from unicoll.process.timeouts import Timeout, positive_seconds

if TYPE_CHECKING:
    from unicoll.group.backends import GroupBackends

_ALL_REDUCE = OPS["all_reduce"]
_ROUNDS = ("SUM", "AVG", "PRODUCT", "PREMUL_SUM")


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Settings of the calls made through a group or through a view of it
    (:meth:`ProcessGroup.using`).

    Attributes:
        timeout: default timeout, seconds.
        timed: True if the duration of asynchronous calls is recorded.
        options: options of each call, or None.
        by_functions: True if only public functions call the methods, which user code has called.
        compression: of the group's all_reduces, or "".
        exact_sums: True if the sums of the group are exact.
        compressed: True if calls may have a compression.
        exact: True if the sums of these calls are exact.
        passed: the options that the backend gets, or None.
        special: True if calls differ from plain ones in anything but the timeout.
    """

    timeout: float
    timed: bool = False
    options: CallOptions | None = None
    compression: str = ""
    by_functions: bool = False
    exact_sums: bool = False
    compressed: bool = field(init=False)
    exact: bool = field(init=False)
    passed: CallOptions | None = field(init=False)
    special: bool = field(init=False)

    def __post_init__(self) -> None:
        # All of this is computed once, so that a plain call looks at ``special`` alone.
        options = self.options
        compressed = bool(self.compression) or (
            options is not None and options.compression is not None
        )
        passed = options.for_backend() if options is not None else None
        asked = options.exact if options is not None else None
        object.__setattr__(self, "compressed", compressed)
        object.__setattr__(self, "exact", self.exact_sums if asked is None else asked)
        object.__setattr__(self, "passed", passed)
        object.__setattr__(
            self, "special", self.timed or options is not None or compressed or self.exact
        )

    def seconds(self, timeout: Timeout) -> float:
        """The timeout of one call in seconds; None gives the default.

        Raises:
            DistArgumentError: it is not positive.
        """
        seconds = positive_seconds(timeout)
        return self.timeout if seconds is None else seconds

    def apply(self, call: Call, backends: GroupBackends) -> None:
        """Set options, timing, compression and exact reduction of a new call.

        The compression and the exact sums of a group apply to the calls that can have them; the
        others do not change.

        Raises:
            DistArgumentError: the call has a compression or exact sum of its own, and cannot have
                it.
        """
        call.options = self.passed
        call.timed = self.timed
        if self.exact and call.reduce is not None and call.inputs:
            self._make_exact(call)
        if not self.compressed:
            return
        asked = self.options.compression if self.options is not None else None
        compression = self.compression if asked is None else asked
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
            # If no backend serves the device, GroupBackends.route() refuses the call later.
            if backend is None or backend.caps.compresses:
                call.compression = compression
            elif asked is not None:
                raise DistArgumentError(
                    f"{call.describe()}: compression={asked!r}: backend {backend.name} does not"
                    " support compression",
                    op=call.op.name,
                )
        elif asked is not None:
            raise DistArgumentError(
                f"{call.describe()}: compression={asked!r} needs an all_reduce by SUM or AVG of"
                f" {' or '.join(COMPRESSED)}",
                op=call.op.name,
            )

    def _make_exact(self, call: Call) -> None:
        reduce, dtype = call.reduce, call.inputs[0].dtype
        assert reduce is not None
        exact = EXACT.get(reduce.name)
        if exact is not None and is_defined(call.op, dtype, exact):
            call.reduce = exact
        elif (
            self.options is not None
            and self.options.exact
            and dtype.kind in "fc"
            and reduce.name in _ROUNDS
        ):
            raise DistArgumentError(
                f"{call.describe()}: exact=True needs an all_reduce, reduce or reduce_scatter by"
                " SUM or AVG, and no float8",
                op=call.op.name,
            )

    def changed(
        self, timeout: Timeout, timed: bool | None, options: CallOptions | None
    ) -> CallSettings:
        """These settings with other options; None for timeout or timing keeps the present value."""
        return replace(
            self,
            timeout=self.seconds(timeout),
            timed=self.timed if timed is None else bool(timed),
            options=options,
        )
