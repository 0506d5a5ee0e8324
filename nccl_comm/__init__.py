"""The NCCL backend: not here yet; :mod:`unicoll.registry` says so to whoever asks for it."""
