"""Options of a process group (``pg_options``) and of single calls (``ProcessGroup.using``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from unicoll.arrays.types import COMPRESSIONS
from unicoll.errors import DistArgumentError, DistTypeError
from unicoll.process import environment

_COMPRESSIONS = ("none", *COMPRESSIONS)


@dataclass(frozen=True)
class Options:
    """Options of a process group, for ``pg_options=`` (a dict with the same names is accepted,
    too).

    Attributes:
        deterministic: reductions give the same bits for every size, transport and timing:
            contributions are reduced in rank order, in the element type (float16, bfloat16: in
            float32, rounded once). Between hosts this takes more messages. All ranks must give the
            same. None: ``UNICOLL_DETERMINISTIC=1`` sets it, else False.
        sum: ``"exact"``: all_reduce, reduce and reduce_scatter by SUM or AVG of float16, bfloat16,
            float32, float64 and complex numbers give the sum of exact arithmetic, rounded once: the
            same bits for every order, world size, transport and backend
            (:mod:`unicoll.arrays.exact_arithmetic`). Other calls do not change. All ranks must give
            the same. ``"plain"``: every addition is rounded. None: ``UNICOLL_EXACT_SUM=1`` sets
            ``"exact"``, else ``"plain"``.
        high_priority: True if asynchronous operations on a GPU run on a stream of high priority;
            None: True.
        blocking: True if NCCL's calls return only when they are done (``ncclConfig_t.blocking``);
            None: True. False costs a thread of NCCL for every call.
        cga_cluster_size, min_ctas, max_ctas: share of a GPU that NCCL's kernels take
            (``ncclConfig_t``).
        net_name: NCCL's network plug-in.
        split_share: True if communicators split from this group's share its resources.
        traffic_class: of InfiniBand or RoCE; NCCL 2.27.
        timing: True if ``Work.duration`` of its asynchronous operations is recorded; None:
            ``UNICOLL_TIMING=1`` sets it, else False.
        compression: ``"bfloat16"`` or ``"int8"`` compresses what an all_reduce by SUM or AVG of
            float32 or float64 sends between hosts, from 64 KiB on; other calls do not change. The
            backend ``gloo`` has it; :mod:`unicoll.arrays.compression` has the error bounds. All
            ranks must give the same. None or ``"none"``: exact.
    """

    deterministic: bool | None = None
    sum: str | None = None
    high_priority: bool | None = None
    blocking: bool | None = None
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: bool | None = None
    traffic_class: int | None = None
    timing: bool | None = None
    compression: str | None = None

    @property
    def in_order(self) -> bool:
        """True if reductions are deterministic, by option or environment."""
        return wants_order(self)


@dataclass(frozen=True)
class CallOptions:
    """Options of single calls, for :meth:`ProcessGroup.using`; None leaves a choice to the library.

    All but ``compression`` and ``exact`` are NCCL's (``ncclCollConfig_t``, from 2.31) and concern
    its kernels only: the other backends accept and ignore them. All ranks must give the same for
    the same call. This is not compared: NCCL reads those of its own rank only, and ranks that
    differ may hang.

    Attributes:
        min_ctas, max_ctas: thread blocks that the call's kernel takes; at most the communicator's
            own ``max_ctas``.
        nvls_ctas: the largest number of them for NVLink SHARP.
        cga_cluster_size: thread blocks in a cluster (Hopper and later).
        algorithm: the algorithms that may be chosen, in NCCL's syntax: ``"ring"``, ``"tree,nvls"``,
            ``"^ring"``.
        force_algorithm: True if it is an error that none of them can be used; None: True. With
            False NCCL then chooses freely.
        cta_policy: ``"default"``, ``"efficiency"``, or ``"zero"`` for the copy engines in place of
            kernels.
        profiler_tag: number from 0 to 2**63 - 1 that NCCL passes to profiler plug-ins.
        compression: as in :class:`Options`, in place of the group's; ``"none"`` for an exact
            result. A call that cannot be compressed is refused. Ranks that differ raise
            CollectiveMismatchError.
        exact: True for the exact sum, as ``sum="exact"`` of :class:`Options`; False for the plain
            one. A call of floating-point numbers that has no exact variant is refused. Ranks that
            differ raise CollectiveMismatchError.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    nvls_ctas: int | None = None
    cga_cluster_size: int | None = None
    algorithm: str | None = None
    force_algorithm: bool | None = None
    cta_policy: str | None = None
    profiler_tag: int | None = None
    compression: str | None = None
    exact: bool | None = None

    def for_backend(self) -> CallOptions | None:
        """The options that a backend gets; None if none is set."""
        rest = replace(self, compression=None, exact=None)
        return rest if rest.given() else None

    def given(self) -> dict[str, Any]:
        """The options that are set, by name."""
        return {name: value for name in _CALL_TYPES if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.given().items())


@dataclass(slots=True)
class NCCLConfig:
    """torch.distributed's ``ProcessGroupNCCL.NCCLConfig``: :class:`Options` of the same names;
    None: NCCL's choice."""

    blocking: bool | None = None
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: bool | None = None
    traffic_class: int | None = None


@dataclass(slots=True)
class NCCLOptions:
    """``ProcessGroupNCCL.Options`` of torch.distributed, for ``pg_options=``; :class:`Options` has
    more.

    Attributes:
        is_high_priority_stream: ``high_priority`` of :class:`Options` if True; else its default.
        config: of the communicator.
    """

    is_high_priority_stream: bool = False
    config: NCCLConfig = field(default_factory=NCCLConfig)


class ProcessGroupNCCL:
    """The names of torch.distributed's class that programs use for options; groups are made by
    ``new_group``."""

    Options = NCCLOptions
    NCCLConfig = NCCLConfig


_UNDEFINED = -(1 << 31)
"""The value of an option that is not set in NCCL's own option objects."""
_KINDS: dict[Any, type] = {"bool | None": bool, "int | None": int, "str | None": str}
_TYPES = {option.name: _KINDS[option.type] for option in fields(Options)}
_CALL_TYPES = {option.name: _KINDS[option.type] for option in fields(CallOptions)}
_POLICIES = ("default", "efficiency", "zero")
_TAGS = 1 << 63


def as_call_options(
    base: CallOptions | None, given: Any, named: Mapping[str, Any]
) -> CallOptions | None:
    """The options of a call: those of ``base``, overridden by ``given`` and then by ``named``; None
    if none is set.

    Args:
        given: a :class:`CallOptions`, a dict with the same names, or None.
        named: options by name; None removes one.

    Raises:
        DistArgumentError: an unknown name, or an impossible value.
        DistTypeError: an option of the wrong type.
    """
    if given is not None and not isinstance(given, CallOptions | Mapping):
        raise DistTypeError(f"using: expected CallOptions or a dict, got {given!r}")
    changes = {**(given.given() if isinstance(given, CallOptions) else given or {}), **named}
    unknown = set(changes) - set(_CALL_TYPES)
    if unknown:
        known = ", ".join(("timeout", *_CALL_TYPES, "timing"))
        raise DistArgumentError(
            f"using: unknown {', '.join(sorted(map(repr, unknown)))}; known are {known}"
        )
    _check_types("using", _CALL_TYPES, changes)
    made = replace(base or CallOptions(), **changes)
    for name in ("min_ctas", "max_ctas", "nvls_ctas", "cga_cluster_size"):
        value = getattr(made, name)
        if value is not None and value < (0 if name == "cga_cluster_size" else 1):
            raise DistArgumentError(f"using: {name}={value} is too small")
    if made.min_ctas is not None and made.max_ctas is not None and made.min_ctas > made.max_ctas:
        raise DistArgumentError(
            f"using: min_ctas={made.min_ctas} is more than max_ctas={made.max_ctas}"
        )
    if made.cta_policy is not None and made.cta_policy not in _POLICIES:
        raise DistArgumentError(
            f"using: cta_policy={made.cta_policy!r} is none of {', '.join(_POLICIES)}"
        )
    if made.profiler_tag is not None and not 0 <= made.profiler_tag < _TAGS:
        raise DistArgumentError(
            f"using: profiler_tag={made.profiler_tag} is not from 0 to 2**63 - 1"
        )
    _check_compression("using", made.compression)
    return made if made.given() else None


def _check_compression(where: str, compression: str | None) -> None:
    if compression is not None and compression not in _COMPRESSIONS:
        raise DistArgumentError(
            f"{where}: compression={compression!r} is none of {', '.join(_COMPRESSIONS)}"
        )


def _check_sum(where: str, kind: str | None) -> None:
    if kind not in (None, "exact", "plain"):
        raise DistArgumentError(f"{where}: sum={kind!r} is none of exact, plain")


def _check_types(what: str, types: Mapping[str, type], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        kind = types[name]
        if value is not None and (
            not isinstance(value, kind) or (kind is int and isinstance(value, bool))
        ):
            raise DistTypeError(f"{what}: {name} must be {_article(kind)}, got {value!r}")


def as_options(given: Any) -> Options:
    """The user's ``pg_options`` as :class:`Options`.

    From other libraries' objects (torch's ``ProcessGroupNCCL.Options``) the attributes of the same
    meaning are taken.

    Raises:
        DistArgumentError: a dict with an unknown name.
        DistTypeError: an option of the wrong type.
    """
    if isinstance(given, Options):
        found = given
    elif isinstance(given, Mapping):
        unknown = set(given) - set(_TYPES)
        if unknown:
            raise DistArgumentError(
                f"pg_options: unknown {', '.join(map(repr, sorted(unknown)))}; known are"
                f" {', '.join(sorted(_TYPES))}"
            )
        found = Options(**given)
    elif given is None:
        return Options()
    else:
        found = _from_foreign(given)
    _check_types("pg_options", _TYPES, {name: getattr(found, name) for name in _TYPES})
    _check_compression("pg_options", found.compression)
    _check_sum("pg_options", found.sum)
    return found


def compression_of(given: Any) -> str:
    """The compression in ``pg_options`` of any kind; "" if there is none.

    Raises:
        DistArgumentError: it is unknown.
        DistTypeError: it is no text.
    """
    found = _option(given, "compression") if isinstance(given, Mapping | Options) else None
    _check_types("pg_options", _TYPES, {"compression": found})
    _check_compression("pg_options", found)
    return found or ""


def wants_timing(given: Any) -> bool:
    """True if ``pg_options`` of any kind, or else the environment, ask for durations."""
    timing = _option(given, "timing")
    return bool(environment.flag("UNICOLL_TIMING")) if timing is None else timing is True


def wants_order(given: Any) -> bool:
    """True if ``pg_options`` of any kind, or else the environment, ask for deterministic
    reductions."""
    deterministic = _option(given, "deterministic")
    return (
        bool(environment.flag("UNICOLL_DETERMINISTIC"))
        if deterministic is None
        else deterministic is True
    )


def wants_exact_sums(given: Any) -> bool:
    """True if ``pg_options`` of any kind, or else the environment, ask for exact sums.

    Raises:
        DistArgumentError: ``sum`` is unknown.
        DistTypeError: it is no text.
    """
    kind = _option(given, "sum") if isinstance(given, Mapping | Options) else None
    _check_types("pg_options", _TYPES, {"sum": kind})
    _check_sum("pg_options", kind)
    return bool(environment.flag("UNICOLL_EXACT_SUM")) if kind is None else kind == "exact"


def _option(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


def _article(kind: type) -> str:
    return "an int" if kind is int else f"a {kind.__name__}"


def _from_foreign(given: Any) -> Options:
    """The options of another library's object that have a counterpart here."""
    config = getattr(given, "config", None)
    values = {
        "deterministic": getattr(given, "deterministic", None),
        # False is the value of an object in which the program has not set it, so it leaves the
        # choice to the library.
        "high_priority": getattr(given, "is_high_priority_stream", None) or None,
    }
    for name in (option.name for option in fields(NCCLConfig)):
        value = getattr(config, name, None)
        if value is not None and value != _UNDEFINED:
            values[name] = bool(value) if _TYPES[name] is bool else value
    return Options(**values)
