"""oneCCL's bindings: the interface, the real library, and the reasons why it cannot be used."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import unicoll as dist
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


@pytest.mark.parametrize("cls", [bindings.OneCCL, HostOneCCL])
def test_bindings_have_the_members_of_the_interface_with_their_arguments(cls: Any) -> None:
    """Methods that are oneCCL's functions have no signature; those that it lacks are not there."""
    library = cls(StandIn(), "/stand-in/libccl.so.2")
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


@real
def test_the_plug_in_for_gpus_is_refused_for_host_memory() -> None:
    assert "CCL_PLUGIN is 'ONECCL_LEGACY'" in run(REASON, CCL_PLUGIN="ONECCL_LEGACY")


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
