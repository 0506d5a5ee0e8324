"""The command ``unicoll``: ``unicoll run``, ``doctor``, ``trace`` and ``bench``; also ``python -m
unicoll``.

Unlike ``python -m``, the command does not import modules from the working directory, which may be
another user's.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.path and sys.path[0] == __file__.rpartition("/")[0]:
    # The file was run by its path: Python puts the file's folder first, where "import trace" would find
    # unicoll.trace.
    del sys.path[0]

import os
from collections.abc import Sequence
from importlib import import_module

PROGRAM = os.path.abspath(__file__)
"""Python runs this file by its path without the working directory in ``sys.path``, unlike ``-m
unicoll``."""
VERBS = {
    "run": "start a distributed program, as torchrun does (also: unirun)",
    "doctor": "report on this machine, or on the ranks of a job",
    "trace": "say what happened in a job, from the flight recorder dumps of its ranks",
    "bench": "measure an operation, side by side with other libraries",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb with the arguments after it (``sys.argv[1:]`` if None); returns its exit status.

    No verb, or an unknown one, is an error with status 2.
    """
    verb, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if verb in VERBS:
        status: int = import_module(f"unicoll.{verb}").main(arguments)
        return status
    if verb == "--version":
        from importlib.metadata import version

        print(f"unicoll {version('unicoll')}")
        return 0
    lines = [
        "usage: unicoll VERB [arguments]",
        "",
        *(f"  {name:8}{text}" for name, text in VERBS.items()),
    ]
    lines += ["", "unicoll VERB --help lists its arguments; unicoll --version prints the version."]
    asked = verb in ("-h", "--help")
    if verb and not asked:
        lines[:0] = [f"unicoll: error: there is no verb {verb!r}", ""]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
