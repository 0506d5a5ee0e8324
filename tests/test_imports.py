"""Who may import whom, and what ``import unicoll`` does not bring along."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicoll.testing.ranks import ROOT, environment

BACKENDS = ("gloo_fallback", "mpi_comm", "nccl_comm")
LOW = {
    "auth", "backend", "buffers", "call", "channel", "checks", "composites", "device_memory", "errors", "exchanged",
    "forks", "frames", "halves", "kernels", "lane", "net", "observe", "ops", "options", "server", "settings", "stores",
    "streams", "types", "work",
}  # fmt: skip
"""The rooms of unicoll that backends may enter; what a new room there is for belongs into docs/architecture.md."""
_LAYERS = (
    {"errors", "excepthook", "forks", "futures", "settings"},
    {"users", "types", "options", "net", "auth", "channel", "tls", "frames", "launchers", "server", "mesh_layout",
     "codec"},
    {"buffers", "halves", "kernels", "ops", "stores", "work", "observe", "call", "streams",
     "cuda_driver", "dlpack", "torch_buffers"},
    {"pinned", "device_memory"},
    {"arguments", "backend", "checks", "composites", "lane", "device_messages", "direct", "dock", "exchanged", "pieces",
     "staging", "meeting", "places", "rendezvous", "invitations"},
    {"registry", "outlook", "under_mpi"},
    {"dispatch", "one_sided"},
    {"group"},
    {"joining"},
    {"world"},
    {"subgroups", "collectives", "p2p", "objects", "mesh", "device_mesh"},
    {"parallel", "spawning", "run", "bench", "doctor", "torch_plugin", "testing"},
)
"""From the lowest to the highest; a room imports from its own layer and those below it."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, everywhere: bool = True) -> Iterator[str]:
    """Modules that a file imports, as absolute names; of ``from package import x`` also ``package.x``.

    Imports for type checkers do not count; with ``everywhere=False`` neither do those within functions.
    """
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in _nodes(ast.parse(path.read_text()), everywhere):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _nodes(tree: ast.AST, everywhere: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from _nodes(other, everywhere)
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not everywhere:
            continue
        yield node
        yield from _nodes(node, everywhere)


def room(module: str) -> str | None:
    """The first part of a module's name below unicoll; None outside, "" for unicoll itself."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "unicoll" else None


def _rooms() -> set[str]:
    return {p.stem for p in (ROOT / "unicoll").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}


@pytest.mark.parametrize("package", BACKENDS)
def test_backends_import_only_what_lies_below_them(package: str) -> None:
    rooms = _rooms()
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in modules(package)
        for module in imports(path)
        if module.partition(".")[0] in set(BACKENDS) - {package}
        or (room(module) in rooms and room(module) not in LOW)
    ]
    assert modules(package)
    assert not wrong, wrong


def test_unicoll_names_its_backends_only_as_strings() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in modules("unicoll")
        for module in imports(path)
        if module.partition(".")[0] in BACKENDS
    ]
    assert not wrong, wrong


def test_every_room_has_its_layer() -> None:
    layered = [r for layer in _LAYERS for r in layer]
    assert len(layered) == len(set(layered))
    missing = _rooms() - set(layered) - {"__init__"}
    assert not missing, f"give {missing} a layer here and a place in docs/architecture.md"


def test_imports_point_one_way() -> None:
    height = {r: i for i, layer in enumerate(_LAYERS) for r in layer}
    wrong = []
    for path in modules("unicoll"):
        here = room(name_of(path))
        if not here:
            continue
        for module in imports(path, everywhere=False):
            there = room(module)
            if there in height and height[there] > height[here]:
                wrong.append(f"{name_of(path)} imports {module}")
    assert not wrong, wrong


def test_there_is_no_circle_of_imports() -> None:
    files = {name_of(p): p for package in ("unicoll", *BACKENDS) for p in modules(package)}
    edges = {n: {m for m in imports(p, everywhere=False) if m in files and m != n} for n, p in files.items()}
    for name, path in files.items():
        if path.name == "__init__.py":  # it may gather what lies in it
            edges[name] = set()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in edges[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in files:
        visit(name, ())


def _run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_import_brings_no_array_library_but_numpy() -> None:
    heavy = ["torch", "cupy", "mpi4py", "ml_dtypes", "asyncio", "subprocess", "multiprocessing", *BACKENDS]
    out = _run(f"import sys, unicoll, unicoll.parallel; print([m for m in {heavy!r} if m in sys.modules])")
    assert out.strip() == "[]"


def test_import_starts_no_thread_and_opens_no_file() -> None:
    program = (
        "import os, threading, numpy; before = len(os.listdir('/proc/self/fd')); import unicoll;"
        " print(threading.active_count(), len(os.listdir('/proc/self/fd')) - before)"
    )
    assert _run(program).split() == ["1", "0"]


def test_using_it_with_numpy_arrays_imports_nothing_else() -> None:
    program = (
        "import sys, numpy as np, unicoll as dist; dist.init_process_group('gloo', rank=0, world_size=1);"
        " dist.all_reduce(np.ones(3)); dist.destroy_process_group();"
        " print([m for m in ('torch', 'cupy', 'mpi4py', 'ml_dtypes') if m in sys.modules])"
    )
    assert _run(program).strip() == "[]"


def test_all_public_names_are_there() -> None:
    import unicoll

    assert sorted(set(unicoll.__all__)) == sorted(unicoll.__all__)
    for name in unicoll.__all__:
        assert getattr(unicoll, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = unicoll.nonsense
