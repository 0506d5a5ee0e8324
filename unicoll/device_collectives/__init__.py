"""Collectives between device arrays through a library with NCCL's API: communicators, streams,
deadlines, memory."""
