"""The line of a call that a framework makes: the user's, with the framework's behind it."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true, await_word, send_word
from tests.support.programs import python
from tests.support.ranks import ROOT
from unicoll.calls import call_site
from unicoll.calls.flight_recorder import ring
from unicoll.diagnosis.recorder_contents import recorded_calls

FRAMEWORK = """
def run(function, *arguments, **options):
    return inner(function, arguments, options)

def inner(function, arguments, options):
    return function(*arguments, **options)
"""
INNER_LINE = 6


def framework(name: str = "framework") -> Any:
    """A module of an installed package that calls a function, two frames deep."""
    names: dict[str, Any] = {"__name__": f"{name}.engine", "__package__": name}
    exec(compile(FRAMEWORK, f"/usr/lib/python3/dist-packages/{name}/engine.py", "exec"), names)
    return SimpleNamespace(**names)


def _line() -> int:
    return sys._getframe(1).f_lineno


def at(line: int) -> str:
    return f"{__file__}:{line} via framework/engine.py:{INNER_LINE}"


@on_ranks(2)
def test_records_have_both_lines() -> None:
    me, x, run = dist.get_rank(), np.ones(2), framework().run
    group: Any = dist.group.WORLD
    ring().clear()
    first = _line()
    run(dist.all_reduce, x)
    run(group.all_reduce, x)
    run(dist.all_reduce, x, async_op=True).wait()
    run(dist.barrier)
    run(*(dist.send, x, 1) if me == 0 else (dist.recv, x, 0))
    run(dist.broadcast, x, 0)
    run(dist.all_reduce_coalesced, [x[:1], x[1:]])
    sites = [call.site for call in recorded_calls()]
    assert sites == [at(first + i) for i in (1, 2, 3, 4, 5, 6, 7, 7)]


@on_ranks(2)
def test_a_call_that_waits_has_both_lines() -> None:
    if dist.get_rank() == 1:
        await_word()
        dist.all_reduce(np.ones(1))
        return
    ring().clear()
    thread = threading.Thread(target=lambda: framework().run(dist.all_reduce, np.ones(1)))
    line = _line() - 1
    thread.start()
    await_true(lambda: any(call.state == "started" for call in recorded_calls()))
    assert [call.site for call in recorded_calls()] == [at(line)]
    send_word(1)
    thread.join(60)


@on_ranks(2, env={})
def test_errors_have_both_lines() -> None:
    x, me = np.ones(2), dist.get_rank()
    line = _line() + 2
    with pytest.raises(dist.CollectiveMismatchError) as raised:
        framework().run(dist.all_reduce, x[me:])
    assert str(raised.value).count(f"at {at(line)}") == 2, str(raised.value)


def test_a_users_own_package_may_be_installed(tmp_path: Path) -> None:
    """``python -m trainer.main``: the lines are those of this package, not of the framework that it uses."""
    packages = tmp_path / "site-packages"
    for name in ("trainer", "framework"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
    (packages / "framework" / "engine.py").write_text(FRAMEWORK)
    (packages / "trainer" / "steps.py").write_text(
        "import numpy as np, unicoll as dist\n"
        "from framework.engine import run\n"
        "def step():\n"
        "    run(dist.all_reduce, np.ones(1))\n"
        "    dist.barrier()\n"
    )
    (packages / "trainer" / "main.py").write_text(
        "import unicoll as dist\n"
        "from unicoll.net.stores import HashStore\n"
        "from trainer.steps import step\n"
        "from unicoll.diagnosis.recorder_contents import recorded_calls\n"
        "dist.init_process_group(rank=0, world_size=1, store=HashStore())\n"
        "step()\n"
        "print(*(call.site for call in recorded_calls()), sep='\\n')\n"
    )
    done = python("-m", "trainer.main", PYTHONPATH=f"{ROOT}:{packages}")
    steps = packages / "trainer" / "steps.py"
    assert done.stdout.splitlines() == [
        f"{steps}:4 via framework/engine.py:{INNER_LINE}",
        f"{steps}:5",
    ], done.stderr


def test_a_command_of_an_installed_package_is_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    command = next(path for path in call_site._pythons_folders() if Path(path).name == "bin") + "train"
    main = SimpleNamespace(
        __file__=command, __spec__=None, sys=sys, re=re.compile, main=framework("trainer").run
    )
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert call_site._program_package.__wrapped__() == "trainer"
