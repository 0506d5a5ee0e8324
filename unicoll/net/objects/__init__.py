"""Values of other processes: objects as pickles or in a format without code, and JSON with limits.

Start with ``object_codec.py``. Who may send a pickle is decided by the callers.
"""
