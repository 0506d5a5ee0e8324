"""Parameters and gradients across ranks: broadcast, averaging, and bitwise comparison."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.api.world import member
from unicoll.arrays.families import host_bytes, kind_of
from unicoll.arrays.types import ReduceOp
from unicoll.errors import DistError
from unicoll.parallel.packing import (
    Arrays,
    Packer,
    check_writable,
    listed,
    named,
    plan_buckets,
)

MESSAGE_BYTES = 25 * 2**20
DIGEST_BYTES = 32


def broadcast_parameters(parameters: Arrays, src: int = 0, group: Any = None) -> None:
    """Overwrite every rank's arrays with those of one rank; small arrays share a message.

    Args:
        parameters: arrays, as a sequence or a mapping; the same order, shapes and dtypes on every
            rank.
        src: the global rank of the source.
        group: the process group; the default group when None.

    Raises:
        DistArgumentError: an array is read-only, or ``src`` is not in the group.
        DistTypeError: an element is not an array, or of a dtype that cannot be communicated.
        NotInitializedError: no group is given, and there is no default group.
    """
    members = member(group, "broadcast_parameters")
    root = members.group_rank(src)
    for packer in _packers(parameters):
        packer.pack()
        members.broadcast(packer.flat, src=root)
        packer.unpack()


def average_gradients(gradients: Arrays, group: Any = None) -> None:
    """Replace every array by its average over the ranks, in place; small arrays share a message.

    For training loops that communicate after the backward pass; :class:`GradientBuckets` overlaps
    the two.

    Args:
        gradients: arrays, as a sequence or a mapping; the same order, shapes and dtypes on every
            rank.
        group: the process group; the default group when None.

    Raises:
        DistArgumentError: an array is read-only.
        DistTypeError: an element is not an array, or of a dtype that cannot be communicated.
        NotInitializedError: no group is given, and there is no default group.
    """
    members = member(group, "average_gradients")
    packers = _packers(gradients)
    works: list[Any] = []
    for packer in packers:
        # The first arrays are averaged while the next ones are packed.
        packer.pack()
        works.append(members.all_reduce(packer.flat, op=ReduceOp.AVG, async_op=True))
    for packer, work in zip(packers, works, strict=True):
        work.wait()
        packer.unpack()


def parameters_digest(parameters: Arrays) -> str:
    """SHA-256, in hex, of the arrays' names, dtypes, shapes and bytes.

    The names of arrays in a sequence are their indices. The library and device have no influence.
    """
    return arrays_digest(*named(parameters)).hex()


def check_identical(parameters: Arrays, group: Any = None) -> str:
    """Check that all ranks have bitwise equal arrays. All ranks of the group call it.

    Args:
        parameters: arrays, as a sequence or a mapping.
        group: the process group; the default group when None.

    Returns:
        The common digest, as :func:`parameters_digest` returns it.

    Raises:
        DistError: the arrays differ; raised on all ranks. The message names the ranks whose arrays
            differ from the most common ones (the lowest rank's, in case of a tie), and the arrays
            that differ; ``rank`` is the first such rank.
        NotInitializedError: no group is given, and there is no default group.
    """
    members = member(group, "check_identical")
    names, arrays = named(parameters)
    own = arrays_digest(names, arrays)
    count = len(arrays).to_bytes(8, "little")
    like = arrays[0] if arrays else np.empty(0)
    answers = _gather(members, own + count, like)
    if len(set(answers)) == 1:
        return own.hex()
    # Counter keeps the order of the ranks, so of equally common answers that of the lowest rank
    # comes first.
    common = Counter(answers).most_common(1)[0][0]
    deviating = [r for r, answer in enumerate(answers) if answer != common]
    if len({answer[DIGEST_BYTES:] for answer in answers}) > 1:
        counts = ", ".join(
            str(int.from_bytes(answer[DIGEST_BYTES:], "little")) for answer in answers
        )
        what = f"they have different numbers of arrays ({counts}, by rank)"
    else:
        # All ranks have the same answers, so all of them take part in this second exchange.
        each = b"".join(
            arrays_digest([name], [array]) for name, array in zip(names, arrays, strict=True)
        )
        rows = [
            np.frombuffer(row, np.uint8).reshape(-1, DIGEST_BYTES)
            for row in _gather(members, each, like)
        ]
        reference = rows[answers.index(common)]
        differs = np.any([(rows[r] != reference).any(axis=1) for r in deviating], axis=0)
        what = f"they differ in {listed([names[i] for i in np.flatnonzero(differs)])}"
    ranks = [members.global_rank(r) for r in deviating]
    raise DistError(
        f"parameters are not the same on all ranks: rank{'s' * (len(ranks) > 1)} "
        f"{', '.join(map(str, ranks))} of {len(answers)} differ from the others; {what}",
        rank=ranks[0],
    )


def _packers(arrays: Arrays) -> list[Packer]:
    names, members = named(arrays)
    for name, array in zip(names, members, strict=True):
        check_writable(name, array)
    plan = plan_buckets(
        [kind_of(a) for a in members],
        [a.nbytes for a in members],
        range(len(members)),
        MESSAGE_BYTES,
        MESSAGE_BYTES,
    )
    return [Packer([members[i] for i in bucket]) for bucket in plan]


def arrays_digest(names: Sequence[str], arrays: Sequence[Any]) -> bytes:
    """SHA-256 of the arrays' names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, array in zip(names, arrays, strict=True):
        dtype = kind_of(array).dtype_name
        digest.update(f"{name!r} {dtype} {list(array.shape)}\n".encode())
        digest.update(host_bytes(array).data)
    return digest.digest()


def _gather(group: Any, data: bytes, like: Any) -> list[bytes]:
    """The bytes of each rank, equally many, communicated on the device of ``like``, which the group
    supports."""
    size = group.size()
    family = kind_of(like).family
    own: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8).copy()
    everyone = family.bytes_on_device_of(like, np.empty(size * len(data), np.uint8))
    group.all_gather_into_tensor(everyone, family.bytes_on_device_of(like, own))
    return [row.tobytes() for row in host_bytes(everyone).reshape(size, -1)]
