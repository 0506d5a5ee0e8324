"""The direction of imports between packages, and what ``import unicoll`` must not import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, environment

BACKENDS = ("gloo_fallback", "mpi_comm", "nccl_comm", "xccl_comm")
SHARED = {"backend", "calls", "arrays", "devices", "net", "process", "errors"}
"""The packages of unicoll that a backend may import."""
WITH_DEVICES = SHARED | {"device_collectives"}
"""Those that a backend over a library with NCCL's API may import."""
CALL = {"calls", "arrays", "devices", "process", "errors"}
"""The lower layers of a call, which do not depend on connections between processes."""
LAYERS = (
    {"errors"},
    {"process"},
    {"devices"},
    {"arrays"},
    {"calls"},
    {"net"},
    {"net.objects"},
    {"net.wire"},
    {"net.stores"},
    {"net.control"},
    {"run", "launch"},
    {"backend"},
    {"backend.host"},
    {"backend.connections"},
    {"device_collectives", "staging"},
    {"group"},
    {"diagnosis"},
    {"bootstrap"},
    {"api"},
    {"mesh"},
    {"__main__", "device_mesh", "bench", "doctor", "torch_autoload", "testing", "trace"},
    {"torch_plugin"},
    {"torch_watch", "parallel"},
    {"integrations"},
)
"""From the lowest to the highest layer; a package imports from its own layer and those below it, also inside of
functions and for type checking."""
BACK = {
    # torch calls its entry point when it is imported; importing the plug-in then would be too early and too slow.
    ("torch_autoload", "torch_plugin"),
    ("torch_autoload", "torch_watch"),
}
"""The imports that point from a lower layer to a higher one, inside of functions."""
PRIVATE = ("unicoll.backend.host", "unicoll.backend.connections")
"""Packages whose modules only :mod:`unicoll.backend` imports; others import the names of the package."""
BY_NAME = {"unicoll.backend.host.fake"}
"""Modules of these packages that are loaded by their names: that of the backend fake."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, types: bool = True) -> Iterator[str]:
    """The modules that a file imports, as absolute names; for ``from package import x`` also ``package.x``.

    With ``types=False`` imports under TYPE_CHECKING are omitted.
    """
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in _nodes(ast.parse(path.read_text()), types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _nodes(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from _nodes(other, types)
            continue
        yield node
        yield from _nodes(node, types)


def subpackage(module: str) -> str | None:
    """The subpackage of unicoll that a module belongs to; "" for unicoll itself, None for other packages."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "unicoll" else None


def _subpackages() -> set[str]:
    return {p.stem for p in (ROOT / "unicoll").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}


@pytest.mark.parametrize(
    ("folder", "backends", "allowed"),
    [
        *(
            (name, {name}, WITH_DEVICES if name in ("nccl_comm", "xccl_comm") else SHARED)
            for name in BACKENDS
        ),
        # The launcher starts quickly; it loads process/excepthook.py by its path.
        ("unicoll/run", set(), {"run", "net", "process", "errors"}),
        *((f"unicoll/{name}", set(), CALL) for name in ("calls", "arrays", "devices")),
        ("unicoll/process", set(), {"process", "errors"}),
        ("unicoll/net", set(), {"net", "process", "errors"}),
        ("unicoll", set(), None),
    ],
)
def test_a_package_imports_only_lower_layers(
    folder: str, backends: set[str], allowed: set[str] | None
) -> None:
    subpackages = _subpackages()
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in modules(folder)
        for module in imports(path)
        if module.partition(".")[0] in set(BACKENDS) - backends
        or (allowed is not None and subpackage(module) in subpackages - allowed)
    ]
    assert modules(folder)
    assert not wrong, wrong


def test_every_subpackage_has_a_layer() -> None:
    layered = [name for layer in LAYERS for name in layer]
    assert len(layered) == len(set(layered))
    missing = _subpackages() - set(layered) - {"__init__"}
    assert not missing, f"add {missing} to LAYERS and to docs/internals.md"


def layer(module: str) -> str | None:
    """The name in LAYERS of a module of unicoll; None for unicoll itself and for other packages."""
    names = {name for names in LAYERS for name in names}
    parts = module.split(".")[1:] if module.startswith("unicoll.") else []
    return next((name for n in (2, 1) if (name := ".".join(parts[:n])) in names), None)


def test_imports_point_from_high_to_low_layers() -> None:
    height = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    wrong, back = [], set()
    for path in modules("unicoll"):
        importer = layer(name_of(path))
        for module in imports(path):
            imported = layer(module)
            # A package imports names of its modules, for others.
            own = path.name == "__init__.py" and module.startswith(f"{name_of(path)}.")
            if importer and imported and not own and height[imported] > height[importer]:
                if (importer, imported) in BACK:
                    back.add((importer, imported))
                else:
                    wrong.append(f"{name_of(path)} imports {module}")
    assert not wrong, wrong
    assert back == BACK


def test_modules_inside_the_backend_package_are_private() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for package in ("unicoll", *BACKENDS)
        for path in modules(package)
        if not name_of(path).startswith("unicoll.backend")
        for module in imports(path)
        for private in PRIVATE
        if (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
        and module.startswith(f"{private}.")
        and module not in BY_NAME
    ]
    assert not wrong, wrong


def test_there_is_no_import_cycle() -> None:
    files = {name_of(p): p for package in ("unicoll", *BACKENDS) for p in modules(package)}
    edges = {n: {m for m in imports(p, types=False) if m in files and m != n} for n, p in files.items()}
    for name, path in files.items():
        if path.name == "__init__.py":  # it may import the modules of its package
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
    # coverage imports modules
    env = {k: v for k, v in environment().items() if not k.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


HEAVY = ["torch", "cupy", "mpi4py", "ml_dtypes", "asyncio", "subprocess", "multiprocessing", *BACKENDS]
HEAVY += ["dask", "distributed"]
JOB_ONLY = (
    "unicoll.bootstrap unicoll.net.stores unicoll.net.control unicoll.process.logs unicoll.net.wire.handshake"
    " unicoll.group.process_group unicoll.backend.host.host_backend"
    " logging socket hashlib hmac secrets json difflib inspect numpy.typing"
)
"""What ``init_process_group`` and the public classes load, so that the first use of a name is quick."""
JOB = "import sys, numpy as np, unicoll as dist; dist.init_process_group('gloo', rank=0, world_size=1);"


@pytest.mark.parametrize(
    "program",
    [
        "import sys; before = set(sys.modules); import unicoll.torch_autoload;"
        " print([m for m in sorted(set(sys.modules) - before) if m in ('numpy', 'logging') or m.startswith('unicoll.')"
        " and m != 'unicoll.torch_autoload'])",
        f"import sys, unicoll, unicoll.parallel; print([m for m in {HEAVY} if m in sys.modules])",
        "import sys, numpy; before = set(sys.modules); import unicoll; unicoll.all_reduce;"
        f" print([m for m in {JOB_ONLY!r}.split() if m in set(sys.modules) - before])",
        # init_process_group imports for all calls, so that no first call takes longer
        f"{JOB} before = set(sys.modules); x = np.ones(3); dist.all_reduce(x);"
        " dist.all_reduce(x, async_op=True).wait(); dist.all_gather_into_tensor(x, x); dist.barrier();"
        " dist.all_gather_object([None], {'a': x}); dist.get_rank(); dist.destroy_process_group();"
        " print(sorted(set(sys.modules) - before))",
        f"{JOB} dist.all_reduce(np.ones(3)); dist.destroy_process_group();"
        " print([m for m in ('torch', 'cupy', 'mpi4py', 'ml_dtypes') if m in sys.modules])",
    ],
    ids=["nothing at first", "no array library", "nothing of a job", "nothing in collectives", "numpy alone"],
)
def test_needless_imports(program: str) -> None:
    assert _run(program).strip() == "[]"


def test_import_starts_no_thread_and_opens_no_file() -> None:
    program = (
        "import os, threading, numpy; before = len(os.listdir('/proc/self/fd')); import unicoll; unicoll.all_reduce;"
        " print(threading.active_count(), len(os.listdir('/proc/self/fd')) - before)"
    )
    assert _run(program).split() == ["1", "0"]


def test_all_public_names_exist() -> None:
    import unicoll

    assert sorted(set(unicoll.__all__)) == sorted(unicoll.__all__)
    for name in unicoll.__all__:
        assert getattr(unicoll, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = unicoll.nonsense


def test_threads_may_use_the_first_names_at_the_same_time() -> None:
    program = """
import threading, unicoll
wrong, start = [], threading.Barrier(8)
def use(step):
    start.wait()
    for name in unicoll.__all__[::step]:
        try:
            getattr(unicoll, name)
        except BaseException as error:
            wrong.append(error)
threads = [threading.Thread(target=use, args=(step,)) for step in (1, -1) * 4]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(wrong)
"""
    assert _run(program).strip() == "[]"


def test_names_that_are_imported_late_can_be_listed_and_imported() -> None:
    program = (
        "import unicoll; from unicoll import *; import pydoc; unicoll.backend;"
        " print(set(unicoll.__all__) <= set(dir(unicoll)), set(unicoll.__all__) <= set(globals()),"
        " 'class TCPStore' in pydoc.plain(pydoc.render_doc(unicoll)), unicoll.group.WORLD is None)"
    )
    assert _run(program).split() == ["True"] * 4
