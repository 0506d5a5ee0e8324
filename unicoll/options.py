"""What ``pg_options`` may say to our own backends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import DistArgumentError, DistTypeError

__all__ = ["Options", "as_options"]


@dataclass(frozen=True)
class Options:
    """Options of a process group, for ``pg_options=`` (a dict with the same names will do).

    Attributes:
        deterministic: reductions give the same bits whatever the size, the transport and the timing: contributions
            are folded in rank order, in the element type (half types: in float32, rounded once). Between hosts this
            takes more messages. All ranks must give the same. None: as ``UNICOLL_DETERMINISTIC`` says (``1``), else
            no.
        high_priority: whether asynchronous operations on a GPU run on a stream of high priority; None: yes.
        blocking: whether NCCL's calls return only when they are done (``ncclConfig_t.blocking``); None: yes. No costs a
            thread of NCCL's for every call.
        cga_cluster_size, min_ctas, max_ctas: how much of a GPU NCCL's kernels take (``ncclConfig_t``).
        net_name: NCCL's network plug-in.
        split_share: whether communicators split from this group's share its resources.
        traffic_class: of InfiniBand or RoCE; NCCL 2.27.
    """

    deterministic: bool | None = None
    high_priority: bool | None = None
    blocking: bool | None = None
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: bool | None = None
    traffic_class: int | None = None

    @property
    def in_order(self) -> bool:
        """Whether reductions are to be deterministic, by option or environment."""
        if self.deterministic is not None:
            return self.deterministic
        return os.environ.get("UNICOLL_DETERMINISTIC", "").strip().lower() in ("1", "true", "yes", "on")


_UNDEFINED = -(1 << 31)
"""What NCCL's own option objects say for "not given"."""
_TYPES: dict[str, type] = {
    "deterministic": bool, "high_priority": bool, "blocking": bool, "cga_cluster_size": int, "min_ctas": int,
    "max_ctas": int, "net_name": str, "split_share": bool, "traffic_class": int,
}  # fmt: skip


def as_options(given: Any) -> Options:
    """Our options from what a user passed.

    Of other libraries' objects (torch's ``ProcessGroupNCCL.Options``) the attributes that mean the same are taken.

    Raises:
        DistArgumentError: a dict with a name that is none.
        DistTypeError: an option of the wrong type.
    """
    if isinstance(given, Options):
        found = given
    elif isinstance(given, Mapping):
        unknown = set(given) - set(_TYPES)
        if unknown:
            raise DistArgumentError(
                f"pg_options: unknown {', '.join(map(repr, sorted(unknown)))}; known are {', '.join(sorted(_TYPES))}"
            )
        found = Options(**given)
    elif given is None:
        return Options()
    else:
        found = _of_others(given)
    for name, kind in _TYPES.items():
        value = getattr(found, name)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise DistTypeError(f"pg_options: {name} must be {_article(kind)}, got {value!r}")
    return found


def _article(kind: type) -> str:
    return "an int" if kind is int else f"a {kind.__name__}"


def _of_others(given: Any) -> Options:
    """What another library's options say that we know, too."""
    config = getattr(given, "config", None)
    told = {
        "deterministic": getattr(given, "deterministic", None),
        "high_priority": getattr(given, "is_high_priority_stream", None) or None,
    }
    for name in ("cga_cluster_size", "min_ctas", "max_ctas", "net_name", "traffic_class"):
        value = getattr(config, name, None)
        told[name] = None if value == _UNDEFINED else value
    for name in ("blocking", "split_share"):
        value = getattr(config, name, None)
        told[name] = None if value in (None, _UNDEFINED) else bool(value)
    return Options(**told)
