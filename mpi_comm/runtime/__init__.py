"""The MPI library: where it is, starting and ending it, its thread, its communicators."""
