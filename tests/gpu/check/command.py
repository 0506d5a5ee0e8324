"""The command line, and the run through the stages."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gpu.check import results
from tests.gpu.check.place import Place
from tests.gpu.check.record import Document, plain
from tests.gpu.check.stages import STAGES, Runner, Stage
from tests.nccl.device_ranks import SHARING
from tests.support.ranks import ROOT

PASSED, FAILED, USAGE, NO_GPU, CUT = 0, 1, 2, 3, 4
"""Exit codes: passed; a check failed; wrong arguments; no GPU; incomplete."""
_LATE = 1.15
_GRACE_S = 2.0
_LEAST_S = 2.0
"""Seconds that must be left for a stage to begin."""
_CONCLUSION_S = 6.0
"""The part of the budget for the plot and the summary."""
_DEFAULT_S = 480.0
_FIRST = "machine"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    given = _parser().parse_args(words)
    unknown = [name for name in (*given.stages, *given.without) if name not in STAGES]
    if unknown:
        print(f"gpu_check: no stage {unknown[0]!r}; the stages are {', '.join(STAGES)}", file=sys.stderr)
        return USAGE
    return Run(given, words).go()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        allow_abbrev=False,
        description="Check unicoll on this machine's GPU, and measure the cost of calls.",
    )
    add = parser.add_argument
    names: dict[str, Any] = {"type": lambda text: text.split(","), "metavar": "NAMES"}
    seconds: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
    sharing = "the way to make NCCL accept several ranks on one GPU (auto: the one that works)"
    patience = "time for each call, after which ranks count as hung (10)"
    stages = f"of {', '.join(STAGES)}; {_FIRST} is always done"
    add("--stages", **names, default=list(STAGES), help=stages)
    add("--without", **names, default=[], help="omit these")
    add("--budget", **seconds, default=_DEFAULT_S, help=f"for everything ({_DEFAULT_S:g})")
    add("--patience", **seconds, default=10.0, help=patience)
    add("--output", metavar="FILE", help="the JSON (benchmarks/gpu_check_<gpu>.json, or in $OUT)")
    add("--sharing", choices=SHARING, default="auto", help=sharing)
    add("--simulate", action="store_true", help="use the simulated device, without a GPU")
    add("--no-plot", action="store_true", help="draw nothing")
    add("--spent", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser


class Run:
    """One run through the stages."""

    def __init__(self, given: argparse.Namespace, words: list[str]) -> None:
        self.given = given
        wanted = {_FIRST, *given.stages} - ({*given.without} - {_FIRST})
        self.stages = [stage for name, stage in STAGES.items() if name in wanted]
        self.began = time.monotonic() - float(given.spent)
        self.end = self.began + float(given.budget)
        self.place = Place(patience=given.patience, sharing=given.sharing)
        if given.simulate:
            self.place = Place(("simulated",), True, given.patience, devices=2)
        head = {
            "program": "scripts/gpu_check",
            "arguments": words,
            "simulated": given.simulate,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "budget_s": given.budget,
        }
        path = Path(given.output or Path(os.environ.get("OUT") or ROOT / "benchmarks", "gpu_check.json"))
        path.parent.mkdir(parents=True, exist_ok=True)
        self.document = Document(path, head)
        self.runner = Runner()

    def go(self) -> int:
        """Run all stages; results are on disk and summarized whatever happens."""
        before = {number: signal.signal(number, _stop) for number in _ENDS}
        whole = False
        try:
            for i, stage in enumerate(self.stages):
                self._stage(stage, self._limit(i))
                if stage.name == _FIRST and not self._look():
                    return NO_GPU
            whole = True
        finally:
            for number in _ENDS:
                signal.signal(number, signal.SIG_IGN)  # the rest is short
            self.runner.close()
            self._conclude(drawn=whole)
            for number, handler in before.items():
                signal.signal(number, handler)
        return {"passed": PASSED, "failed": FAILED}.get(self.document.data["verdict"], CUT)

    def _left(self) -> float:
        """Seconds until the stages must be over."""
        return self.end - min(_CONCLUSION_S, 0.1 * float(self.given.budget)) - time.monotonic()

    def _limit(self, i: int) -> float:
        """Seconds for a stage: its share of the remaining time."""
        return max(0.0, self._left() * self.stages[i].share / sum(s.share for s in self.stages[i:]))

    def _look(self) -> bool:
        """Read the results of the first stage; False if nothing can be checked."""
        figures = self.document.data["stages"][_FIRST]["figures"]
        kits = tuple(figures.get("kits", []))
        if not kits:
            reason = figures.get("reason", "CUDA and the array libraries did not respond in time")
            print(f"gpu_check: no GPU can be checked here: {reason}", file=sys.stderr)
        elif not self.given.simulate:
            devices = figures.get("device", {}).get("devices", 1)
            self.place = replace(self.place, kits=kits, devices=devices)
        return bool(kits)

    def _stage(self, stage: Stage, seconds: float) -> None:
        record = self.document.begin(stage.name, seconds)
        if seconds < _LEAST_S:
            record["state"] = "not run"
            self.document.write()
            print(f"-- {stage.title}: not run, {seconds:.0f} s are left for it", flush=True)
            return
        print(f"== {stage.title} ({seconds:.0f} s)", flush=True)
        began, explanation = time.monotonic(), ""

        def take(line: dict[str, Any]) -> None:
            self.document.take(record, line)  # everything printed is on disk
            _show(line, time.monotonic() - self.began)

        try:
            limit = min(seconds * _LATE + _GRACE_S, self._left())
            record["state"], explanation = self.runner.do(stage.name, seconds, self.place, limit, take)
            self.place = replace(self.place, sharing=record["figures"].get("sharing", self.place.sharing))
        except BaseException:
            record["state"] = "cut off"
            raise
        finally:
            record["seconds"] = round(time.monotonic() - began, 2)
            if explanation:
                record["stderr"] = explanation
                print(f"   {record['state']}: {explanation.strip()[-600:]}", flush=True)
            self.document.write()
            self._rename()

    def _rename(self) -> None:
        """Name the file after the GPU, once that is known."""
        device = self.document.data["stages"][_FIRST]["figures"].get("device")
        name = "simulated" if self.given.simulate else (device or {}).get("name")
        if name and self.given.output is None:
            slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
            self.document.move(self.document.path.with_name(f"gpu_check_{slug}.json"))

    def _conclude(self, drawn: bool) -> None:
        data = self.document.data
        data["seconds"] = round(time.monotonic() - self.began, 1)
        data["bars"] = plain(results.bars(data["stages"]))
        data["verdict"] = results.verdict(data["stages"], [s.name for s in self.stages])
        self.document.write()
        if drawn and not self.given.no_plot:
            self._draw()
        print("\n".join(results.summary(data, str(self.document.path))), flush=True)

    def _draw(self) -> None:
        """Plot in a process of its own, since building a font cache can take long."""
        program = [sys.executable, "-m", "tests.gpu.check.results", str(self.document.path.resolve())]
        seconds = max(1.0, self.end - time.monotonic())
        try:
            subprocess.run(program, cwd=ROOT, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            print("there was no time for the plot", flush=True)


_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _show(line: dict[str, Any], at: float) -> None:
    """Print a line of a report."""
    if "say" in line:
        print(f"{at:7.1f}    {line['say']}", flush=True)
    elif "check" in line:
        mark = {"passed": "ok", "failed": "FAILED"}.get(line["outcome"], line["outcome"])
        print(f"{at:7.1f}  {mark:7} {line['check']} ({line['seconds']:.1f} s)", flush=True)
        shown = line["detail"].strip().splitlines()[: 12 if line["outcome"] == "failed" else 1]
        for text in shown:
            print(f"{'':18}{text[:200]}", flush=True)
