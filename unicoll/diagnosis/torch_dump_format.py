"""The flight recorder's calls in the format of PyTorch's flight recorder, for its analyser
``torchfrtrace``.

The format is that of torch 2.7 and later. It has rules that unicoll's calls do not follow by
themselves:

* An operation must have a name of a fixed set. Others are recorded as "coalesced", which is
  compared by name only.
* Sizes of all ranks must be equal where torch has one tensor of all ranks' parts; lists become such
  a tensor.
* All ranks of a group must make each call. So the messages from one rank to another with one tag
  get a group of their own, in which they are numbered. Receives from any rank are left out, since
  their sources are not recorded.
* There is no failed state: a failed call is one that has not completed.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

from unicoll.calls.call_site import users_part
from unicoll.diagnosis.recorder_contents import RecordedCall

PREFIX = "nccl_trace_rank_"
"""Prefix of the files' names, as torch's."""

_VERSION = "2.10"
_BACKENDS = ("gloo", "nccl")
_NAMES = {
    "all_gather_into_tensor": "_all_gather_base",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    **{
        name: name
        for name in (
            "all_gather",
            "all_reduce",
            "all_to_all",
            "barrier",
            "broadcast",
            "gather",
            "reduce",
            "reduce_scatter",
            "scatter",
        )
    },
}
_SEVERAL = {
    "all_gather_into_tensor": "all_gather_into_tensor_coalesced",
    "all_reduce": "allreduce_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_tensor_coalesced",
}
"""Names of operations on several arrays as one call."""
_DTYPES = {
    "bfloat16": "BFloat16",
    "bool": "Bool",
    "complex128": "ComplexDouble",
    "complex64": "ComplexFloat",
    "float16": "Half",
    "float32": "Float",
    "float64": "Double",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "int8": "Char",
    "uint8": "Byte",
}
_STATES = {"failed": "started"}

Entry = dict[str, Any]


def dumped(
    rank: int, calls: Sequence[RecordedCall], groups: Sequence[Any], full: bool, epoch: float
) -> bytes:
    """This rank's dump; ``full`` if older calls may have been dropped, ``epoch`` is wall minus
    monotonic clock."""
    descriptions = {g.name: g.group_desc for g in groups}
    config = {g.name: _config(g.name, g.group_desc, g.ranks) for g in groups}
    status = {name: dict.fromkeys(_STATUS, -1) for name in config}
    counts: Counter[str] = Counter()
    entries: list[Entry] = []
    last: tuple[str, int] | None = None
    for call in calls:
        if call.is_message:
            own = call.ranks.index(rank)
            if call.peer in (-1, own) or call.tag is None or call.op == "probe":
                # Torch has no probes, and no messages to oneself, from any rank or with any tag.
                continue
            ends = (own, call.peer) if call.op == "send" else (call.peer, own)
            name = f"{call.group}: {ends[0]}->{ends[1]}, tag {call.tag}"
            description = "messages"
            members = [call.ranks[end] for end in ends]
            counts[name] += 1
            number, is_message = counts[name], True
        else:
            name, description, members = (
                call.group,
                descriptions.get(call.group, "undefined"),
                list(call.ranks),
            )
            number, is_message = call.seq or counts[name] + 1, False
            counts[name] = number
            # Calls with one number are the arrays of one batch, which torch records as one call.
            if last == (name, number) and number:
                _join(entries[-1], call)
                continue
        last = None if is_message else (name, number)
        config.setdefault(name, _config(name, description, members))
        entry = _entry(call, name, description, members, number, epoch)
        entries.append(entry)
        _note(status.setdefault(name, dict.fromkeys(_STATUS, -1)), entry, number)
    first = _first_record(calls) if full else 0
    for index, entry in enumerate(entries):
        entry["record_id"] = first + index
    content = {"version": _VERSION, "pg_config": config, "pg_status": status, "entries": entries}
    return pickle.dumps(content, protocol=4)


_STATUS = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")


def _config(name: str, description: str, ranks: Sequence[int]) -> Entry:
    return {"name": name, "desc": description, "ranks": str(list(ranks))}


def _note(status: dict[str, int], entry: Entry, number: int) -> None:
    reached = {"scheduled": 1, "started": 2, "completed": 3}[entry["state"]]
    for name in _STATUS[:reached]:
        status[name] = max(status[name], number)


def _first_record(calls: Sequence[RecordedCall]) -> int:
    """Number of the first entry, as if all ranks had dropped the same calls: torch drops what not
    all ranks have."""
    for index, call in enumerate(calls):
        if call.seq and not call.is_message:
            return max(0, call.seq - 1 - index)
    return 0


def _entry(
    call: RecordedCall,
    group: str,
    description: str,
    members: Sequence[int],
    number: int,
    epoch: float,
) -> Entry:
    name, inputs, outputs = _arrays(call)
    is_message = call.is_message
    # Torch numbers the members in the order of their global ranks.
    if is_message:
        source, target = (0, 1) if members[0] < members[1] else (1, 0)
        name = f"send {source}->{target}" if call.op == "send" else f"recv {target}<-{source}"
    file, _, line = users_part(call.site).rpartition(":")
    types = [_DTYPES.get(dtype.name, dtype.name) for dtype, _ in (call.inputs or call.outputs)[:1]]
    return {
        "record_id": 0,
        "pg_id": 0,
        "process_group": (group, description),
        "collective_seq_id": number,
        "p2p_seq_id": number if is_message else 0,
        "op_id": number,
        "profiling_name": f"{call.backend if call.backend in _BACKENDS else 'gloo'}:{name}",
        "time_created_ns": _nanoseconds(call.created, epoch),
        "input_sizes": list(inputs),
        "input_dtypes": types * len(inputs),
        "output_sizes": list(outputs),
        "output_dtypes": types * len(outputs),
        "state": _STATES.get(call.state, call.state),
        "time_discovered_started_ns": _nanoseconds(call.started, epoch),
        "time_discovered_completed_ns": _nanoseconds(
            call.ended if call.state == "completed" else 0, epoch
        ),
        "retired": call.state == "completed",
        "timeout_ms": 0,
        "is_p2p": is_message,
        "frames": [{"name": call.op, "filename": file, "line": int(line) if line.isdigit() else 0}],
    }


def _nanoseconds(moment: float, epoch: float) -> int | None:
    return int((moment + epoch) * 1e9) if moment else None


def _join(entry: Entry, call: RecordedCall) -> None:
    """Add an array of the same call."""
    _, inputs, outputs = _arrays(call)
    backend, _, _ = entry["profiling_name"].partition(":")
    entry["profiling_name"] = f"{backend}:{_SEVERAL.get(call.op, _NAMES.get(call.op, 'coalesced'))}"
    for side, sizes in (("input", inputs), ("output", outputs)):
        entry[f"{side}_dtypes"] += entry[f"{side}_dtypes"][:1] * len(sizes)
        entry[f"{side}_sizes"] += sizes


def _arrays(call: RecordedCall) -> tuple[str, list[list[int]], list[list[int]]]:
    """Name, and sizes of inputs and outputs, as torch records them."""
    name = _NAMES.get(call.op, "coalesced")
    inputs = [list(shape) for _, shape in call.inputs]
    outputs = [list(shape) for _, shape in call.outputs]
    if name in ("all_reduce", "broadcast", "reduce"):
        inputs = outputs = inputs or outputs
    elif name == "all_to_all":
        inputs, outputs = [[_total(inputs)]], [[_total(outputs)]]
    elif name in ("all_gather", "reduce_scatter"):
        parts = outputs if name == "all_gather" else inputs
        if all(part == parts[0] for part in parts):
            whole = [[len(parts), *parts[0]]]
            inputs, outputs = (inputs, whole) if name == "all_gather" else (whole, outputs)
        else:
            # The sizes of single parts differ between ranks.
            name += "_v"
            inputs = outputs = [[_total(parts)]]
    return name, inputs, outputs


def _total(shapes: Sequence[Sequence[int]]) -> int:
    return sum(prod(shape) for shape in shapes)
