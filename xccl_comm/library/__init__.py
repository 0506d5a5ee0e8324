"""oneCCL: locating it, its functions by ctypes, its result codes; its CPU plug-in on streams of the
host."""
