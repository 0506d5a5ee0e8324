"""The process's listener, connections between the members of a group, and a base for backends that
only move bytes."""

from unicoll.backend.connections.endpoint import MESSAGES, Endpoint
from unicoll.backend.connections.member_connections import MemberConnections

__all__ = ["MESSAGES", "Endpoint", "MemberConnections"]
