"""Programs that a test starts and waits for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.ranks import ROOT, environment


def python(
    *words: str | Path, cwd: Path = ROOT, input: str = "", timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, without the variables of a launcher; ``variables`` are added to the environment."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment(variables),
        input=input,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
