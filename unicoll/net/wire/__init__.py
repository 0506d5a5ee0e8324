"""Authenticated connections: the secret, the handshake, the channel, and the server of stores,
relay and endpoints.

No byte of a peer that has not proved that it knows the secret is parsed as anything but a
handshake. Start with ``handshake.py`` and ``authenticated_server.py``; ``interfaces.py`` and
``links.py`` choose the addresses.
"""
