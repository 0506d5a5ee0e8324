"""From the environment of a launcher to a job that this process has joined.

Three steps: ``resolve.py`` (who, where, which backends), ``rendezvous.py`` (a store and a key),
``enter.py`` (control plane and default group), which has all three in ``join()``. A job is left by
:meth:`unicoll.backend.contract.Job.leave`, at exit by ``process_end.py``. Stores, connections and
the control plane are in :mod:`unicoll.net`.
"""
