"""``python -m tests.gpu.check``; scripts/gpu_check runs it."""

import sys

from tests.gpu.check.command import main

if __name__ == "__main__":
    sys.exit(main())
