"""The CPU backend: transports, shared memory, several hosts."""
