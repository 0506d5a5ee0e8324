"""The collective algorithms: over sockets, in shared memory, and hierarchical (both)."""
