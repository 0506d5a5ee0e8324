"""One run on one rank: open the contenders, measure every case, print the table on rank 0, and
close."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import unicoll as dist
from unicoll.arrays.types import BY_NAME, DType
from unicoll.bench import report, table
from unicoll.bench.args import TYPES, BenchOptions
from unicoll.bench.contenders import label, open_contenders
from unicoll.bench.contract import BenchCase
from unicoll.bench.measure import Series, Stats, attempt, check, measure
from unicoll.bench.operations import IN, OUT
from unicoll.process.formatting import print_text

_PLACES = {"both": (OUT, IN), "out": (OUT,), "in": (IN,)}
_OVER_RANKS = (
    "of rank 0",
    "average over {n} ranks",
    "minimum of {n} ranks",
    "maximum of {n} ranks",
)


def run(options: BenchOptions) -> int:
    """Measure as one rank of a job; returns the exit status. Rank 0 returns that of the run, other
    ranks 0.

    An exception aborts the job also under MPI's launchers, which would let the other ranks wait.
    """
    dist.init_process_group("cpu:gloo", timeout=options.timeout)
    try:
        session = Session(options)
        status = session.run()
        for contender in reversed(session.contenders):
            contender.close()
        dist.destroy_process_group()
        return status if session.rank == 0 else 0
    except KeyboardInterrupt:
        _abort_mpi(reported=True)
        return 130
    except BaseException:
        _abort_mpi(reported=False)
        raise


def _abort_mpi(reported: bool) -> None:
    """Abort the MPI job of a failed rank: MPI does not notify the other ranks, which would wait
    forever."""
    mpi = sys.modules.get("mpi4py.MPI")
    if (
        mpi is not None
        and mpi.Is_initialized()
        and not mpi.Is_finalized()
        and mpi.COMM_WORLD.size > 1
    ):
        if not reported:
            traceback.print_exc()
            sys.stderr.flush()
        mpi.COMM_WORLD.Abort(130 if reported else 1)


class Session:
    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.failed = 0
        self._printed: set[str] = set()
        self._bandwidths: dict[str, list[float]] = {}
        self.contenders, self.skipped = open_contenders(options)

    @property
    def compared(self) -> bool:
        """True if the table has the columns that compare contenders."""
        return len(self.contenders) > 1

    def print_line(self, text: str) -> None:
        if self.rank == 0:
            print_text(text)

    def print_once(self, text: str) -> None:
        """Print a comment line, unless the same line has been printed before."""
        if text not in self._printed:
            self._printed.add(text)
            self.print_line(f"# {text}")
            self.data["errors"].append(text)

    def _print_error(self, text: str) -> None:
        if self.rank == 0:
            print(f"unicoll.bench: {text}", file=sys.stderr, flush=True)

    def run(self) -> int:
        """Measure and return the exit status."""
        for name, why in self.skipped.items():
            self._print_error(f"{label(name)} is not measured: {why}")
        if not self.contenders:
            return 1
        roots = self.options.roots or ()
        if self.options.op.rooted and any(root >= self.size for root in roots):
            self._print_error(f"-r {roots[0]}: the job has {self.size} ranks")
            return 2
        devices: list[Any] = [None] * self.size
        dist.all_gather_object(devices, report.device(self.rank, self.contenders))
        transports = {contender.name: contender.describe() for contender in self.contenders}
        self.data = report.begin(
            self.options, self.size, devices, transports, self._staging(), self.skipped
        )
        self._print_header()
        if self.options.overlap:
            from unicoll.bench.overlap import sweep

            measured = sweep(self)
        else:
            measured = self._sweep()
        for name, count in self._staging().items():
            if count > self.data["staging"][name]["bytes_per_rank"]:
                self.print_once(
                    f"{label(name)}: staging memory has grown to {count} bytes per rank"
                )
                self.data["staging"][name]["bytes_per_rank_after"] = count
        return self._finish(measured)

    def _staging(self) -> dict[str, int]:
        """Staging memory in bytes of each contender that reports it: the maximum over the ranks."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(
            gathered, {contender.name: contender.staging() for contender in self.contenders}
        )
        return {
            contender.name: max(by_name[contender.name] for by_name in gathered)
            for contender in self.contenders
            if all(by_name[contender.name] is not None for by_name in gathered)
        }

    def _finish(self, measured: bool) -> int:
        options = self.options
        minimum = options.min_bandwidth
        average = {
            name: sum(values) / len(values) for name, values in self._bandwidths.items() if values
        }
        if not (options.osu or options.overlap):
            for line in table.footer(self.failed, average, minimum, options.op.program):
                self.print_line(line)
        data = report.finish(self.data, self.failed, average, minimum)
        if not measured:
            self.print_line("# nothing was measured")
        written = self.rank != 0 or self._write_files(data, measured)
        slow = minimum is not None and next(iter(average.values()), 0.0) < minimum * 0.9
        return int(bool(self.failed or slow or not measured or not written))

    def _write_files(self, data: dict[str, Any], measured: bool) -> bool:
        """Write the JSON and the plot; False if one of them cannot be written."""
        options = self.options
        try:
            if options.json:
                report.write(data, options.json)
            if options.plot and measured:
                from unicoll.bench.plot import draw

                draw(data, options.plot)
        except OSError as error:
            self._print_error(f"the results cannot be written: {error}")
            return False
        return True

    # --- header -----------------------------------------------------------------------------------

    def _print_header(self) -> None:
        options, data = self.options, self.data
        load = os.getloadavg()[0]
        if warning := report.load_warning(load, len(os.sched_getaffinity(0))):
            self.print_line(f"# warning: {warning}")
        if options.osu:
            kinds = {
                contender.device.partition(":")[0].upper() for contender in self.contenders
            } - {"CPU"}
            title = "unicoll.bench" if self.compared else label(self.contenders[0].name)
            header_fields = (
                options.op,
                "-".join([title, *sorted(kinds)]),
                dist.__version__,
                options.types[0],
                options.osu_full,
                self.compared,
            )
            for line in table.osu_header(*header_fields):
                self.print_line(line)
            return
        sizes = options.sizes
        self.print_line(f"# unicoll version {dist.__version__}, in the format of nccl-tests")
        self.print_line(f"# Collective test starting: {options.op.program}")
        self.print_line(
            f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: {options.step}"
            f" warmup iters: {options.warmup} iters: {options.iters or 'auto'} agg iters:"
            f" {options.aggregate} validation: {options.checks} graph: 0 unalign: {options.unalign}"
        )
        self.print_line("#\n# Using devices")
        for d in data["devices"]:
            self.print_line(
                f"#  Rank {d['rank']:2d} Group {d['group']:2d} Pid {d['pid']:6d} on"
                f" {d['hostname']:>10} device {d['device']:2d} [{d['device_hex']}]"
                f" {d['device_info']}"
            )
        self.print_line("#")
        over = _OVER_RANKS[options.average].format(n=self.size)
        calls = f"{options.iters} calls" if options.iters else f"calls for {options.budget:g} s"
        self.print_line(
            f"# machine: {report.cpu()}, {os.cpu_count()} cores, load average {load:.2f} at the"
            " start"
        )
        self.print_line(
            f"# time: {options.statistic} of a rank's calls, {over}; {calls} in {options.turns}"
            " turns"
        )
        transports = {name: entry["transport"] for name, entry in data["contenders"].items()}
        for name, transport in transports.items():
            self.print_line(f"# {label(name)}: {transport}")
        for name, entry in data["staging"].items():
            count = entry["bytes_per_rank"]
            self.print_line(
                f"# staging: {count} bytes per rank ({transports[name]}), constant in the message"
                " size"
            )
        if not options.overlap:
            self.print_line("#")
            for line in table.header(self.compared, options.host_time):
                self.print_line(line)

    # --- rows -------------------------------------------------------------------------------------

    def cases(self) -> Iterator[tuple[int, DType, str, str, int]]:
        """The parameters of each row: size in bytes, element type and its name, reduction, root."""
        options = self.options
        redops = options.redops if options.op.reduces else ("none",)
        roots = (options.roots or tuple(range(self.size))) if options.op.rooted else (-1,)
        for type_name, redop, root, size in itertools.product(
            options.types, redops, roots, options.sizes
        ):
            yield size, BY_NAME[TYPES[type_name]], type_name, redop, root

    def _case(
        self, size: int, dtype: DType, redop: str, root: int, placement: str
    ) -> BenchCase | None:
        """The case of a row and a placement; None if a rank would have less than one element."""
        op = self.options.op
        if self.options.osu and op.osu_share:
            size *= self.size
        counts = op.divide(size // dtype.itemsize, self.size)
        if not counts.shown and op.name != "barrier":
            return None
        return BenchCase(op, placement, dtype, redop, max(root, 0), counts, self.rank, self.size)

    def _sweep(self) -> bool:
        measured = False
        for _ in range(self.options.cycles) if self.options.cycles else itertools.count():
            for case in self.cases():
                measured |= self._measure_row(*case)
            if not measured:
                break
        return measured

    def _measure_row(self, size: int, dtype: DType, type_name: str, redop: str, root: int) -> bool:
        series_list = list(self.series(size, dtype, redop, root))
        if not series_list:
            return False
        counts = series_list[0].case.counts
        actual = max(counts.send, counts.recv) * dtype.itemsize
        stats = measure(series_list, actual, self.options)
        rows: dict[str, dict[str, Any]] = {}
        for series, stat in zip(series_list, stats, strict=True):
            name = series.contender.name
            if name not in rows:
                row: dict[str, Any] = {
                    "size": actual,
                    "count": counts.shown,
                    "type": type_name,
                    "redop": redop,
                }
                rows[name] = row | {"root": f"{root:6d}", OUT: None, IN: None}
            rows[name][series.case.placement] = result = self._result(series, stat, actual)
            self._bandwidths.setdefault(name, []).append(result["bus_bw"])
        first = rows.get(self.contenders[0].name)
        for name, row in rows.items():
            iterations = max(
                row[place]["iterations"] for place in (OUT, IN) if row[place] is not None
            )
            row |= {"actual_iterations": iterations, "experiment_name": name, "contender": name}
            row["ratio"] = None if first is None else self._ratio(row, first)
            self._print(row)
            self.data["results"].append(row)
        return True

    def series(
        self, size: int, dtype: DType, redop: str, root: int, places: int = 2
    ) -> Iterator[Series]:
        """The series of a row, of the first ``places`` placements of ``--place`` that each
        contender supports.

        Lines say what is missing: no such placement, or the reason of a contender that does not
        support the case.
        """
        options = self.options
        for contender in self.contenders:
            name = label(contender.name)
            placements = [
                p for p in contender.placements(options.op) if p in _PLACES[options.placements]
            ]
            if not placements:
                text = "in place" if options.placements == "in" else "out of place"
                self.print_once(f"{name} does not support {options.op.name} {text}")
            for placement in placements[:places]:
                case = self._case(size, dtype, redop, root, placement)
                if case is None:
                    continue
                series, problem = attempt(contender, case, options)
                if series is not None:
                    yield series
                else:
                    place = placement.replace("_", " ")
                    self.print_once(f"{name}, {place}, {dtype.name}, {redop}: {problem}")

    def _result(self, series: Series, stat: Stats, size: int) -> dict[str, Any]:
        """The in-place or the out-of-place part of a row; ``calls`` has the untimed ones of a rank,
        too."""
        wrong = None
        if self.options.checks and series.contender.checked:
            wrong, failed = check(series, self.options.checks)
            self.failed += failed
        us = stat["us"][self.options.statistic]
        algorithm, bus = table.bandwidths(series.case.op, size, us, self.size)
        result = {
            "cpu_time" if self.options.host_time else "time": us,
            "alg_bw": algorithm,
            "bus_bw": bus,
        }
        return (
            result
            | {"nwrong": None if wrong is None else float(wrong), "calls": series.calls}
            | stat
        )

    def _ratio(self, row: table.Row, first: table.Row) -> float | None:
        for place in (*self.options.op.placements, IN, OUT):
            if row[place] is not None and first[place] is not None:
                return table.time_us(row[place]) / table.time_us(first[place])
        return None

    def _print(self, row: table.Row) -> None:
        options = self.options
        if options.osu:
            text = table.osu_line(options.op, row, self.size, options.osu_full, self.compared)
        else:
            text = table.line(row, self.compared)
        self.print_line(text)
