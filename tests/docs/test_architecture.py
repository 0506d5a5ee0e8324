"""docs/internals.md names every module; references in pages and docstrings name what exists."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from tests.support.ranks import ROOT

PACKAGES = ("unicoll", "gloo_fallback", "mpi_comm", "nccl_comm", "xccl_comm")


def test_every_module_is_named() -> None:
    named = set(re.findall(r"\w+\.py\b", (ROOT / "docs" / "internals.md").read_text()))
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("[!_]*.py")]
    assert modules
    missing = [str(path.relative_to(ROOT)) for path in modules if path.name not in named]
    assert not missing, "docs/internals.md does not name these modules"


@pytest.mark.parametrize("page", ["architecture.md", "internals.md"])
def test_named_modules_exist(page: str) -> None:
    known = {path.name for package in (*PACKAGES, "tests") for path in (ROOT / package).rglob("*.py")}
    named = set(re.findall(r"\w+\.py\b", (ROOT / "docs" / page).read_text()))
    assert named
    assert not named - known


REFERENCE = re.compile(rf":(?:mod|class|func|meth|attr|data|exc):`~?((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`")


def _exists(name: str) -> bool:
    """True if a dotted name is a module, or an attribute of what stands before its last point."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            found = importlib.import_module(".".join(parts[:end]))
            break
    for part in parts[end:]:
        if not hasattr(found, part):
            return (
                re.search(rf"\bself\.{part}\b|^ +{part}\b *[:=]", inspect.getsource(found), re.M) is not None
            )
        found = getattr(found, part)
    return True


@pytest.mark.torch
def test_references_name_what_exists() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in sorted(set(REFERENCE.findall(path.read_text())))
        if not _exists(name)
    ]
    assert not wrong, wrong
