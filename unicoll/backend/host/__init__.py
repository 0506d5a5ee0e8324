"""Backends of host arrays: their base, the queue that orders collectives, matching of messages, and
fallbacks.

Backends import these names; the modules are private to the package. Start with ``host_backend.py``,
then ``op_queue.py``. ``fake.py``, the backend that moves no data, is a module that is loaded by its
name.
"""

from unicoll.backend.host.fallback_adapter import with_fallbacks
from unicoll.backend.host.fallbacks import (
    available,
    even_parts,
    flat_of,
    kernel_of,
    one_rank,
    split,
)
from unicoll.backend.host.host_backend import HostBackend
from unicoll.backend.host.inbox import Inbox
from unicoll.backend.host.message_matcher import MessageMatcher
from unicoll.backend.host.op_queue import Execute, OpQueue
from unicoll.backend.host.size_agreement import (
    check_sizes,
    exchange_sizes,
    largest_part,
    shape_hash,
)

__all__ = [
    "Execute",
    "HostBackend",
    "Inbox",
    "MessageMatcher",
    "OpQueue",
    "available",
    "check_sizes",
    "even_parts",
    "exchange_sizes",
    "flat_of",
    "kernel_of",
    "largest_part",
    "one_rank",
    "shape_hash",
    "split",
    "with_fallbacks",
]
