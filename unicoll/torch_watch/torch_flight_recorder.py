"""What torch's own flight recorder says of a group's collectives in progress.

torch (2.13 and later for Gloo, earlier for NCCL) records the collectives that its C++ code starts,
too, those of DistributedDataParallel and functional ones, and which have ended, on NCCL on the
device. It is read when a collective seems to last, so calls cost nothing more.
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import json
import time
from math import prod
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_c10d as torchs

from unicoll.arrays.buffer import Buffer
from unicoll.arrays.types import ALL_DTYPES, DType
from unicoll.calls.call import Call
from unicoll.calls.ops import OPS, Arity, Op, Sizes
from unicoll.devices import runtimes
from unicoll.torch_watch.torch_groups import TorchGroup

_LASTS_S = 1.0
"""A collective that has lasted for so long is looked up: a full recorder of torch takes 50 ms to
read."""

_OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_to_allv": "all_to_all_single",
    "ALLTOALL_BASE": "all_to_all_single",
}
"""Operations by torch's names, where these are others."""
_TYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "ComplexHalf": "complex32",
}
_DTYPES = {dtype.name: dtype for dtype in ALL_DTYPES}
_UNKNOWN = Op("collective", 0, Arity.NONE, Arity.NONE, Sizes.NONE)


class UnrecordedCall(Call):
    """A collective that torch's C++ code has started.

    Attributes:
        presumed: True if torch's flight recorder does not have it.
    """

    __slots__ = ("presumed",)

    def __init__(
        self, group: TorchGroup, seq: int, site: str, entry: dict[str, Any] | None = None
    ) -> None:
        inputs: tuple[Buffer, ...] = ()
        outputs = inputs
        op = _UNKNOWN
        if entry is not None:
            name = str(entry["profiling_name"]).rpartition(":")[2]
            op = OPS.get(_OPS.get(name, name), _UNKNOWN)
            inputs = _buffers(entry["input_sizes"], entry["input_dtypes"])
            outputs = _buffers(entry["output_sizes"], entry["output_dtypes"])
        super().__init__(op, inputs, outputs, group.timeout)
        self.presumed = entry is None
        self.seq, self.site = seq, site

    @property
    def is_described(self) -> bool:
        """True if the operation is known."""
        return self.op is not _UNKNOWN

    def describe(self) -> str:
        return (
            super().describe()
            if self.is_described
            else "a collective that torch's C++ code has started"
        )

    def describe_with_number(self) -> str:
        if self.is_described:
            return super().describe_with_number()
        return f"collective #{self.seq}, which torch's C++ code has started,"


def _buffers(sizes: list[list[int]], dtypes: list[str]) -> tuple[Buffer, ...]:
    found = []
    for i, shape in enumerate(sizes):
        name = dtypes[i] if i < len(dtypes) else "?"
        name = _TYPES.get(name, name.lower())
        dtype = _DTYPES.get(name) or DType(0, name, "u", "u1")
        found.append(Buffer(None, dtype, tuple(shape), None, count=prod(shape)))
    return tuple(found)


class InProgress(NamedTuple):
    """The oldest collective of a group that has not ended: how many were started after it, and
    torch's record of it."""

    later: int
    entry: dict[str, Any]


class TorchRecorder:
    """Looks up a group's collectives in torch's flight recorder, if its last one lasts.

    Attributes:
        is_available: False if torch's flight recorder does not have the group's collectives: it is
            not of this version, or is turned off.
    """

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        name = "_dump_fr_trace_json" if group.completes else "_dump_nccl_trace_json"
        self._dump = getattr(torchs, name, None)
        self.is_available = self._dump is not None
        self._seq = 0
        self._since = self._next = 0.0
        self._found: InProgress | None = None

    def in_progress(self, seq: int) -> InProgress | None:
        """The oldest collective in progress, if the last one, ``seq``, is not new; None if there is
        none."""
        now = time.monotonic()
        if seq != self._seq:
            self._seq, self._since, self._next, self._found = seq, now, now + _LASTS_S, None
        if self._dump is None or not seq:
            return None
        if now >= self._next:
            # A full recorder takes long to read, so it is read more and more rarely while the
            # collective lasts.
            self._next = now + max(_LASTS_S, (now - self._since) / 2)
            found = None if self._all_have_ended() else self._read()
            if found is not None and not self._group.has_messages:
                # The record may be one of an earlier group of this name, whose numbers differ.
                found = found if found.entry["collective_seq_id"] == seq - found.later else None
            # If a collective was posted during the reading, the count of later ones is wrong.
            self._found = found if self._group.sequence == seq else None
        elif self._found is not None and self._all_have_ended():
            self._found = None
        return self._found

    def _all_have_ended(self) -> bool:
        """True if no collective of any group is in progress; that takes 0.1 ms."""
        assert self._dump is not None
        status = json.loads(self._dump(False, False)).get("pg_status", {}).values()
        self.is_available = bool(status)
        return all(
            one["last_completed_collective"] == one["last_enqueued_collective"] for one in status
        )

    def _read(self) -> InProgress | None:
        assert self._dump is not None
        if torch.cuda.is_initialized() and runtimes.reason_against("cuda") is None:
            # Torch queries the events of NCCL's calls on this thread, which would otherwise break
            # the capture of a graph on another one.
            runtimes.runtime("cuda").ignore_captures()
        name = self._group.torchs_name
        entries = json.loads(self._dump(True, False))["entries"]
        mine = [e for e in entries if e["process_group"][0] == name and not e["is_p2p"]]
        self.is_available = bool(mine)
        numbers = [entry["collective_seq_id"] for entry in mine]
        # Where the numbers go down, a new group of the same name begins.
        begin = max((i for i in range(1, len(mine)) if numbers[i] < numbers[i - 1]), default=0)
        mine = mine[begin:]
        first = next((i for i, entry in enumerate(mine) if not entry["retired"]), None)
        if first is None:
            return None
        number = mine[first]["collective_seq_id"]
        later = {entry["collective_seq_id"] for entry in mine[first:]} - {number}
        return InProgress(len(later), mine[first])
