"""What waits, and why: blocked calls of all threads, warnings of long waits, and dumps of the
flight recorder.

It observes backends and makes no calls of a group. The search for deadlocks among all ranks is in
:mod:`unicoll.net.control`. Start with ``wait_monitor.py``.
"""
