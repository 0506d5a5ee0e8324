"""``python -m unicoll.doctor``."""

import sys

from unicoll.doctor import main

if __name__ == "__main__":
    sys.exit(main())
