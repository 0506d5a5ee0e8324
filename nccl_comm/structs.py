"""NCCL's structures as ctypes sees them, the same bytes that ``nccl.h`` of the loaded version lays out."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_uint
from typing import Any, ClassVar

from unicoll.errors import DistArgumentError

from .api import UNIQUE_ID_BYTES, Config

__all__ = ["NEWEST", "NO_COLOR", "UNDEFINED", "ConfigStruct", "UniqueId", "config_struct", "version_text"]

UNDEFINED = -(2**31)
"""NCCL_CONFIG_UNDEF_INT."""
NO_COLOR = -1
"""NCCL_SPLIT_NOCOLOR."""
NEWEST = 23203
"""The newest version whose header was read; a newer library is spoken to as this one, which it understands."""
_MAGIC = 0xCAFEBEEF


class UniqueId(ctypes.Structure):
    """ncclUniqueId; functions take it by value."""

    _fields_ = [("internal", c_ubyte * UNIQUE_ID_BYTES)]


_HEAD: tuple[tuple[str, Any], ...] = (("size", c_size_t), ("magic", c_uint), ("version", c_uint))
_MEMBERS: tuple[tuple[int, str, Any], ...] = (
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
    (23000, "graphStreamOrdering", c_int),
    (23100, "launchOrderImplicit", c_int),
    (23100, "numRmaSig", c_int),
    (23100, "rmaEagerInit", c_int),
    (23100, "hostCftMode", c_int),
    (23200, "nvlsHostMode", c_int),
)
"""Members and the version that brought them; new ones only ever come at the end."""


class ConfigStruct(ctypes.Structure):
    """ncclConfig_t of the newest version; an older library is told the size that its own header gives."""

    _fields_ = [*_HEAD, *((name, kind) for _, name, kind in _MEMBERS)]
    since: ClassVar[dict[str, int]] = {name: version for version, name, _ in _MEMBERS}


_kept: dict[str, bytes] = {}
"""Names that NCCL has been given: it may keep the pointer as long as the communicator lives."""


def config_struct(config: Config, version: int) -> ConfigStruct:
    """What a library of a version is to be told.

    Raises:
        DistArgumentError: the library is too old for something that was asked for.
    """
    made = ConfigStruct(size=_size(version), magic=_MAGIC, version=min(version, NEWEST))
    for _, name, kind in _MEMBERS:
        if kind is c_int:
            setattr(made, name, UNDEFINED)
    made.blocking = int(config.blocking)
    numbers = {
        "cgaClusterSize": config.cga_cluster_size,
        "minCTAs": config.min_ctas,
        "maxCTAs": config.max_ctas,
        "splitShare": config.split_share,
        "trafficClass": config.traffic_class,
    }
    for name, value in numbers.items():
        if value is not None:
            _demand(name, version)
            setattr(made, name, int(value))
    if config.net_name is not None:
        made.netName = _keep(config.net_name)
    if config.comm_name is not None and version >= ConfigStruct.since["commName"]:  # for logs only
        made.commName = _keep(config.comm_name)
    return made


def version_text(version: int) -> str:
    """``"2.30.7"`` of 23007."""
    hundreds, patch = divmod(version, 100)
    major, minor = divmod(hundreds, 100 if version >= 10000 else 10)
    return f"{major}.{minor}.{patch}"


def _demand(name: str, version: int) -> None:
    needed = ConfigStruct.since[name]
    if version < needed:
        raise DistArgumentError(
            f"NCCL's option {name} needs version {version_text(needed)}; this is {version_text(version)}"
        )


def _keep(name: str) -> bytes:
    return _kept.setdefault(name, name.encode())


def _size(version: int) -> int:
    """``sizeof(ncclConfig_t)`` in the header of a version."""
    kinds = [*_HEAD, *((name, kind) for since, name, kind in _MEMBERS if since <= version)]
    return ctypes.sizeof(type("_Config", (ctypes.Structure,), {"_fields_": kinds}))
