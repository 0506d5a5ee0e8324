"""Addresses and interfaces: where this host listens, and how ``host:port`` is written.

Only the standard library, and no reverse DNS anywhere: a wrong or slow resolver must not stall a job, and the
name that a resolver gives back for an address is often one that the other hosts cannot reach.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import resource
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from unicoll.errors import DistArgumentError, DistNetworkError

__all__ = [
    "Choice",
    "Interface",
    "hostname",
    "interfaces",
    "is_local_address",
    "is_loopback",
    "is_loopback_name",
    "join_hostport",
    "listen_addresses",
    "match_interfaces",
    "parse_port",
    "raise_descriptor_limit",
    "resolve",
    "split_hostport",
]

_IFF_UP = 0x1
_IFF_LOOPBACK = 0x8
# Documentation addresses: nobody owns them, so the route to them is the default route (RFC 5737, RFC 3849).
_ANYWHERE = (
    (socket.AF_INET, ("203.0.113.1", 9)),
    (socket.AF_INET6, ("2001:db8::1", 9, 0, 0)),
)


class Interface(NamedTuple):
    """One address of one network interface.

    ``family`` is ``socket.AF_INET`` or ``AF_INET6``; ``address`` its text, without a zone; ``scope`` is
    ``"host"`` (loopback), ``"link"`` (valid on its own link only) or ``"global"``.
    """

    name: str
    family: int
    address: str
    scope: str
    is_loopback: bool
    is_up: bool

    def __str__(self) -> str:
        return f"{self.name} {self.address}"


class Choice(NamedTuple):
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
    ("netmask", ctypes.c_void_p),
    ("target", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interfaces() -> list[Interface]:
    """Every IPv4 and IPv6 address of this host's interfaces, in the kernel's order (Linux, ``getifaddrs``).

    Raises:
        DistNetworkError: the system would not list them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        error = ctypes.get_errno()
        raise DistNetworkError(f"cannot list the network interfaces: {os.strerror(error)}")
    try:
        return list(_walk(head))
    finally:
        libc.freeifaddrs(head)


def _walk(entry: Any) -> Iterator[Interface]:
    while entry:
        item = entry.contents
        entry = item.next
        if not item.addr:
            continue
        family = item.addr.contents.family
        # sockaddr_in: port (2), address (4); sockaddr_in6: port (2), flow (4), address (16).
        if family == socket.AF_INET:
            raw = bytes(item.addr.contents.data[2:6])
        elif family == socket.AF_INET6:
            raw = bytes(item.addr.contents.data[6:22])
        else:
            continue
        address = socket.inet_ntop(family, raw)
        loopback = bool(item.flags & _IFF_LOOPBACK)
        scope = _scope(address, loopback)
        yield Interface(
            item.name.decode(errors="surrogateescape"),
            family,
            address,
            scope,
            loopback,
            bool(item.flags & _IFF_UP),
        )


def _scope(address: str, loopback: bool) -> str:
    parsed = ipaddress.ip_address(address)
    if loopback or parsed.is_loopback:
        return "host"
    return "link" if parsed.is_link_local else "global"


def match_interfaces(spec: str, found: Iterable[Interface]) -> list[Interface]:
    """The addresses of ``found`` that ``spec`` selects, in the order of ``spec``.

    ``spec`` is written as for ``NCCL_SOCKET_IFNAME``: names separated by commas are prefixes; ``=`` in front
    of the list makes them exact names, ``^`` excludes what they match, ``^=`` excludes exact names. An
    exclusion alone never selects the loopback interface (NCCL's may).

    Raises:
        DistArgumentError: ``spec`` names nothing.
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
        return [i for i in found if not i.is_loopback and not any(matches(i, name) for name in names)]
    chosen = [interface for name in names for interface in found if matches(interface, name)]
    return list(dict.fromkeys(chosen))


def listen_addresses(
    master_host: str | None, environ: Mapping[str, str] = os.environ, *, single_host: bool = False
) -> Choice:
    """The addresses on which this process accepts its peers' data connections.

    In order: ``UNICOLL_SOCKET_IFNAME`` (syntax of :func:`match_interfaces`; one address an interface, in the
    order given), ``GLOO_SOCKET_IFNAME`` (exact names by comma), loopback when the master is loopback or
    ``single_host`` says that every rank is on this host, else the source address of the route to
    ``master_host``. A name that resolves to loopback here need not do so elsewhere (Debian gives a host's own
    name 127.0.1.1), so there, as with no master known (None), it is the source address of the default route.

    Raises:
        DistNetworkError: nothing fits; the message lists the interfaces there are.
    """
    for variable, prefix in (("UNICOLL_SOCKET_IFNAME", ""), ("GLOO_SOCKET_IFNAME", "=")):
        spec = environ.get(variable, "").strip()
        if spec:
            return _named_addresses(variable, spec, prefix + spec, _route_family(master_host))
    if master_host is not None and is_loopback_name(master_host):
        return Choice([_loopback_address(master_host)], f"the master, {master_host}, is on loopback")
    if single_host:
        return Choice(["127.0.0.1"], "every rank is on this host")
    if master_host is not None:
        choice = _towards(master_host)
        if choice is not None:
            return choice
    for family, target in _ANYWHERE:
        address = _source_address(family, target)
        if address is not None and not is_loopback_name(address):
            return Choice([address], "source address of the default route")
    if master_host is None or is_loopback(master_host):
        return Choice([_loopback_address(master_host or "127.0.0.1")], "there is no route but loopback's")
    raise DistNetworkError(
        f"no address to listen on: no route to {master_host}; set UNICOLL_SOCKET_IFNAME to one of "
        f"{_listing(interfaces())}"
    )


def _named_addresses(variable: str, spec: str, pattern: str, family: int | None) -> Choice:
    """One address of each interface that ``pattern`` selects, of ``family`` where the interface has one."""
    found = interfaces()
    selected = match_interfaces(pattern, [i for i in found if i.is_up])
    # A link-local address means nothing to a peer without this host's zone.
    usable = [i for i in selected if i.scope != "link" or i.family == socket.AF_INET]
    if not usable:
        why = "only link-local addresses fit" if selected else "no interface that is up fits"
        raise DistNetworkError(f"{variable}={spec}: {why}; there are {_listing(found)}")
    preferred = family or socket.AF_INET
    by_name: dict[str, Interface] = {}
    for interface in usable:
        if interface.name not in by_name or (
            interface.family == preferred and by_name[interface.name].family != preferred
        ):
            by_name[interface.name] = interface
    chosen = list(by_name.values())
    return Choice([i.address for i in chosen], f"{variable}={spec} ({', '.join(map(str, chosen))})")


def _listing(found: list[Interface]) -> str:
    return ", ".join(f"{i}{'' if i.is_up else ' (down)'}" for i in found) or "no interfaces"


def _towards(host: str) -> Choice | None:
    """The source address of the route to ``host``; None when that is loopback or there is no route."""
    for family, target in resolve(host, 9):
        address = _source_address(family, target)
        if address is not None and not is_loopback_name(address):
            return Choice([address], f"source address of the route to {host}")
    return None


def _source_address(family: int, target: Any) -> str | None:
    """The address this host would send from; a datagram socket's connect looks up the route, no more."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    # A link-local address (it has a zone) means nothing to the other hosts.
    return None if address in ("0.0.0.0", "::") or "%" in address else address


def _route_family(host: str | None) -> int | None:
    if host is None:
        return None
    try:
        candidates = resolve(host, 9)
    except DistNetworkError:
        return None
    return next((f for f, target in candidates if _source_address(f, target) is not None), None)


def resolve(host: str, port: int) -> list[tuple[int, Any]]:
    """``(family, socket address)`` for every address of ``host``, in the resolver's order of preference.

    Raises:
        DistNetworkError: the name cannot be resolved.
    """
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DistNetworkError(f"cannot resolve host {host!r}: {error}") from error
    return [(int(family), address) for family, _, _, _, address in answers]


def is_loopback_name(host: str) -> bool:
    """Whether ``host`` means loopback on every host: ``localhost``, 127.0.0.0/8, ``::1``."""
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
    """Whether ``host`` is loopback here, by its name or since all its addresses are; False if it has none."""
    if is_loopback_name(host):
        return True
    try:
        answers = resolve(host, 0)
    except DistNetworkError:
        return False
    return all(is_loopback_name(str(address[0])) for _, address in answers)


def is_local_address(host: str) -> bool:
    """Whether ``host`` (an address or a name) is one of this host's own addresses; False if it has none."""
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
        return next((str(address[0]) for family, address in _resolve_or_nothing(name)), "127.0.0.1")
    return "127.0.0.1"


def _resolve_or_nothing(host: str) -> list[tuple[int, Any]]:
    try:
        answers = resolve(host, 0)
    except DistNetworkError:
        return []
    return sorted(answers, key=lambda answer: answer[0] != socket.AF_INET)


def split_hostport(text: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[IPv6]:port"`` as host (without brackets) and port.

    Raises:
        DistArgumentError: a part is missing, the port is no number from 0 to 65535, or an IPv6 address lacks
            its brackets.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host:
        raise DistArgumentError(f"{text!r} is not host:port")
    if host.startswith("[") != host.endswith("]"):
        raise DistArgumentError(f"{text!r}: the brackets around the IPv6 address do not match")
    if ":" in host and not host.startswith("["):
        raise DistArgumentError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:29500")
    bare = host.strip("[]")
    if not bare:
        raise DistArgumentError(f"{text!r} has no host")
    return bare, parse_port(port, text)


def parse_port(text: str, where: str) -> int:
    """A port number from its text; ``where`` is what the error quotes.

    Raises:
        DistArgumentError: it is no number from 0 to 65535.
    """
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise DistArgumentError(f"{where!r}: the port must be a number from 0 to 65535, not {text!r}")
    return int(text)


def join_hostport(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def hostname() -> str:
    """This host's own name as the kernel has it; never looked up."""
    return socket.gethostname()


def raise_descriptor_limit(wanted: int | None = None) -> bool:
    """Raise the soft limit of open files towards the hard one; False where that gives nothing.

    Args:
        wanted: descriptors that will be needed; None asks for four times what there are.
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
