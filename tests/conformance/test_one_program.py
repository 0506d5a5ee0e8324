"""One program over gloo and nccl (simulated); tests/mpi and tests/xccl run it over mpi and oneCCL."""

from __future__ import annotations

import pytest

from tests.support import one_program
from tests.support.programs import python


@pytest.mark.every(n=2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_backends_name_is_the_one_word_that_changes(backend: str, size: int) -> None:
    done = python("-m", "unicoll.run", "-n", str(size), "--no-prefix", "-m", one_program.__name__, backend)
    assert (done.returncode, done.stderr) == (0, "")
    one_program.check(done.stdout, size)
