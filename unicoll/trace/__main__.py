"""``python -m unicoll.trace``."""

import sys

from unicoll.trace import main

if __name__ == "__main__":
    sys.exit(main())
