"""``python -m unicoll.bench``."""

import sys

from unicoll.bench import main

if __name__ == "__main__":
    sys.exit(main())
