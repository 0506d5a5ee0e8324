"""The stage on data-parallel training: two ranks with half the batch each reach the parameters of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gpu.check import rank_jobs, training_jobs
from tests.gpu.check.place import Place, called, joined, leave
from tests.gpu.check.record import Reporter

__all__ = ["both", "same"]

_TOLERANCE = 1e-9
_NEEDS_S = 2.0


def both(reporter: Reporter, place: Place) -> None:
    """Explicit gradients for CuPy, autograd for torch."""
    for name in place.kits:
        train = training_jobs.transformer if name == "torch" else training_jobs.perceptron
        reporter.check(
            f"{name}: two ranks train as one", _train, reporter, place, name, train, needs=_NEEDS_S
        )


def _train(reporter: Reporter, place: Place, name: str, train: Any) -> None:
    results: dict[int, list[dict[str, Any]]] = {}
    for size in (1, 2):
        with joined(place, size, [name]) as job:
            called(place, job, rank_jobs.warm_up, name)
            results[size] = called(place, job, train, name, timeout=2 * place.patience)  # this one is traced
            if size == 2:
                reporter.figure(name, same(results))
            leave(place, job)


def same(results: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Check that all ranks of both runs have the same parameters, and that the loss has decreased.

    Returns:
        The largest relative difference, and the other results of the runs.
    """
    reference = results[1][0]
    worst = 0.0
    for result in results[2]:
        for mine, theirs in zip(result["parameters"], reference["parameters"], strict=True):
            a, b = np.asarray(mine), np.asarray(theirs)
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    assert worst <= _TOLERANCE, f"parameters differ by {worst:g} (relative)"
    first, last = reference["losses"][0], reference["losses"][-1]
    assert last < 0.9 * first, f"the loss went from {first} to {last}"
    told = {key: value for key, value in results[2][0].items() if key != "parameters"}
    return {"relative difference": worst, **told}
