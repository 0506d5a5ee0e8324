"""The gradients of a torch module, averaged while its backward pass still runs: ``Reducer``.

autograd calls a hook of each parameter when its ``.grad`` is complete. The last of a bucket's starts the bucket's
averaging in the background; the last of all has autograd call :meth:`Reducer._finish` when the backward pass is over.
Whatever the order in which gradients come, buckets are launched in one fixed order, the same on all ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from unicoll.errors import DistArgumentError, DistError, DistTypeError
from unicoll.group import ProcessGroup
from unicoll.parallel.comm_hooks import GradBucket
from unicoll.parallel.common import explained, kind_of, listed, plan_buckets
from unicoll.parallel.torch_buckets import Bucket
from unicoll.parallel.torch_graph import reachable_leaves
from unicoll.parallel.torch_join import Round, Uneven
from unicoll.types import ReduceOp
from unicoll.work import Work

__all__ = ["Reducer"]

MIB = 2**20
FIRST_BUCKET_MIB = 1.0
"""A small first bucket starts to travel early."""

Hook = Callable[[Any, GradBucket], Any]


class Reducer:
    """Averages the gradients of parameters over a group, in each backward pass that is expected to.

    Args:
        names: of the parameters, for messages.
        parameters: all that require gradients, in forward order; the same on every rank.
        group: the process group.
        bucket_cap_mb: most MiB in a bucket; a larger gradient has a bucket of its own.
        as_views: ``.grad`` becomes a view of the bucket.
        find_unused: parameters that the outputs do not lead to count as zeros.
        static: every pass uses the same parameters, equally often.

    Attributes:
        uneven: where ranks may run out of inputs at different times, what they tell each other.
    """

    def __init__(
        self,
        names: list[str],
        parameters: list[torch.Tensor],
        group: ProcessGroup,
        *,
        bucket_cap_mb: float,
        as_views: bool,
        find_unused: bool,
        static: bool,
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._group = group
        self._as_views = as_views
        self._static = static
        self._find_unused = find_unused and not static
        self._hook: tuple[Any, Hook] | None = None
        self.uneven: Uneven | None = None
        kinds = [kind_of(p) for p in parameters]
        sizes = [p.numel() * p.element_size() for p in parameters]
        first_cap, cap = int(min(FIRST_BUCKET_MIB, bucket_cap_mb) * MIB), int(bucket_cap_mb * MIB)
        plan = plan_buckets(kinds, sizes, reversed(range(len(parameters))), first_cap, cap)
        self._buckets = [Bucket(members, parameters) for members in plan]
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.members}
        self._everything = frozenset(range(len(parameters)))
        self._expecting = False  # whether gradients are to be averaged in the next backward pass
        self._recording = static  # this is the first step of a static graph
        self._step_over = True  # no forward pass since gradients were averaged
        self._reached: set[int] = set()  # id of parameters that the outputs since then lead to
        self._unused: frozenset[int] = frozenset()  # those that count as ready from the start
        self._used: set[int] = set()  # those that got a gradient since the last averaging, also under no_sync
        self._used_by_any: list[bool] | None = None  # ... on some rank; kept for a static graph
        self._fired: Counter[int] = Counter()  # static graph: how often each is accumulated into in a pass
        self._begin()
        self._handles = [self._watch(i, p) for i, p in enumerate(parameters)]
        weakref.finalize(self, _remove, self._handles).atexit = False  # the module may outlive this

    def _watch(self, index: int, parameter: torch.Tensor) -> Any:
        itself = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            reducer = itself()
            if reducer is not None:
                with torch.no_grad():
                    try:
                        reducer._accumulated(index)
                    except BaseException:  # it ends the backward pass
                        reducer._leave_running()
                        reducer._begin()
                        raise

        return parameter.register_post_accumulate_grad_hook(accumulated)

    def use_hook(self, state: Any, hook: Hook) -> None:
        """Average buckets by ``hook(state, bucket)``; DistArgumentError when there is one, or in a backward pass."""
        if not callable(hook):
            raise DistTypeError(f"the communication hook is not callable: {hook!r}")
        if self._hook is not None:
            raise DistArgumentError("a communication hook is registered already; there can be one")
        if self._ready:
            raise DistArgumentError(
                "a communication hook cannot be registered in the middle of a backward pass"
            )
        self._hook = (state, hook)

    # --- around a forward pass ---------------------------------------------------------------------------------

    def check_finished(self) -> None:
        """Before a forward pass: DistError when some parameter got no gradient in the backward pass before."""
        if not self._ready or self._launched == len(self._buckets):
            return
        self._leave_running()
        missing = sorted(self._everything - self._ready)
        names = ", ".join(self._names[i] for i in missing)
        numbers = " ".join(map(str, missing))
        rank = self._group.global_rank(self._group.rank())
        if self._static:
            advice = "With static_graph=True every pass must use the parameters that the first one used."
        elif self._find_unused:
            advice = "All tensors that forward returns must take part in the loss."
        else:
            advice = (
                "Pass find_unused_parameters=True to DistributedDataParallel if your module does not use all of its "
                "parameters in each pass, and see that all tensors that forward returns take part in the loss."
            )
        raise DistError(
            "Expected to have finished reduction in the prior iteration before starting a new one: parameters were "
            f"not used in producing the loss, so the gradients of this step are not averaged. {advice} "
            f"Parameters which did not receive grad for rank {rank}: {names}. "
            f"Parameter indices which did not receive grad for rank {rank}: {numbers}",
            group=self._group.name,
            rank=rank,
        )

    def expect(self, outputs: Iterable[torch.Tensor]) -> None:
        """After a forward pass: the backward pass of these outputs averages the gradients."""
        self._expecting = True
        if self._recording:
            for output in outputs:
                if output.requires_grad:
                    output.register_hook(self._backward_begins)
        elif self._find_unused:
            leaves = reachable_leaves(outputs)
            self._reached = leaves if self._step_over else self._reached | leaves
            self._unused = frozenset(i for i, p in enumerate(self._parameters) if id(p) not in self._reached)
        self._step_over = False

    def expect_nothing(self) -> None:
        """After a forward pass: gradients of its backward pass stay on this rank."""
        self._expecting = False

    # --- in a backward pass ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A new step: nothing is ready, nothing is launched."""
        self._ready: set[int] = set()
        self._left = Counter(self._fired) if self._fired else Counter(dict.fromkeys(self._everything, 1))
        self._launched = 0
        self._usage: tuple[torch.Tensor, Any] | None = None
        self._round: Round | None = None
        self._finishing = False
        for bucket in self._buckets:
            bucket.pending = len(bucket.members)
            bucket.outcome = None

    def _accumulated(self, index: int) -> None:
        """autograd has completed a parameter's ``.grad``."""
        gradient = self._parameters[index].grad
        if gradient is not None:
            if gradient.layout != torch.strided:
                raise DistTypeError(
                    f"the gradient of parameter {self._names[index]} is sparse; only dense ones are averaged"
                )
            self._used.add(index)
        if not self._expecting:
            return
        if self._recording:
            self._fired[index] += 1
            return
        if not self._ready:
            self._complete(self._unused)
        if index in self._ready:
            raise DistError(self._twice(index))
        self._left[index] -= 1
        if self._left[index] == 0:
            self._complete((index,))

    def _leave_running(self) -> None:
        """Nobody is going to wait for what has been launched."""
        works = [bucket.outcome for bucket in self._buckets] + [self._usage and self._usage[1]]
        for work in works:
            if isinstance(work, Work):
                work.add_done_callback(lambda: None)

    def _twice(self, index: int) -> str:
        which = f"parameter {self._names[index]} (index {index}) was marked ready twice in one step"
        if self._static:
            return f"{which}: with static_graph=True every pass must use each parameter as the first one did"
        if index in self._unused:
            return f"{which}: it got a gradient though no tensor that forward returned leads to it"
        return (
            f"{which}: a parameter may be used by one reentrant checkpoint only, and by one backward pass of a step. "
            "If the graph does not change, static_graph=True allows it"
        )

    def _complete(self, indices: Iterable[int]) -> None:
        """Gradients that do not change any more in this step; launch the buckets that they fill."""
        for index in indices:
            self._ready.add(index)
            self._bucket_of[index].pending -= 1
        while self._launched < len(self._buckets) and not self._buckets[self._launched].pending:
            self._launch()
        if self._launched == len(self._buckets) and not self._finishing:
            self._finishing = True
            _at_the_end_of_backward(self._finish)

    def _launch(self) -> None:
        number, bucket = self._launched, self._buckets[self._launched]
        if number == 0 and self.uneven is not None:
            self._round = self.uneven.backward_begins()
        bucket.pack(self._as_views)
        self._launched += 1
        bucket.outcome = self._averaging(number, bucket.flat)
        if self._launched == len(self._buckets):
            self._usage = self._telling_usage([int(i in self._used) for i in range(len(self._parameters))])

    def _averaging(self, number: int, flat: torch.Tensor) -> Any:
        """Start to average a bucket's contents; what there will be of it."""
        try:
            if self._hook is None:
                return self._group.all_reduce(flat, op=ReduceOp.AVG, async_op=True)
            state, hook = self._hook
            last = number == len(self._buckets) - 1
            return hook(state, GradBucket(number, flat, self._buckets[number].parameters, last))
        except Exception as error:
            raise self._explained(error, number) from error

    def _telling_usage(self, marks: list[int]) -> tuple[torch.Tensor, Any] | None:
        """Start to add up over the ranks who used what, so that gradients that nobody has are left alone."""
        if self._used_by_any is not None or not (self._find_unused or self._static):
            return None
        usage = torch.tensor(marks, dtype=torch.int32, device=self._parameters[0].device)
        return usage, self._group.all_reduce(usage, async_op=True)

    def follow(self) -> None:
        """Take part in the other ranks' averaging, with zeros: this one has run out of inputs."""
        outcomes = []
        for number, bucket in enumerate(self._buckets):
            outcomes.append(self._averaging(number, torch.zeros_like(bucket.flat)))
        told = self._telling_usage([0] * len(self._parameters))
        for number, outcome in enumerate(outcomes):
            try:
                _value(outcome, self._group.timeout)
            except Exception as error:
                raise self._explained(error, number) from error
        if told is not None:
            told[1].wait()
            if self._static:  # it is told once
                self._used_by_any = [bool(mark) for mark in told[0].tolist()]

    # --- at the end of a backward pass -------------------------------------------------------------------------

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        """The first backward pass of a static graph: everything is averaged at its end."""
        if self._recording and self._expecting and not self._finishing:
            self._finishing = True
            _at_the_end_of_backward(self._end_recording)

    def _end_recording(self) -> None:
        self._recording = False
        self._unused = self._everything - set(self._fired)
        for index in self._unused:
            self._fired[index] = 1
        self._complete(self._everything)
        self._finish()

    def _finish(self) -> None:
        """Wait for all buckets, also after a failure, put the averages into ``.grad``, and begin a new step."""
        failure: DistError | None = None
        results: list[torch.Tensor] = []
        try:
            for number, bucket in enumerate(self._buckets):
                try:
                    results.append(self._result(bucket))
                except Exception as error:
                    failure = failure or self._explained(error, number)
            if failure is not None:
                self._leave_running()
                raise failure
            if self._usage is not None:
                self._usage[1].wait()
            usage = self._usage_by_any()
            factor = 1.0
            if self._round is not None and self._hook is None:
                factor = self._round.factor()
            for bucket, result in zip(self._buckets, results, strict=True):
                if factor != 1:
                    result.mul_(factor)
                bucket.unpack(result, usage, self._as_views)
        finally:
            self._step_over = True
            if not self._static:
                self._used.clear()
            self._begin()

    def _result(self, bucket: Bucket) -> torch.Tensor:
        result = _value(bucket.outcome, self._group.timeout)
        if self._hook is not None and bucket.flat.is_cuda:  # a future's callbacks run on the default stream
            device = bucket.flat.device
            torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        if self._hook is None:
            return bucket.flat
        if not isinstance(result, torch.Tensor) or result.numel() != bucket.flat.numel():
            shown = f"a tensor of {result.numel()}" if isinstance(result, torch.Tensor) else repr(result)
            raise DistTypeError(
                f"the communication hook gave {shown}, not a tensor of {bucket.flat.numel()} elements"
            )
        return result.detach().reshape(-1)

    def _usage_by_any(self) -> list[bool] | None:
        """By parameter, whether some rank has a gradient for it; None where all have, or have to have."""
        if self._used_by_any is not None:
            return self._used_by_any
        if self._usage is None or len(self._used) == len(self._parameters):
            found = None
        else:  # on a CUDA device this waits for it; only ranks that left something out do
            found = [bool(mark) for mark in self._usage[0].tolist()]
        if self._static:
            self._used_by_any = found or [True] * len(self._parameters)
        return found

    def _explained(self, error: Exception, number: int) -> DistError:
        members = listed([self._names[i] for i in self._buckets[number].members])
        return explained(error, number, len(self._buckets), members)


def _at_the_end_of_backward(function: Callable[[], None]) -> None:
    def call() -> None:
        with torch.no_grad():
            function()

    torch.autograd.Variable._execution_engine.queue_callback(call)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _value(outcome: Any, timeout: float) -> Any:
    """What a hook's outcome comes to: of a Work, a future of Python or torch, or a tensor at once."""
    if isinstance(outcome, Work):
        return outcome.result()
    if hasattr(outcome, "result"):
        return outcome.result(timeout)
    return outcome.wait() if hasattr(outcome, "wait") else outcome
