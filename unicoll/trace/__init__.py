"""The analyser of flight recorder dumps: ``python -m unicoll.trace DIRECTORY``.

It reads the ``rank_R.json`` of all ranks, which ``unicoll.dump_flight_recorder()``, SIGUSR1 or a failure has written,
and prints in one sentence what happened, with the last calls. It writes the calls of all ranks on one clock as a trace
for https://ui.perfetto.dev.
"""

from unicoll.trace.command import main

__all__ = ["main"]
