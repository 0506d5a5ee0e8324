"""The tree of modules in docs/architecture.md has every module of unicoll and of the backends, and no others."""

from __future__ import annotations

import re

from tests.support.ranks import ROOT

PACKAGES = ("unicoll", "gloo_fallback", "mpi_comm", "nccl_comm")
BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDER = re.compile(r" *(\w+)/ ")
MODULE = re.compile(r"\b((?:\w+/)*)(\w+\.py)\b")


def modules() -> set[str]:
    """The modules, as paths; a package's own two files are described by the package's line."""
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }


def tree() -> tuple[list[str], list[str]]:
    """The lines of the tree's two blocks: unicoll; backends and tests."""
    blocks = BLOCK.findall((ROOT / "docs" / "architecture.md").read_text())
    ours = next(block for block in blocks if block.startswith("errors.py"))
    backends = next(block for block in blocks if block.startswith("gloo_fallback/"))
    return ours.splitlines(), backends.splitlines()


def named(lines: list[str], root: str) -> tuple[set[str], list[str]]:
    """The modules that the lines name, and the names without a module.

    A line that begins with a folder is the folder's. A name is relative to that folder, to the folder of the name
    before it, or to ``root``.
    """
    known, found, unknown = modules(), set(), []
    package = folder = before = ""
    for line in lines:
        if begin := FOLDER.match(line):
            if line[0] != " ":
                package = folder = begin[1] + "/"
            else:
                folder = f"{package}{begin[1]}/"
            before = ""
        elif re.match(r" {0,2}\w", line):  # not the continuation of a line
            folder, before = package if line[0] == " " else "", ""
        if package == "tests/":
            break
        for path, name in MODULE.findall(line):
            before = path or before
            places = (folder + path, folder + before, path)
            module = next((f"{root}{p}{name}" for p in places if f"{root}{p}{name}" in known), None)
            if module is None:
                unknown.append(path + name)
            else:
                found.add(module)
    return found, unknown


def test_the_tree_is_complete_and_has_no_other_names() -> None:
    ours, backends = tree()
    found, unknown = named(ours, "unicoll/")
    found_too, unknown_too = named(backends, "")
    assert not unknown + unknown_too, "docs/architecture.md names modules that do not exist"
    assert not sorted(modules() - found - found_too), "docs/architecture.md does not name these modules"
