"""The quickstart's training: its gradients, and its check of the result on real processes."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_digits.py"
PATIENCE = 240

# Trains like the example, with one injected error.
WRONG_RESULTS = """
import sys
sys.path.insert(0, sys.argv.pop())
import train_digits
import unicoll as dist

wrong = sys.argv.pop()
train = train_digits.train_parallel
buckets = train_digits.GradientBuckets

def train_and_flip_a_bit(*settings):
    network = train(*settings)
    if dist.get_rank() == 1:
        network.parameters[0][0, 0] *= 1 + 2**-52
    return network

if wrong == "weights":
    train_digits.train_parallel = train_and_flip_a_bit
else:
    train_digits.GradientBuckets = lambda *args, **settings: buckets(*args, op=dist.ReduceOp.SUM, **settings)
sys.exit(train_digits.main())
"""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unicoll.run", "--nproc-per-node", str(processes), *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # the checkout need not be installed
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def printed_difference(output: str) -> float:
    match = re.search(r"largest relative difference to the single-process run: (\S+) ", output)
    assert match is not None, output
    return float(match[1])


def test_the_data_are_the_documented_ones(example: ModuleType) -> None:
    table = gzip.decompress(example.DATA.read_bytes())
    assert hashlib.sha256(table).hexdigest() in (example.DATA.parent / "README.md").read_text()
    training, test = example.load_digits()
    assert (training.pixels.shape, test.pixels.shape) == ((1437, 64), (360, 64))
    labels = np.concatenate([training.labels, test.labels])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert training.pixels.min() == 0
    assert training.pixels.max() == 1


def test_the_hand_written_gradients_are_the_finite_differences(example: ModuleType) -> None:
    network = example.Network(seed=4)
    images, _ = example.load_digits()
    pixels, labels = images.pixels[:20], images.labels[:20]

    def loss() -> float:
        scores = network.forward(pixels)[-1]
        return float(-scores[np.arange(len(labels)), labels].mean())

    gradients = dict(network.backward(network.forward(pixels), labels))
    assert sorted(gradients) == list(range(len(network.parameters)))
    rng = np.random.default_rng(0)
    step = 1e-6
    for number, parameter in enumerate(network.parameters):
        assert gradients[number].shape == parameter.shape
        steepest = np.abs(gradients[number]).argmax()
        for place in [steepest, *rng.integers(parameter.size, size=5)]:
            weight = np.unravel_index(place, parameter.shape)
            before = parameter[weight]
            parameter[weight] = before + step
            above = loss()
            parameter[weight] = before - step
            below = loss()
            parameter[weight] = before
            assert gradients[number][weight] == pytest.approx(
                (above - below) / (2 * step), rel=1e-4, abs=1e-8
            )


def test_one_process_learns_the_digits(example: ModuleType) -> None:
    training, test = example.load_digits()
    network = example.train_alone(training, epochs=40, share=64, rate=0.1, seed=0, world=1)
    assert example.count_correct(network, test) > 0.97 * len(test)


@pytest.mark.every(n=3)
@pytest.mark.parametrize("processes", [1, 3, 4])
def test_processes_train_together(processes: int) -> None:
    done = launch(processes, str(EXAMPLE), "--epochs", "3", "--seed", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"bit-identical on all {processes} processes" in done.stdout
    assert re.search(r"epoch +3/3  loss 0\.\d+ +accuracy +\d+\.\d%", done.stdout)
    assert printed_difference(done.stdout) < 1e-9
    assert re.search(r"test accuracy: (8|9)\d\.\d%", done.stdout)
    assert "VERDICT: identical and correct" in done.stdout


@pytest.mark.every(n=2)
@pytest.mark.parametrize("wrong", ["weights", "sums"])
def test_the_check_detects_errors(wrong: str, tmp_path: Path) -> None:
    script = tmp_path / "wrong_results.py"
    script.write_text(WRONG_RESULTS)
    done = launch(2, str(script), "--epochs", "2", wrong, str(EXAMPLE.parent))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VERDICT: FAILED" in done.stdout
    assert ("ranks [1] DIFFER" in done.stdout) == (wrong == "weights")
    assert (printed_difference(done.stdout) > 1e-3) == (wrong == "sums")
