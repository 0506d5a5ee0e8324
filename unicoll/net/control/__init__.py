"""The control plane: which ranks are alive, which groups have failed, and what each rank is in.

Each process has one connection to a relay in rank 0. Data and stores do not use it. Start with
``client.py`` and ``relay.py``; ``deadlock_detector.py`` searches for ranks that wait for each
other.
"""
