"""What a torch module takes and gives: tensors within containers, and the parameters that made them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["moved", "reachable_leaves", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists, tuples, dictionaries' values and fields of dataclasses, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def reachable_leaves(outputs: Iterable[torch.Tensor]) -> set[int]:
    """``id`` of every leaf tensor that takes part in computing one of the outputs."""
    found: set[int] = set()
    seen: set[Any] = set()  # the nodes themselves: a node that nobody holds may give its id to another
    pending: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            pending.append(output.grad_fn)
        elif output.requires_grad:
            found.add(id(output))
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # what the end of a path accumulates into
        if leaf is not None:
            found.add(id(leaf))
        pending += [following for following, _ in node.next_functions if following is not None]
    return found


def moved(value: Any, device: torch.device) -> Any:
    """The value with its tensors on ``device``; containers are copied where they hold any."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[moved(item, device) for item in value])
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, moved(item, device)) for key, item in value.items())
    return value
