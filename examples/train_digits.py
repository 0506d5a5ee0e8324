"""Trains a small network on images of handwritten digits, data-parallel, with NumPy alone.

    unirun --nproc-per-node 4 examples/train_digits.py

Each process computes the gradients of its share of every batch; ``GradientBuckets`` averages them
over the processes during the backward pass. At the end the program checks the result: all processes
have bit-identical weights, and they equal those of one process that trains on the whole batches, up
to rounding. Otherwise it exits with 1. It runs with any number of processes, including one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

import unicoll as dist
from unicoll.parallel import (
    DistributedSampler,
    GradientBuckets,
    broadcast_parameters,
    parameters_digest,
)

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

DATA = Path(__file__).parent / "data" / "optdigits.csv.gz"
TEST_IMAGES = 360
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
# The parallel sums round differently from the single process's, and training amplifies that, epoch
# by epoch; a wrong gradient or a lost sample changes the first digits.
ROUNDING = 1e-9


class Network:
    """Layers of 64, 128, 64 and 10 units with ReLU between them; softmax cross-entropy as loss.

    ``parameters`` is weights, bias, weights, bias... from the first layer to the last.
    """

    SIZES = (64, 128, 64, 10)

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.parameters: list[Array] = []
        for inputs, outputs in zip(self.SIZES[:-1], self.SIZES[1:], strict=True):
            self.parameters.append(rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs))
            self.parameters.append(np.zeros(outputs))

    def forward(self, images: Array) -> list[Array]:
        """The images and each layer's output; the last one's rows are logarithms of
        probabilities."""
        outputs = [images]
        for layer in range(0, len(self.parameters), 2):
            weights, bias = self.parameters[layer : layer + 2]
            outputs.append(outputs[-1] @ weights + bias)
            if layer < len(self.parameters) - 2:
                np.maximum(outputs[-1], 0, out=outputs[-1])
        scores = outputs[-1]
        scores -= scores.max(axis=1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return outputs

    def backward(self, outputs: list[Array], labels: Labels) -> Iterator[tuple[int, Array]]:
        """Each parameter's number and gradient of the mean loss, from the last layer to the
        first."""
        delta = np.exp(outputs[-1])
        delta[np.arange(len(labels)), labels] -= 1
        delta /= len(labels)
        for layer in reversed(range(0, len(self.parameters), 2)):
            inputs = outputs[layer // 2]
            yield layer + 1, delta.sum(axis=0)
            yield layer, inputs.T @ delta
            if layer:
                delta = (delta @ self.parameters[layer].T) * (inputs > 0)


class Optimizer:
    """Stochastic gradient descent with momentum and weight decay; the rate falls to zero along a
    cosine."""

    def __init__(self, parameters: list[Array], rate: float, steps: int) -> None:
        self.parameters = parameters
        self.velocities = [np.zeros_like(p) for p in parameters]
        self.rate = rate
        self.steps = steps
        self.done = 0

    def step(self, gradients: list[Array]) -> None:
        rate = self.rate * (1 + np.cos(np.pi * self.done / self.steps)) / 2
        for parameter, velocity, gradient in zip(
            self.parameters, self.velocities, gradients, strict=True
        ):
            velocity *= MOMENTUM
            velocity -= rate * (gradient + WEIGHT_DECAY * parameter)
            parameter += velocity
        self.done += 1


class Images:
    """Images as rows of 64 numbers in 0 .. 1, and their labels."""

    def __init__(self, pixels: Array, labels: Labels) -> None:
        self.pixels = pixels
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, order: list[int], size: int) -> Iterator[tuple[Array, Labels]]:
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            yield self.pixels[chosen], self.labels[chosen]


def load_digits() -> tuple[Images, Images]:
    """Training and test images: the same random split in every process and every run."""
    table = np.loadtxt(DATA, delimiter=",", dtype=np.int64)
    table = table[np.random.default_rng(1797).permutation(len(table))]
    pixels, labels = table[:, :-1] / 16.0, table[:, -1]
    return Images(pixels[TEST_IMAGES:], labels[TEST_IMAGES:]), Images(
        pixels[:TEST_IMAGES], labels[:TEST_IMAGES]
    )


def count_correct(network: Network, images: Images) -> int:
    return int((network.forward(images.pixels)[-1].argmax(axis=1) == images.labels).sum())


def steps_per_epoch(samples: int, batch: int) -> int:
    return -(-samples // batch)


def train_parallel(images: Images, epochs: int, share: int, rate: float, seed: int) -> Network:
    """Train together with the other processes; each takes ``share`` images of every batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    network = Network(seed + rank)  # different on purpose: the broadcast makes them the same
    broadcast_parameters(network.parameters)
    sampler = DistributedSampler(images, shuffle=True, seed=seed)
    optimizer = Optimizer(network.parameters, rate, epochs * steps_per_epoch(len(sampler), share))
    # Buckets smaller than this small network, so that the last layers' gradients travel before the
    # first's.
    buckets = GradientBuckets(network.parameters, bucket_cap_mb=0.07, first_bucket_mb=0.07)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        start, waited = time.perf_counter(), 0.0
        totals = np.zeros(3)  # loss, correct answers, images
        for pixels, labels in images.batches(list(sampler), share):
            outputs = network.forward(pixels)
            for number, gradient in network.backward(outputs, labels):
                buckets.ready(number, gradient)
            scores = outputs[-1]
            totals += (
                -scores[np.arange(len(labels)), labels].sum(),
                (scores.argmax(axis=1) == labels).sum(),
                len(labels),
            )
            blocked = time.perf_counter()
            gradients = buckets.wait()
            waited += time.perf_counter() - blocked
            optimizer.step(gradients)
        dist.all_reduce(totals)
        seconds = time.perf_counter() - start
        if rank == 0 and (epoch + 1 == epochs or (epoch + 1) % max(1, epochs // 12) == 0):
            loss, correct, seen = totals
            print(
                f"epoch {epoch + 1:3d}/{epochs}  loss {loss / seen:.4f}  accuracy"
                f" {correct / seen:6.1%}  {seen / seconds:8,.0f} images/s on {world}  waiting for"
                f" gradients {waited / seconds:4.0%}",
                flush=True,
            )
    return network


def train_alone(
    images: Images, epochs: int, share: int, rate: float, seed: int, world: int
) -> Network:
    """The same training in one process: the same batches, whole, in the same order."""
    network = Network(seed)
    samplers = [
        DistributedSampler(images, world, rank, shuffle=True, seed=seed) for rank in range(world)
    ]
    optimizer = Optimizer(
        network.parameters, rate, epochs * steps_per_epoch(len(samplers[0]), share)
    )
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        order = np.stack([list(sampler) for sampler in samplers], axis=1).ravel().tolist()
        for pixels, labels in images.batches(order, share * world):
            gradients = dict(network.backward(network.forward(pixels), labels))
            optimizer.step([gradients[i] for i in range(len(network.parameters))])
    return network


def relative_difference(network: Network, reference: Network) -> float:
    """The largest difference of a weight, relative to the largest weight of its layer."""
    pairs = zip(network.parameters, reference.parameters, strict=True)
    return max(float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in pairs)


def same_everywhere(network: Network) -> bool:
    """True if the weights are bit-identical on all processes; rank 0 prints the result."""
    world = dist.get_world_size()
    digests: list[str | None] = [None] * world
    dist.all_gather_object(digests, parameters_digest(network.parameters))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if dist.get_rank() == 0:
        if different:
            print(f"weights: ranks {different} DIFFER from rank 0")
        else:
            print(
                f"weights: bit-identical on all {world} processes (SHA-256"
                f" {str(digests[0])[:16]}...)"
            )
    return not different


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, over all processes"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at the start")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.epochs < 1 or chosen.batch_size < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    return chosen


def main() -> int:
    chosen = arguments()
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    training, test = load_digits()
    share = max(1, chosen.batch_size // world)
    if rank == 0:
        rounded = (
            f" ({chosen.batch_size} is no multiple of {world})"
            if share * world != chosen.batch_size
            else ""
        )
        print(
            f"{len(training)} training images, {len(test)} test images; {world} processes, "
            f"batches of {share * world}{rounded}",
            flush=True,
        )
    network = train_parallel(training, chosen.epochs, share, chosen.lr, chosen.seed)
    good = same_everywhere(network)
    if rank == 0:
        correct = count_correct(network, test)
        print(f"test accuracy: {correct / len(test):.1%} ({correct} of {len(test)})")
        alone = train_alone(training, chosen.epochs, share, chosen.lr, chosen.seed, world)
        difference = relative_difference(network, alone)
        print(
            f"largest relative difference to the single-process run: {difference:.1e} (bound"
            f" {ROUNDING:.0e})"
        )
        good = good and difference <= ROUNDING
        print("VERDICT: " + ("identical and correct" if good else "FAILED"), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
