"""From the environment of a launcher to a job that this process has joined, and out of it again.

A store, who may connect to it, and the control plane are in :mod:`unicoll.net`. Start with
``join.py``; ``launchers.py`` reads the environment, ``rendezvous_protocol.py`` says how processes
at one store agree on the members of a job.
"""
