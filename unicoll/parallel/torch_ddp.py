"""``DistributedDataParallel``: a torch module whose gradients are averaged over unicoll's groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unicoll.errors import DistArgumentError, DistError, DistTypeError
from unicoll.objects import all_gather_object
from unicoll.parallel.comm_hooks import GradBucket
from unicoll.parallel.common import member_group
from unicoll.parallel.ddp import broadcast_parameters
from unicoll.parallel.torch_graph import moved, tensors_in
from unicoll.parallel.torch_join import Uneven
from unicoll.parallel.torch_reducer import Reducer

__all__ = ["DistributedDataParallel"]

BUCKET_CAP_MIB = 25.0


class DistributedDataParallel(torch.nn.Module):  # type: ignore[misc]
    """A module that every rank has a copy of, and whose gradients are averages over the ranks after ``backward()``.

    Arguments, methods and semantics are those of ``torch.nn.parallel.DistributedDataParallel``, over unicoll's own
    process groups. All ranks construct it together: parameters and buffers become rank 0's. In the backward pass
    gradients are packed into buckets, last layer first, and each full bucket is averaged in the background; when
    ``backward()`` returns, ``.grad`` of every parameter holds the average. Parameters that do not require gradients
    when this is constructed are left alone. ``state_dict()`` has the keys of torch's class (``module.``...).

    Unlike torch's, it keeps the buckets' order of the parameters whatever the order of their gradients, and several
    ``backward()`` after one ``forward()`` are each averaged.

    Attributes:
        module: the module itself.
        require_backward_grad_sync: False within :meth:`no_sync`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        """Compare the module's parameters over the ranks and spread those of rank 0.

        Args:
            module: on the device that it is used on, all gradients dense.
            device_ids: the one CUDA device to which inputs are moved; None leaves inputs where they are.
            output_device: that of ``device_ids``, or None.
            dim: 0; has no effect, as in torch.
            broadcast_buffers: rank 0's buffers overwrite the others' at construction and before each forward pass
                that follows a pass with averaging; True when None.
            init_sync: False leaves out the comparing and the spreading: all ranks have the same weights already.
            process_group: a group of unicoll's; the default group when None.
            bucket_cap_mb: most MiB in a bucket (the first has 1 MiB at most); 25 when None.
            find_unused_parameters: after each forward pass, find the parameters that its outputs do not depend on,
                and count them as zeros. Without it, all parameters must get a gradient in each backward pass.
            check_reduction: has no effect, as in torch.
            gradient_as_bucket_view: ``.grad`` becomes a view of the bucket, which saves memory and a copy.
            static_graph: every pass uses the same parameters, in the same way. Unused parameters and reentrant
                checkpoints are then allowed; the first step is averaged at its end.
            forward_sync_buffers: in place of ``broadcast_buffers``, for forward passes alone: buffers are spread at
                construction whatever it is.

        Raises:
            DistArgumentError: no parameter requires a gradient; devices that do not fit the module's.
            DistTypeError: it is no module, has sparse gradients, or parameters of no shape yet.
            DistError: the ranks' parameters or buffers differ in number, name, shape or dtype; names the rank.
            NotInitializedError: no group is given, and there is no default group.
        """
        super().__init__()
        self.process_group = member_group(process_group)
        _check_module(module)
        self.module = module
        self.device_ids, self.output_device = _devices(module, device_ids, output_device)
        self.dim = dim
        before_each = broadcast_buffers is not False
        self.broadcast_buffers = before_each if forward_sync_buffers is None else forward_sync_buffers
        self._spreads_buffers = before_each or forward_sync_buffers is not None
        self.bucket_cap_mb = BUCKET_CAP_MIB if bucket_cap_mb is None else float(bucket_cap_mb)
        if not self.bucket_cap_mb > 0:
            raise DistArgumentError(f"bucket_cap_mb ({bucket_cap_mb}) must be positive")
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._start(init_sync)

    def _start(self, spread: bool) -> None:
        """Agree with the other ranks and watch the parameters' gradients."""
        group = self.process_group
        ignored = set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))
        self._parameter_names = [n for n, _ in self.module.named_parameters() if n not in ignored]
        every = self._parameters_now()
        learned = {n: p for n, p in every.items() if p.requires_grad}
        if not learned:
            raise DistArgumentError(
                "DistributedDataParallel is not needed when a module doesn't have any parameters that require "
                "a gradient"
            )
        self._buffer_names = [n for n, _ in self.module.named_buffers() if n not in ignored]
        if spread:
            _compare(group, self._all_now())
            self._spread(self._all_now(), 0)
        self._uneven: Uneven | None = None
        self._reducer = Reducer(
            list(learned),
            list(learned.values()),
            group,
            bucket_cap_mb=self.bucket_cap_mb,
            as_views=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            static=self.static_graph,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; the backward pass of what it returns averages the gradients.

        Raises:
            DistError: in the backward pass before, some parameters got no gradient; names them. Within :meth:`join`,
                a rank has run out of inputs and this is to be raised.
            Any error of the communication, where buffers are broadcast.
        """
        syncing = torch.is_grad_enabled() and self.require_backward_grad_sync
        if syncing:
            self._reducer.check_finished()
        spreads = self.require_forward_param_sync and self.broadcast_buffers and bool(self._buffer_names)
        source = 0 if self._uneven is None else self._uneven.forward_begins(spreads)
        if spreads:
            self._spread(self._buffers_now(), source)
        if self.device_ids:
            inputs, kwargs = moved((inputs, kwargs), self.device_ids[0])
        output = self.module(*inputs, **kwargs)
        self.require_forward_param_sync = syncing
        if syncing:
            self._reducer.expect(tensors_in(output))
        elif torch.is_grad_enabled():
            self._reducer.expect_nothing()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes of forward passes add to this rank's gradients and nothing is communicated.

        The next pass outside averages the sums. The forward pass must be within, too.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Around a training loop whose number of steps differs between ranks; all ranks of the group enter it.

        A rank that leaves the loop takes part in the others' averages, with zeros, until all have left it. Then all
        get the model, parameters and buffers, of the rank that was last (the highest of those). Buffers that are
        spread before a forward pass are those of the highest rank that still has inputs. What the module or the loop
        communicates otherwise is not taken part in: use ``throw_on_early_termination`` there.

        Args:
            divide_by_initial_world_size: averages divide by the number of all ranks, so that each input counts the
                same; False: by the number of ranks that still have inputs. Comm hooks divide as they will.
            enable: False does nothing, where numbers of steps are known to be equal.
            throw_on_early_termination: as soon as one rank has run out, all ranks raise: the others in their next
                forward pass, this one when it leaves the loop.

        Raises:
            DistArgumentError: it is entered already.
            DistError: ranks have run out of inputs and this is to be raised; ranks with inputs make different passes.
            Any error of the communication.
        """
        if not enable:
            yield
            return
        if self._uneven is not None:
            raise DistArgumentError("join: it is entered already")
        device = next(iter(self._parameters_now().values())).device
        uneven = Uneven(self.process_group, device, divide_by_initial_world_size, throw_on_early_termination)
        self._uneven = self._reducer.uneven = uneven
        try:
            yield
            last = uneven.follow(lambda source: self._spread(self._buffers_now(), source), self._reducer.follow)
            self._spread(self._all_now(), last)
            self.require_forward_param_sync = True  # on all ranks, whatever their last passes were
        finally:
            self._uneven = self._reducer.uneven = None

    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        """Average each bucket by ``hook(state, bucket)`` instead of an all_reduce.

        Args:
            state: passed to the hook, for what it remembers.
            hook: called in the backward pass, for one bucket after another, in the same order on all ranks. It gets a
                :class:`~unicoll.parallel.comm_hooks.GradBucket` and returns a future of the averaged flat tensor: of
                ``Work.get_future()``, with ``then``, or torch's; a ``Work`` or the tensor itself will do, too.

        Raises:
            DistArgumentError: there is a hook already, or a backward pass is going on.
            DistTypeError: the hook is not callable.
        """
        self._reducer.use_hook(state, hook)

    def _buffers_now(self) -> dict[str, torch.Tensor]:
        """The module's buffers; a module may have put other tensors in their places."""
        found = dict(self.module.named_buffers())
        return {name: found[name] for name in self._buffer_names if name in found}

    def _parameters_now(self) -> dict[str, torch.Tensor]:
        found = dict(self.module.named_parameters())
        return {name: found[name] for name in self._parameter_names}

    def _all_now(self) -> dict[str, torch.Tensor]:
        """What is to be the same on all ranks."""
        return self._parameters_now() | (self._buffers_now() if self._spreads_buffers else {})

    def _spread(self, tensors: dict[str, torch.Tensor], source: int) -> None:
        """Overwrite the tensors with those of a rank in the group."""
        group = self.process_group
        with torch.no_grad():
            broadcast_parameters(tensors, src=group.global_rank(source), group=group)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without what belongs to this process; a copy uses the default group."""
        return {k: v for k, v in self.__dict__.items() if k not in ("process_group", "_reducer", "_uneven")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = member_group(None)
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._start(spread=True)


def _check_module(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise DistTypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise DistTypeError(f"parameter {name} has no shape yet: run a forward pass of the module first")
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise DistTypeError(
                f"{name or type(part).__name__} has sparse gradients (sparse=True); only dense ones are averaged"
            )


def _devices(module: torch.nn.Module, ids: Sequence[Any] | None, output: Any) -> tuple[Any, Any]:
    """The devices of inputs and output: of one entry or None, as torch's arguments have it."""
    if not ids:
        if output is not None:
            raise DistArgumentError(f"output_device ({output}) needs device_ids")
        return None, None
    homes = {p.device for p in module.parameters()}
    if len(ids) != 1 or len(homes) != 1 or next(iter(homes)).type == "cpu":
        raise DistArgumentError(
            "device_ids and output_device are for modules on one GPU, and name it: got "
            f"device_ids {list(ids)}, output_device {output}, and parameters on {sorted(map(str, homes))}"
        )
    device = _device(ids[0])
    return [device], device if output is None else _device(output)


def _device(name: Any) -> torch.device:
    return torch.device("cuda", name) if isinstance(name, int) else torch.device(name)


def _compare(group: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Raise DistError, on all ranks, unless all have tensors of the same names, shapes, dtypes and strides."""
    mine = [
        [
            name,
            list(t.shape),
            str(t.dtype).removeprefix("torch."),
            list(torch.empty_like(t, device="meta").stride()),
        ]
        for name, t in tensors.items()
    ]
    everyone: list[Any] = [None] * group.size()
    all_gather_object(everyone, mine, group)
    first = everyone[0]
    for number, theirs in enumerate(everyone):
        if theirs == first:
            continue
        rank, root = group.global_rank(number), group.global_rank(0)
        if len(theirs) != len(first):
            what = f"{len(theirs)} parameters and buffers, rank {root} has {len(first)}"
            names = {entry[0] for entry in theirs} ^ {entry[0] for entry in first}
            what += f"; not on both: {', '.join(sorted(names)[:8])}" if names else ""
        else:
            index = next(i for i, (a, b) in enumerate(zip(theirs, first, strict=True)) if a != b)
            what = f"{_shown(index, theirs[index])}, rank {root} has {_shown(index, first[index])}"
        raise DistError(
            f"DistributedDataParallel needs the same module on all ranks: rank {rank} has {what}",
            group=group.name,
            rank=rank,
        )


def _shown(index: int, entry: Any) -> str:
    name, shape, dtype, strides = entry
    return f"{name} (index {index}) of shape {shape}, {dtype}, strides {strides}"
