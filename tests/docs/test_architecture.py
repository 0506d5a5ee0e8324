"""docs/architecture.md names every module of unicoll and of the backends."""

from __future__ import annotations

import re

from tests.support.ranks import ROOT

PACKAGES = ("unicoll", "gloo_fallback", "mpi_comm", "nccl_comm", "xccl_comm")


def test_every_module_is_named() -> None:
    named = set(re.findall(r"\w+\.py\b", (ROOT / "docs" / "architecture.md").read_text()))
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("[!_]*.py")]
    assert modules
    missing = [str(path.relative_to(ROOT)) for path in modules if path.name not in named]
    assert not missing, "docs/architecture.md does not name these modules"
