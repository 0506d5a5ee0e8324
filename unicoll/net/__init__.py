"""How processes connect: connections, the values on them, stores, and the control plane. Nothing
here depends on arrays.

``wire/`` authenticates connections, and has the one server; ``objects/`` reads what others have
written; ``stores/`` and ``control/`` are built on both. Start with
``wire/authenticated_server.py``.
"""
