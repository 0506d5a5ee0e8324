"""What every rank does: open the contenders, go through the lines, print them on rank 0, and close."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import unicoll as dist

from .. import launchers
from ..types import DType
from . import report, table
from .args import Options
from .contenders import contender
from .contract import Case, Contender, World
from .measure import Lane, Stats, agree, attempt, check, measure
from .operations import IN, OUT
from .progress import Progress, wanted

__all__ = ["Session", "run"]

_PLACES = {"both": (OUT, IN), "out": (OUT,), "in": (IN,)}
_OVER_RANKS = ("of rank 0", "average over {n} ranks", "least of {n} ranks", "most of {n} ranks")


def run(options: Options) -> int:
    """Measure as one rank of a job; the exit status, which is rank 0's to give: one bad one is enough."""
    dist.init_process_group("cpu:gloo", timeout=options.timeout)
    try:
        session = Session(options)
        try:
            status = session.run()
        finally:
            session.progress.clear()
        session.close()
        dist.destroy_process_group()
        return status if session.rank == 0 else 0
    except KeyboardInterrupt:
        _abort_mpi(told=True)
        return 130
    except BaseException:
        _abort_mpi(told=False)
        raise


def _abort_mpi(told: bool) -> None:
    """A rank that fails takes an MPI job down: MPI does not tell the others, which might wait for ever."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        if not told:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        mpi.COMM_WORLD.Abort(130 if told else 1)


class Session:
    """One run on one rank."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.progress = Progress(self.rank == 0 and wanted())
        self.contenders: list[Contender] = []
        self.skipped: dict[str, str] = {}
        self.failed = 0
        self._said: set[str] = set()
        self._bandwidths: dict[str, list[float]] = {}
        self._open()

    @property
    def compared(self) -> bool:
        """Whether the table has the columns that compare contenders."""
        return len(self.contenders) > 1

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self.rank == 0:
            self.progress.clear()
            print(text, flush=True)

    def say_once(self, text: str) -> None:
        """Print a remark, the first time only."""
        if text not in self._said:
            self._said.add(text)
            self.say(f"# {text}")
            self.report.add_error(text)

    # --- beginning and end ------------------------------------------------------------------------------------

    def _open(self) -> None:
        launched = launchers.detect()
        hosts: list[Any] = [None] * self.size
        dist.all_gather_object(hosts, socket.gethostname())
        local = launched.local_rank if launched is not None else None
        if local is None:
            local = hosts[: self.rank].count(hosts[self.rank])
        world = World(self.rank, self.size, local, tuple(hosts), self.options.timeout)
        for name in self.options.contenders:
            self.progress.what = "opening"
            self.progress.tell(name)
            one = contender(name)
            problem = agree(one.reason())
            if problem is None:
                try:
                    one.open(world)
                except Exception as e:
                    problem = f"{type(e).__name__}: {e}"
                problem = agree(problem)
            if problem is None:
                self.contenders.append(one)
            else:
                self.skipped[name] = problem

    def close(self) -> None:
        """Give everything back."""
        for one in reversed(self.contenders):
            one.close()

    def run(self) -> int:
        """Measure; the exit status."""
        for name, why in self.skipped.items():
            if self.rank == 0:
                print(f"unicoll.bench: {name} is not measured: {why}", file=sys.stderr, flush=True)
        if not self.contenders:
            return 1
        roots = self.options.roots or ()
        if self.options.op.rooted and any(root >= self.size for root in roots):
            if self.rank == 0:
                print(
                    f"unicoll.bench: -r {roots[0]}: there are {self.size} ranks", file=sys.stderr, flush=True
                )
            return 2
        staging = self._staging()
        devices: list[Any] = [None] * self.size
        dist.all_gather_object(devices, report.device(self.rank, self.contenders))
        transports = {one.name: one.describe() for one in self.contenders}
        self.report = report.Report(self.options, self.size, devices, transports, staging, self.skipped)
        self._print_head(devices, transports, staging)
        if self.options.overlap:
            from .overlap import sweep

            measured = sweep(self)
        else:
            measured = self._sweep()
        return self._conclude(measured)

    def _staging(self) -> dict[str, int]:
        """Bytes of staging memory of each contender that tells: the most that a rank has."""
        everyones: list[Any] = [None] * self.size
        dist.all_gather_object(everyones, {one.name: one.staging() for one in self.contenders})
        return {
            one.name: max(theirs[one.name] for theirs in everyones)
            for one in self.contenders
            if all(theirs[one.name] is not None for theirs in everyones)
        }

    def _conclude(self, measured: bool) -> int:
        options = self.options
        text = os.environ.get("NCCL_TESTS_MIN_BW")
        least = float(text) if text else None
        average = {name: sum(all_bw) / len(all_bw) for name, all_bw in self._bandwidths.items() if all_bw}
        if not (options.osu or options.overlap):
            for line in table.footer(self.failed, average, least, options.op.program):
                self.say(line)
        data = self.report.finish(self.failed, average, least)
        if not measured:
            self.say("# nothing was measured")
        if self.rank == 0:
            if options.json:
                report.write(data, options.json)
            if options.plot and measured:
                from .plot import draw

                draw(data, options.plot)
        slow = least is not None and next(iter(average.values()), 0.0) < least * 0.9
        return int(bool(self.failed or slow or not measured))

    # --- what is printed first --------------------------------------------------------------------------------

    def _print_head(
        self, devices: list[dict[str, Any]], transports: dict[str, str], staging: dict[str, int]
    ) -> None:
        options, pace = self.options, self.options.pace
        if options.osu:
            cuda = any(one.device != "cpu" for one in self.contenders)
            title = "unicoll.bench" if self.compared else self.contenders[0].name
            head = (
                options.op,
                f"{title}{'-CUDA' if cuda else ''}",
                dist.__version__,
                options.types[0],
                options.osu_full,
                self.compared,
            )
            for line in table.osu_header(*head):
                self.say(line)
            return
        sizes = options.sweep.sizes
        self.say(f"# unicoll version {dist.__version__}, in the format of nccl-tests")
        self.say(f"# Collective test starting: {options.op.program}")
        self.say(
            f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: {options.sweep.step}"
            f" warmup iters: {pace.warmup} iters: {pace.iters or 'auto'} agg iters: {pace.aggregate}"
            f" validation: {options.checks} graph: 0 unalign: {options.unalign}"
        )
        self.say("#\n# Using devices")
        for d in devices:
            self.say(
                f"#  Rank {d['rank']:2d} Group {d['group']:2d} Pid {d['pid']:6d} on {d['hostname']:>10}"
                f" device {d['device']:2d} [{d['device_hex']}] {d['device_info']}"
            )
        self.say("#")
        over = _OVER_RANKS[options.average].format(n=self.size)
        many = f"{pace.iters} calls" if pace.iters else f"calls for {pace.budget:g} s"
        load = os.getloadavg()[0]
        self.say(f"# machine: {report.cpu()}, {os.cpu_count()} cores, load average {load:.2f} when we began")
        self.say(f"# time: {options.statistic} of a rank's calls, {over}; {many} in {pace.turns} turns")
        for one in self.contenders:
            self.say(f"# {one.name}: {transports[one.name]}")
        for name, count in staging.items():
            self.say(f"# staging: {count} bytes per rank ({transports[name]}), constant in the message size")
        if not options.overlap:
            self.say("#")
            for line in table.header(self.compared, pace.host_time, options.timestamps):
                self.say(line)

    # --- the lines --------------------------------------------------------------------------------------------

    def cases(self) -> Iterator[tuple[int, DType, str, str, int]]:
        """What the lines are of: bytes asked for, element type and its name, reduction, root."""
        options = self.options
        redops = options.redops if options.op.reduces else ("none",)
        roots = (options.roots or tuple(range(self.size))) if options.op.rooted else (-1,)
        for type_name in options.types:
            for redop in redops:
                for root in roots:
                    for size in options.sweep.sizes:
                        yield size, options.dtype(type_name), type_name, redop, root

    def case(self, size: int, dtype: DType, redop: str, root: int, half: str) -> Case | None:
        """One line for one half; None where a rank would have less than an element."""
        op = self.options.op
        if self.options.osu and op.osu_share:
            size *= self.size
        counts = op.divide(size // dtype.itemsize, self.size)
        if not counts.shown and op.name != "barrier":
            return None
        return Case(op, half, dtype, redop, max(root, 0), counts, self.rank, self.size)

    def _sweep(self) -> bool:
        measured, cycle = False, 0
        while cycle < self.options.cycles or not self.options.cycles:
            for case in self.cases():
                measured |= self._line(*case)
            cycle += 1
            if not measured:
                break
        return measured

    def _line(self, size: int, dtype: DType, type_name: str, redop: str, root: int) -> bool:
        self.progress.what = f"{self.options.op.name} {type_name} {size} bytes"
        lanes = list(self._lanes(size, dtype, redop, root))
        if not lanes:
            return False
        counts = lanes[0].case.counts
        actual = max(counts.send, counts.recv) * dtype.itemsize
        stats = measure(lanes, actual, self.options.pace, self.options.average, self.progress.tell)
        halves: dict[str, dict[str, table.Half]] = {}
        for lane, stat in zip(lanes, stats, strict=True):
            half = self._half(lane, stat, actual)
            halves.setdefault(lane.contender.name, {})[lane.case.half] = half
            self._bandwidths.setdefault(lane.contender.name, []).append(half.busbw)
        reference = halves.get(self.contenders[0].name, {})
        for name, found in halves.items():
            line = table.Line(
                actual, counts.shown, type_name, redop, root, found, name, self._ratio(found, reference)
            )
            self._print(line)
            self.report.add(line)
        self._watch_staging()
        return True

    def _lanes(self, size: int, dtype: DType, redop: str, root: int) -> Iterator[Lane]:
        options = self.options
        for one in self.contenders:
            halves = [h for h in one.halves(options.op) if h in _PLACES[options.halves]]
            if not halves:
                where = "in place" if options.halves == "in" else "out of place"
                self.say_once(f"{one.name} has no {options.op.name} {where}")
            for half in halves:
                case = self.case(size, dtype, redop, root, half)
                if case is None:
                    continue
                self.progress.tell(one.name)
                lane, problem = attempt(one, case, options.array, options.unalign)
                if lane is not None:
                    yield lane
                else:
                    self.say_once(f"{one.name}, {half.replace('_', ' ')}, {dtype.name}, {redop}: {problem}")

    def _half(self, lane: Lane, stat: Stats, size: int) -> table.Half:
        wrong = None
        if self.options.checks:
            self.progress.tell(f"{lane.contender.name}, checking")
            wrong, failed = check(lane, self.options.checks)
            self.failed += failed
        us = stat.over_ranks[self.options.statistic]
        algorithm, bus = table.bandwidths(lane.case.op, size, us, self.size)
        return table.Half(us, stat.over_ranks, algorithm, bus, wrong, stat.calls, stat.by_rank)

    def _ratio(self, found: dict[str, table.Half], reference: dict[str, table.Half]) -> float | None:
        for half in (*self.options.op.halves, IN, OUT):
            if half in found and half in reference:
                return found[half].time / reference[half].time
        return None

    def _print(self, line: table.Line) -> None:
        options = self.options
        if options.osu:
            text = table.osu_line(options.op, line, self.size, options.osu_full, self.compared)
        else:
            text = table.row(line, self.compared, options.timestamps)
        self.say(text)

    def _watch_staging(self) -> None:
        for name, count in self._staging().items():
            if not self.report.note_staging(name, count):
                self.say_once(f"{name}: staging memory has grown to {count} bytes per rank")
