"""``python -m tests.gpu.check``; scripts/gpu_check runs it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT)]

from tests.gpu.check.command import main  # noqa: E402 - needs the path

if __name__ == "__main__":
    sys.exit(main())
