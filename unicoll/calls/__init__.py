"""What a call is: its record, the table of operations, validation, options, handles of posted
calls, and the recorder.

Nothing here sends or executes a call: backends do (:mod:`unicoll.backend`). Start with ``call.py``
and ``ops.py``, then ``work.py``.
"""
