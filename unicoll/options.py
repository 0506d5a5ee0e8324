"""What ``pg_options`` may say to our own backends, and what ``ProcessGroup.using`` may say of single calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import settings
from .errors import DistArgumentError, DistTypeError

__all__ = ["CallOptions", "Options", "as_call_options", "as_options", "wants_timing"]


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
        timing: whether ``Work.duration`` of its asynchronous operations tells how long they took; None: as
            ``UNICOLL_TIMING`` says (``1``), else no.
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
    timing: bool | None = None

    @property
    def in_order(self) -> bool:
        """Whether reductions are to be deterministic, by option or environment."""
        if self.deterministic is not None:
            return self.deterministic
        return bool(settings.flag("UNICOLL_DETERMINISTIC"))


@dataclass(frozen=True)
class CallOptions:
    """Options of single calls, for :meth:`ProcessGroup.using`; None leaves a choice to the library.

    They are NCCL's (``ncclCollConfig_t``, from 2.31) and concern its kernels only: the other backends take them and do
    nothing about them. All ranks must give the same for the same call, which nobody compares: NCCL looks at its own
    rank's alone, and ranks that differ may hang.

    Attributes:
        min_ctas, max_ctas: thread blocks that the call's kernel takes; at most the communicator's own ``max_ctas``.
        nvls_ctas: the most of them for NVLink SHARP.
        cga_cluster_size: thread blocks in a cluster (Hopper and later).
        algorithm: which algorithms may be chosen, in NCCL's words: ``"ring"``, ``"tree,nvls"``, ``"^ring"``.
        force_algorithm: whether it is an error that none of them can be used; None: yes. Otherwise NCCL then chooses
            freely.
        cta_policy: ``"default"``, ``"efficiency"``, or ``"zero"`` for the copy engines in place of kernels.
        profiler_tag: number from 0 to 2**63 - 1 that NCCL hands on to profiler plug-ins.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    nvls_ctas: int | None = None
    cga_cluster_size: int | None = None
    algorithm: str | None = None
    force_algorithm: bool | None = None
    cta_policy: str | None = None
    profiler_tag: int | None = None

    def given(self) -> dict[str, Any]:
        """What has been said, by name."""
        return {name: value for name in _CALL_TYPES if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.given().items())


_UNDEFINED = -(1 << 31)
"""What NCCL's own option objects say for "not given"."""
_TYPES: dict[str, type] = {
    "deterministic": bool, "high_priority": bool, "blocking": bool, "cga_cluster_size": int, "min_ctas": int,
    "max_ctas": int, "net_name": str, "split_share": bool, "traffic_class": int, "timing": bool,
}  # fmt: skip
_CALL_TYPES: dict[str, type] = {
    "min_ctas": int, "max_ctas": int, "nvls_ctas": int, "cga_cluster_size": int, "algorithm": str,
    "force_algorithm": bool, "cta_policy": str, "profiler_tag": int,
}  # fmt: skip
_POLICIES = ("default", "efficiency", "zero")
_TAGS = 1 << 63


def as_call_options(base: CallOptions | None, given: Any, named: Mapping[str, Any]) -> CallOptions | None:
    """The options of a call: those of ``base``, less what ``given`` and then ``named`` say otherwise; None for none.

    Args:
        base: what holds already.
        given: a :class:`CallOptions`, a dict with the same names, or None.
        named: options by name; None takes one back.

    Raises:
        DistArgumentError: a name that is none, or a value that cannot be.
        DistTypeError: an option of the wrong type.
    """
    if given is not None and not isinstance(given, CallOptions | Mapping):
        raise DistTypeError(f"using: expected CallOptions or a dict, got {given!r}")
    told = {**(given.given() if isinstance(given, CallOptions) else given or {}), **named}
    unknown = set(told) - set(_CALL_TYPES)
    if unknown:
        known = ", ".join(("timeout", *_CALL_TYPES, "timing"))
        raise DistArgumentError(f"using: unknown {', '.join(sorted(map(repr, unknown)))}; known are {known}")
    _check_types("using", _CALL_TYPES, told)
    made = replace(base or CallOptions(), **told)
    for name in ("min_ctas", "max_ctas", "nvls_ctas", "cga_cluster_size"):
        value = getattr(made, name)
        if value is not None and value < (0 if name == "cga_cluster_size" else 1):
            raise DistArgumentError(f"using: {name}={value} is too small")
    if made.min_ctas is not None and made.max_ctas is not None and made.min_ctas > made.max_ctas:
        raise DistArgumentError(f"using: min_ctas={made.min_ctas} is more than max_ctas={made.max_ctas}")
    if made.cta_policy is not None and made.cta_policy not in _POLICIES:
        raise DistArgumentError(f"using: cta_policy={made.cta_policy!r} is none of {', '.join(_POLICIES)}")
    if made.profiler_tag is not None and not 0 <= made.profiler_tag < _TAGS:
        raise DistArgumentError(f"using: profiler_tag={made.profiler_tag} is not from 0 to 2**63 - 1")
    return made if made.given() else None


def _check_types(what: str, types: Mapping[str, type], told: Mapping[str, Any]) -> None:
    for name, value in told.items():
        kind = types[name]
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise DistTypeError(f"{what}: {name} must be {_article(kind)}, got {value!r}")


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
    _check_types("pg_options", _TYPES, {name: getattr(found, name) for name in _TYPES})
    return found


def wants_timing(given: Any) -> bool:
    """Whether ``pg_options``, whoever they are for, or else the environment ask for durations."""
    said = given.get("timing") if isinstance(given, Mapping) else getattr(given, "timing", None)
    return bool(settings.flag("UNICOLL_TIMING")) if said is None else said is True


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
