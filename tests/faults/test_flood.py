"""A job continues while connections without the secret flood its ports: the short form of scripts/flood.py."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.ranks import ROOT, environment


@pytest.mark.every(n=0)
def test_a_job_continues_in_a_flood() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "flood.py"), "--short"]
    done = subprocess.run(
        command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "held"
    reached = re.search(r"open at once: (\d+) silent", done.stdout)
    assert reached is not None
    assert int(reached[1]) > 200, done.stdout  # more than one listener takes with 1024 descriptors
    counts = re.findall(r"at most (\d+) with it; the cap is (\d+)", done.stdout)
    assert len(counts) == 2
    clients = re.search(r"new clients +(\d+) +(\d+)", done.stdout)
    assert clients is not None
    assert int(clients[2]) > 0, done.stdout
    for most, cap in counts:
        assert 0 < int(most) <= int(cap) < 1024, done.stdout
