"""What a failure of rank 1 prints in programs that know nothing of unicoll: the rank, and the line of the program."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.frameworks.page_programs import PROGRAMS, TORCHRUN, UNIRUN, start, unchanged
from tests.support.ranks import ROOT

pytestmark = pytest.mark.every(n=0)
STEPS = {
    "accelerate": "optimizer.step()",
    "composer": "trainer.fit(",
    "deepspeed": "engine.step()",
    "lightning": "trainer.fit(",
    "transformers": "trainer.train()",
}
"""The line of each program in which rank 1 has its fault."""
WHO = r"rank 1 \(host \S+, pid \d+\)"
CALL = r"(?: \(host \S+, pid \d+\))?: all_\w+\(.* at \S*LINE"


def lost(reason: str) -> str:
    """The error of rank 0 with a line in its traceback, or its log's notice, which has one."""
    return rf"LINE(?:.|\n)*RankLostError: .*{WHO} {reason}|{WHO} {reason}.*; this rank is at \S*LINE"


FAULTS = {
    "raise": (1, 1, [lost("ended with ValueError: the data of rank 1 are wrong"), "STEP, in <module>"]),
    "kill": (1, 137, [lost("died")]),
    "uneven": (1, 1, [rf"rank 0{CALL}.*\n.*rank 1{CALL}|{lost('has left the job')}"]),
    "sleep": (
        1,
        1,
        [rf"OperationTimeoutError: .*missing: {WHO}: .*; is at \S*STEP via fault\.py:\d+, last was"],
    ),
    "interrupt": (1, 130, [r"STEP, in <module>(?:.|\n)*KeyboardInterrupt"]),
}
"""By fault: the exit codes of torchrun and unirun, and what is printed. STEP is the fault's line, LINE any."""
ENDS = {
    ("composer", "uneven"): (0, 0, []),  # over Gloo as well
    # They handle KeyboardInterrupt.
    ("composer", "interrupt"): (1, 130, []),
    ("lightning", "interrupt"): (1, 130, ["Detected KeyboardInterrupt"]),
}
"""What differs from FAULTS."""


@pytest.mark.sampled("framework", "fault", 2)
@pytest.mark.parametrize("launcher", ["torchrun", "unirun"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("framework", STEPS)
def test_a_fault_is_reported_with_rank_and_line(
    framework: str, fault: str, launcher: str, tmp_path: Path
) -> None:
    name = f"with_{framework}.py"
    # In front of the first line, so that the lines keep their numbers.
    code = f"import fault; {unchanged(PROGRAMS[name])}"
    installed = tmp_path / "site-packages"
    installed.mkdir()
    shutil.copy(ROOT / "tests" / "frameworks" / "fault.py", installed)

    def interrupt(process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 120
        while not (tmp_path / "asleep").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)

    ended = start(
        tmp_path,
        name,
        code,
        TORCHRUN if launcher == "torchrun" else UNIRUN,
        interrupt if fault == "interrupt" else None,
        FAULT=fault,
        UNICOLL_REPLACE="gloo",
    )
    *codes, texts = ENDS.get((framework, fault), FAULTS[fault])
    assert ended.returncode == codes[launcher == "unirun"], ended.stderr
    (number,) = (i for i, line in enumerate(code.splitlines(), 1) if STEPS[framework] in line)
    place = rf'{re.escape(name)}(?:", line |:)'
    for text in texts:
        pattern = text.replace("STEP", rf"{place}{number}").replace("LINE", rf"{place}\d+")
        assert re.search(pattern, ended.stderr), f"{pattern}\n{ended.stderr}"
