"""The stage on data-parallel training: two ranks with half the batch each reach the parameters of one with all of it.

A perceptron with explicit gradients on CuPy, a transformer with autograd on torch.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check import rank_jobs
from tests.gpu.check.kits import kit
from tests.gpu.check.place import Place, called, joined, leave
from tests.gpu.check.record import Reporter
from unicoll.parallel import GradientBuckets, broadcast_parameters

_TOLERANCE = 1e-9
_NEEDS_S = 2.0
_STEPS, _RATE, _BATCH = 20, 0.1, 64
_BUCKET_MB = 0.01
Run = tuple[list[float], list[Any]]
"""The losses, and the parameters at the end."""


def both(reporter: Reporter, place: Place) -> None:
    """Explicit gradients for CuPy, autograd for torch."""
    for name in place.kits:
        train = transformer if name == "torch" else perceptron
        words = f"{name}: two ranks train as one"
        reporter.check(words, _train, reporter, place, name, train, needs=_NEEDS_S)


def _train(reporter: Reporter, place: Place, name: str, train: Any) -> None:
    with joined(place, 2, [name]) as job:
        called(place, job, rank_jobs.warm_up, name)
        reporter.figure(name, called(place, job, train, name, timeout=2 * place.patience)[0])
        leave(place, job)


# --- functions of ranks -----------------------------------------------------------------------------------------------


def _same(found: Run, alone: Run) -> dict[str, Any]:
    """Check that the parameters are those of a run on one rank, whose loss has decreased.

    Returns:
        The largest relative difference, and the losses.
    """
    pairs = zip(found[1], alone[1], strict=True)
    worst = max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)
    assert worst <= _TOLERANCE, f"parameters differ by {worst:g} (relative)"
    first, last = alone[0][0], alone[0][-1]
    assert last < 0.9 * first, f"the loss went from {first} to {last}"
    return {"relative difference": worst, "losses": found[0]}


class _Gradients:
    """The interface of GradientBuckets for one rank, and for arrays of the simulated device."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._given: dict[int, tuple[Any, Any]] = {}

    def ready(self, index: int, gradient: Any) -> None:
        """Start averaging a gradient."""
        reduces = self._ranks > 1
        work = dist.all_reduce(gradient, op=dist.ReduceOp.AVG, async_op=True) if reduces else None
        self._given[index] = gradient, work

    def wait(self) -> list[Any]:
        """The averages in order."""
        for _, work in self._given.values():
            if work is not None:
                work.wait()
        return [self._given[index][0] for index in sorted(self._given)]


def perceptron(name: str) -> dict[str, Any]:
    """Two layers in float64; the gradients of the last layer are reduced while those of the first are computed."""
    return _same(_perceptron(name, dist.get_rank(), dist.get_world_size()), _perceptron(name, 0, 1))


def _perceptron(name: str, me: int, n: int) -> Run:
    k, rng = kit(name), np.random.default_rng(7)
    x, y = rng.standard_normal((_BATCH, 16)), rng.standard_normal((_BATCH, 4))
    weights = [k.array(rng.standard_normal((16, 32)) / 4), k.array(rng.standard_normal((32, 4)) / 6)]
    averages: Any = _Gradients(n)
    if n > 1 and not k.simulated:
        broadcast_parameters(weights)
        averages = GradientBuckets(weights, bucket_cap_mb=_BUCKET_MB)
    mine, due = (k.array(np.ascontiguousarray(each[me::n])) for each in (x, y))
    rows, losses = len(x[me::n]), []
    first, last = weights
    for _ in range(_STEPS):
        hidden, error, loss, g_first, g_last = (
            k.array(np.zeros(shape)) for shape in ((rows, 32), (rows, 4), 1, (16, 32), (32, 4))
        )
        k.compute(hidden, lambda xp, x, w: xp.maximum(x @ w, 0), mine, first)
        k.compute(error, lambda xp, h, w, y: 2 * (h @ w - y) / y.size, hidden, last, due)
        k.compute(loss, lambda xp, e: (e * e).sum() * e.size / 4, error)
        k.compute(g_last, lambda xp, h, e: h.T @ e, hidden, error)
        averages.ready(1, g_last)
        k.compute(g_first, lambda xp, x, e, w, h: x.T @ ((e @ w.T) * (h > 0)), mine, error, last, hidden)
        averages.ready(0, g_first)
        for weight, gradient in zip(weights, averages.wait(), strict=True):
            k.compute(weight, lambda xp, w, g: w - _RATE * g, weight, gradient)
        losses.append(loss)
    values = [float(np.asarray(k.numpy(loss)).reshape(-1)[0]) for loss in losses]
    return values, [np.asarray(k.numpy(w)) for w in weights]


def transformer(name: str, device: str = "cuda") -> dict[str, Any]:
    """One encoder layer in float64, whose gradients are averaged as autograd computes them."""
    found = _transformer(device, dist.get_rank(), dist.get_world_size())
    return _same(found, _transformer(device, 0, 1))


def _transformer(device: str, me: int, n: int) -> Run:
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = torch.nn.Sequential(layer, torch.nn.Linear(32, 1, dtype=torch.float64)).to(device)
    x, y = torch.randn(16, 8, 32, dtype=torch.float64), torch.randn(16, 8, 1, dtype=torch.float64)
    mine, due = x[me::n].to(device), y[me::n].to(device)
    parameters = list(model.parameters())
    buckets: Any = _Gradients(n)
    if n > 1:
        broadcast_parameters(parameters)
        buckets = GradientBuckets(parameters, bucket_cap_mb=_BUCKET_MB, first_bucket_mb=_BUCKET_MB / 2)
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(
            lambda given, index=index: buckets.ready(index, given.grad)
        )
    optimizer = torch.optim.SGD(parameters, lr=_RATE)
    losses = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(mine), due)
        loss.backward()
        for parameter, gradient in zip(parameters, buckets.wait(), strict=True):
            parameter.grad.copy_(gradient)
        optimizer.step()
        losses.append(loss.detach())
    values = [float(loss) for loss in losses]
    return values, [p.detach().cpu().numpy() for p in parameters]
