"""The choice of a group's backends: one for each device type, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from unicoll.backend.contract import Backend as BackendBase
from unicoll.devices import runtimes
from unicoll.errors import BackendUnavailableError, DistArgumentError, DistTypeError
from unicoll.group.registry import devices_of, load, reason_against, registered_devices

DEFAULTS = {"cuda": "nccl", "xpu": "xccl"}
"""The default backend of the device types other than the CPU, where it is available."""
STAGED = frozenset(DEFAULTS)
"""The device types whose arrays a backend of the CPU serves through host memory."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend chosen for a device type, and the reason.

    Attributes:
        device: the device type.
        name, cls: of the backend.
        why: the reason, for ``explain()``.
        explicit: True if the user named it.
        implicit: True if it was added to the backend that the user named.
        staged: True if arrays go through host memory, which is what the backend serves.
    """

    device: str
    name: str
    cls: type[BackendBase]
    why: str
    explicit: bool = False
    implicit: bool = False
    staged: bool = False


def choose(
    backend: str | None, started_by_mpi: bool = False, against_mpi: str = ""
) -> list[BackendChoice]:
    """The backends of a group, one for each device type that is served.

    Args:
        backend: None (by device: CPU arrays go to MPI under mpirun or srun where it is available
            and ranks are on several hosts, else to gloo; CUDA arrays to NCCL and XPU arrays to XCCL
            where it is available), a name, or ``"cpu:gloo,cuda:nccl"``. With ``"nccl"``, and
            ``"xccl"`` on XPUs, the default backend of CPU arrays is added, for objects and
            barriers.
        started_by_mpi: True if an MPI launcher started the process.
        against_mpi: the reason why MPI, though available, does not serve the arrays; "" if it does.

    Raises:
        BackendUnavailableError: the backend cannot be used; the message has each candidate's
            reason.
        DistArgumentError: not a backend specification.
        DistTypeError: no text.
    """
    if backend is None or backend in ("", "undefined"):
        return _choose_by_device(started_by_mpi, against_mpi)
    if not isinstance(backend, str):
        raise DistTypeError(f"backend: expected a name, got {backend!r}")
    spec = backend.lower()
    if ":" not in spec:
        cls = _usable([spec])[1]
        choices = [
            BackendChoice(d, spec, cls, f"backend={backend!r}", True)
            for d in sorted(devices_of(spec, cls))
        ]
        # XCCL on host memory serves CPU arrays itself, and gets no backend beside it.
        if spec in DEFAULTS.values() and all(choice.device != "cpu" for choice in choices):
            host = _choose_by_device(started_by_mpi, against_mpi)[0]
            why = f"for objects, barriers and CPU arrays, beside {spec.upper()}"
            choices.append(replace(host, why=why, implicit=True))
        return choices
    choices = []
    for part in spec.split(","):
        device, _, name = part.strip().partition(":")
        if not device or not name:
            raise DistArgumentError(f"backend: {backend!r} is not of the form 'cpu:gloo,cuda:nccl'")
        if any(device == choice.device for choice in choices):
            raise DistArgumentError(f"backend: {backend!r} has two backends of {device} arrays")
        cls = _usable([name])[1]
        why = f"backend={backend!r}"
        served = device in devices_of(name, cls)
        staged = not served and device in STAGED and cls.stages
        if not (served or staged):
            raise BackendUnavailableError(f"backend {name!r} does not serve {device} arrays")
        if staged:
            why += "; through the host's memory"
        choices.append(BackendChoice(device, name, cls, why, True, staged=staged))
    return choices


def is_fake(choices: Iterable[BackendChoice]) -> bool:
    """True if the backend is ``fake``.

    Raises:
        DistArgumentError: it is for some of the device types only.
    """
    found = {choice.cls.fake for choice in choices}
    if len(found) > 1:
        raise DistArgumentError("backend: 'fake' cannot be combined with other backends")
    return found == {True}


def _usable(names: Iterable[str]) -> tuple[str, type[BackendBase]]:
    """The first of the named backends that is available."""
    reasons = []
    for name in names:
        reason = reason_against(name)
        if reason is None:
            return name, load(name)
        reasons.append(reason)
    raise BackendUnavailableError("; ".join(reasons))


def _choose_by_device(started_by_mpi: bool, against_mpi: str) -> list[BackendChoice]:
    name, cls = _usable(["mpi", "gloo"] if started_by_mpi and not against_mpi else ["gloo"])
    if not started_by_mpi:
        why = "the default for CPU arrays"
    elif name == "mpi":
        why = "started by an MPI launcher"
    else:
        why = f"an MPI launcher started this process, but {against_mpi or reason_against('mpi')}"
    choices = [BackendChoice("cpu", name, cls, why)]
    for device, name in DEFAULTS.items():
        if device != "cuda" and runtimes.reason_against(device) is not None:
            # Without a device the backend is not even loaded. For CUDA that question would
            # initialise CUDA: NCCL's backend looks for its library first, and asks only if there is
            # one.
            continue
        cls = load(name)
        # The class that xccl gives may be the one for host memory, which does not serve the device.
        if device in devices_of(name, cls) and reason_against(name) is None:
            choices.append(BackendChoice(device, name, cls, f"the default for {device} arrays"))
    return choices


def default_backend_for_device(device: Any) -> str:
    """Name of the backend that serves a device type by default: ``"gloo"`` for cpu, ``"nccl"`` for
    cuda, ``"xccl"`` for xpu.

    Args:
        device: ``"cpu"``, ``"cuda:1"``, or a device object of torch or unicoll.

    Raises:
        DistArgumentError: no backend serves it.
    """
    kind = str(getattr(device, "type", device)).partition(":")[0]
    names = {"cpu": "gloo", **DEFAULTS}
    for name, types in registered_devices().items():
        for served in types:
            names.setdefault(served, name)
    if kind not in names:
        raise DistArgumentError(
            f"no backend serves {kind!r} arrays; served are {', '.join(sorted(names))}"
        )
    return names[kind]
