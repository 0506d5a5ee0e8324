"""``python -m unicoll.run``."""

import sys

from unicoll.run import main

if __name__ == "__main__":
    sys.exit(main())
