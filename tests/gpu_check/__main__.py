"""``python -m gpu_check``, with tests/ on the path; scripts/gpu_check sees to that."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from gpu_check.command import main  # noqa: E402 - needs the path

if __name__ == "__main__":
    sys.exit(main())
