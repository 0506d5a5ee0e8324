"""Hooks for mkdocs: the site keeps the repository's layout, and Sphinx roles in docstrings are
converted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("*.md", "LICENSE", "docs/**/*", "examples/*", "examples/kubernetes/*", "benchmarks/*")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Files keep their paths in the repository, so that links out of docs/ resolve as on a Git
    host."""
    other_files = [
        file for file in files if not str(file.abs_src_path).startswith(str(ROOT / "docs"))
    ]
    linked_paths = {path for pattern in LINKED for path in ROOT.glob(pattern) if path.is_file()}
    return Files(
        other_files
        + [
            File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path))
            for path in sorted(linked_paths)
        ]
    )


class PlainRoles(griffe.Extension):
    """Converts :func:`name` and similar roles to `name`, and the double colon before a code block
    to one colon."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r":(?:func|meth|class|mod|attr):`~?", "`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)
