#!/usr/bin/env python3
"""``python -m unicoll.run`` from an uninstalled checkout: ``python scripts/launch.py [flags] script
[arguments]``."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    # Replaces this file's directory at the start of the module search path.
    sys.path[0] = ROOT

    from unicoll.run import main

    sys.exit(main())
