"""The process's listener and the connections between the members of a group.

The CPU backend imports these names; the modules are private to the package. A base for backends
that only move bytes is ``unicoll.backend.MemberConnections``. Start with ``endpoint.py``.
"""

from unicoll.backend.connections.endpoint import MESSAGES, Endpoint

__all__ = ["MESSAGES", "Endpoint"]
