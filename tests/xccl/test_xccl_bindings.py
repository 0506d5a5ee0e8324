"""oneCCL's bindings: the interface, the real library, and the reasons why it cannot be used."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unicoll as dist
from tests.simulated_nccl.cuda import Simulation
from tests.simulated_nccl.oneccl import SimulatedXpu
from tests.support.programs import python
from tests.xccl.xccl_ranks import unavailable_reason
from unicoll.device_collectives import interface
from xccl_comm.library import bindings
from xccl_comm.library.errors import CODES
from xccl_comm.library.host_calls import HostOneCCL

real = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "oneCCL is here")


class Function:
    def __call__(self, *arguments: Any) -> int:
        return 0


class StandIn:
    """Any function of libccl; none is called."""

    def __getattr__(self, name: str) -> Any:
        return Function()


def for_xpu(library: Any) -> bindings.XpuOneCCL:
    """The bindings on an XPU, the current device of which is the third."""
    simulation = Simulation(4, runtime=SimulatedXpu)
    simulation.cuda.set_device(2)
    simulation.close()
    return bindings.XpuOneCCL(library, "/stand-in/libccl.so.2", simulation.cuda)


@pytest.mark.parametrize("make", [for_xpu, partial(HostOneCCL, path="/stand-in/libccl.so.2")])
def test_bindings_have_the_members_of_the_interface_with_their_arguments(make: Any) -> None:
    """Methods that are oneCCL's functions have no signature; those that it lacks are not there."""
    library = make(StandIn())
    for name, member in (vars(interface.Operations) | vars(interface.CollectiveLibrary)).items():
        if name.startswith("_"):
            continue
        found = getattr(library, name, None)
        if found is None:
            assert not library.has(name), name
            continue
        if inspect.isfunction(getattr(type(library), name, None)):
            expected = list(inspect.signature(member).parameters)[1:]
            assert list(inspect.signature(found).parameters) == expected, name


def test_options_of_a_communicator_are_refused_by_name() -> None:
    library = HostOneCCL(StandIn(), "/stand-in/libccl.so.2")
    library.config(interface.Config(comm_name="world"))
    with pytest.raises(dist.DistArgumentError, match=r"min_ctas, max_ctas: .*libccl\.so\.2"):
        library.config(interface.Config(min_ctas=1, max_ctas=2))


def test_oneccl_gets_the_current_device_before_it_makes_a_communicator() -> None:
    calls: list[tuple[str, int]] = []

    class Recorded(StandIn):
        def __getattr__(self, name: str) -> Any:
            def function(*arguments: Any) -> int:
                calls.append((name, arguments[0]))
                return 0

            return function

    library = for_xpu(Recorded())
    calls.clear()
    code, _ = library.comm_init(2, [bytes(4096)], 0, interface.Config(comm_name="world"))
    assert code == 0
    assert calls[0] == ("onecclSetDevice", 2)
    assert calls[1][0] == "onecclCommInitRankConfig"


def run(program: str, **env: str) -> str:
    ended = python("-c", program, **env)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


REASON = """
import unicoll
from unicoll.group import registry
print(unicoll.is_xccl_available())
print(registry.reason_against("xccl"))
"""


def test_a_named_library_that_cannot_be_loaded_is_the_reason(tmp_path: Path) -> None:
    said = run(REASON, UNICOLL_XCCL_LIBRARY=str(tmp_path / "libccl.so.2"))
    assert said.startswith("False\n")
    assert "backend 'xccl': UNICOLL_XCCL_LIBRARY:" in said
    assert "libccl.so.2" in said


def test_the_plug_in_for_gpus_needs_a_device() -> None:
    said = run(REASON, CCL_PLUGIN="ONECCL_LEGACY")
    assert said.startswith("False\nbackend 'xccl': Intel's driver for GPUs cannot be loaded: ")


@real
def test_the_variables_of_oneccl_are_set_for_its_own_calls_only() -> None:
    program = """
import os, unicoll
assert unicoll.is_xccl_available()
unicoll.init_process_group("xccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
import numpy as np
x = np.ones(3)
unicoll.all_reduce(x)
print([name for name in os.environ if name.startswith("CCL_")])
unicoll.destroy_process_group()
"""
    assert "[]" in run(program).splitlines()


@real
def test_the_real_library_exports_what_is_bound_and_makes_ids_that_differ() -> None:
    program = """
from xccl_comm.library import locate
from xccl_comm.library.bindings import SYMBOLS
library = locate.oneccl()
print("missing:", [symbol for symbol in SYMBOLS.values() if not library.has_symbol(symbol)])
print(library.version_text, len({library.unique_id() for _ in range(3)}))
"""
    said = run(program).splitlines()
    assert "missing: []" in said
    assert "2022.1 3" in said


def test_every_code_has_an_exception() -> None:
    assert sorted(CODES) == list(range(13))
    assert all(code.name.startswith("oneccl") for code in CODES.values())
