"""One communicator: readiness, errors, deadlines, and teardown in bounded time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import TypeVar

from unicoll.backend import Call, Context, operation_errors
from unicoll.calls.options import CallOptions
from unicoll.device_collectives.communicators import agreement
from unicoll.device_collectives.communicators.teardown import END_S, TeardownThreads
from unicoll.device_collectives.communicators.unique_id import Origin
from unicoll.device_collectives.errors import error_for
from unicoll.device_collectives.interface import (
    SUCCESS,
    CollectiveLibrary,
    Config,
    HandleSlot,
    Operations,
)
from unicoll.device_collectives.reductions import factor_bytes
from unicoll.devices.device_runtime import DeviceRuntime, backoff
from unicoll.errors import DistError, OperationTimeoutError, RankLostError
from unicoll.process import logs
from unicoll.process.interrupts import Flag, LazyThread

_Result = TypeVar("_Result")

_LOCK_S = 1.0
"""How long a thread in the library may take to leave it before its communicator is revoked or
aborted."""
_CHECK_PERIOD_S = 0.05
_DEATH_NOTICE_S = 1.0
"""The longest time from the library's error to the control plane's notice of the death of a rank
that caused it."""
_REDUCTIONS = 512
"""Kinds of reductions whose expression in the library is kept."""
_PREMUL_OPS = 64
"""Reduction operations with a factor that are kept."""


class Communicator:
    """A communicator among the members of a group.

    The functions that make a communicator wait for the other ranks, so they run on a thread that
    can be abandoned. While the library works on something that it has begun ("in progress", on
    non-blocking communicators), the methods wait for it until a deadline, or until the group has
    failed.

    Args:
        origin: where the members have exchanged their facts.
        begin: the function that makes the communicator, from a new slot; returns the library's code
            and the slot of the handle.
        what: name of the library's function, for errors.
        check: called while waiting, with the call that waits or None; raises the error that has
            ended the group.
        parent: the communicator that the library makes this one from, and that is aborted if it
            does not end that.

    Attributes:
        handle: the library's; 0 once the communicator has ended.
        teardown_threads: threads for calls of the library that may never return.
        scratch: address of device memory for barriers.
    """

    def __init__(
        self,
        context: Context,
        origin: Origin,
        library: CollectiveLibrary,
        runtime: DeviceRuntime,
        device: int,
        begin: Callable[[HandleSlot], tuple[int, HandleSlot]],
        what: str,
        deadline: float,
        check: Callable[[Call | None], None],
        parent: Communicator | None = None,
    ) -> None:
        self.context = context
        self.origin = origin
        self.library = library
        self._in_progress = library.in_progress
        self.runtime = runtime
        self.device = device
        self.rank, self.size = context.rank, context.size
        self.scratch = 0
        # It is set unless a thread is stopping or ending the communicator.
        self._returned = Flag()
        self._returned.set()
        # One flag for each thread that was left behind in the library; it is set when the thread
        # has returned.
        self._left_behind: list[Flag] = []
        self._check = check
        self._log = logs.logger(context.backend)
        # They are made with the first communicator: no thread can be started when the interpreter
        # ends, which may be when this one ends.
        self.teardown_threads: TeardownThreads = context.job.shared(
            f"{context.backend}-teardown", partial(TeardownThreads, context.backend, runtime)
        )
        self.native_all_to_all = library.has("all_to_all")
        self.scales_one_rank = library.scales_one_rank
        self.reduction = lru_cache(_REDUCTIONS)(library.reduction)
        self._abandoned = False
        self._premul_ops: dict[tuple[int, bytes], int] = {}
        # The watchdog may query the state at any time. NCCL frees what a query reads when the
        # communicator is ended, so a query and the taking of the handle exclude each other.
        self._state_lock = threading.Lock()
        slot = library.new_slot()
        self.handle = 0
        self._warn_at = time.monotonic() + agreement.WARNING_S
        try:
            code, self._slot = self.on_thread(partial(begin, slot), what, deadline)
        except BaseException:
            # An exception that ends the wait, also one of a signal's handler, leaves the thread in
            # the library, where it waits for the other ranks.
            self._abort_start(slot, parent)
            raise
        self.handle = self._slot.value or 0
        if code not in (SUCCESS, self._in_progress):
            self.await_death_notice(code, None)
            raise self.error(code, what, None)
        try:
            self.await_ready(what, deadline, None)
        except BaseException:
            self.abort()
            raise
        # The warning is about the start; later waits are not for connections to all ranks.
        self._warn_at = math.inf

    def _abort_start(self, slot: HandleSlot, parent: Communicator | None) -> None:
        """Have the thread leave the library that makes the communicator: NCCL's loops for that use
        a whole core."""
        if not self._left_behind or not self._can_abort():
            return
        # The thread is in a call for the parent, and there is no handle of a new communicator yet:
        # only an abort of the parent makes the thread return.
        if parent is not None and not slot.value:
            parent._left_behind = [*parent._left_behind, *self._left_behind]
            parent.abort()
            return

        def abort() -> None:
            # NCCL writes the handle before it waits for other ranks, so this loop ends soon: by the
            # handle, or by the return of the thread.
            for _ in backoff():
                if slot.value or self._left_behind[-1].is_set():
                    break
            self.handle = slot.value or 0
            self._abort(self._await_threads)

        self._bounded(abort, "aborting")

    def on_thread(self, begin: Callable[[], _Result], what: str, deadline: float) -> _Result:
        """Call ``begin`` on another thread, which is left behind at the deadline or when the group
        fails."""
        answers: list[_Result] = []
        errors: list[BaseException] = []
        thread, ended, given_up = LazyThread(f"unicoll-{self.context.name}-{what}"), Flag(), Flag()

        def run() -> None:
            try:
                # A thread whose start was interrupted may begin after the caller has given up. It
                # calls nothing then.
                if not given_up.is_set():
                    # A new thread has no device; NCCL would take device 0 for it.
                    self.runtime.set_device(self.device)
                    answers.append(begin())
            except BaseException as e:
                # It is raised on the thread that waits.
                errors.append(e)
            finally:
                ended.set()

        # The wait is for a flag: Thread.join(), if an exception interrupts it, takes a thread that
        # runs for one that has ended.
        try:
            thread.start(run)
            while not ended.wait(_CHECK_PERIOD_S):
                self._check(None)
                self._check_deadline(what, deadline, None)
        except BaseException:
            # The order matters: a thread that begins after the first line calls nothing, and one
            # that has begun before it has its ident already.
            given_up.set()
            if thread.ident is not None:
                self._left_behind = [*self._left_behind, ended]
            raise
        if errors:
            raise errors[0]
        return answers[0]

    # --- codes ------------------------------------------------------------------------------------

    def error(self, code: int, what: str, call: Call | None) -> DistError:
        """The exception for one of the library's codes."""
        op, seq = (call.op.name, call.seq) if call is not None else (None, None)
        left = (
            operation_errors.first_member_that_left(self.context)
            if code in self.library.peer_errors
            else None
        )
        control = self.context.job.control
        departed = control.departed[left] if control is not None and left is not None else ""
        error = error_for(
            code, self.library, self.handle, what, self.context.name, op, seq, departed
        )
        if isinstance(error, RankLostError):
            error.rank = left
        return error

    def handle_code(self, code: int, call: Call, deadline: float) -> None:
        """Handle a code other than success: wait while the library is in progress, else raise the
        error."""
        what = call.describe_with_number()
        if code != self._in_progress:
            self.await_death_notice(code, call)
            raise self.error(code, what, call)
        self.await_ready(what, deadline, call)

    def await_death_notice(self, code: int, call: Call | None) -> None:
        """Raise the group's error, or that of a member's death, if that caused the library's error;
        else return.

        The control plane's notice may come a moment after the library's error.
        """
        until = time.monotonic() + (_DEATH_NOTICE_S if code in self.library.peer_errors else 0.0)
        self._check(call)
        while time.monotonic() < until:
            time.sleep(_CHECK_PERIOD_S)
            self._check(call)

    def state(self) -> int:
        """The communicator's state: one of the library's codes."""
        # Without a handle the communicator is being ended. It counts as in progress, so that a
        # thread in await_ready() waits for the group's error, which `check` raises.
        with self._state_lock:
            code, state = (
                self.library.comm_state(self.handle) if self.handle else (self._in_progress, 0)
            )
        return code or state

    def _take_handle(self) -> int:
        """Take the handle in order to end the communicator; its state is not queried from then
        on."""
        with self._state_lock:
            handle, self.handle = self.handle, 0
        return handle

    def await_completion(self, code: int, what: str, deadline: float) -> None:
        """Wait while the library is in progress with a call; raise its error.

        Success may mean that, too: some functions of NCCL (split, shrink, windows from 2.28 on)
        return it for a non-blocking communicator though they have only begun.
        """
        if code not in (SUCCESS, self._in_progress):
            raise self.error(code, what, None)
        self.await_ready(what, deadline, None)

    def await_ready(self, what: str, deadline: float, call: Call | None) -> None:
        """Wait while the library is in progress; raise its error, or the group's."""
        for _ in backoff():
            state = self.state()
            if state != self._in_progress:
                break
            self._check(call)
            self._check_deadline(what, deadline, call)
        if state != SUCCESS:
            self.await_death_notice(state, call)
            raise self.error(state, what, call)

    def _check_deadline(self, what: str, deadline: float, call: Call | None) -> None:
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = math.inf
            self._log.warning(
                "group %r: %s has not returned for %g s: %s has not connected to all ranks. %s",
                self.context.name,
                what,
                agreement.WARNING_S,
                self.library.name,
                self.library.connection_hint(self.context.job.addresses),
            )
        if now >= deadline:
            raise OperationTimeoutError(
                f"{what} on group {self.context.name!r}: {self.library.name} had not returned by"
                " the deadline",
                group=self.context.name,
                op=call.op.name if call is not None else None,
            )

    # --- operations -------------------------------------------------------------------------------

    def grouped(self, calls: Iterable[Callable[[], int]]) -> int:
        """Several calls as one group call; the first code that is not success.

        Also an exception right behind the beginning ends it: in a group the library only notes what
        the thread calls.
        """
        codes: list[int] = []
        library, begun = self.library, SUCCESS
        try:
            # `begun` is already success before the call: an exception may come right behind the
            # call, when the group has begun and has to be ended.
            begun = library.group_start()
            if begun == SUCCESS:
                codes.extend(call() for call in calls)
        finally:
            ended = library.group_end() if begun == SUCCESS else begun
        return next((code for code in codes if code), ended)

    def premul_op(self, call: Call, type_code: int) -> int:
        """The reduction operation that multiplies by the call's factor and sums."""
        assert call.reduce is not None
        assert call.dtype is not None
        factor = factor_bytes(call.dtype, call.reduce.factor)
        found = self._premul_ops.get((type_code, factor))
        if found is not None:
            return found
        if len(self._premul_ops) >= _PREMUL_OPS:
            # NCCL allows this for operations in flight: it needs an operation only until the
            # functions that got it have returned.
            self._destroy_premul_ops()
        code, op = self.library.premul_sum(factor, type_code, self.handle)
        if code:
            raise self.error(code, self.library.symbol("premul_sum"), call)
        self._premul_ops[(type_code, factor)] = op
        return op

    def _destroy_premul_ops(self) -> None:
        ops, self._premul_ops = self._premul_ops, {}
        for op in ops.values():
            self.library.redop_destroy(op, self.handle)

    def register_window(self, ptr: int, nbytes: int, deadline: float) -> int:
        """The library's handle of a new symmetric window, which all ranks register; 0 if it has no
        use for one.

        After an error the library may still use the memory: the registration may hang, and is
        abandoned then.
        """
        what = f"{self.library.symbol('window_register')} of {nbytes} bytes"
        begin = partial(self.library.window_register, self.handle, ptr, nbytes, True)
        code, slot = self.on_thread(begin, what, deadline)
        self.await_completion(code, what, deadline)
        return slot.value or 0

    # --- other communicators made from this one ---------------------------------------------------

    def split(
        self, color: int | None, key: int, config: Config, deadline: float
    ) -> tuple[int, HandleSlot]:
        """Take part in a split, on a thread that may be abandoned; with ``color`` None this rank
        joins no new group."""
        made = self.library.comm_split(self.handle, color, key, config)
        return self._await_handle("comm_split", deadline, made)

    def shrink(
        self,
        excluded: list[int],
        config: Config,
        deadline: float,
        check: Callable[[Call | None], None],
    ) -> tuple[int, HandleSlot]:
        """The handle of a communicator of the remaining members, on a thread that may be abandoned.

        ``check`` is that of the new group: this one may have failed, which does not stop the new
        one.
        """
        self._check = check
        made = self.library.comm_shrink(self.handle, excluded, config, True)
        return self._await_handle("comm_shrink", deadline, made)

    def _await_handle(
        self, method: str, deadline: float, made: tuple[int, HandleSlot]
    ) -> tuple[int, HandleSlot]:
        """Wait until this communicator has made another: the new handle may not be there before."""
        code, slot = made
        if code in (SUCCESS, self._in_progress):
            self.await_completion(code, self.library.symbol(method), deadline)
            code = SUCCESS
        return code, slot

    # --- teardown ---------------------------------------------------------------------------------

    def finish(self) -> bool:
        """End the communicator after its operations; all members call this. False if it did not
        return in time."""
        # The function ncclCommDestroy waits until the ranks of this host have closed their
        # connections to it.
        return self._bounded(
            self._finish, "ending", "the other ranks of this host may not have ended theirs; "
        )

    def _finish(self) -> None:
        self._destroy_premul_ops()
        code = self._await_end_of(self.library.comm_finalize(self.handle))
        if code == SUCCESS:
            # The state is queried until here, so the handle is taken only now.
            self.library.comm_destroy(self._take_handle())
        elif self._can_abort():
            self.library.comm_abort(self._take_handle())

    def stop(self, lock: threading.RLock) -> bool:
        """End all operations, also of a thread in the library, which holds ``lock``; False if it
        did not return in time.

        The communicator stays for :meth:`shrink`, unless the library cannot revoke it (NCCL before
        2.28.7) or refuses.
        """
        return self._can_abort() and self._bounded(partial(self._stop, lock), "stopping")

    def _stop(self, lock: threading.RLock) -> None:
        # NCCL does not allow that a communicator is ended while a thread uses it. So a thread in
        # the library gets a second to leave it. If it does not, it waits for a rank that is gone:
        # the revoke, or the abort in a group call, makes it return, and the lock is taken without a
        # limit. With the lock, and once the threads that were left behind have returned too, no
        # thread uses the communicator, and an abort may free it.
        locked = lock.acquire(timeout=_LOCK_S)

        def await_threads() -> None:
            nonlocal locked
            locked = locked or lock.acquire()
            self._await_threads()

        try:
            if self._revoke():
                await_threads()
            else:
                self._abort(await_threads)
        finally:
            if locked:
                lock.release()

    def _revoke(self) -> bool:
        """Stop all operations, and wait until none is on the device; False if the library cannot,
        or refuses to."""
        if not self.handle or not self.library.has("comm_revoke"):
            return False
        return self._await_end_of(self.library.comm_revoke(self.handle)) == SUCCESS

    def abort(self) -> bool:
        """End the communicator and its operations; False if the library cannot, or did not return
        in time."""
        return self._can_abort() and self._bounded(
            partial(self._abort, self._await_threads), "aborting"
        )

    def _can_abort(self) -> bool:
        """True if the library can abort a communicator; otherwise the communicator is abandoned
        with its threads."""
        if self.library.has("comm_abort"):
            return True
        if not self._abandoned:
            self._abandoned = True
            self._log.warning(
                "group %r: %s cannot abort a communicator: its threads, connections and memory stay"
                " until the process ends",
                self.context.name,
                self.library.name,
            )
        return False

    def _abort(self, await_threads: Callable[[], object]) -> None:
        """Abort the communicator, which the other threads leave then, and free it after
        ``await_threads``."""
        if handle := self._take_handle():
            self.library.group_start()
            # In a group call ncclCommAbort has the other threads return, and frees the communicator
            # only when the group call ends: after they have stopped using it.
            self.library.comm_abort(handle)
            await_threads()
            self.library.group_end()

    def _await_threads(self) -> None:
        """Wait until the threads that were left behind have returned from the library."""
        for ended in self._left_behind:
            ended.wait(math.inf)

    def _await_end_of(self, code: int) -> int:
        """The code with which a call of the library ends that has returned ``code``."""
        polls = backoff()
        while code == self._in_progress:
            next(polls)
            code = self.state()
        return code

    def _bounded(self, function: Callable[[], object], what: str, reason: str = "") -> bool:
        """Call a function on a thread that may be abandoned, since the library can hang; False if
        it has not returned.

        The next call waits for its end, and has no effect without it: an abort frees what the
        thread uses.
        """

        returned = Flag()

        def run() -> None:
            try:
                self.runtime.set_device(self.device)
                function()
            finally:
                returned.set()

        # A thread that has not returned uses the communicator, which the next call would free.
        if not self._returned.wait(END_S):
            return False
        self._returned = returned
        self.teardown_threads.start(run)
        if not self._returned.wait(END_S):
            self._log.error(
                "%s %s's communicator of group %r did not return in %.0f s; %sits thread is"
                " abandoned",
                what,
                self.library.name,
                self.context.name,
                END_S,
                reason,
            )
        return self._returned.is_set()


class CommunicatorWithOptions:
    """The attributes of a communicator that operations use, with collectives that pass options to
    the library."""

    def __init__(self, comm: Communicator, options: CallOptions) -> None:
        # The handle is a copy, which stays when the communicator ends. It is not used then:
        # DeviceBackend._issue checks the group's state first.
        self.rank, self.size, self.handle, self.scratch = (
            comm.rank,
            comm.size,
            comm.handle,
            comm.scratch,
        )
        self.native_all_to_all, self.scales_one_rank = comm.native_all_to_all, comm.scales_one_rank
        self.premul_op, self.grouped, self.reduction = comm.premul_op, comm.grouped, comm.reduction
        self.library: Operations = comm.library.with_options(options)


AnyCommunicator = Communicator | CommunicatorWithOptions
