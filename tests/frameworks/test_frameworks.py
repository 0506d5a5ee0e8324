"""The programs of docs/frameworks.md, with unicoll's lines and without, have the losses and parameters of Gloo."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.frameworks.page_programs import PROGRAMS, TORCHRUN, UNIRUN, start, unchanged

pytestmark = pytest.mark.every(n=0)
JOINED = "created group 'world' (cpu:gloo)"
# A line in one write: ranks share the file, and torchrun's are not buffered.
PRINT = "print = lambda line: __import__('sys').stdout.write(f'{line}\\n')\n"
PRINT_PARAMETERS = """
import contextlib, hashlib, sys

zero = sys.modules.get("deepspeed.zero")  # its stage 3 divides the parameters, with undefined values as padding
with zero.GatheredParameters(model.parameters()) if zero else contextlib.nullcontext():
    values = [p.detach() for p in model.parameters()]
    values = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in values]
    data = b"".join(v.contiguous().numpy().tobytes() for v in values)
print(f"parameters: {len(data)} bytes, {hashlib.sha256(data).hexdigest()}")
"""
CASES = {name.removeprefix("with_").removesuffix(".py"): (name, "") for name in PROGRAMS}
CASES |= {f"deepspeed, ZeRO {i}": ("with_deepspeed.py", f'"stage": {i}') for i in (0, 1, 3)}


def program(case: str) -> str:
    name, stage = CASES[case]
    code = PRINT + PROGRAMS[name] + PRINT_PARAMETERS
    assert not stage or '"stage": 2' in code
    return code.replace('"stage": 2', stage) if stage else code


def lines(printed: str) -> list[str]:
    """The losses and the parameters' hashes of both ranks, in one order."""
    return sorted(re.findall(r"rank \d: .+|parameters: .+", printed))


@cache
def of_gloo(case: str) -> list[str]:
    with TemporaryDirectory() as folder:
        ended = start(Path(folder), CASES[case][0], unchanged(program(case)), TORCHRUN)
    assert ended.returncode == 0, ended.stderr
    assert JOINED not in ended.stderr
    found = lines(ended.stdout)
    # Two losses, and the same parameters on both ranks: the program has trained one model.
    assert len(found) == 4, ended.stdout
    assert found[0] == found[1] != "parameters: 0 bytes", ended.stdout
    return found


@pytest.mark.parametrize("launcher", [TORCHRUN, UNIRUN], ids=["torchrun", "unirun"])
@pytest.mark.parametrize("how", ["lines", "variable"])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_parameters_are_those_of_gloo(
    case: str, how: str, launcher: list[str], tmp_path: Path
) -> None:
    code, variables = program(case), {}
    if how == "variable":
        code = unchanged(code)
        if launcher is TORCHRUN:
            variables = {"UNICOLL_REPLACE": "gloo"}
        else:
            launcher = [*UNIRUN[:-1], "--replace-backend", "gloo", UNIRUN[-1]]
    ended = start(tmp_path, CASES[case][0], code, launcher, **variables)
    assert ended.returncode == 0, ended.stderr
    assert all(f"{JOINED}: rank {rank} of 2" in ended.stderr for rank in (0, 1)), ended.stderr
    assert lines(ended.stdout) == of_gloo(case), ended.stdout


def test_lightning_starts_the_second_process(tmp_path: Path) -> None:
    ended = start(tmp_path, "with_lightning.py", program("lightning"), [])
    assert ended.returncode == 0, ended.stderr
    assert f"{JOINED}: rank 1 of 2" in ended.stderr
    assert lines(ended.stdout) == of_gloo("lightning"), ended.stdout
