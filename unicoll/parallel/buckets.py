"""Gradients averaged over the ranks while the backward pass still runs: ``GradientBuckets``.

One message per gradient would pay the network's latency for every small array, and one message for all of
them could not start before the last gradient is there. So gradients are packed into flat buckets, and each
full bucket is averaged in the background while later gradients are computed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from unicoll.errors import DistArgumentError, DistError, DistTypeError
from unicoll.parallel.common import (
    Arrays,
    Kind,
    element_type,
    explained,
    flat_like,
    host_bytes,
    kind_of,
    listed,
    member_group,
    named,
    plan_buckets,
    without_history,
)
from unicoll.types import ReduceOp

__all__ = ["GradientBuckets"]

MIB = 2**20


class _Bucket:
    """A flat array: the gradients of its members, then a mark for each (``GradientBuckets._launch``)."""

    __slots__ = ("expected", "flat", "marks", "members", "views", "work")

    def __init__(self, members: list[int], parameters: list[Any]) -> None:
        self.members = members
        counts = [math.prod(parameters[i].shape) for i in members]
        end = sum(counts)
        self.flat = flat_like(parameters[members[0]], end + len(members))
        self.marks = self.flat[end:]
        self.views = []
        start = 0
        for index, count in zip(members, counts, strict=True):
            self.views.append(self.flat[start : start + count].reshape(parameters[index].shape))
            start += count
        self.expected = len(members)
        self.work: Any = None


class GradientBuckets:
    """Averages gradients over a group, bucket by bucket, overlapped with the backward pass.

    A step hands over every gradient as soon as it is computed, then waits::

        buckets = GradientBuckets(parameters)
        for index, gradient in backward(batch):        # last layer first
            buckets.ready(index, gradient)
        for parameter, gradient in zip(parameters, buckets.wait()):
            parameter -= rate * gradient

    Buckets are filled in the reverse of the order in which the parameters are given, since a backward pass
    reaches the last layer first; each holds arrays of one library, device and dtype. Whatever the order in
    which gradients get ready, every rank launches its buckets in the same fixed order. All ranks must give
    the same parameters in the same order and use the same settings.

    A gradient that some rank never gave is noticed by all ranks at no extra message, from a mark that travels
    in the bucket; on a CUDA device, where reading marks would stall the host, only by the rank that did not
    give it.

    Not for use from several threads at once; on CUDA, all calls of a step belong on one stream.

    Attributes:
        names: the parameters' names, in the given order.
        layout: per bucket, in launch order, the indices of its parameters in filling order.
    """

    def __init__(
        self,
        parameters: Arrays,
        *,
        bucket_cap_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        group: Any = None,
        op: Any = ReduceOp.AVG,
        find_unused: bool = False,
    ) -> None:
        """Lay out the buckets; nothing is communicated yet.

        Args:
            parameters: arrays of NumPy, CuPy or torch in forward order, as a sequence or a mapping from
                names. Their shapes, dtypes and devices are those of the gradients; their values are not read,
                and the arrays are not kept.
            bucket_cap_mb: most MiB in a bucket; a larger gradient has a bucket of its own.
            first_bucket_mb: the same for the first bucket of each dtype: a small one starts to travel early.
            group: the process group; the default group when None.
            op: ``ReduceOp.AVG`` or ``ReduceOp.SUM``.
            find_unused: a rank may leave gradients out: it then contributes zeros, and :meth:`wait` gives
                None for those that no rank gave. Costs a wait for the device on CUDA. When False, leaving one
                out is an error.

        Raises:
            DistArgumentError: another op, or a cap that is not positive.
            DistTypeError: a parameter is no array, or not of a floating-point or complex dtype.
            NotInitializedError: no group is given, and there is no default group.
        """
        if op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise DistArgumentError(f"gradients can be combined by AVG or SUM, not by {op}")
        if not (bucket_cap_mb > 0 and first_bucket_mb > 0):
            raise DistArgumentError(
                f"bucket_cap_mb ({bucket_cap_mb}) and first_bucket_mb ({first_bucket_mb}) must be positive"
            )
        self.names, arrays = named(parameters)
        self._kinds = [_gradient_kind(name, array) for name, array in zip(self.names, arrays, strict=True)]
        self._group = member_group(group)
        self._op = op
        self._find_unused = find_unused
        self.layout = plan_buckets(
            self._kinds,
            [array.nbytes for array in arrays],
            reversed(range(len(arrays))),
            int(min(first_bucket_mb, bucket_cap_mb) * MIB),
            int(bucket_cap_mb * MIB),
        )
        self._buckets = [_Bucket(members, arrays) for members in self.layout]
        self._bucket_of: dict[int, _Bucket] = {i: bucket for bucket in self._buckets for i in bucket.members}
        self._views: dict[int, Any] = {
            i: view for bucket in self._buckets for i, view in zip(bucket.members, bucket.views, strict=True)
        }
        self._numbers = {name: i for i, name in enumerate(self.names)}
        self._syncing = True
        self._lent: set[int] = set()  # views handed out and not yet declared ready
        self._held: set[int] = set()  # gradients accumulated under no_sync()
        self._given: set[int] = set()  # gradients of this step
        self._launched = 0

    def view(self, parameter: int | str) -> Any:
        """The gradient's place in its bucket, to compute it there without a copy before ``ready(parameter)``.

        The contents are unspecified until written.

        Raises:
            DistArgumentError: there is no such parameter; its gradient was already given in this step; or the
                place holds a sum from :meth:`no_sync`, to which ``ready(parameter, gradient)`` adds.
        """
        index = self._open(parameter)
        if index in self._held:
            raise DistArgumentError(
                f"the bucket holds a sum for {self._name(index)} from no_sync(): "
                "pass the gradient to ready(), which adds it"
            )
        self._lent.add(index)
        return self._views[index]

    def ready(self, parameter: int | str, gradient: Any = None) -> None:
        """Hand over one gradient; when that completes a bucket, its averaging starts in the background.

        Under :meth:`no_sync`, and in the first step after it, gradients of one parameter add up.

        Args:
            parameter: its index, or its name.
            gradient: an array of the parameter's shape, dtype, library and device; it is copied. Leave it out
                when it was written to :meth:`view`.

        Raises:
            DistArgumentError: there is no such parameter; its gradient was already given in this step; the
                shape is not the parameter's; or there is no gradient, and :meth:`view` was not called either.
            DistTypeError: it is not of the parameter's dtype, library or device.
        """
        index = self._open(parameter)
        view = self._views[index]
        if gradient is None or gradient is view:
            if index not in self._lent:
                raise DistArgumentError(
                    f"no gradient for {self._name(index)}: give one, or write it to view({parameter!r}) first"
                )
        else:
            self._store(index, view, gradient)
        self._lent.discard(index)
        if not self._syncing:
            self._held.add(index)
            return
        self._given.add(index)
        self._bucket_of[index].expected -= 1
        while self._launched < len(self._buckets) and not self._buckets[self._launched].expected:
            self._launch()

    def wait(self, timeout: timedelta | float | None = None) -> list[Any]:
        """Finish the step: launch what is left, wait for every bucket, and start a new step.

        Args:
            timeout: for each bucket's wait, in seconds or as a timedelta; the group's when None.

        Returns:
            The averaged gradients in the parameters' order: views of the buckets, valid until the next step's
            gradients are given. With ``find_unused``, None for parameters that no rank gave a gradient for.

        Raises:
            DistArgumentError: called under :meth:`no_sync`.
            DistError: a rank left gradients out (and ``find_unused`` is False); it names them. All buckets
                have travelled then, and the group stays usable.
            Any error of the communication, with the bucket and its parameters named in the message.
        """
        if not self._syncing:
            raise DistArgumentError("nothing is averaged under no_sync(); call wait() in the step after it")
        missing = sorted(set(range(len(self.names))) - self._given)
        try:
            self._settle(timeout)
        finally:
            self._given.clear()
            self._held.clear()
            self._lent.clear()
            self._launched = 0
            for bucket in self._buckets:
                bucket.expected = len(bucket.members)
                bucket.work = None
        return self._results(missing)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients add up locally and nothing is communicated; the next step averages the sums.

        The sums are not divided by the number of local steps.

        Raises:
            DistArgumentError: entered in the middle of a step.
        """
        if self._given:
            given = self._list(sorted(self._given))
            raise DistArgumentError(
                f"no_sync() in the middle of a step: {given} given already; call wait() first"
            )
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _open(self, parameter: int | str) -> int:
        """The index of a parameter whose gradient may still be given in this step."""
        index = self._numbers.get(parameter) if isinstance(parameter, str) else operator.index(parameter)
        if index is None or not 0 <= index < len(self.names):
            raise DistArgumentError(f"there is no parameter {parameter!r} among {len(self.names)}")
        if index in self._given:
            raise DistArgumentError(
                f"the gradient of {self._name(index)} was already given; call wait() between steps"
            )
        return index

    def _store(self, index: int, view: Any, gradient: Any) -> None:
        kind = kind_of(gradient)
        if kind != self._kinds[index]:
            raise DistTypeError(f"the gradient of {self._name(index)} is {kind}, not {self._kinds[index]}")
        if gradient.shape != view.shape:
            raise DistArgumentError(
                f"the gradient of {self._name(index)} has shape {[*gradient.shape]}, not {[*view.shape]}"
            )
        gradient = without_history(gradient)
        if index in self._held:
            view += gradient
        else:
            view[...] = gradient

    def _launch(self) -> None:
        """Start the next bucket. Gradients that are not there become zeros.

        The marks tell the other ranks which are there: with ``find_unused`` 1 for each that is, so that a sum
        of 0 means "nobody's"; otherwise 1 for each that is not, so that any sum but 0 is an error.
        """
        bucket = self._buckets[self._launched]
        bucket.marks[...] = 1 if self._find_unused else 0
        if bucket.expected:
            for place, index in enumerate(bucket.members):
                if index not in self._given and not (self._find_unused and index in self._held):
                    bucket.views[place][...] = 0
                    bucket.marks[place] = 0 if self._find_unused else 1
        self._launched += 1
        try:
            bucket.work = self._group.all_reduce(bucket.flat, op=self._op, async_op=True)
        except Exception as error:
            raise self._explained(error, self._launched - 1) from error

    def _settle(self, timeout: timedelta | float | None) -> None:
        """Launch what is left and wait for everything, also after a failure: no bucket may stay in flight."""
        failure: DistError | None = None
        try:
            while self._launched < len(self._buckets):
                self._launch()
        except DistError as error:
            failure = error
        for number, bucket in enumerate(self._buckets):
            if bucket.work is None:
                continue
            try:
                bucket.work.wait() if timeout is None else bucket.work.wait(timeout)
            except Exception as error:
                failure = failure or self._explained(error, number)
        if failure is not None:
            raise failure

    def _results(self, missing: list[int]) -> list[Any]:
        if self._find_unused:
            unused = self._marked(False)
            return [None if i in unused else self._views[i] for i in range(len(self.names))]
        anywhere = self._marked(True, on_device=False).union(missing)
        if anywhere:
            if missing:
                where = f"this rank got no gradient for {self._list(missing)}"
            else:
                where = f"another rank got no gradient for {self._list(sorted(anywhere))}"
            raise DistError(
                f"{where} in this step. Give every gradient on every rank, or pass find_unused=True "
                "to count what is left out as zeros",
                op="all_reduce",
            )
        return [self._views[i] for i in range(len(self.names))]

    def _marked(self, value: bool, on_device: bool = True) -> set[int]:
        """Parameters whose mark, after the reduction, is (not) zero."""
        found: set[int] = set()
        for bucket in self._buckets:
            if on_device or self._kinds[bucket.members[0]].on_host:
                marks = host_bytes(bucket.marks).reshape(len(bucket.members), -1)
                found.update(i for i, mark in zip(bucket.members, marks, strict=True) if mark.any() == value)
        return found

    def _explained(self, error: Exception, number: int) -> DistError:
        return explained(error, number, len(self._buckets), self._list(self.layout[number]))

    def _name(self, index: int) -> str:
        return f"parameter {self.names[index]}"

    def _list(self, indices: list[int]) -> str:
        return listed([self.names[i] for i in indices])


def _gradient_kind(name: str, array: Any) -> Kind:
    kind = kind_of(array)
    if element_type(kind).kind not in "fc":
        raise DistTypeError(f"parameter {name} is {kind}; gradients have floating-point or complex dtypes")
    return kind
