"""Diagnosis of torch.distributed's groups of any backend: :func:`watch`.

It makes no calls of a group: it records those of torch, and lets the wait monitor, the control
plane and the flight recorder work for them. unicoll's own backends for torch are
:mod:`unicoll.torch_plugin`. Start with ``watcher.py``.
"""

from unicoll.torch_watch.watcher import watch

__all__ = ["watch"]
