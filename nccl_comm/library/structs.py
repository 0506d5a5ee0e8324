"""NCCL's structures for ctypes, with the layout of ``nccl.h`` of the loaded version."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, ClassVar

from unicoll.calls.options import CallOptions
from unicoll.device_collectives.interface import Config
from unicoll.errors import DistArgumentError

UNIQUE_ID_BYTES = 128
UNDEFINED = -(2**31)
"""NCCL_CONFIG_UNDEF_INT."""
NEWEST = 23203
"""The newest version whose header was read; a newer library is passed this version's structures,
which it accepts."""
_MAGIC = 0xCAFEBEEF
_MOST_CTAS = 64
"""MAXCHANNELS, NCCL's default; older versions have 32, and reduce a larger number to that."""


CALL_CONFIGS_SINCE = 23100
"""The first version with ``ncclCollConfig_t`` and the functions that take one."""
_POLICIES = {"default": 0x00, "efficiency": 0x01, "zero": 0x02}
"""NCCL_CTA_POLICY_*."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId; functions take it by value."""

    _fields_ = [("internal", c_ubyte * UNIQUE_ID_BYTES)]


class WaitSignal(ctypes.Structure):
    """ncclWaitSignalDesc_t."""

    _fields_ = [("opCnt", c_int), ("peer", c_int), ("sigIdx", c_int), ("ctx", c_int)]


_Members = tuple[tuple[int, str, Any], ...]
"""Members of a structure and the first version with them; NCCL appends new members at the end."""
_HEAD: tuple[tuple[str, Any], ...] = (("size", c_size_t), ("magic", c_uint), ("version", c_uint))
_MEMBERS: _Members = (
    (21700, "blocking", c_int),
    (21700, "cgaClusterSize", c_int),
    (21700, "minCTAs", c_int),
    (21700, "maxCTAs", c_int),
    (21700, "netName", c_char_p),
    (21700, "splitShare", c_int),
    (22600, "trafficClass", c_int),
    (22700, "commName", c_char_p),
    (22700, "collnetEnable", c_int),
    (22700, "CTAPolicy", c_int),
    (22700, "shrinkShare", c_int),
    (22700, "nvlsCTAs", c_int),
    (22800, "nChannelsPerNetPeer", c_int),
    (22800, "nvlinkCentricSched", c_int),
    (22900, "graphUsageMode", c_int),
    (22900, "numRmaCtx", c_int),
    (23000, "maxP2pPeers", c_int),
    (23006, "graphStreamOrdering", c_int),
    (23100, "launchOrderImplicit", c_int),
    (23100, "numRmaSig", c_int),
    (23100, "rmaEagerInit", c_int),
    (23100, "hostCftMode", c_int),
    (23200, "nvlsHostMode", c_int),
)
_CALL_MEMBERS: _Members = (
    (23100, "ext", c_void_p),
    (23100, "minCTAs", c_int),
    (23100, "maxCTAs", c_int),
    (23100, "nvlsCTAs", c_int),
    (23100, "cgaClusterSize", c_int),
    (23100, "algSelection", c_char_p),
    (23100, "forceAlgSelection", c_int),
    (23100, "CTAPolicy", c_int),
    (23100, "userProfilerTag", c_uint64),
    (23200, "launchCompletionEvent", c_void_p),
)


class ConfigStruct(ctypes.Structure):
    """ncclConfig_t of the newest version; an older library is passed the size that its own header
    gives."""

    _fields_ = [*_HEAD, *((name, kind) for _, name, kind in _MEMBERS)]
    since: ClassVar[dict[str, int]] = {name: version for version, name, _ in _MEMBERS}


class CallConfigStruct(ctypes.Structure):
    """ncclCollConfig_t of the newest version."""

    _fields_ = [*_HEAD, *((name, kind) for _, name, kind in _CALL_MEMBERS)]


_kept: dict[str, bytes] = {}
"""Names passed to NCCL, which may keep the pointers until the communicator ends."""


def config_struct(config: Config, version: int) -> ConfigStruct:
    """The structure for a library of a version.

    Raises:
        DistArgumentError: the library is too old for one of the options.
    """
    made = ConfigStruct(size=_size(_MEMBERS, version), magic=_MAGIC, version=min(version, NEWEST))
    for _, name, kind in _MEMBERS:
        if kind is c_int:
            setattr(made, name, UNDEFINED)
    made.blocking = int(config.blocking)
    most = config.max_ctas
    # NCCL compares the undefined maximum as a number, which is smaller than any minimum, and would
    # refuse both.
    if config.min_ctas is not None and most is None:
        most = max(config.min_ctas, _MOST_CTAS)
    numbers = {
        "cgaClusterSize": config.cga_cluster_size,
        "minCTAs": config.min_ctas,
        "maxCTAs": most,
        "splitShare": config.split_share,
        "trafficClass": config.traffic_class,
    }
    for name, value in numbers.items():
        if value is not None:
            _require(name, version)
            setattr(made, name, int(value))
    if config.net_name is not None:
        made.netName = _keep(config.net_name)
    # The name is for logs only, so an older library is not refused because of it.
    if config.comm_name is not None and version >= ConfigStruct.since["commName"]:
        made.commName = _keep(config.comm_name)
    return made


def call_config_struct(options: CallOptions, version: int) -> CallConfigStruct:
    """The structure for one call, for a library of a version."""
    made = CallConfigStruct(
        size=_size(_CALL_MEMBERS, version), magic=_MAGIC, version=min(version, NEWEST)
    )
    numbers = {
        "minCTAs": options.min_ctas,
        "maxCTAs": options.max_ctas,
        "nvlsCTAs": options.nvls_ctas,
        "cgaClusterSize": options.cga_cluster_size,
        "CTAPolicy": None if options.cta_policy is None else _POLICIES[options.cta_policy],
    }
    for name, value in numbers.items():
        setattr(made, name, UNDEFINED if value is None else value)
    made.forceAlgSelection = int(options.force_algorithm is not False)
    made.userProfilerTag = options.profiler_tag or 0
    if options.algorithm is not None:
        made.algSelection = _keep(options.algorithm)
    return made


def version_text(version: int) -> str:
    """``"2.30.7"`` of 23007."""
    hundreds, patch = divmod(version, 100)
    major, minor = divmod(hundreds, 100 if version >= 10000 else 10)
    return f"{major}.{minor}.{patch}"


def _require(name: str, version: int) -> None:
    needed = ConfigStruct.since[name]
    if version < needed:
        raise DistArgumentError(
            f"NCCL's option {name} needs NCCL {version_text(needed)}; this is"
            f" {version_text(version)}"
        )


def _keep(name: str) -> bytes:
    return _kept.setdefault(name, name.encode())


def _size(members: _Members, version: int) -> int:
    """``sizeof`` the structure in the header of a version."""
    kinds = [*_HEAD, *((name, kind) for since, name, kind in members if since <= version)]
    return ctypes.sizeof(type("_Config", (ctypes.Structure,), {"_fields_": kinds}))
