"""The layer between NCCL's C functions and the backend: signatures, structures, finding the library, error codes.

No GPU is needed: what reaches C is seen by a stand-in that is called by C's rules, signatures are held to NCCL's header
and the real library is asked what it can answer on any machine, where the wheel is installed.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nccl_comm.library import errors, locate, structs
from nccl_comm.library.bindings import SIGNATURES, WITH_CONFIG, Bindings
from nccl_comm.library.errors import IN_PROGRESS
from nccl_comm.library.locate import LOCATOR, RCCL_LOCATOR
from nccl_comm.library.nccl import DIRECT, SYMBOLS
from nccl_comm.library.rccl import RcclBindings
from tests.simulated_nccl.cuda import Simulation
from tests.simulated_nccl.rccl import SimulatedHip
from tests.support.programs import python
from tests.unit.c_functions import BY_VALUE, WORD, StandIn, alike, header, kind, parse, put, putting
from tests.unit.declarations import NCCL, NCCL_CALL_CONFIG_BYTES, NCCL_CODES, NCCL_CONFIG_BYTES, NCCL_SINCE
from unicoll import errors as tree
from unicoll.arrays.types import BY_NAME, Reduction
from unicoll.bootstrap import environment_report
from unicoll.calls.options import CallOptions
from unicoll.device_collectives import bindings as common
from unicoll.device_collectives import interface
from unicoll.device_collectives import locate as common_locate
from unicoll.device_collectives.errors import error_for
from unicoll.devices import runtimes
from unicoll.devices.cuda import hip_driver
from unicoll.devices.device_runtime import DeviceError

DECLARED = parse(NCCL)
NAMES = {
    "send": {"sendbuff", "localbuff"},
    "offset": {"peerWinOffset"},
    "signal_index": {"sigIdx"},
    "context": {"ctx"},
    "recv": {"recvbuff"},
    "count": {"count", "sendcount", "recvcount"},
    "dtype": {"datatype"},
    "window": {"win", "peerWin"},
}
"""Arguments with different names in the protocol and in NCCL."""
COMM, STREAM = 0x5555_0000_1000, 0x5555_0000_2000


def stand_in(version: int = structs.NEWEST, without: Any = ()) -> StandIn:
    made = StandIn(DECLARED, without)
    made.answers["ncclGetVersion"] = putting(0, version, ctypes.c_int)
    return made


def bound(version: int = structs.NEWEST, without: Any = ()) -> tuple[StandIn, Any]:
    made = stand_in(version, without)
    return made, Bindings(made, "/stand-in/libnccl.so.2")


def members() -> dict[str, Any]:
    found = vars(interface.Operations) | vars(interface.CollectiveLibrary)
    return {n: f for n, f in found.items() if not n.startswith("_")}


def noting(made: StandIn, symbol: str, code: int, slot: str = "", **read: Any) -> list[dict[str, Any]]:
    """The arguments of a function's calls by NCCL's names, read while a call runs; functions in ``read`` read what they
    point at. A handle is written through ``slot``."""
    seen: list[dict[str, Any]] = []

    def answer(*arguments: Any) -> int:
        given = dict(zip(DECLARED[symbol].names, arguments, strict=True))
        seen.append({name: read.get(name, int)(value) if value else value for name, value in given.items()})
        if slot:
            put(given[slot], COMM + 8, ctypes.c_void_p)
            del seen[-1][slot]
        return code

    made.answers[symbol] = answer
    return seen


def _members_of(struct: Any, address: int) -> dict[str, Any]:
    """The members of a structure at an address."""
    found = struct.from_address(address)
    return {name: getattr(found, name) for name, *_ in struct._fields_}


def _most_ctas(address: int) -> Any:
    return _members_of(structs.ConfigStruct, address)["maxCTAs"]


# --- the protocol -----------------------------------------------------------------------------------------------


def test_bindings_have_every_member_of_the_protocol_with_its_arguments() -> None:
    _, nccl = bound()
    for name, member in members().items():
        assert hasattr(nccl, name), name
        if isinstance(member, property):
            continue
        expected = list(inspect.signature(member).parameters)[1:]
        if name not in DIRECT:
            assert list(inspect.signature(getattr(nccl, name)).parameters) == expected, name
            continue
        theirs = DECLARED[DIRECT[name]].names
        assert len(SIGNATURES[DIRECT[name]]) == len(expected) == len(theirs), name
        for mine, its in zip(expected, theirs, strict=True):
            assert its in NAMES.get(mine, {mine}), f"{name}: {mine} is NCCL's {its}"
    assert set(DIRECT) <= set(members())


@pytest.mark.parametrize("wide", [True, False], ids=["as pointers", "as declared"])
def test_every_argument_arrives_whole_and_in_its_place(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not wide:
        monkeypatch.setattr(common, "_EIGHT_BYTES_EACH", False)
    made, nccl = bound()
    with_options = nccl.with_options(CallOptions())
    for table, functions in ((DIRECT, nccl), (WITH_CONFIG, with_options)):
        for name, symbol in table.items():
            types = DECLARED[symbol].types[: -1 if table is WITH_CONFIG else None]
            # Pointers and counts that do not fit into 32 bits, and a small number of its own for each place.
            values = [
                place + 1 if kind(c_type) not in ("pointer", WORD) else (place + 1 << 40) + 0x89ABCDEF
                for place, c_type in enumerate(types)
            ]
            made.answers[symbol] = lambda *_: 5
            assert getattr(functions, name)(*values) == 5, name
            assert made.last(symbol)[: len(values)] == tuple(values), name


def test_signatures_are_those_that_nccl_declares() -> None:
    _hold_to(DECLARED)
    assert set(SIGNATURES) == set(DECLARED)
    for name, symbol in WITH_CONFIG.items():
        assert DECLARED[symbol].names[:-1] == DECLARED[DIRECT[name]].names
        assert SIGNATURES[symbol][:-1] == SIGNATURES[DIRECT[name]]


def _hold_to(declared: dict[str, Any]) -> None:
    for name, arguments in SIGNATURES.items():
        if name in declared:
            assert len(arguments) == len(declared[name].types), name
            assert all(map(alike, arguments, declared[name].types)), name


# --- functions that create something ------------------------------------------------------------------------------

IDENT = bytes(range(1, 128)) + b"\0"


def test_all_bytes_of_the_unique_id_arrive_in_both_directions() -> None:
    made, nccl = bound()
    fill = lambda address: ctypes.memmove(address, IDENT, 128) and 0  # noqa: E731
    made.answers["ncclGetUniqueId"] = fill
    assert nccl.unique_id() == (0, IDENT)
    made.answers["ncclCommGetUniqueId"] = lambda comm, address: fill(address)
    assert nccl.comm_unique_id(COMM) == (0, IDENT)
    assert made.last("ncclCommGetUniqueId")[0] == COMM
    made.answers["ncclCommInitRankConfig"] = putting(0, COMM, ctypes.c_void_p, 7)
    code, slot = nccl.comm_init(4, [IDENT], 3, interface.Config())
    assert (code, slot.value) == (7, COMM)
    assert made.last("ncclCommInitRankConfig")[1:4] == (4, IDENT, 3)
    assert kind(DECLARED["ncclCommInitRankConfig"].types[2]) == BY_VALUE
    with pytest.raises(tree.DistBackendError, match="128 bytes, not 4"):
        nccl.comm_init(1, [b"four"], 0, interface.Config())


def test_unique_ids_excluded_ranks_config_and_slot_are_passed() -> None:
    made, nccl = bound()
    config, idents = interface.Config(max_ctas=4), [bytes([i]) * 128 for i in (1, 2, 3)]
    begun = noting(
        made,
        "ncclCommInitRankScalable",
        7,
        "newcomm",
        commIds=lambda at: ctypes.string_at(at, 3 * 128),
        config=_most_ctas,
    )
    two = ctypes.c_int * 2
    shrunk = noting(
        made,
        "ncclCommShrink",
        7,
        "newcomm",
        excludeRanksList=lambda at: list(two.from_address(at)),
        config=_most_ctas,
    )
    grown = noting(
        made, "ncclCommGrow", 7, "newcomm", uniqueId=lambda at: ctypes.string_at(at, 128), config=_most_ctas
    )
    for code, slot in (
        nccl.comm_init(300, idents, 299, config),
        nccl.comm_shrink(COMM, [5, 2], config, True),
        nccl.comm_shrink(COMM, [5, 2], config, False),
        nccl.comm_grow(COMM, 6, IDENT, -1, config),
        nccl.comm_grow(COMM, 6, None, -1, config),
        nccl.comm_grow(0, 6, IDENT, 5, config),
    ):
        assert (code, slot.value) == (7, COMM + 8)
    assert [tuple(one.values()) for one in begun] == [(300, 299, 3, b"".join(idents), 4)]
    assert [tuple(one.values()) for one in shrunk] == [(COMM, [5, 2], 2, 4, flag) for flag in (1, 0)]
    assert [tuple(one.values()) for one in grown] == [
        (COMM, 6, IDENT, -1, 4),
        (COMM, 6, 0, -1, 4),
        (0, 6, IDENT, 5, 4),
    ]


def test_a_split_passes_color_key_and_config_and_the_slot_for_the_handle() -> None:
    made, nccl = bound()
    read = partial(_members_of, structs.ConfigStruct)
    seen = noting(made, "ncclCommSplit", IN_PROGRESS, config=read)
    config = interface.Config(
        min_ctas=2,
        max_ctas=8,
        cga_cluster_size=1,
        split_share=True,
        net_name="Socket",
        traffic_class=5,
        comm_name="half",
        blocking=False,
    )
    code, slot = nccl.comm_split(COMM, 3, 1, config)
    comm, color, key, place, told = seen[0].values()
    assert (code, slot.value, comm, color, key) == (7, None, COMM, 3, 1)
    put(place, COMM + 8, ctypes.c_void_p)  # as NCCL's own thread does later
    assert slot.value == COMM + 8
    given = {"size": NCCL_CONFIG_BYTES[structs.NEWEST], "magic": 0xCAFEBEEF, "version": structs.NEWEST}
    given |= {"blocking": 0, "minCTAs": 2, "maxCTAs": 8, "cgaClusterSize": 1, "splitShare": 1}
    names = {"netName": b"Socket", "commName": b"half"}
    assert told == dict.fromkeys(told, structs.UNDEFINED) | given | names | {"trafficClass": 5}
    nccl.comm_split(COMM, None, 0, interface.Config(blocking=True))
    assert (seen[1]["color"], seen[1]["config"]["blocking"]) == (-1, 1)


@pytest.mark.parametrize("code", [IN_PROGRESS, interface.SUCCESS])
def test_the_slot_of_a_late_handle_outlives_its_caller(code: int) -> None:
    made, nccl = bound()
    seen = noting(made, "ncclCommSplit", code)
    nccl.comm_split(COMM, 0, 0, interface.Config())
    others = [ctypes.c_void_p() for _ in range(1000)]
    assert seen[0]["newcomm"] not in {ctypes.addressof(o) for o in others}
    put(seen[0]["newcomm"], 1, ctypes.c_void_p)
    assert all(o.value is None for o in others)


def test_state_revoke_memory_and_windows() -> None:
    made, nccl = bound()
    made.answers["ncclCommGetAsyncError"] = putting(1, 6, ctypes.c_int, 0)
    assert nccl.comm_state(COMM) == (0, 6)
    assert nccl.comm_revoke(COMM) == 0
    assert made.last("ncclCommRevoke") == (COMM, 0)
    made.answers["ncclMemAlloc"] = putting(0, 1 << 44, ctypes.c_void_p)
    assert nccl.mem_alloc(3 << 33) == (0, 1 << 44)
    assert made.last("ncclMemAlloc")[1] == 3 << 33
    made.answers["ncclCommWindowRegister"] = putting(3, 0x77, ctypes.c_void_p)
    for symmetric in (True, False):
        code, window = nccl.window_register(COMM, 1 << 44, 1 << 33, symmetric)
        assert (code, window.value) == (0, 0x77)
        comm, ptr, nbytes, _, flags = made.last("ncclCommWindowRegister")
        assert (comm, ptr, nbytes, flags) == (COMM, 1 << 44, 1 << 33, int(symmetric))
    made.answers["ncclCommRegister"] = putting(3, 0x99 << 32, ctypes.c_void_p)
    assert nccl.comm_register(COMM, 1 << 44, 1 << 33) == (0, 0x99 << 32)
    assert made.last("ncclCommRegister")[:3] == (COMM, 1 << 44, 1 << 33)
    made.answers["ncclCommRegister"] = lambda *_: 5
    assert nccl.comm_register(COMM, 1 << 44, 1) == (5, 0)


def test_signals_and_a_factor_are_read_while_the_call_runs() -> None:
    made, nccl = bound()
    eight = ctypes.c_int * 8
    signals = noting(made, "ncclWaitSignal", 5, signalDescs=lambda at: list(eight.from_address(at)))
    assert nccl.wait_signal([(3, 2), (0, 1)], COMM, STREAM) == 5
    assert list(signals[0].values()) == [2, [2, 3, 0, 0, 1, 0, 0, 0], COMM, STREAM]
    factors = noting(made, "ncclRedOpCreatePreMulSum", 0, scalar=lambda at: ctypes.string_at(at, 8))
    assert nccl.premul_sum(b"12345678", interface.DATA_TYPES["float64"], COMM)[0] == 0
    assert list(factors[0].values())[1:] == [b"12345678", 8, 1, COMM]
    made.answers["ncclRedOpCreatePreMulSum"] = putting(0, 0x1234, ctypes.c_int)
    assert nccl.premul_sum(b"12345678", interface.DATA_TYPES["float64"], COMM) == (0, 0x1234)


def test_operations_with_options_are_all_operations() -> None:
    _, nccl = bound()
    operations = nccl.with_options(CallOptions())
    for name in members():
        assert hasattr(operations, name) == (name in vars(interface.Operations)), name
    for name in set(DIRECT) - set(WITH_CONFIG):
        if name in vars(interface.Operations):
            assert getattr(operations, name) is getattr(nccl, name)


@pytest.mark.parametrize("name", sorted(WITH_CONFIG))
def test_options_of_a_call_arrive_as_nccls_structure(name: str) -> None:
    made, nccl = bound()
    symbol = WITH_CONFIG[name]
    read = {DECLARED[symbol].names[-1]: partial(_members_of, structs.CallConfigStruct)}
    seen = noting(made, symbol, 0, **read)
    rest = [1] * (len(DECLARED[symbol].types) - 1)
    options = CallOptions(
        min_ctas=2,
        max_ctas=8,
        nvls_ctas=3,
        cga_cluster_size=1,
        algorithm="ring,tree",
        force_algorithm=False,
        cta_policy="zero",
        profiler_tag=(1 << 63) - 1,
    )
    for told in (options, CallOptions()):
        assert getattr(nccl.with_options(told), name)(*rest) == 0
    always = {"size": 72, "magic": 0xCAFEBEEF, "version": structs.NEWEST, "ext": None}
    always |= {"launchCompletionEvent": None}
    given = {
        "minCTAs": 2,
        "maxCTAs": 8,
        "nvlsCTAs": 3,
        "cgaClusterSize": 1,
        "algSelection": b"ring,tree",
        "forceAlgSelection": 0,
        "CTAPolicy": 2,
        "userProfilerTag": (1 << 63) - 1,
    }
    left = {"algSelection": None, "forceAlgSelection": 1, "userProfilerTag": 0}
    left = dict.fromkeys(given, structs.UNDEFINED) | left
    for call, expected in zip(seen, (given, left), strict=True):
        found = list(call.values())[-1]
        assert {name: found[name] for name in (*always, *expected)} == always | expected


def test_the_last_error_is_text() -> None:
    made, nccl = bound()
    text = ctypes.create_string_buffer("Fehler \u00fcberall\n".encode())
    made.answers["ncclGetLastError"] = lambda comm: ctypes.addressof(text)
    assert nccl.last_error() == "Fehler \u00fcberall"
    assert made.last("ncclGetLastError") == (0,)
    made.answers["ncclGetLastError"] = lambda comm: None
    assert nccl.last_error(COMM) == ""


def test_a_function_that_an_old_library_lacks_raises_when_called() -> None:
    _, nccl = bound(21803, NCCL_SINCE)
    for name in DECLARED:
        assert nccl.has_symbol(name) == (name not in NCCL_SINCE)
    for method, name in SYMBOLS.items():
        assert nccl.has(method) == (name not in NCCL_SINCE)
        assert nccl.symbol(method) == name
    with pytest.raises(tree.DistBackendError, match=r"NCCL 2\.18\.3 .* has no ncclAlltoAll"):
        nccl.all_to_all(1, 2, 3, 7, COMM, STREAM)
    with pytest.raises(tree.DistBackendError, match="ncclCommShrink"):
        nccl.comm_shrink(COMM, [1], interface.Config(), False)


# --- structures and codes ---------------------------------------------------------------------------------------


def test_structures_are_as_large_as_the_version_has_them() -> None:
    for version, nbytes in NCCL_CONFIG_BYTES.items():
        told = structs.config_struct(interface.Config(), version)
        assert (told.size, told.version) == (nbytes, version)
        assert nbytes <= ctypes.sizeof(structs.ConfigStruct)
    for version, nbytes in NCCL_CALL_CONFIG_BYTES.items():
        call = structs.call_config_struct(CallOptions(), version)
        assert (call.size, call.version) == (nbytes, version)
        assert nbytes <= ctypes.sizeof(structs.CallConfigStruct)
    newer = structs.config_struct(interface.Config(), 24901)
    assert (newer.version, newer.size) == (structs.NEWEST, NCCL_CONFIG_BYTES[structs.NEWEST])


def test_options_that_a_version_lacks_are_refused_unless_they_are_for_logs_only() -> None:
    with pytest.raises(tree.DistArgumentError, match=r"trafficClass needs NCCL 2\.26\.0; this is 2\.21\.5"):
        structs.config_struct(interface.Config(traffic_class=1), 22105)
    assert structs.config_struct(interface.Config(comm_name="x"), 22605).commName is None


@pytest.mark.parametrize("version", [21805, 22203, 22809, 23007, 23203])
@pytest.mark.parametrize("given", [(4, None), (None, 4), (100, None), (4, 8), (None, None)])
def test_either_number_of_ctas_may_be_given_alone(given: tuple[int | None, int | None], version: int) -> None:
    least, most = given
    told = structs.config_struct(interface.Config(min_ctas=least, max_ctas=most), version)
    # else NCCL refuses them, also where one is undefined: parseCommConfig in its init.cc
    assert told.minCTAs <= told.maxCTAs
    assert told.minCTAs == (structs.UNDEFINED if least is None else least)
    if most is not None or least is None:
        assert told.maxCTAs == (structs.UNDEFINED if most is None else most)


def test_version_text() -> None:
    texts = {code: structs.version_text(code) for code in (2708, 21803, 23007)}
    assert texts == {2708: "2.7.8", 21803: "2.18.3", 23007: "2.30.7"}


BECOMES = {
    "ncclSuccess": tree.DistBackendError,
    "ncclUnhandledCudaError": DeviceError,
    "ncclSystemError": tree.DistNetworkError,
    "ncclInternalError": tree.DistBackendError,
    "ncclInvalidArgument": tree.DistArgumentError,
    "ncclInvalidUsage": tree.DistBackendError,
    "ncclRemoteError": tree.RankLostError,
    "ncclInProgress": tree.DistBackendError,
    "ncclTimeout": tree.OperationTimeoutError,
}


def test_every_code_has_an_exception() -> None:
    assert {c.name: n for n, c in errors.CODES.items()} == NCCL_CODES
    assert {c.name: c.error for c in errors.CODES.values()} == BECOMES


@pytest.mark.parametrize("code", [*NCCL_CODES.values(), 99])
def test_errors_contain_nccls_text_and_the_call(code: int) -> None:
    made, nccl = bound()
    text = ctypes.create_string_buffer(b"first line\n second line\n")
    made.answers["ncclGetLastError"] = lambda comm: ctypes.addressof(text)
    error = error_for(code, nccl, COMM, "all_reduce #3", "default", "all_reduce", 3)
    assert (error.group, error.op, error.seq) == ("default", "all_reduce", 3)
    known = errors.CODES.get(code)
    assert type(error) is (known.error if known else tree.DistBackendError)
    assert str(error).startswith("all_reduce #3 on group 'default': ")
    assert (known.name if known else "code 99") in str(error)
    assert str(error).endswith("NCCL reports: first line; second line")
    assert "NCCL 2.32.3" in str(error)
    made.answers["ncclGetLastError"] = lambda comm: None
    quiet = error_for(code, nccl, 0, "ncclGetUniqueId", None, None, None)
    assert "NCCL_DEBUG=WARN" in str(quiet)
    assert (quiet.group, quiet.op, quiet.seq) == (None, None, None)


# --- finding the library ----------------------------------------------------------------------------------------


@pytest.fixture
def _own_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(locate.VARIABLE, raising=False)
    monkeypatch.setattr(hip_driver, "_KERNEL_DRIVER", "/no/such/file")
    locate.install(None)
    yield
    locate.install(None)


@pytest.mark.usefixtures("_own_library")
class TestFinding:
    def test_another_implementation_replaces_it_and_explain_names_version_and_path(self) -> None:
        _, nccl = bound()
        locate.install(nccl)
        assert locate.nccl() is nccl
        assert interface.describe(locate.nccl()) == "NCCL 2.32.3 (/stand-in/libnccl.so.2)"
        simulation = Simulation()
        runtimes.install("cuda", simulation.cuda)
        try:
            said = environment_report.lines({})
        finally:
            runtimes.install("cuda", None)
            simulation.close()
        assert "backend 'nccl': available: NCCL 2.32.3 (/stand-in/libnccl.so.2)" in said
        assert "simulated CUDA: 1 device" in said

    @pytest.mark.parametrize(
        ("named", "words"),
        [
            ("/no/such/libnccl.so", (f"{locate.VARIABLE}: ", "/no/such/libnccl.so")),
            ("libc.so.6", (f"{locate.VARIABLE}: ", "has no ncclGetVersion")),
            ("", ("libnccl-that-is-not-here.so.2", "nvidia-nccl-cu12")),
        ],
    )
    def test_why_there_is_no_library(
        self, named: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A path that was named is the only one tried; without a name the package to install is named."""
        monkeypatch.setattr(LOCATOR.file, "candidates", lambda: iter(["libnccl-that-is-not-here.so.2"]))
        if named:
            monkeypatch.undo()
            monkeypatch.setenv(locate.VARIABLE, named)
        reason = locate.find()
        assert isinstance(reason, str)
        assert all(word in reason for word in words), reason
        with pytest.raises(tree.BackendUnavailableError, match=re.escape(words[-1])):
            locate.nccl()

    @pytest.mark.parametrize(("version", "taken"), [(21703, False), (21803, True), (24901, True)])
    def test_versions_before_2_18_are_refused(
        self, version: int, taken: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(LOCATOR.file, "candidates", lambda: iter(["/stand-in/libnccl.so.2"]))
        monkeypatch.setattr(common_locate.ctypes, "CDLL", lambda path: stand_in(version))
        found = locate.find()
        assert isinstance(found, str) is not taken
        if isinstance(found, str):
            assert "NCCL 2.17.3 (/stand-in/libnccl.so.2) is too old: 2.18.0 or newer" in found

    def test_rccl_is_the_library_of_amds_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has NCCL's functions and versions; its 8-bit types have the format of the device."""
        simulation = Simulation(runtime=SimulatedHip)
        runtimes.install("cuda", simulation.cuda)
        try:
            monkeypatch.setattr(RCCL_LOCATOR.file, "candidates", lambda: iter(["/stand-in/librccl.so.1"]))
            monkeypatch.setattr(common_locate.ctypes, "CDLL", lambda path: stand_in(22703))
            found: Any = locate.nccl()
            assert isinstance(found, RcclBindings)
            assert interface.describe(found) == "RCCL 2.27.3 (/stand-in/librccl.so.1)"
            assert found.needed("put_signal") == "RCCL 2.29; this is 2.27.3"
            assert found.reduction(BY_NAME["float32"], Reduction.SUM) is not None
            assert found.reduction(BY_NAME["float8_e4m3fn"], Reduction.SUM) is None
            locate.install(None)
            monkeypatch.setattr(common_locate.ctypes, "CDLL", lambda path: stand_in(21703))
            assert "RCCL 2.17.3 (/stand-in/librccl.so.1) is too old: 2.18.0" in str(locate.find())
        finally:
            locate.install(None)
            runtimes.install("cuda", None)
            simulation.close()

    def test_the_search_runs_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[int] = []
        monkeypatch.setattr(LOCATOR, "search", lambda: looks.append(1) or "none")
        threads = [threading.Thread(target=locate.find) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(looks) == 1

    def test_a_mapped_library_is_preferred_to_the_wheels(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        wheel = tmp_path / "nccl" / "lib" / "libnccl.so.2"
        wheel.parent.mkdir(parents=True)
        wheel.touch()
        file = LOCATOR.file
        monkeypatch.setattr(file, "folders", lambda: [wheel.parent])
        monkeypatch.setattr(file, "mapped", list)  # an earlier test may have mapped one
        assert next(file.candidates()) == str(wheel)
        mapped = ["/torch/lib/libnccl.so.2", "/preloaded/libnccl.so.2"]
        monkeypatch.setattr(file, "mapped", lambda: mapped)
        monkeypatch.setattr(file, "loaded_from", lambda library: None)
        assert list(file.candidates()) == ["/torch/lib/libnccl.so.2"]
        monkeypatch.setattr(file, "loaded_from", lambda library: "/preloaded/libnccl.so.2")
        assert list(file.candidates()) == ["/preloaded/libnccl.so.2"]

    def test_mapped_libraries_are_read_from_proc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        maps = (
            "7f00-7f01 r--p 00000000 08:01 1   /opt/a b/libnccl.so.2.27.5\n"
            "7f01-7f02 r-xp 00000000 08:01 1   /opt/a b/libnccl.so.2.27.5\n"
            "7f02-7f03 r-xp 00000000 08:01 2   /opt/libnccl.so.2 (deleted)\n"
            "7f03-7f04 r-xp 00000000 08:01 3   /opt/libnccl-net.so\n"
        )
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: maps)
        assert LOCATOR.file.mapped() == ["/opt/a b/libnccl.so.2.27.5"]


# --- the real header and library --------------------------------------------------------------------------------

HEADER = header("nccl/include/nccl.h", "nccl.h")
with_header = pytest.mark.skipif(HEADER is None, reason="nccl.h is not here (pip install nvidia-nccl-cu12)")


@with_header
def test_signatures_are_those_of_the_header() -> None:
    assert HEADER is not None
    declared = parse(HEADER.read_text())
    _hold_to(declared)
    for name, ours in DECLARED.items():
        if name in declared:
            assert declared[name] == ours


@with_header
def test_every_code_of_the_header_is_mapped() -> None:
    assert HEADER is not None
    codes = dict(re.findall(r"\b(nccl\w+) *= *(\d+)", _enum(HEADER.read_text(), "ncclResult_t")))
    codes.pop("ncclNumResults")
    assert len(codes) >= 8
    assert {n: int(c) for n, c in codes.items()}.items() <= NCCL_CODES.items()


@with_header
def test_types_and_reductions_are_those_of_the_header() -> None:
    assert HEADER is not None
    text = HEADER.read_text()
    types = dict(re.findall(r"\b(nccl\w+) *= *(\d+)", _enum(text, "ncclDataType_t")))
    theirs = {"float8_e4m3fn": "ncclFloat8e4m3", "float8_e5m2": "ncclFloat8e5m2"}
    for name, code in interface.DATA_TYPES.items():
        symbol = theirs.get(name, "nccl" + name.capitalize())
        if symbol in types or not name.startswith("float8"):
            assert int(types[symbol]) == code, name
    ops = dict(re.findall(r"\b(nccl\w+) *= *(\d+)", _enum(text, "ncclRedOp_t")))
    found = [int(ops[f"nccl{n}"]) for n in ("Sum", "Prod", "Max", "Min", "Avg")]
    assert found == [interface.SUM, interface.PROD, interface.MAX, interface.MIN, interface.AVG]


def _enum(text: str, name: str) -> str:
    found = re.search(r"typedef enum \{([^}]*)\}\s*" + name, text)
    assert found is not None, name
    return re.sub(r"/\*.*?\*/", "", found[1], flags=re.S)


@with_header
def test_the_config_has_the_headers_members() -> None:
    assert HEADER is not None
    text = HEADER.read_text()
    found = re.search(r"typedef struct ncclConfig_v\d+ \{(.*?)\} ncclConfig_t;", text, flags=re.S)
    assert found is not None
    members = re.findall(r"^ *(?:const )?([\w ]+?) *\*?(\w+);", found[1], flags=re.M)
    ours = [name for name, *_ in structs.ConfigStruct._fields_]
    assert [name for _, name in members] == ours[: len(members)]


@with_header
def test_the_options_of_a_call_have_the_headers_members_and_defaults() -> None:
    assert HEADER is not None
    text = HEADER.read_text()
    found = re.search(r"typedef struct ncclCollConfig_v\d+ \{(.*?)\} ncclCollConfig_t;", text, flags=re.S)
    initial = re.search(r"define NCCL_COLLCONFIG_INITIALIZER \{(.*?)\n\}", text, flags=re.S)
    if found is None:
        pytest.skip("this header is older than 2.31")
    assert initial is not None
    plain = re.sub(r"/\*.*?\*/", "", found[1], flags=re.S)
    members = re.findall(r"^ *(?:const )?([\w ]+?) *\*? *(\w+);", plain, flags=re.M)
    ours = [name for name, *_ in structs.CallConfigStruct._fields_]
    assert [name for _, name in members] == ours[: len(members)]
    values = re.findall(r"^ *(\w+|sizeof\(\w+\)), ", initial[1], flags=re.M)
    by_word = {"NCCL_CONFIG_UNDEF_INT": structs.UNDEFINED, "NCCL_CONFIG_UNDEF_PTR": None, "0": 0, "1": 1}
    told = structs.call_config_struct(CallOptions(), structs.NEWEST)
    assert len(values) == len(members)
    for name, value in list(zip(ours, values, strict=False))[3:]:
        assert getattr(told, name) == by_word[value], name
    policies = dict(re.findall(r"#define NCCL_CTA_POLICY_(\w+) (0x\d+)", text))
    assert {name.lower(): int(code, 16) for name, code in policies.items()} == structs._POLICIES


REAL = isinstance(header("nccl/lib/libnccl.so.2"), Path)
with_library = pytest.mark.skipif(not REAL, reason="libnccl is not here (pip install nvidia-nccl-cu12)")


def ask(program: str) -> str:
    """The output of a process of its own: NCCL starts threads that never end."""
    opening = (
        "from nccl_comm.library import locate\nfrom unicoll.device_collectives import interface\n"
        "from unicoll.device_collectives.errors import error_for\nnccl = locate.nccl()\n"
    )
    done = python("-c", opening + program, CUDA_VISIBLE_DEVICES="", NCCL_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    return done.stdout


@with_library
def test_the_real_library_is_found_without_importing_its_package() -> None:
    out = ask(
        "import sys\nprint(interface.describe(nccl), [m for m in sys.modules if m.startswith('nvidia')])"
    )
    assert re.match(r"NCCL 2\.\d+\.\d+ \(/.*/libnccl\.so\.2\) \[\]$", out)


@with_library
def test_the_real_library_exports_what_its_version_should_have() -> None:
    out = ask(
        "from nccl_comm.library.bindings import SIGNATURES\n"
        "print(nccl.version, *(n for n in SIGNATURES if nccl.has_symbol(n)))"
    )
    version, *names = out.split()
    assert set(names) == {n for n in SIGNATURES if NCCL_SINCE.get(n, 0) <= int(version)}


@with_library
def test_the_real_library_makes_ids_that_differ() -> None:
    out = ask(
        "a, b = nccl.unique_id(), nccl.unique_id()\nprint(a[0], b[0], len(a[1]), a[1] != b[1], any(a[1]))"
    )
    assert out.split() == ["0", "0", "128", "True", "True"]


@with_library
def test_the_real_library_refuses_invalid_arguments_with_a_reason() -> None:
    out = ask(
        "code = nccl.all_reduce(0, 0, 1, 7, 0, 0, 0)\n"
        "print(code, nccl.group_start(), nccl.group_end(), nccl.comm_abort(0))\n"
        "e = error_for(code, nccl, 0, 'all_reduce #1', 'g', 'all_reduce', 1)\n"
        "print(type(e).__name__, e)"
    )
    codes, error = out.strip().split("\n")
    assert codes == "4 0 0 0"
    assert error.startswith("DistArgumentError all_reduce #1 on group 'g': ncclInvalidArgument of NCCL 2.")
    assert "NCCL reports: " in error


@with_library
def test_the_real_library_returns_an_error_without_a_gpu() -> None:
    out = ask(
        "code, slot = nccl.comm_init(1, [nccl.unique_id()[1]], 0, interface.Config(min_ctas=1, comm_name='one'))\n"
        "print(type(error_for(code, nccl, 0, 'ncclCommInitRankConfig', 'g', None, None)).__name__, slot.value,"
        " 'CUDA' in nccl.last_error() or 'Cuda' in nccl.last_error())"
    )
    assert out.split() == ["DeviceError", "None", "True"]


@with_library
def test_the_real_library_reads_the_options_of_a_call() -> None:
    out = ask(
        "from nccl_comm.library import bindings, structs\nfrom unicoll.calls.options import CallOptions\n"
        "if not nccl.has('with_options'):\n    print('it is older than 2.31')\n    raise SystemExit\n"
        "def tell(**wrong):\n"
        "    told = structs.call_config_struct(CallOptions(max_ctas=4, algorithm='ring'), nccl.version)\n"
        "    for name, value in wrong.items():\n        setattr(told, name, value)\n"
        "    bindings.call_config_struct = lambda *_: told\n"
        "    print(nccl.with_options(None).all_reduce(0, 0, 1, 7, 0, 0, 0), nccl.last_error())\n"
        "tell()\ntell(forceAlgSelection=7)\ntell(CTAPolicy=9)\n"
    )
    if "older" in out:
        pytest.skip(out.strip())
    fine, force, policy = out.strip().split("\n")
    assert fine == "4 AllReduce : comm argument is NULL"  # the options are past, the next argument is wrong
    assert "forceAlgSelection=7" in force
    assert "CTAPolicy=9" in policy
