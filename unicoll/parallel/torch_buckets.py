"""Gradients that travel together: ``Bucket``."""

from __future__ import annotations

from typing import Any

import torch

from unicoll.parallel.comm_hooks import views_of

__all__ = ["Bucket"]


class Bucket:
    """A flat tensor, its members' places in it, and how far it is in this step.

    Args:
        members: indices of its parameters, in the order in which they lie in it.
        parameters: all parameters.
    """

    __slots__ = ("flat", "members", "outcome", "parameters", "pending", "views")

    def __init__(self, members: list[int], parameters: list[torch.Tensor]) -> None:
        self.members = members
        self.parameters = [parameters[i] for i in members]
        first = self.parameters[0].detach()
        self.flat = first.new_zeros(sum(p.numel() for p in self.parameters))
        self.views = views_of(self.flat, self.parameters)
        self.pending = len(members)
        self.outcome: Any = None

    def pack(self, as_views: bool) -> None:
        """Copy the gradients in, zeros where there is none; with ``as_views`` they then live there."""
        places, gradients = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif not _same_memory(gradient, view):
                places.append(view)
                gradients.append(gradient.detach())
                if as_views:
                    parameter.grad = view
        if places:
            torch._foreach_copy_(places, gradients)

    def unpack(self, result: torch.Tensor, usage: list[bool] | None, as_views: bool) -> None:
        """Make the parts of a flat tensor the gradients, but for parameters of which ``usage``, by index, says no."""
        if as_views and not _same_memory(result, self.flat):
            self.flat.copy_(result)
            result = self.flat
        views = self.views if result is self.flat else views_of(result, self.parameters)
        averages, gradients = [], []
        for index, parameter, view in zip(self.members, self.parameters, views, strict=True):
            if usage is not None and not usage[index]:
                continue
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = view if as_views else view.to(parameter.dtype, copy=True)
            elif not _same_memory(gradient, view):
                averages.append(view)
                gradients.append(gradient.detach())
        if gradients:
            torch._foreach_copy_(gradients, averages)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(
        one is other
        or (
            one.data_ptr() == other.data_ptr()
            and one.device == other.device
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.stride() == other.stride()
        )
    )
