"""This process: its environment, logs, files, signals, forks, timeouts, and uncaught exceptions.

Nothing here depends on a network, an array or a group. ``environment.py`` has the variables that a
user sets; ``interrupts.py`` says which locks an exception of a signal handler leaves intact.
"""
