"""Options of single calls: NCCL's functions that are told some, and which operations have them.

An operation that is collectives of NCCL's, one or several as a group, is told them in each. Messages have no such
options: hints are then without effect, and a choice of algorithms that must be kept is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unicoll.backend import Call
from unicoll.errors import DistArgumentError
from unicoll.options import CallOptions

from .api import Nccl
from .communicator import Communicator
from .structs import CALL_CONFIGS_SINCE, version_text

__all__ = ["Tuned", "refuse_algorithm", "refuse_options"]

_FUNCTION = "ncclAllReduceConfig"
"""Stands for all of its kind, which came together."""
_MESSAGES = frozenset(("send", "recv", "gather", "scatter", "all_to_all"))
"""Operations that are messages to NCCL; an all_to_all_single is, too, where it is not NCCL's own."""


def refuse_options(options: CallOptions, nccl: Nccl) -> None:
    """Raise DistArgumentError if NCCL is too old for options of a call."""
    if not nccl.has(_FUNCTION):
        raise DistArgumentError(
            f"using({options}): options of single calls need NCCL {version_text(CALL_CONFIGS_SINCE)}; this is"
            f" {version_text(nccl.version)}"
        )


def refuse_algorithm(call: Call, options: CallOptions, native_all_to_all: bool) -> None:
    """Raise DistArgumentError if a call has no algorithms to choose from, and must not be done otherwise."""
    name = call.op.name
    if options.algorithm is None or options.force_algorithm is False:
        return
    if name in _MESSAGES or (name == "all_to_all_single" and not (call.even and native_all_to_all)):
        raise DistArgumentError(
            f"{name}: it is made of messages, which have no algorithm to choose (algorithm={options.algorithm!r}):"
            " leave it out, or give force_algorithm=False",
            op=name,
        )


class Tuned:
    """A communicator whose collectives are told a call's options; as much of one as operations use.

    Args:
        comm: the communicator.
        options: of the calls.
    """

    def __init__(self, comm: Communicator, options: CallOptions) -> None:
        self.rank, self.size, self.handle = comm.rank, comm.size, comm.handle
        self.native_all_to_all = comm.native_all_to_all
        self.made_op, self.group = comm.made_op, comm.group
        self.nccl = _Functions(comm.nccl, comm.nccl.call_config(options))


class _Functions:
    """NCCL's operations, with the options where they are collectives."""

    def __init__(self, nccl: Nccl, config: Any) -> None:
        self.version = nccl.version
        self.send, self.recv = nccl.send, nccl.recv
        self.put_signal, self.signal, self.wait_signal = nccl.put_signal, nccl.signal, nccl.wait_signal
        self.all_reduce = _told(nccl.all_reduce_config, config)
        self.broadcast = _told(nccl.broadcast_config, config)
        self.reduce = _told(nccl.reduce_config, config)
        self.all_gather = _told(nccl.all_gather_config, config)
        self.reduce_scatter = _told(nccl.reduce_scatter_config, config)
        self.all_to_all = _told(nccl.all_to_all_config, config)


def _told(function: Callable[..., int], config: Any) -> Callable[..., int]:
    return lambda *arguments: function(*arguments, config)
