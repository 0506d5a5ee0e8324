"""Options of single calls: the checks, and a communicator whose collectives pass them to NCCL.

A collective that is several of NCCL's collectives passes the options to each. Sends and receives have no options: hints
have no effect there, and a required choice of algorithms is refused.
"""

from __future__ import annotations

from nccl_comm.communicators.communicator import Communicator
from nccl_comm.library.interface import Nccl, Operations
from nccl_comm.library.structs import CALL_CONFIGS_SINCE, version_text
from unicoll.backend import Call
from unicoll.backend.options import CallOptions
from unicoll.errors import DistArgumentError

_FUNCTION = "ncclAllReduceConfig"
"""One of the functions that take options; NCCL has all of them or none."""
_P2P_OPERATIONS = frozenset(("send", "recv", "gather", "scatter", "all_to_all"))
"""Operations that are sends and receives in NCCL; an all_to_all_single is too, unless ncclAlltoAll does it."""


def check_options(options: CallOptions, nccl: Nccl) -> None:
    """Raise DistArgumentError if NCCL is too old for options of a call."""
    if not nccl.has(_FUNCTION):
        raise DistArgumentError(
            f"using({options}): options of single calls need NCCL {version_text(CALL_CONFIGS_SINCE)}; this is"
            f" {version_text(nccl.version)}"
        )


def check_algorithm(call: Call, options: CallOptions, native_all_to_all: bool) -> None:
    """Raise DistArgumentError if a call requires an algorithm but has none to choose from."""
    name = call.op.name
    if options.algorithm is None or options.force_algorithm is False:
        return
    if name in _P2P_OPERATIONS or (name == "all_to_all_single" and not (call.even and native_all_to_all)):
        raise DistArgumentError(
            f"{name}: it consists of sends and receives, to which algorithm={options.algorithm!r} does not apply:"
            " omit it, or pass force_algorithm=False",
            op=name,
        )


class CommunicatorWithOptions:
    """The attributes of a communicator that operations use, with collectives that pass options to NCCL."""

    def __init__(self, comm: Communicator, options: CallOptions) -> None:
        self.rank, self.size, self.handle, self.scratch = comm.rank, comm.size, comm.handle, comm.scratch
        self.native_all_to_all = comm.native_all_to_all
        self.premul_op, self.group = comm.premul_op, comm.group
        self.nccl: Operations = comm.nccl.with_options(options)


AnyCommunicator = Communicator | CommunicatorWithOptions
