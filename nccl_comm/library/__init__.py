"""libnccl: locating it, its functions by ctypes, its structures, types and error codes."""
