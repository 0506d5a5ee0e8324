"""``GradientBuckets``: averaging of gradients over the ranks during the backward pass.

One message per gradient would add the network's latency for every small array, and one message for
all gradients could not start before the last one is computed. So gradients are packed into flat
buckets, and each full bucket is averaged in the background while later gradients are computed.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unicoll.api.world import member
from unicoll.arrays.families import Kind, host_bytes, kind_of, of_known_library
from unicoll.arrays.types import ReduceOp
from unicoll.errors import DistArgumentError, DistBackendError, DistError, DistTypeError
from unicoll.parallel.packing import (
    Arrays,
    bucket_like,
    listed,
    named,
    parts,
    plan_buckets,
)
from unicoll.process.timeouts import Timeout

_MIB = 2**20


class _Bucket:
    """A flat array with the gradients of its parameters, then one mark per parameter
    (``GradientBuckets._launch``)."""

    __slots__ = ("expected", "flat", "marks", "members", "views", "work")

    def __init__(self, members: list[int], parameters: list[Any], group: Any) -> None:
        self.members = members
        shapes = [parameters[i].shape for i in members]
        end = sum(map(math.prod, shapes))
        self.flat = bucket_like(group, parameters[members[0]], end + len(members))
        self.marks = self.flat[end:]
        self.views = parts(self.flat, shapes)
        self.expected = len(members)
        self.work: Any = None


class GradientBuckets:
    """Averages gradients over a group, bucket by bucket, overlapped with the backward pass.

    A step passes every gradient as soon as it is computed, then waits::

        buckets = GradientBuckets(parameters)
        for index, gradient in backward(batch):        # last layer first
            buckets.ready(index, gradient)
        for parameter, gradient in zip(parameters, buckets.wait()):
            parameter -= rate * gradient

    Buckets are filled in the reverse order of the parameters, since a backward pass computes the
    gradients of the last layer first; each bucket has arrays of one library, device and dtype.
    Every rank launches its buckets in the same fixed order, independently of the order of the
    gradients. All ranks must pass the same parameters in the same order and use the same settings.

    If a rank passes no gradient for a parameter, all ranks detect it without an extra message, by a
    mark in the bucket; on a CUDA device, where reading marks would block the host, only that rank
    detects it.

    Not for use from several threads at once; on CUDA, all calls of a step belong on one stream.

    Attributes:
        names: the parameters' names, in order.
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
        """Lay out the buckets; all members of the group call it, since large buckets are in
        symmetric memory.

        Args:
            parameters: arrays in forward order, as a sequence or a mapping from names. Their
                shapes, dtypes and devices are those of the gradients; their values are not read,
                and the arrays are not kept.
            bucket_cap_mb: maximum MiB per bucket; a larger gradient has its own bucket.
            first_bucket_mb: the same for the first bucket of each dtype: a small one starts early.
            group: the process group; the default group when None.
            op: ``ReduceOp.AVG`` or ``ReduceOp.SUM``.
            find_unused: if True, a rank may omit gradients: it contributes zeros, and :meth:`wait`
                returns None for gradients that every rank omits. On CUDA the host waits for the
                device. If False, omitting a gradient is an error.

        Raises:
            DistArgumentError: ``op`` is another reduction, or a size is not positive.
            DistTypeError: a parameter is not an array, or not of a floating-point or complex dtype.
            NotInitializedError: no group is given, and there is no default group.
        """
        if op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise DistArgumentError(f"gradients can be combined by AVG or SUM, not by {op}")
        if not (bucket_cap_mb > 0 and first_bucket_mb > 0):
            raise DistArgumentError(
                f"bucket_cap_mb ({bucket_cap_mb}) and first_bucket_mb ({first_bucket_mb}) must be"
                " positive"
            )
        self.names, arrays = named(parameters)
        self._kinds = [
            _gradient_kind(name, array) for name, array in zip(self.names, arrays, strict=True)
        ]
        self._group = member(group, "GradientBuckets")
        self._op = op
        self._find_unused = find_unused
        self.layout = plan_buckets(
            self._kinds,
            [array.nbytes for array in arrays],
            reversed(range(len(arrays))),
            int(min(first_bucket_mb, bucket_cap_mb) * _MIB),
            int(bucket_cap_mb * _MIB),
        )
        self._buckets = [_Bucket(members, arrays, self._group) for members in self.layout]
        self._bucket_of: dict[int, _Bucket] = {
            i: bucket for bucket in self._buckets for i in bucket.members
        }
        self._views: dict[int, Any] = {
            i: view
            for bucket in self._buckets
            for i, view in zip(bucket.members, bucket.views, strict=True)
        }
        self._numbers = {name: i for i, name in enumerate(self.names)}
        self._syncing = True
        # These parameters have had a view() but no ready() yet.
        self._writing: set[int] = set()
        # These parameters have a sum from no_sync().
        self._accumulated: set[int] = set()
        # These parameters have a gradient in this step.
        self._ready: set[int] = set()
        self._launched = 0

    def view(self, parameter: int | str) -> Any:
        """The gradient's slice of its bucket, to compute it there without a copy before
        ``ready(parameter)``.

        The contents are unspecified until written.

        Raises:
            DistArgumentError: there is no such parameter; its gradient was already passed in this
                step; or the slice has a sum from :meth:`no_sync`, to which ``ready(parameter,
                gradient)`` adds.
        """
        index = self._open(parameter)
        if index in self._accumulated:
            raise DistArgumentError(
                f"the bucket holds a sum for {self._name(index)} from no_sync(): "
                "pass the gradient to ready(), which adds it"
            )
        self._writing.add(index)
        return self._views[index]

    def ready(self, parameter: int | str, gradient: Any = None) -> None:
        """Pass one gradient; when it completes a bucket, the bucket's averaging starts in the
        background.

        Under :meth:`no_sync`, and in the first step after it, gradients of one parameter add up.

        Args:
            parameter: its index, or its name.
            gradient: an array of the parameter's shape, dtype, library and device; it is copied.
                Omit it if it was written to :meth:`view`.

        Raises:
            DistArgumentError: there is no such parameter; its gradient was already passed in this
                step; the shape is not the parameter's; or there is no gradient, and :meth:`view`
                was not called either.
            DistTypeError: it is not of the parameter's dtype, library or device.
        """
        index = self._open(parameter)
        view = self._views[index]
        if gradient is None or gradient is view:
            if index not in self._writing:
                raise DistArgumentError(
                    f"no gradient for {self._name(index)}: give one, or write it to"
                    f" view({parameter!r}) first"
                )
        else:
            self._store(index, view, gradient)
        self._writing.discard(index)
        if not self._syncing:
            self._accumulated.add(index)
            return
        self._ready.add(index)
        self._bucket_of[index].expected -= 1
        # A full bucket waits for those before it: the ranks may compute gradients in different
        # orders, but must start the collectives in the same one.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].expected:
            self._launch()

    def wait(self, timeout: Timeout = None) -> list[Any]:
        """Complete the step: launch the remaining buckets, wait for all buckets, and start a new
        step.

        Args:
            timeout: for each bucket's wait, in seconds or as a timedelta; the group's when None.

        Returns:
            The averaged gradients in the parameters' order: views of the buckets, valid until the
            next step's gradients are passed. With ``find_unused``, None for parameters without a
            gradient on any rank.

        Raises:
            DistArgumentError: called under :meth:`no_sync`.
            DistError: a rank omitted gradients (and ``find_unused`` is False); the message names
                them. All buckets are averaged, and the group stays usable.
            OperationTimeoutError: a bucket was not averaged within ``timeout``. It is still in
                flight, and the step goes on: call wait() again.
            Exception: any communication error; the message names the bucket and its parameters.
        """
        if not self._syncing:
            raise DistArgumentError(
                "nothing is averaged under no_sync(); call wait() in the step after it"
            )
        missing = sorted(set(range(len(self.names))) - self._ready)
        try:
            self._complete(timeout)
        finally:
            # After a timeout or an interrupt an all_reduce may still write to its bucket: then the
            # step is not over, its gradients count as passed, and wait() can be called again.
            if all(bucket.work is None or bucket.work.is_completed() for bucket in self._buckets):
                self._ready.clear()
                self._accumulated.clear()
                self._writing.clear()
                self._launched = 0
                for bucket in self._buckets:
                    bucket.expected = len(bucket.members)
                    bucket.work = None
        return self._results(missing)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which gradients are summed locally without communication; the next step
        averages the sums.

        The sums are not divided by the number of local steps.

        Raises:
            DistArgumentError: entered in the middle of a step.
        """
        if self._ready:
            ready = self._list(sorted(self._ready))
            raise DistArgumentError(
                f"no_sync() in the middle of a step: {ready} already passed; call wait() first"
            )
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _open(self, parameter: int | str) -> int:
        """The index of a parameter without a gradient in this step."""
        index = (
            self._numbers.get(parameter)
            if isinstance(parameter, str)
            else operator.index(parameter)
        )
        if index is None or not 0 <= index < len(self.names):
            raise DistArgumentError(f"there is no parameter {parameter!r} among {len(self.names)}")
        if index in self._ready:
            raise DistArgumentError(
                f"the gradient of {self._name(index)} was already given; call wait() between steps"
            )
        return index

    def _store(self, index: int, view: Any, gradient: Any) -> None:
        gradient = of_known_library(gradient)
        kind = kind_of(gradient)
        if kind != self._kinds[index]:
            raise DistTypeError(
                f"the gradient of {self._name(index)} is {kind}, not {self._kinds[index]}"
            )
        if gradient.shape != view.shape:
            raise DistArgumentError(
                f"the gradient of {self._name(index)} has shape {[*gradient.shape]}, not"
                f" {[*view.shape]}"
            )
        gradient = kind.family.without_history(gradient)
        if index in self._accumulated:
            view += gradient
        else:
            view[...] = gradient

    def _launch(self) -> None:
        """Start the next bucket, with zeros for missing gradients.

        The marks show the other ranks which gradients are missing: with ``find_unused`` the mark of
        a gradient is 1 if present, so that a sum of 0 means no rank has it; otherwise 1 if missing,
        so that a sum other than 0 is an error.
        """
        bucket = self._buckets[self._launched]
        bucket.marks[...] = 1 if self._find_unused else 0
        if bucket.expected:
            # With find_unused a sum from no_sync() is the gradient of this step.
            for place, index in enumerate(bucket.members):
                if index not in self._ready and not (
                    self._find_unused and index in self._accumulated
                ):
                    bucket.views[place][...] = 0
                    bucket.marks[place] = 0 if self._find_unused else 1
        # It counts as launched before the call: if that raises, wait() goes on with the next
        # bucket.
        self._launched += 1
        try:
            bucket.work = self._group.all_reduce(bucket.flat, op=self._op, async_op=True)
        except Exception as error:
            raise self._explained(error, self._launched - 1) from error

    def _complete(self, timeout: Timeout) -> None:
        """Launch the remaining buckets and wait for all, also after an error: no bucket may stay in
        flight."""
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
                f"{where} in this step. Give every gradient on every rank, or pass find_unused=True"
                " to count missing gradients as zeros",
                op="all_reduce",
            )
        return [self._views[i] for i in range(len(self.names))]

    def _marked(self, value: bool, on_device: bool = True) -> set[int]:
        """Parameters whose mark after the reduction is nonzero, or zero if ``value`` is False."""
        found: set[int] = set()
        for bucket in self._buckets:
            if on_device or self._kinds[bucket.members[0]].on_host:
                marks = host_bytes(bucket.marks).reshape(len(bucket.members), -1)
                found.update(
                    i for i, mark in zip(bucket.members, marks, strict=True) if mark.any() == value
                )
        return found

    def _explained(self, error: Exception, number: int) -> DistError:
        """The same error with the bucket named in its message; a DistBackendError for foreign
        types."""
        members = self._list(self.layout[number])
        text = (
            f"{error} (averaging gradient bucket {number + 1} of {len(self._buckets)}: {members})"
        )
        result: DistError
        if isinstance(error, DistError):
            # The error is copied, because all operations of a failed group have the same object.
            result = copy.copy(error)
            result.args = (text,)
        else:
            result = DistBackendError(f"{type(error).__name__}: {text}", op="all_reduce")
        result.__cause__ = error
        return result

    def _name(self, index: int) -> str:
        return f"parameter {self.names[index]}"

    def _list(self, indices: list[int]) -> str:
        return listed([self.names[i] for i in indices])


def _gradient_kind(name: str, array: Any) -> Kind:
    kind = kind_of(array)
    if kind.element_type.kind not in "fc":
        raise DistTypeError(
            f"parameter {name} is {kind}; gradients have floating-point or complex dtypes"
        )
    return kind
