"""The groups of torch.distributed whose calls are recorded, and their calls that have not ended."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll.calls import flight_recorder
from unicoll.torch_watch.torch_calls import TorchCall

_MAX_CHANNELS = 200
"""Kinds of messages up to which a rank sends the numbers of all of them to the relay."""

_DEFAULT = "default_pg"
_REFUSED_S = 1.0
"""After this time torch does not refuse a call."""

Channel = tuple[str, int, int]
"""torch's method, the other member and the tag of messages: number n of the sender is number n of
the receiver."""


class TorchGroup:
    """A backend of a group of torch.distributed whose calls are recorded. It does not keep torch's
    group alive.

    The number of a collective must be equal on all ranks. Gloo and NCCL number their collectives,
    also those of torch's C++ code. Where the number may mean something else, the recorded
    collectives are counted: in a group with another backend, a group that had made calls before
    they were recorded (its messages may be in the number), and at torch's debug level DETAIL, whose
    comparison of calls comes before the number.

    Args:
        pg: torch's process group.
        backend: torch's name of the backend.
        device: a type of device that it is for.
        number: how many groups torch has made of this name.
        is_only: True if the group has no other backend.
        is_new: True before the group's first call.

    Attributes:
        pg: a weak reference to torch's process group.
        torchs_name: torch's name of it.
        name: that name (``default_pg`` for the default group, torch's description of it), with a
            number if it had an earlier group of this name, and the type of device if it has several
            backends.
        desc: torch's description of it.
        backend_name: torch's name of its backend.
        by_device: if it has several backends and this is the first one, all of them by the type of
            device; else empty.
        completes: True if its works may be asked on any thread whether they are completed. Those of
            a device's library ask the device, which would break the capture of a graph.
        rank: of this process in the group.
        timeout: default timeout of its calls, seconds.
        job_number: of the job in which it is watched; 0 before there is one.
        newest: the collective that was made last, or None.
        last: the collective that ended last, or None.
        on_error: called with a call in whose wait torch raises an error, and the error; or None.
        is_counted_from_start: True if equal numbers of calls on its members mean the same call, as
            far as the program is correct: it was recorded before its first call.
        is_numbered: True if calls have torch's numbers.
        has_messages: True once it has sent or received.
        messages: by how much torch's number is too high: Gloo counts messages, too, of which ranks
            have different numbers.
        count: number of its recorded collectives, if calls do not have torch's numbers.
        channels: number of messages of each kind.
        counts_messages: True while the messages have numbers: the program has not received from any
            rank, and does not use more than :data:`_MAX_CHANNELS` kinds of messages.
    """

    def __init__(
        self, pg: Any, backend: str, device: str, number: int, is_only: bool, is_new: bool
    ) -> None:
        self.pg = weakref.ref(pg)
        self.torchs_name = c10d._world.pg_names.get(pg, "")
        name = _DEFAULT if _is_default(pg) else self.torchs_name
        numbered = name if number == 1 else f"{name}#{number}"
        self.name = numbered if is_only else f"{numbered}:{device}"
        self.desc = str(getattr(pg, "group_desc", ""))
        self.backend_name = backend
        self.by_device: dict[str, TorchGroup] = {}
        self.completes = backend == "gloo"
        self.timeout = float("inf")
        self.job_number = 0
        self.newest: TorchCall | None = None
        self.last: TorchCall | None = None
        self.on_error: Callable[[TorchCall, BaseException], None] | None = None
        self.messages = 0
        self.count = 0
        self.channels: dict[Channel, int] = {}
        self.counts_messages = self.completes
        self.rank: int = pg.rank()
        self._ranks: tuple[int, ...] = ()
        # The device whose backend torch is asked for its number; None if the group has only one.
        self._device = None if is_only else torch.device(device)
        has_numbers = backend in ("gloo", "nccl")
        if has_numbers and is_only:
            try:
                pg._get_sequence_number_for_group()
            except RuntimeError:
                # Before 2.13 torch does not know the backend that it has chosen itself, and is
                # asked by device.
                self._device = torch.device(device)
        self.is_counted_from_start = is_new or (has_numbers and not self._read_number(pg))
        self.is_numbered = (
            has_numbers
            and self.is_counted_from_start
            # Not compared by identity: equal values are different objects.
            and dist.get_debug_level() != dist.DebugLevel.DETAIL
        )
        self._message_step = int(self.backend_name == "gloo")
        self.has_messages = False
        self._counting = threading.RLock()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of its members, in group order; empty while torch makes the group."""
        if not self._ranks:
            ranks = c10d._world.pg_group_ranks.get(self.pg()) or {}
            self._ranks = tuple(sorted(ranks, key=ranks.__getitem__))
        return self._ranks

    @property
    def parts(self) -> tuple[TorchGroup, ...]:
        """This backend, and the others of the same group if it is the first one."""
        return tuple(self.by_device.values()) or (self,)

    def part_of(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> TorchGroup:
        """The one of several backends that makes a call with these arguments."""
        for argument in (*arguments, *options.values()):
            while isinstance(argument, list | tuple) and argument:
                argument = argument[0]
            device = getattr(argument, "device", None)
            if isinstance(device, torch.device) and device.type in self.by_device:
                return self.by_device[device.type]
        return self

    def _read_number(self, pg: Any) -> int:
        numbered = pg if self._device is None else pg._get_backend(self._device)
        return int(numbered._get_sequence_number_for_group())

    def _torchs_number(self) -> int:
        pg = self.pg()
        return self._read_number(pg) if pg is not None and self.is_numbered else 0

    @property
    def sequence(self) -> int:
        """The number of the last collective that was passed to torch."""
        return self._torchs_number() - self.messages if self.is_numbered else self.count

    @property
    def is_alive(self) -> bool:
        """False once torch has released its group."""
        return self.pg() is not None

    def count_message(self, method: str, arguments: Sequence[Any]) -> int:
        """The number of a message, which is being posted, among those with the same peer and tag; 0
        if it has none."""
        numbers = [each for each in arguments[1:] if isinstance(each, int)]
        if method == "recv_anysource" or len(numbers) != 2:
            self.counts_messages = False
            return 0
        channel = method, numbers[0], numbers[1]
        with self._counting:
            if channel not in self.channels and len(self.channels) >= _MAX_CHANNELS:
                self.counts_messages = False
            if not self.counts_messages:
                return 0
            self.channels[channel] = number = self.channels.get(channel, 0) + 1
        return number

    def discard_message(self, method: str, arguments: Sequence[Any]) -> None:
        """torch has refused the message that was counted last."""
        with self._counting:
            self.channels[method, arguments[1], arguments[2]] -= 1

    def channel_name(self, channel: Channel) -> str:
        """The same text on both members."""
        method, peer, tag = channel
        sender, receiver = (self.rank, peer) if method == "send" else (peer, self.rank)
        return f"{sender}>{receiver} tag {tag}"

    def message(self, torchs: Callable[[], Any], is_one: bool = True) -> Any:
        """Have torch send or receive; ``is_one`` is False if it is not known how many messages."""
        step = self._message_step if is_one else None
        self.has_messages = True
        # The lock is that of number(), which reads torch's number and ``messages``: it finds a
        # message in both or in neither. A monitored_barrier waits for the other ranks, and must not
        # have the lock meanwhile.
        with self._counting if is_one else nullcontext():
            before = self._torchs_number()
            try:
                result = torchs()
            except BaseException:
                # Torch may have counted the message before it refused it.
                step = None
                raise
            finally:
                if self.is_numbered:
                    # The difference is used only where the step is not known: collectives of other
                    # threads may be in it.
                    counted = self._torchs_number() - before
                    self.messages += (
                        step if step is not None else min(counted, 1) if is_one else counted
                    )
        return result

    def number(self, pg: Any) -> int:
        """The number of the collective that this thread has passed to torch last."""
        # Written out here for what most groups need; it is what _read_number() does.
        number = (
            int(pg._get_sequence_number_for_group())
            if self._device is None
            else self._read_number(pg)
        )
        # This is set before the first message is in torch's number, so the number above has none.
        if not self.has_messages:
            return number
        # Under the lock no message of another thread is in torch's number alone.
        with self._counting:
            return self._read_number(pg) - self.messages


def _is_default(pg: Any) -> bool:
    world = c10d.GroupMember.WORLD
    # Torch is making its default group, or this is it.
    return world is None or world is pg


_names: Counter[str] = Counter()
"""How many groups of each name torch has made beside, or after, its present default group."""
groups: dict[int, TorchGroup] = {}
"""The recorded groups, by the id of torch's process group."""
pending: dict[int, tuple[weakref.ref[Any], TorchCall]] = {}
"""The calls whose works were not waited for, by the id of the work. The work has references to the
tensors."""
_finding = threading.Lock()
_making = 0
"""Groups that torch is making."""


@contextmanager
def making() -> Iterator[None]:
    """While torch makes a group: it may be found before it is added."""
    global _making
    with _finding:
        _making += 1
    try:
        yield
    finally:
        with _finding:
            # In a child that was forked meanwhile it is 0 already.
            _making = max(0, _making - 1)


def add(pg: Any) -> None:
    """Record the calls of a group that torch has made now; all its members do this in the same
    order.

    ``pg`` is a number on other processes.
    """
    if type(pg) is c10d.ProcessGroup and pg in c10d._world.pg_map and pg.size() > 1:
        with _finding:
            # This is a new default group, with which torch's names begin again on all ranks.
            if c10d.GroupMember.WORLD is None:
                _names.clear()
            groups[id(pg)] = _made(pg, True)


def find(pg: Any) -> TorchGroup | None:
    """The recorded group of a process group of torch; None if it is not one of torch.distributed's,
    or has one rank.

    Of several backends the first one.
    """
    with _finding:
        group = groups.get(id(pg))
        if group is not None and group.pg() is pg:
            return group
        # A group that torch is making is left to add(), which knows that it has made no calls.
        if (
            type(pg) is not c10d.ProcessGroup
            or pg not in c10d._world.pg_map
            or pg.size() < 2
            or _making
        ):
            return None
        groups[id(pg)] = group = _made(pg, False)
        return group


def _made(pg: Any, is_new: bool) -> TorchGroup:
    name, config = c10d._world.pg_names.get(pg, ""), c10d._world.pg_backend_config.get(pg, "")
    _names[name] += 1
    pairs = [part.split(":") for part in config.split(",")]
    # Where all devices have the same name of a backend, torch makes one for all.
    is_only = len({pair[-1] for pair in pairs}) == 1
    if is_only:
        pairs = pairs[:1]
    made = {p[0]: TorchGroup(pg, p[-1], p[0], _names[name], is_only, is_new) for p in pairs}
    first = next(iter(made.values()))
    if not is_only:
        first.by_device = made
    return first


def forget() -> None:
    """Drop all, in a forked child."""
    global _finding, _making
    # Another thread may have had the lock at the fork.
    _finding, _making = threading.Lock(), 0
    groups.clear()
    pending.clear()


def forget_destroyed() -> None:
    """Drop the groups that torch has destroyed."""
    with _finding:
        for key, group in [*groups.items()]:
            if group.pg() is None:
                del groups[key]


def end_completed() -> None:
    """Mark the calls as ended that torch has completed; those whose work was dropped are not
    tracked any more."""
    # A copy, because other threads add calls and remove those that they have waited for.
    for key, (reference, call) in [*pending.items()]:
        work = reference()
        if work is None or (call.group.completes and not call.ended and work.is_completed()):
            if work is None and pending.get(key, (None,))[0] is reference:
                # Only this work's entry: another thread may have removed it, and a new work may
                # have the id.
                pending.pop(key, None)
            call.end()


def last_calls() -> list[TorchCall]:
    """The calls in the flight recorder."""
    return [entry for entry in flight_recorder.snapshot() if isinstance(entry, TorchCall)]


def last_collectives() -> dict[TorchGroup, list[TorchCall]]:
    """For each group the recorded collectives that have a number, in the order in which they began.

    Without those that torch may still refuse, so that their numbers are given again.
    """
    found: dict[TorchGroup, list[TorchCall]] = defaultdict(list)
    now = monotonic()
    for call in last_calls():
        if call.seq and (call.returned or now - call.created > _REFUSED_S):
            found[call.group].append(call)
    return found


def pending_calls(group: TorchGroup) -> list[TorchCall]:
    """The calls of a group that have not been seen to end, oldest first; of a group of a device's
    library only the one that is being made."""
    calls = {
        call
        for _, call in [*pending.values()]
        if call.group is group and group.completes and not call.ended
    }
    newest = group.newest
    if newest is not None and not (newest.ended or newest.returned):
        calls.add(newest)
    return sorted(calls, key=lambda call: call.created)
