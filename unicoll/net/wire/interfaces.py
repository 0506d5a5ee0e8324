"""Network interfaces, addresses, and ``host:port`` as text.

Only the standard library, and no reverse DNS: a wrong or slow resolver must not stall a job, and
other hosts often cannot reach the name that a resolver returns for an address.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import resource
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from unicoll.errors import DistArgumentError, DistError, DistNetworkError
from unicoll.process import environment
from unicoll.process.timeouts import backoff, seconds_left

_T = TypeVar("_T")

FIREWALL_HINT = "UNICOLL_PORT_RANGE=first-last gives all listeners ports of that range"

VARIABLES = {"UNICOLL_SOCKET_IFNAME": "", "GLOO_SOCKET_IFNAME": "="}
"""The variables that select network interfaces, and what precedes their values in the syntax of
:func:`match_interfaces`."""

_SPARE_DESCRIPTORS = 24
"""For listeners, selectors, pipes and the like, beside the connections."""
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1
_IFF_LOOPBACK = 0x8
_IFF_RUNNING = 0x40
# Addresses for documentation are assigned to no host, so their route is the default route (RFC
# 5737, RFC 3849).
_DEFAULT_ROUTE_TARGETS = (
    (socket.AF_INET, ("203.0.113.1", 9)),
    (socket.AF_INET6, ("2001:db8::1", 9, 0, 0)),
)


class Interface(NamedTuple):
    """One address of one network interface.

    ``family`` is ``socket.AF_INET`` or ``AF_INET6``; ``address`` is text without a zone; ``scope``
    is ``"host"`` (loopback), ``"link"`` (valid on its own link only) or ``"global"``.
    ``has_carrier`` is False without a cable or with a switch that is off; ``network`` is in CIDR
    notation, such as 10.0.0.0/24.
    """

    name: str
    family: int
    address: str
    scope: str
    is_loopback: bool
    is_up: bool
    has_carrier: bool = True
    network: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.address}"

    @property
    def zone(self) -> str:
        """``%name`` if sockets on this host need it after the address: if that is IPv6 and
        link-local."""
        return f"%{self.name}" if self.scope == "link" and self.family == socket.AF_INET6 else ""


class AddressChoice(NamedTuple):
    """The addresses to listen on, best first, and why they were chosen."""

    addresses: list[str]
    reason: str


class _Sockaddr(ctypes.Structure):
    _fields_ = [("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26)]


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("addr", ctypes.POINTER(_Sockaddr)),
    ("netmask", ctypes.POINTER(_Sockaddr)),
    ("target", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interfaces() -> list[Interface]:
    """Every IPv4 and IPv6 address of this host's interfaces, in the kernel's order (Linux,
    ``getifaddrs``).

    Raises:
        DistNetworkError: the system does not list them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        error = ctypes.get_errno()
        raise DistNetworkError(f"cannot list the network interfaces: {os.strerror(error)}")
    try:
        return list(_entries(head))
    finally:
        libc.freeifaddrs(head)


def _entries(entry: Any) -> Iterator[Interface]:
    while entry:
        item = entry.contents
        entry = item.next
        if not item.addr:
            continue
        family = item.addr.contents.family
        # sockaddr_in: port (2), address (4); sockaddr_in6: port (2), flow (4), address (16).
        if family == socket.AF_INET:
            part = slice(2, 6)
        elif family == socket.AF_INET6:
            part = slice(6, 22)
        else:
            continue
        address = socket.inet_ntop(family, bytes(item.addr.contents.data[part]))
        network = ""
        if item.netmask:
            bits = int.from_bytes(item.netmask.contents.data[part]).bit_count()
            network = str(ipaddress.ip_network(f"{address}/{bits}", strict=False))
        loopback = bool(item.flags & _IFF_LOOPBACK)
        scope = _scope(address, loopback)
        yield Interface(
            item.name.decode(errors="surrogateescape"),
            family,
            address,
            scope,
            loopback,
            bool(item.flags & _IFF_UP),
            bool(item.flags & _IFF_RUNNING),
            network,
        )


def _scope(address: str, loopback: bool) -> str:
    parsed = ipaddress.ip_address(address)
    if loopback or parsed.is_loopback:
        return "host"
    return "link" if parsed.is_link_local else "global"


def match_interfaces(spec: str, found: Iterable[Interface]) -> list[Interface]:
    """The addresses of ``found`` that ``spec`` selects, in the order of ``spec``.

    ``spec`` has the syntax of ``NCCL_SOCKET_IFNAME``: names separated by commas are prefixes; ``=``
    before the list makes them exact names, ``^`` excludes matching interfaces, ``^=`` excludes
    exact names. An exclusion never selects the loopback interface (NCCL's may).

    Raises:
        DistArgumentError: ``spec`` contains no name.
    """
    exclude = spec.strip().startswith("^")
    rest = spec.strip().removeprefix("^").strip()
    exact = rest.startswith("=")
    names = [name.strip() for name in rest.removeprefix("=").split(",") if name.strip()]
    if not names:
        raise DistArgumentError(f"{spec!r} names no network interface")

    def matches(interface: Interface, name: str) -> bool:
        return interface.name == name if exact else interface.name.startswith(name)

    found = list(found)
    if exclude:
        return [
            i for i in found if not i.is_loopback and not any(matches(i, name) for name in names)
        ]
    chosen = [interface for name in names for interface in found if matches(interface, name)]
    return list(dict.fromkeys(chosen))


def listen_addresses(
    master_host: str | None, environ: Mapping[str, str] = os.environ, *, single_host: bool = False
) -> AddressChoice:
    """The addresses on which this process accepts its peers' data connections.

    In order of priority: ``UNICOLL_SOCKET_IFNAME`` (syntax of :func:`match_interfaces`; one address
    per interface, in that order, without those that have no carrier if others have one),
    ``GLOO_SOCKET_IFNAME`` (exact names, comma-separated), loopback if the master is loopback or
    ``single_host`` is true (every rank is on this host), else the source address of the route to
    ``master_host``. A name that resolves to loopback on this host may resolve differently on others
    (Debian maps a host's own name to 127.0.1.1); for such a name, or if the master is unknown
    (None), it is the source address of the default route, or without one an address of the first
    interface that is not loopback.

    Raises:
        DistNetworkError: no interface matches; the message lists the interfaces of this host.
    """
    for variable, prefix in VARIABLES.items():
        spec = environ.get(variable, "").strip()
        if spec:
            return _named_addresses(variable, spec, prefix + spec, _route_family(master_host))
    if master_host is not None and is_loopback_name(master_host):
        return AddressChoice(
            [_loopback_address(master_host)], f"the master, {master_host}, is on loopback"
        )
    if single_host:
        return AddressChoice(["127.0.0.1"], "every rank is on this host")
    if master_host is not None:
        choice = _source_towards(master_host)
        if choice is not None:
            return choice
    for family, target in _DEFAULT_ROUTE_TARGETS:
        address = _source_address(family, target)
        if address is not None and not is_loopback_name(address):
            return AddressChoice([address], "source address of the default route")
    if master_host is None or is_loopback(master_host):
        if (interface := _first_usable(interfaces())) is not None:
            reason = (
                f"there is no default route, and {interface.name} is the first interface besides"
                " loopback"
            )
            return AddressChoice([interface.address], reason)
        return AddressChoice(
            [_loopback_address(master_host or "127.0.0.1")], "there is no route except loopback's"
        )
    raise DistNetworkError(
        f"no address to listen on: no route to {master_host}; set UNICOLL_SOCKET_IFNAME to one of "
        f"{_describe(interfaces())}"
    )


def _named_addresses(variable: str, spec: str, pattern: str, family: int | None) -> AddressChoice:
    """One address of each interface that ``pattern`` selects, of ``family`` where the interface has
    one."""
    found = interfaces()
    # These are exact names, as in Gloo, so one that no interface has is an error.
    if variable == "GLOO_SOCKET_IFNAME":
        names = {name.strip() for name in spec.split(",")} - {""}
        unknown = names - {interface.name for interface in found}
        if unknown:
            raise DistNetworkError(
                f"{variable}={spec}: no interface with an address has the name"
                f" {', '.join(sorted(unknown))}; this host has {_describe(found)}"
            )
    selected = match_interfaces(pattern, [i for i in found if i.is_up])
    # Link-local addresses only where there are no others: with them, interfaces are paired by their
    # order alone.
    usable = [i for i in selected if not i.zone] or selected
    usable = [i for i in usable if i.has_carrier] or usable
    if not usable:
        raise DistNetworkError(
            f"{variable}={spec}: no interface that is up matches; this host has {_describe(found)}"
        )
    # An exclusion gives no order; the first address is that of the control port.
    if spec.startswith("^"):
        usable.sort(key=_is_inside)
    preferred = family or socket.AF_INET
    by_name: dict[str, Interface] = {}
    for interface in usable:
        if interface.name not in by_name or (
            interface.family == preferred and by_name[interface.name].family != preferred
        ):
            by_name[interface.name] = interface
    chosen = list(by_name.values())
    return AddressChoice(
        [i.address + i.zone for i in chosen], f"{variable}={spec} ({', '.join(map(str, chosen))})"
    )


def _first_usable(found: Iterable[Interface]) -> Interface | None:
    """The first address that other hosts may reach: IPv4 before IPv6, bridges to containers last;
    None without any."""
    usable = [i for i in found if i.is_up and i.has_carrier and i.scope == "global"]
    usable.sort(key=lambda i: (_is_inside(i), i.family != socket.AF_INET))
    return usable[0] if usable else None


def _is_inside(interface: Interface) -> bool:
    """True for a bridge to containers or virtual machines; on all hosts it often has the same
    address."""
    return interface.name.startswith(("docker", "virbr"))


def _describe(found: list[Interface]) -> str:
    return ", ".join(f"{i}{'' if i.is_up else ' (down)'}" for i in found) or "no interfaces"


def _source_towards(host: str) -> AddressChoice | None:
    """The source address of the route to ``host``; None if it is loopback or there is no route."""
    for family, target in resolve(host, 9):
        address = _source_address(family, target)
        if address is not None and not is_loopback_name(address):
            return AddressChoice([address], f"source address of the route to {host}")
    return None


def _source_address(family: int, target: Any) -> str | None:
    """The source address of packets to ``target``; connecting a datagram socket only looks up the
    route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            address, *_, zone = probe.getsockname()
            if family == socket.AF_INET6 and zone:
                address += f"%{socket.if_indextoname(zone)}"
    except OSError:
        return None
    return None if address in ("0.0.0.0", "::") else address


def _route_family(host: str | None) -> int | None:
    if host is None:
        return None
    try:
        candidates = resolve(host, 9)
    except DistNetworkError:
        return None
    return next((f for f, target in candidates if _source_address(f, target) is not None), None)


def resolve(host: str, port: int) -> list[tuple[int, Any]]:
    """``(family, socket address)`` for every address of ``host``, in the resolver's order of
    preference.

    Raises:
        DistNetworkError: the name cannot be resolved.
    """
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DistNetworkError(f"cannot resolve host {host!r}: {error}") from error
    return [(int(family), address) for family, _, _, _, address in answers]


def once_resolved(
    host: str, call: Callable[[], _T], deadline: float, say: Callable[[str], object] | None = None
) -> _T:
    """The result of a call, which is repeated while the name of a host that it resolves has no
    address yet.

    In a cluster a name may get its address long after this process has started.

    Args:
        deadline: ``time.monotonic()`` at the latest.
        say: called with one line if the call is repeated.

    Raises:
        DistNetworkError: of the call, or the name has no address until the deadline.
    """
    begun, pauses = time.monotonic(), backoff(0.05, 1.0)
    is_address = ":" in host or host.replace(".", "").isdigit()
    while True:
        try:
            return call()
        except DistNetworkError as error:
            if is_address or not isinstance(error.__cause__, socket.gaierror):
                raise
            if (left := seconds_left(deadline)) == 0:
                raise DistNetworkError(
                    f"{error}, for {time.monotonic() - begun:.0f} s: is the name right, and does"
                    " that host run?"
                ) from error
            if say is not None:
                say(f"{error}; waiting up to {left:.0f} s for an address")
                say = None
        time.sleep(min(next(pauses), left))


def is_loopback_name(host: str) -> bool:
    """True if ``host`` is loopback on every host: ``localhost``, 127.0.0.0/8, ``::1``."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_loopback(host: str) -> bool:
    """True if ``host`` is loopback by its name, or if it resolves and all its addresses on this
    host are loopback."""
    if is_loopback_name(host):
        return True
    try:
        answers = resolve(host, 0)
    except DistNetworkError:
        return False
    return all(is_loopback_name(str(address[0])) for _, address in answers)


def check_loopback() -> None:
    """Raise DistNetworkError if the loopback interface is down; without it no process can reach
    another one here."""
    # Not by connecting: an interface that goes down keeps its address and the route to it.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sh22x", b"lo", 0))
        except OSError:
            # The loopback interface has another name here.
            return
    if not struct.unpack("16sh22x", found)[1] & _IFF_UP:
        raise DistNetworkError("the loopback interface is down (ip link set lo up)")


def is_local_address(host: str) -> bool:
    """True if ``host`` (an address or a name) resolves to one of this host's own addresses."""
    try:
        answers = {str(address[0]).partition("%")[0] for _, address in resolve(host, 0)}
    except DistNetworkError:
        return False
    own = {interface.address for interface in interfaces()}
    return any(address in own or is_loopback_name(address) for address in answers)


def _loopback_address(host: str) -> str:
    name = host.strip("[]")
    if ":" in name:
        return "::1"
    if is_loopback_name(name) and not name[0].isdigit():
        # "localhost" may be ::1 alone on an IPv6-only host.
        with suppress(DistNetworkError):
            return str(min(resolve(name, 0), key=lambda answer: answer[0] != socket.AF_INET)[1][0])
    return "127.0.0.1"


def split_hostport(text: str, default_port: int | None = None) -> tuple[str, int]:
    """``"host:port"`` or ``"[IPv6]:port"`` as host (without brackets) and port.

    Args:
        default_port: the port if ``text`` has none; with None a port is required.

    Raises:
        DistArgumentError: a part is missing, the port is not a number from 0 to 65535, or an IPv6
            address has no brackets.
    """
    host, colon, port = text.strip().rpartition(":")
    has_port = bool(colon) and not port.endswith("]")
    if not has_port and default_port is not None:
        host = text.strip()
    if not host:
        raise DistArgumentError(f"{text!r} is not host:port")
    if host.startswith("[") != host.endswith("]"):
        raise DistArgumentError(f"{text!r}: the brackets around the IPv6 address do not match")
    if ":" in host and not host.startswith("["):
        raise DistArgumentError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:29500")
    bare = host.strip("[]")
    if not bare:
        raise DistArgumentError(f"{text!r} has no host")
    return bare, parse_port(port, text) if has_port or default_port is None else default_port


def parse_port(text: str, where: str) -> int:
    """A port number from its text; the error quotes ``where``.

    Raises:
        DistArgumentError: it is not a number from 0 to 65535.
    """
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise DistArgumentError(
            f"{where!r}: the port must be a number from 0 to 65535, not {text!r}"
        )
    return int(text)


def in_zone_of(own: str, host: str) -> str:
    """An address of another host for sockets of this one: a link-local one with the zone that
    ``own`` has.

    The zone is the name of this host's interface to the link; the interface of the other one may
    have another name.
    """
    zone = own.partition("%")[2]
    return f"{host.partition('%')[0]}%{zone}" if zone and "%" in host else host


def join_hostport(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def free_ports(host: str) -> Iterator[int]:
    """Ports for a listener at an address of this host that may have any port: 0, the kernel's
    choice.

    With ``UNICOLL_PORT_RANGE`` all ports of the range, from a random one on, and then
    DistNetworkError; for other hosts only: firewalls do not concern loopback.
    """
    ports = environment.port_range()
    if ports is None or is_loopback_name(host):
        yield 0
        return
    # The start is random, so that processes which start together do not all try the same ports
    # first.
    start = secrets.randbelow(len(ports))
    yield from ports[start:]
    yield from ports[:start]
    raise DistNetworkError(
        f"no free port at {host}: all of UNICOLL_PORT_RANGE={ports[0]}-{ports[-1]} are in use on"
        " this host"
    )


def hostname() -> str:
    """This host's name from the kernel, without a lookup."""
    return socket.gethostname()


def raise_descriptor_limit(wanted: int | None = None) -> bool:
    """Raise the soft limit of open files, up to the hard limit; returns False if it cannot be
    raised.

    Args:
        wanted: number of descriptors needed; None for four times the present limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if hard != resource.RLIM_INFINITY else 1 << 20
    target = min(limit, 4 * soft if wanted is None else wanted)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (ValueError, OSError):
        return False
    return True


def require_descriptors(count: int, purpose: str) -> None:
    """Raise DistError, with ``purpose``, unless this process may open so many more files; raises
    the soft limit."""
    needed = count + _SPARE_DESCRIPTORS
    with suppress(OSError):
        needed += len(os.listdir("/proc/self/fd"))
    # A server keeps an eighth of the limit, 64 at most, free (unicoll.net.wire.admission).
    needed += min(64, needed // 7 + 1)
    raise_descriptor_limit(needed)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise DistError(
            f"{purpose} needs {needed} open files in process {os.getpid()}; its limit is {limit}"
            " (ulimit -n)"
        )
