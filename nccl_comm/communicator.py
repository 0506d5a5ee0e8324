"""One communicator of NCCL: readiness, deadlines, errors, and an end in bounded time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unicoll.backend import Call, Context
from unicoll.errors import DistError, OperationTimeoutError
from unicoll.streams import Cuda, naps

from .api import IN_PROGRESS, OF_OTHERS, SUCCESS, Config, Nccl, Slot
from .enders import Enders
from .errors import error_for
from .types import factor_bytes

__all__ = ["Communicator"]

_END_S = 10.0
"""How long NCCL may take to end a communicator before it is left behind."""
_LOOK_S = 0.05
_NEWS_S = 1.0
"""How long NCCL's word of an error is ahead of the control plane's on the death of a rank, at most."""
_MADE_OPS = 64


class Communicator:
    """A communicator among the members of a group.

    What makes a communicator waits for the other ranks, and runs on a thread that can be left behind. Non-blocking
    communicators answer "in progress", which is waited for here, with a deadline and an eye on the group.

    Args:
        context: the group.
        nccl, cuda: the libraries.
        device: ordinal of the device.
        begin: makes it: answers NCCL's code and where the handle is.
        what: name of the function that makes it, for errors.
        deadline: on the clock of ``time.monotonic``.
        look: called while waiting, with the call that waits; raises what has ended the group.

    Attributes:
        enders: threads for what may not come back.
    """

    def __init__(
        self,
        context: Context,
        nccl: Nccl,
        cuda: Cuda,
        device: int,
        begin: Callable[[], tuple[int, Slot]],
        what: str,
        deadline: float,
        look: Callable[[Call | None], None],
    ) -> None:
        self.context = context
        self.nccl = nccl
        self.cuda = cuda
        self.device = device
        self.rank, self.size = context.rank, context.size
        self._look = look
        self.enders: Enders = context.job.shared("nccl-enders", Enders)
        self.native_all_to_all = nccl.has("ncclAlltoAll")
        self._made: dict[tuple[int, bytes], int] = {}
        self._asking = threading.Lock()
        code, self._slot = self._within(begin, what, deadline)
        self.handle = self._slot.value or 0
        if code not in (SUCCESS, IN_PROGRESS):
            self.await_news(code, None)
            raise self.error(code, what, None)
        try:
            self.await_ready(what, deadline, None)
        except BaseException:
            self.abort()
            raise

    def _within(
        self, begin: Callable[[], tuple[int, Slot]], what: str, deadline: float
    ) -> tuple[int, Slot]:
        """Do it on another thread, which is left behind at the deadline, or when the group has ended."""
        answers: list[tuple[int, Slot]] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self.cuda.set_device(self.device)
                answers.append(begin())
            except BaseException as e:  # it is raised on the thread that waits
                errors.append(e)

        thread = threading.Thread(target=run, name=f"unicoll-{self.context.name}-{what}", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive():
                self._look(None)
                self._check_time(what, deadline, None)
        if errors:
            raise errors[0]
        return answers[0]

    # --- codes -----------------------------------------------------------------------------------------------------

    def error(self, code: int, what: str, call: Call | None) -> DistError:
        """Our error for one of NCCL's codes."""
        op, seq = (call.op.name, call.seq) if call is not None else (None, None)
        return error_for(code, self.nccl, self.handle, what, self.context.name, op, seq)

    def settle(self, code: int, call: Call, deadline: float) -> None:
        """What a call of NCCL answered, unless it was success: wait until it is done, or raise."""
        what = f"{call.describe()} #{call.seq}"
        if code != IN_PROGRESS:
            self.await_news(code, call)
            raise self.error(code, what, call)
        self.await_ready(what, deadline, call)

    def await_news(self, code: int, call: Call | None) -> None:
        """Raise what is behind one of NCCL's errors, if something is: the others' news come a moment after it."""
        until = time.monotonic() + (_NEWS_S if code in OF_OTHERS else 0.0)
        self._look(call)
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            self._look(call)

    def state(self) -> int:
        """The communicator's state; a code of NCCL's."""
        with self._asking:
            code, state = self.nccl.comm_state(self.handle) if self.handle else (IN_PROGRESS, 0)
        return code or state

    def _take(self) -> int:
        """The handle, for its end: nobody asks for its state meanwhile, nor afterwards."""
        with self._asking:
            handle, self.handle = self.handle, 0
        return handle

    def await_ready(self, what: str, deadline: float, call: Call | None) -> None:
        """Wait while NCCL works on something that it has begun."""
        for _ in naps():
            state = self.state()
            if state != IN_PROGRESS:
                break
            self._look(call)
            self._check_time(what, deadline, call)
        if state != SUCCESS:
            self.await_news(state, call)
            raise self.error(state, what, call)

    def _check_time(self, what: str, deadline: float, call: Call | None) -> None:
        if time.monotonic() >= deadline:
            raise OperationTimeoutError(
                f"{what} on group {self.context.name!r}: NCCL was still connecting at its deadline",
                group=self.context.name,
                op=call.op.name if call is not None else None,
            )

    # --- operations ---------------------------------------------------------------------------------------------

    @contextmanager
    def group(self) -> Iterator[list[int]]:
        """Calls that go to the device as one; their codes are put into the list, the group's comes last."""
        codes: list[int] = []
        begun = self.nccl.group_start()
        if begun:
            codes.append(begun)
            yield codes
            return
        try:
            yield codes
        finally:
            codes.append(self.nccl.group_end())

    def made_op(self, call: Call, type_code: int) -> int:
        """The operation that multiplies by the call's factor and sums."""
        assert call.reduce is not None
        assert call.dtype is not None
        factor = factor_bytes(call.dtype, call.reduce.factor)
        found = self._made.get((type_code, factor))
        if found is not None:
            return found
        if len(self._made) >= _MADE_OPS:
            self.forget_ops()
        code, op = self.nccl.premul_sum(factor, type_code, self.handle)
        if code:
            raise self.error(code, "ncclRedOpCreatePreMulSum", call)
        self._made[(type_code, factor)] = op
        return op

    def forget_ops(self) -> None:
        """Give back the operations that were made with factors."""
        made, self._made = self._made, {}
        for op in made.values():
            self.nccl.redop_destroy(op, self.handle)

    # --- ends -----------------------------------------------------------------------------------------------------

    def split(self, context: Context | None, config: Config, deadline: float) -> Communicator | None:
        """A communicator among some of the members; the others take part with None."""
        color = min(context.ranks) if context is not None else None
        key = context.rank if context is not None else 0

        def begin() -> tuple[int, Slot]:
            return self._begin("ncclCommSplit", deadline, self.nccl.comm_split(self.handle, color, key, config))

        if context is None:
            code, _ = self._within(begin, "ncclCommSplit", deadline)
            if code:
                raise self.error(code, "ncclCommSplit", None)
            return None
        return Communicator(
            context, self.nccl, self.cuda, self.device, begin, "ncclCommSplit", deadline, self._look
        )

    def shrink(
        self,
        context: Context,
        excluded: list[int],
        config: Config,
        deadline: float,
        look: Callable[[Call | None], None],
    ) -> Communicator:
        """A communicator among the members that are left; ``look`` is theirs."""

        def begin() -> tuple[int, Slot]:
            self._look = look  # what ended this group is no reason to stop
            made = self.nccl.comm_shrink(self.handle, excluded, config, True)
            return self._begin("ncclCommShrink", deadline, made)

        return Communicator(context, self.nccl, self.cuda, self.device, begin, "ncclCommShrink", deadline, look)

    def _begin(self, what: str, deadline: float, made: tuple[int, Slot]) -> tuple[int, Slot]:
        """Wait until this communicator has made another: before, its handle need not be there."""
        code, slot = made
        if code == IN_PROGRESS:
            self.await_ready(what, deadline, None)
            code = SUCCESS
        return code, slot

    def finish(self, timeout: float) -> bool:
        """End it after all that was begun; all members call this. Whether it ended in ``timeout`` seconds."""

        def finalize() -> None:
            self.forget_ops()
            deadline = time.monotonic() + timeout
            code = self.nccl.comm_finalize(self.handle)
            end = self.nccl.comm_destroy
            for _ in naps():
                if code not in (SUCCESS, IN_PROGRESS) or self.state() != IN_PROGRESS:
                    break
                if time.monotonic() >= deadline:
                    end = self.nccl.comm_abort
                    break
            end(self._take())

        return self._bounded(finalize, "ending", timeout + _END_S)

    def abort(self) -> bool:
        """End it and whatever it is doing on the device; whether that was done in bounded time."""
        handle = self._take()
        return not handle or self._bounded(lambda: self.nccl.comm_abort(handle), "aborting", _END_S)

    def revoke(self) -> bool:
        """Stop whatever it is doing, threads in NCCL included, and keep it for :meth:`shrink`; False if NCCL cannot."""
        if not self.handle or not self.nccl.has("ncclCommRevoke"):
            return False
        answered: list[int] = []

        def revoke() -> None:
            code = self.nccl.comm_revoke(self.handle)
            if code == IN_PROGRESS:
                for _ in naps():
                    if (code := self.state()) != IN_PROGRESS or not self.handle:
                        break
            answered.append(code)

        return self._bounded(revoke, "revoking", _END_S) and answered == [SUCCESS]

    def _bounded(self, end: Callable[[], object], what: str, timeout: float) -> bool:
        """Do it on a thread that may be left behind: NCCL can hang in there."""

        def run() -> None:
            self.cuda.set_device(self.device)
            end()

        if not self.enders.start(run).wait(timeout):
            logging.getLogger("unicoll").error(
                "%s NCCL's communicator of group %r has not come back in %.0f s; it is left behind",
                what, self.context.name, timeout,
            )  # fmt: skip
            return False
        return True
