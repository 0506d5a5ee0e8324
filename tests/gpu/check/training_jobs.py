"""Data-parallel training on one rank: a perceptron with explicit gradients, a transformer with autograd."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check.kits import Kit, kit
from tests.gpu.check.trace_jobs import traced, waiting
from unicoll.parallel import GradientBuckets, broadcast_parameters

__all__ = ["overlap", "perceptron", "transformer"]

_STEPS, _RATE, _BATCH = 20, 0.1, 64
_BUCKET_MB = 0.01


class _Averages:
    """The interface of GradientBuckets for other arrays."""

    def __init__(self, parameters: list[Any]) -> None:
        self._given: dict[int, tuple[Any, Any]] = {}
        self._count = len(parameters)

    def ready(self, index: int, gradient: Any) -> None:
        """Start averaging a gradient."""
        self._given[index] = gradient, dist.all_reduce(gradient, op=dist.ReduceOp.AVG, async_op=True)

    def wait(self) -> list[Any]:
        """The averages in order."""
        for _, work in self._given.values():
            work.wait()
        found = [self._given[i][0] for i in range(self._count)]
        self._given = {}
        return found


def perceptron(name: str) -> dict[str, Any]:
    """Two layers in float64; the gradients of the last layer are reduced while those of the first are computed."""
    k, me, n = kit(name), dist.get_rank(), dist.get_world_size()
    rng = np.random.default_rng(7)
    x, y = rng.standard_normal((_BATCH, 16)), rng.standard_normal((_BATCH, 4))
    weights = [k.array(rng.standard_normal((16, 32)) / 4), k.array(rng.standard_normal((32, 4)) / 6)]
    if k.simulated:
        averages: Any = _Averages(weights)
    else:
        broadcast_parameters(weights)
        averages = GradientBuckets(weights, bucket_cap_mb=_BUCKET_MB)
    mine = _Perceptron(k, x[me::n], y[me::n])
    losses = []
    for _ in range(_STEPS):
        loss, gradients = mine.step(weights)
        for index, gradient in gradients:
            averages.ready(index, gradient)
        for weight, gradient in zip(weights, averages.wait(), strict=True):
            k.compute(weight, lambda xp, w, g: w - _RATE * g, weight, gradient)
        losses.append(loss)
    values = [float(np.asarray(k.numpy(loss)).reshape(-1)[0]) for loss in losses]
    return {"losses": values, "parameters": [np.asarray(k.numpy(w)) for w in weights]}


class _Perceptron:
    """Forward and backward pass on a rank's part of the batch; all arrays are on the device."""

    def __init__(self, k: Kit, x: Any, y: Any) -> None:
        self._k = k
        self._x, self._y = k.array(np.ascontiguousarray(x)), k.array(np.ascontiguousarray(y))
        self._rows = x.shape[0]

    def _new(self, *shape: int) -> Any:
        return self._k.array(np.zeros(shape))

    def step(self, weights: list[Any]) -> tuple[Any, Iterable[tuple[int, Any]]]:
        """The loss, then the gradients, last layer first."""
        k, rows = self._k, self._rows
        first, last = weights
        hidden, error, loss = self._new(rows, 32), self._new(rows, 4), self._new(1)
        k.compute(hidden, lambda xp, x, w: xp.maximum(x @ w, 0), self._x, first)
        k.compute(error, lambda xp, h, w, y: 2 * (h @ w - y) / y.size, hidden, last, self._y)
        k.compute(loss, lambda xp, e: (e * e).sum() * e.size / 4, error)

        def gradients() -> Iterable[tuple[int, Any]]:
            g_last, g_first = self._new(32, 4), self._new(16, 32)
            k.compute(g_last, lambda xp, h, e: h.T @ e, hidden, error)
            yield 1, g_last
            k.compute(
                g_first, lambda xp, x, e, w, h: x.T @ ((e @ w.T) * (h > 0)), self._x, error, last, hidden
            )
            yield 0, g_first

        return loss, gradients()


def transformer(name: str, device: str = "cuda") -> dict[str, Any]:
    """One encoder layer in float64, whose gradients are averaged as autograd computes them; on CUDA also traced."""
    torch: Any = importlib.import_module("torch")
    me, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = torch.nn.Sequential(layer, torch.nn.Linear(32, 1, dtype=torch.float64)).to(device)
    x, y = torch.randn(16, 8, 32, dtype=torch.float64), torch.randn(16, 8, 1, dtype=torch.float64)
    mine, due = x[me::n].to(device), y[me::n].to(device)
    parameters = list(model.parameters())
    broadcast_parameters(parameters)
    buckets = GradientBuckets(parameters, bucket_cap_mb=_BUCKET_MB, first_bucket_mb=_BUCKET_MB / 2)
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(
            lambda given, index=index: buckets.ready(index, given.grad)
        )
    optimizer = torch.optim.SGD(parameters, lr=_RATE)

    def step() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(mine), due)
        loss.backward()
        for parameter, gradient in zip(parameters, buckets.wait(), strict=True):
            parameter.grad.copy_(gradient)
        optimizer.step()
        return loss.detach()

    losses = [step() for _ in range(_STEPS)]
    told = _traced(torch, step) if device == "cuda" else {}
    values = [float(loss) for loss in losses]
    return {"losses": values, "parameters": [p.detach().cpu().numpy() for p in parameters], **told}


def _traced(torch: Any, step: Any) -> dict[str, Any]:
    """Two more steps under torch's profiler: calls that wait for the device, and the overlap with computation."""
    torch.cuda.synchronize()

    def body() -> None:
        step()
        step()

    calls, events = traced(torch, body)
    on_device = [e for e in events if str(e.device_type).endswith("CUDA")]
    spans = [("nccl" in e.name.lower(), e.time_range.start, e.time_range.end) for e in on_device]
    return {"trace": {"waiting": waiting(calls), "calls": dict(calls), **overlap(spans)}}


def overlap(spans: Iterable[tuple[bool, float, float]]) -> dict[str, float]:
    """For spans (True for communication, start, end in us): the time of each kind, and of both at once."""
    edges = sorted(
        edge
        for travels, start, end in spans
        for edge in ((start, 1, travels), (end, -1, travels))
        if end > start
    )
    running, total = [0, 0], {"computing_us": 0.0, "travelling_us": 0.0, "both_us": 0.0}
    before = 0.0
    for at, step, travels in edges:
        length = at - before
        total["computing_us"] += length if running[0] else 0.0
        total["travelling_us"] += length if running[1] else 0.0
        total["both_us"] += length if all(running) else 0.0
        running[travels] += step
        before = at
    return total
