#!/usr/bin/env python3
"""``python -m unicoll.bench`` from an uninstalled checkout: ``python scripts/bench.py OP
[flags]``."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    # Replaces this file's directory at the start of the module search path.
    sys.path[0] = ROOT

    from unicoll.bench import main

    sys.exit(main())
