"""torch.distributed's tutorial, step by step: the scripts run as they are and with one import line changed.

The scripts of ``tutorial/`` use torch.distributed. Each runs once so, on torch's Gloo, and once with
``import unicoll as dist`` in place of its import; both runs must say the same.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT, environment, free_port

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SCRIPTS = Path(__file__).parent / "tutorial"
DIGITS = ROOT / "examples" / "data" / "optdigits.csv.gz"
TORCH, OURS = "import torch.distributed as dist\n", "import unicoll as dist\n"
LINES = {"messages": 4, "collective": 42, "ring": 12, "meeting": 9, "training": 6}


def number_or_word(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def run(folder: Path, name: str, *, exits_well: bool = True) -> list[list[str | float]]:
    """The lines that a script's processes print, in words and numbers, sorted."""
    ended = subprocess.run(
        [sys.executable, f"{name}.py", str(free_port()), str(DIGITS)],
        cwd=folder,
        env=environment({"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if exits_well:
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stderr == ""
    return [[number_or_word(w) for w in line.split()] for line in sorted(ended.stdout.splitlines())]


def translated(folder: Path) -> Path:
    """A copy of the scripts with their one import line replaced."""
    for script in SCRIPTS.glob("*.py"):
        source = script.read_text()
        assert source.count(TORCH) == (script.stem in LINES), script
        assert "torch.distributed" not in source.replace(TORCH, ""), script
        (folder / script.name).write_text(source.replace(TORCH, OURS))
    return folder


def about(word: str | float) -> object:
    return pytest.approx(word, rel=1e-5) if isinstance(word, float) else word


def test_every_script_is_run() -> None:
    assert {script.stem for script in SCRIPTS.glob("*.py")} == {*LINES, "processes"}


@pytest.mark.parametrize("name", LINES)
def test_both_say_the_same(name: str, tmp_path: Path) -> None:
    here, there = tmp_path / "torch", tmp_path / "unicoll"
    here.mkdir()
    there.mkdir()
    for script in SCRIPTS.glob("*.py"):
        (here / script.name).write_text(script.read_text())
    # torch's processes have said everything when they, now and then, abort at exit
    expected = run(here, name, exits_well=False)
    found = run(translated(there), name)
    assert len(expected) == LINES[name]
    assert found == [[about(word) for word in line] for line in expected]
