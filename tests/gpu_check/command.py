"""The command line, the run through the stages, and the verdict."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from device_ranks import SHARING

from .probe import Found, probe
from .record import Document, Reporter, plain
from .stages import STAGES, Stage

__all__ = ["CUT", "FAILED", "NO_GPU", "PASSED", "main"]

PASSED, FAILED, USAGE, NO_GPU, CUT = 0, 1, 2, 3, 4
"""Exit codes: all is well; a check failed; a mistake in the arguments; there is no GPU; not everything was run."""
_ROOT = Path(__file__).resolve().parents[2]
_LATE = 1.15
_GRACE_S = 5.0
_DEFAULT_S = 480.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages (or, as their process, one of them); the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    given = _parser().parse_args(words)
    if given.report is not None:
        return _be_stage(given)
    unknown = [name for name in given.stages if name not in STAGES]
    if unknown:
        print(f"gpu_check: no stage {unknown[0]!r}; there are {', '.join(STAGES)}", file=sys.stderr)
        return USAGE
    found = Found(None, (), {}) if given.simulate else probe()
    if found.reason is not None:
        print(f"gpu_check: no GPU can be checked here: {found.reason}", file=sys.stderr)
        return NO_GPU
    given.kits = list(found.kits)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return Run(given, words, found.without).go()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", allow_abbrev=False,
        description="Check unicoll on this machine's GPU, and measure what it costs.",
    )  # fmt: skip
    names = ", ".join(STAGES)
    parser.add_argument(
        "--stages",
        type=lambda text: text.split(","),
        default=list(STAGES),
        metavar="NAMES",
        help=f"of {names}",
    )
    parser.add_argument(
        "--without", type=lambda text: text.split(","), default=[], metavar="NAMES", help="not these"
    )
    parser.add_argument(
        "--budget", type=float, default=_DEFAULT_S, metavar="SECONDS", help=f"for all stages ({_DEFAULT_S:g})"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="the JSON (benchmarks/gpu_check_<gpu>.json, or in $OUT)"
    )
    parser.add_argument(
        "--sharing",
        choices=SHARING,
        default="auto",
        help="how NCCL puts several ranks on one GPU (by its version)",
    )
    parser.add_argument(
        "--simulate", action="store_true", help="on the simulated device, without a GPU: a rehearsal"
    )
    parser.add_argument("--no-plot", action="store_true", help="draw nothing")
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--kits", type=lambda text: text.split(","), default=[], help=argparse.SUPPRESS)
    parser.add_argument("--report", type=int, help=argparse.SUPPRESS)
    return parser


def _be_stage(given: argparse.Namespace) -> int:
    """One stage, in the process that was made for it."""
    from .place import GPU, Place, Simulation

    place: Place = Simulation() if given.simulate else GPU(given.kits, given.sharing)
    STAGES[given.stage].run(Reporter(given.report, given.seconds), place)
    return 0


class Run:
    """One run through the stages."""

    def __init__(self, given: argparse.Namespace, words: list[str], without: dict[str, str]) -> None:
        self.given = given
        self.stages = [STAGES[name] for name in STAGES if name in given.stages and name not in given.without]
        self.began = time.monotonic()
        self.end: float = self.began + given.budget
        head = {
            "program": "scripts/gpu_check", "arguments": words, "simulated": given.simulate,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "budget_s": given.budget,
            "array libraries": given.kits, "without": without,
        }  # fmt: skip
        self.named = given.output is not None
        self.document = Document(
            Path(given.output) if self.named else self._folder() / "gpu_check.json", head
        )

    def _folder(self) -> Path:
        folder = Path(os.environ["OUT"]) if os.environ.get("OUT") else _ROOT / "benchmarks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def go(self) -> int:
        """Run all stages; whatever happens, what is known is on disk."""
        try:
            for i, stage in enumerate(self.stages):
                self._stage(stage, self._limit(i))
        finally:
            self._conclude()
        return self._verdict_code()

    def _limit(self, i: int) -> float:
        """Seconds for a stage: its share of what is left; those before it that were quicker leave more to it."""
        left = self.end - time.monotonic()
        return max(0.0, left * self.stages[i].share / sum(s.share for s in self.stages[i:]))

    def _stage(self, stage: Stage, seconds: float) -> None:
        from .process import run_stage

        if seconds < stage.least and not self.given.simulate:
            record = self.document.begin(stage.name, seconds)
            record["state"] = "not run"
            print(f"-- {stage.title}: not run, {seconds:.0f} s are left for it", flush=True)
            return
        print(f"== {stage.title} ({seconds:.0f} s)", flush=True)
        record, began = self.document.begin(stage.name, seconds), time.monotonic()

        def take(line: dict[str, Any]) -> None:
            _show(line, time.monotonic() - self.began)
            self.document.take(record, line)

        arguments = ["--stage", stage.name, "--seconds", f"{seconds:.2f}", "--sharing", self.given.sharing]
        arguments += ["--simulate"] if self.given.simulate else ["--kits", ",".join(self.given.kits)]
        try:
            record["state"], story = run_stage(arguments, seconds * _LATE + _GRACE_S, take)
            if story:
                record["stderr"] = story
                print(f"   {record['state']}: {story.strip()[-600:]}", flush=True)
        finally:
            record["seconds"] = round(time.monotonic() - began, 2)
            self.document.write()
            self._rename()

    def _rename(self) -> None:
        """Once the GPU is known, the file is called by it."""
        if self.named:
            return
        device = self.document.data["stages"].get("machine", {}).get("figures", {}).get("device")
        name = "simulated" if self.given.simulate else (device or {}).get("name")
        if name:
            slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
            self.document.move(self.document.path.with_name(f"gpu_check_{slug}.json"))

    def _conclude(self) -> None:
        from . import plot, verdict

        data = self.document.data
        data["seconds"] = round(time.monotonic() - self.began, 1)
        data["bars"] = plain(verdict.bars(data["stages"]))
        data["verdict"] = verdict.verdict(data["stages"], [s.name for s in self.stages])
        self.document.write()
        for line in verdict.lines(data):
            print(line)
        if not self.given.no_plot and (drawn := plot.draw(data, self.document.path.with_suffix(".png"))):
            print(f"drawn: {drawn}")
        print(f"{data['verdict']}: {self.document.path}", flush=True)

    def _verdict_code(self) -> int:
        return {"passed": PASSED, "failed": FAILED}.get(self.document.data["verdict"], CUT)


def _show(line: dict[str, Any], at: float) -> None:
    """A line of a report for people."""
    if "say" in line:
        print(f"{at:7.1f}    {line['say']}", flush=True)
    elif "check" in line:
        mark = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}[line["outcome"]]
        print(f"{at:7.1f}  {mark:7} {line['check']} ({line['seconds']:.1f} s)", flush=True)
        if line["detail"]:
            first = line["detail"].strip().splitlines()
            print(
                "\n".join(
                    f"{'':18}{text[:200]}" for text in first[: 12 if line["outcome"] == "failed" else 1]
                ),
                flush=True,
            )
