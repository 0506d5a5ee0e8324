"""Compares the costs in docs/scaling.md with those of the code, counted rank by rank in the simulation.

``PYTHONPATH=. python tests/scaling/test_scaling.py`` writes the tables of docs/scaling.md anew.
"""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gloo_fallback.algorithms import over_sockets
from gloo_fallback.algorithms.circulant import LIMIT
from gloo_fallback.algorithms.rings import SEGMENT as S
from gloo_fallback.shm.slots import SLOT
from gloo_fallback.transport import selection
from gloo_fallback.transport.exchange import HEADER_SIZE
from gloo_fallback.transport.selection import OPERATIONS
from tests.scaling.formulas import ROOTED, WHOLE, Case, Cost, cost, log2
from tests.scaling.simulation import BUFFER, Deadlock, Trace, Turn, replay, run, tallying, watch
from tests.support.ranks import run_ranks
from unicoll.arrays.types import COMPRESSIONS
from unicoll.backend.ops import OPS as TABLE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "scaling.md"
OPS = tuple(name for name in OPERATIONS if not TABLE[name].joined)
FLAT = {OPERATIONS[name]: name for name in OPERATIONS if TABLE[name].joined}
REDUCING = tuple(name for name in OPS if TABLE[name].reduces)
RANKS = (*range(2, 18), 64)
PIECE = SLOT // 2
BULK = 3 << 20
"""Bytes of an array that is cut into several segments, and whose parts are, too, where there are few."""
MEDIUM = 1 << 14
"""Bytes of a rank's part of an array that is too large for an exchange, and goes round the circulant graph."""


@pytest.fixture(autouse=True)
def _kernels_count() -> Iterator[None]:
    with tallying():
        yield


def traces(case: Case) -> list[Trace]:
    return [run(case, rank) for rank in range(case.ranks)]


def counted(case: Case) -> Cost:
    """Simulate all ranks; fails if they deadlock on connections with small buffers."""
    done = traces(case)
    turns = [trace.turns for trace in done]
    replay(turns, case.nodes, BUFFER)
    messages, sent = [t.messages for t in done], [t.bytes for t in done]
    copied = [t.copied for t in done]
    return Cost(
        replay(turns, case.nodes),
        max(messages),
        sum(messages),
        max(sent),
        sum(sent),
        max(t.steps for t in done),
        max(copied),
        sum(copied),
        max(t.reduced for t in done),
    )


def told(case: Case, found: Cost) -> Cost:
    """Without what the formulas do not give: copies over sockets, reductions over several hosts."""
    if case.per_host < case.ranks:
        found = found._replace(copied=0, total_copied=0)
    return found._replace(reduced=0) if 1 < case.per_host < case.ranks else found


def sized(op: str, ranks: int, bytes_: int, **more: Any) -> Case:
    """An array of about so many bytes that all ranks' parts divide evenly, or such a block of it for each rank."""
    each = max(1, bytes_ // 4 // ranks)
    return Case(op, ranks, each * ranks if op in WHOLE else each, **more)


def small(op: str, ranks: int, **more: Any) -> Case:
    return Case(op, ranks, 2 * ranks if op in WHOLE and op != "broadcast" else 2, **more)


def both(op: str, ranks: int, **more: Any) -> Iterator[Case]:
    """Small and large, from the first and the last rank; and something between."""
    for root in (0, ranks - 1) if op in ROOTED else (0,):
        yield small(op, ranks, root=root, **more)
        yield sized(op, ranks, BULK, root=root, **more)
    yield sized(op, ranks, MEDIUM * ranks, **more)


def check(cases: Iterator[Case]) -> None:
    checked = 0
    for case in cases:
        assert told(case, counted(case)) == cost(case), case
        checked += 1
    assert checked


# --- the formulas ---------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("op", OPS)
def test_over_sockets(op: str) -> None:
    check(case for n in RANKS for case in both(op, n))


@pytest.mark.every(2)
@pytest.mark.parametrize("op", OPS)
def test_through_shared_memory(op: str) -> None:
    check(case for n in RANKS for case in both(op, n, per_host=n))


@pytest.mark.every(2)
@pytest.mark.parametrize("op", OPS)
def test_over_several_hosts(op: str) -> None:
    shapes = [(m * hosts, m) for m in (2, 3, 4) for hosts in (2, 3, 5, 8)] + [(32, 2), (38, 2)]
    check(case for n, m in shapes for case in both(op, n, per_host=m))


@pytest.mark.parametrize("op", sorted(FLAT))
def test_one_array_in_place_of_many_costs_the_same(op: str) -> None:
    for n, per_host in ((2, 1), (5, 1), (8, 1), (4, 4), (6, 3)):
        for case in both(op, n, per_host=per_host):
            flat = Case(FLAT[op], n, case.count, per_host=per_host)
            assert counted(flat) == counted(case)


@pytest.mark.every(3)
@pytest.mark.parametrize("op", REDUCING)
def test_in_rank_order(op: str) -> None:
    for bytes_ in (BULK, 1 << 18):
        check(sized(op, n, bytes_, root=n - 1, deterministic=True) for n in RANKS)


@pytest.mark.every(2)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressed(compression: str) -> None:
    def cases(n: int) -> Iterator[Case]:
        for blocks in (1, 70, 1500):
            for dtype in ("float32", "float64"):
                yield Case("all_reduce", n, 256 * n * blocks, dtype=dtype, compression=compression)

    check(case for n in RANKS[:-1] for case in cases(n))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressed_between_hosts(compression: str) -> None:
    for n, per_host in ((4, 2), (6, 2), (9, 3), (16, 2)):
        for count in (16_385, 300_001, 700_000):
            case = Case("all_reduce", n, count, per_host=per_host, compression=compression)
            done = traces(case)
            replay([trace.turns for trace in done], case.nodes, BUFFER)
            plain = traces(Case("all_reduce", n, count, per_host=per_host))
            fraction = 0.52 if compression == "bfloat16" else 0.28
            assert sum(t.bytes for t in done) < fraction * sum(t.bytes for t in plain)
            chunks, hosts = -(-count // ((SLOT - 64) // 8 // 256 * 256)), n // per_host
            assert {t.steps for t in done} == {chunks + 5}
            turns = chunks + 2 if chunks > 1 else 2
            assert max(t.messages for t in done) == log2(hosts) + turns * (hosts - 1)


@pytest.mark.every(2)
@pytest.mark.parametrize("op", REDUCING)
def test_sums_of_half_types_are_twice_as_wide(op: str) -> None:
    for bytes_ in (BULK, 1 << 18):
        check(Case(op, n, (bytes_ // 2 // n) * (n if op in WHOLE else 1), dtype="bfloat16") for n in RANKS)


@pytest.mark.every(3)
@pytest.mark.parametrize("per_host", [1, 8])
@pytest.mark.parametrize("op", OPS)
def test_hundreds_of_ranks_all_of_them(op: str, per_host: int) -> None:
    sizes = (1 << 20, 5 << 20) if per_host == 1 else (1 << 20,)
    for case in (small(op, 128, per_host=per_host), *(sized(op, 128, b, per_host=per_host) for b in sizes)):
        assert told(case, counted(case)) == cost(case)


@pytest.mark.every(4)
@pytest.mark.parametrize(("ranks", "per_host"), [(512, 1), (512, 8), (4096, 1), (4096, 8)])
def test_thousands_of_ranks_some_of_them(ranks: int, per_host: int) -> None:
    for op in OPS:
        if op == "all_to_all" and ranks > 512:
            continue  # its table of sizes alone is 256 MiB
        for bytes_ in (8 * ranks, 4 << 20):
            case = sized(op, ranks, 8 if op in WHOLE and bytes_ == 8 * ranks else bytes_, per_host=per_host)
            chosen = {1, ranks // 2, ranks - 1, *range(0, 8 * per_host, per_host)}
            sample = [run(case, rank) for rank in chosen]
            expected = cost(case)
            assert max(t.messages for t in sample) == expected.messages, case
            assert max(t.bytes for t in sample) == expected.sent, case
            assert {t.steps for t in sample} == {expected.steps}, case


def neighbours(n: int) -> set[int]:
    """Distances to the ranks that exchanges and circulant graphs need; rings and trees need no others."""
    steps = [step for k in range(log2(n)) for step in (2**k, -(-n // 2 ** (k + 1)))]
    return {d for step in steps for d in (step % n, -step % n)}


def test_connections() -> None:
    for n in RANKS:
        near = neighbours(n)
        for op in ("barrier", "broadcast", "all_reduce", "reduce", "all_gather", "reduce_scatter"):
            for case in both(op, n):
                for rank, trace in enumerate(traces(case)):
                    assert trace.peers <= {(rank + d) % n for d in near}
        for op in ("gather", "scatter"):
            assert len(traces(sized(op, n, BULK))[0].peers) == n - 1
        assert {len(t.peers) for t in traces(small("all_to_all", n))} == {n - 1}
        assert {len(t.peers) for t in traces(sized("all_reduce", n, BULK, deterministic=True))} == {n - 1}


@pytest.mark.parametrize(
    ("case", "staging"),
    [
        (Case("all_reduce", 2, 1 << 20), S),
        (Case("all_reduce", 4, 1 << 20), 2 * S),
        (Case("all_reduce", 4, 1 << 21, dtype="bfloat16"), 5 * S // 2),
        (Case("reduce_scatter", 3, 1 << 20), 2 * S),
        (
            Case("all_reduce", 64, 1 << 20),
            3 * LIMIT // 2,
        ),  # the circulant graph's working array, and what arrives
        (Case("all_reduce", 64, 1 << 20, dtype="bfloat16"), 3 * LIMIT // 2),
        (Case("reduce_scatter", 64, 1 << 14, uneven=True), 3 * LIMIT // 4),
        (Case("all_gather", 64, 1 << 14), LIMIT),
        (Case("reduce", 4, 1 << 20), S),
        (
            Case("reduce", 4, 1 << 21, root=3, dtype="bfloat16"),
            2 * S,
        ),  # the first of the chain widens a segment
        (Case("all_reduce", 8, 1 << 20, deterministic=True), 1 << 20),
        (Case("reduce", 8, 1 << 20, deterministic=True), (1 << 20) + (1 << 17)),
        (
            Case("all_reduce", 2, 1 << 20, compression="bfloat16"),
            3 * 4 * (1 << 16) + 8 * (1 << 15),
        ),  # three messages of two chunks, sums
        (Case("all_reduce", 4, 1 << 22, compression="bfloat16"), 9 * 4 * (1 << 17) + 8 * (1 << 15)),
        (Case("all_reduce", 64, 1 << 20, compression="bfloat16"), 189 * 4 * (1 << 13) + 8 * (1 << 13)),
        (
            Case("all_reduce", 2, 1 << 20, compression="int8", dtype="float64"),
            3 * 2 * 67_584 + 16 * (1 << 15),
        ),
        (
            Case("all_reduce", 4, 1 << 20, compression="bfloat16", per_host=2),
            4 * 130_816 + (12 + 5 * 4) * (1 << 16) + 8 * (1 << 15),
        ),  # sums, messages, five own parts
        (Case("all_gather", 4, 1 << 20), 0),
        (Case("broadcast", 4, 1 << 20), 0),
        (Case("all_reduce", 2, 1 << 14), 2 << 16),  # the exchange's scratch memory
        (Case("all_to_all", 512, 1), 33 * 512**2),
        (
            Case("all_reduce", 8, 1 << 20, per_host=2),
            PIECE + PIECE // 2,
        ),  # a leader's sums, two parts of a chunk
        (Case("all_reduce", 4, 1 << 20, per_host=2), 2 * PIECE),
        (Case("all_reduce", 32, 1 << 20, per_host=2), 5 * PIECE // 2),
        (Case("all_reduce", 32, 1 << 20, dtype="bfloat16", per_host=2), 5 * (SLOT // 3)),
        (Case("all_gather", 32, 1 << 16, per_host=2), SLOT),
    ],
    ids=lambda value: f"{value.op}-{value.ranks}" if isinstance(value, Case) else "",
)
def test_staging_memory_does_not_grow_with_the_array(case: Case, staging: int) -> None:
    run(case, 0)  # imports and caches
    tracemalloc.start()
    try:
        turns = len(run(case, 0).turns)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    slack = (
        30_000 + 300 * turns + (3000 if case.op == "all_to_all" else 1000) * case.ranks
    )  # the records themselves
    assert staging * 0.9 <= peak <= staging + slack
    stated = (
        selection.leader_buffer_bytes(case.ranks // case.per_host)
        if case.per_host > 1
        else selection.socket_buffer_bytes(case.ranks, case.deterministic)
    )
    assert staging <= stated or case.op == "all_to_all"  # its table is stated apart


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("transport", "per_host", "deterministic"),
    [("tcp", 1, False), ("tcp", 1, True), ("shm", 5, False), ("hierarchical", 2, False)],
)
def test_real_ranks_match_the_simulation(transport: str, per_host: int, deterministic: bool) -> None:
    more: dict[str, Any] = {"per_host": per_host, "deterministic": deterministic}
    cases = [
        Case(op, 5, count, 3 if op in ROOTED else 0, **more) for op in OPS for count in (3, 5_001, 200_003)
    ]
    env = {"UNICOLL_TRANSPORT": transport, "UNICOLL_PEER_MEMORY": "off"}
    for rank, found in enumerate(run_ranks(5, watch, cases, env=env)):
        for case, turns in zip(cases, found, strict=True):
            assert turns == run(case, rank).turns, (rank, case)


# --- uneven sizes, and one after another -----------------------------------------------------------------------------


def _needed(case: Case) -> int:
    """Bytes that all ranks send over sockets, as the sum over the blocks, but for the agreement."""
    n = case.ranks
    blocks = [case.block(i) * 4 for i in range(n)]
    if case.op == "all_to_all":
        return 16 * n * n * (n - 1) + sum(4 * case.block(i, j) for i in range(n) for j in range(n) if i != j)
    if case.op == "reduce_scatter" and (n - 1) * sum(blocks) <= over_sockets.SMALL:
        return n * (n - 1) * sum(blocks)
    if case.op in WHOLE and case.op != "broadcast" and (n - 1) * blocks[0] <= over_sockets.SMALL:
        return n * (n - 1) * blocks[0]
    return (n - 1) * (blocks[0] * (2 if case.op == "all_reduce" else 1) if case.op in WHOLE else sum(blocks))


@pytest.mark.parametrize("op", ["broadcast", *REDUCING, "all_gather", "all_to_all"])
def test_uneven_sizes_over_sockets(op: str) -> None:
    for n in range(2, 18):
        for count in (1, 7, 1001, 9001, 65_537, 300_007):
            case = Case(op, n, count, root=n // 2 if op in ROOTED else 0, uneven=op not in WHOLE)
            done = traces(case)
            turns = [trace.turns for trace in done]
            replay(turns, buffer=BUFFER)
            assert sum(t.bytes for t in done) == _needed(case) + n * log2(n) * HEADER_SIZE, case


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_uneven_sizes_at_a_root_over_sockets(op: str) -> None:
    for n in (2, 3, 8, 17):
        for count in (1, 1001, 300_007):
            case = Case(op, n, count, root=n // 2, uneven=True)
            done = traces(case)
            replay([trace.turns for trace in done], buffer=BUFFER)
            assert sum(t.bytes for t in done) == 4 * sum(case.block(i) for i in range(n) if i != case.root), (
                case
            )


@pytest.mark.every(2)
@pytest.mark.parametrize("cyclic", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_uneven_sizes_and_hosts(op: str, cyclic: bool) -> None:
    for n in range(3, 14):
        for per_host in (2, 3, 5):
            for count in (7, 100_003):
                uneven = op in (*FLAT, "gather", "scatter")
                case = Case(op, n, count, n - 1 if op in ROOTED else 0, "float32", per_host, cyclic, uneven)
                replay([trace.turns for trace in traces(case)], case.nodes, BUFFER)


@pytest.mark.every(2)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("ranks", "per_host"), [(2, 1), (7, 1), (16, 1), (7, 7), (8, 2), (12, 5)])
def test_a_whole_program_does_not_deadlock(ranks: int, per_host: int, deterministic: bool) -> None:
    cases = [
        case
        for op in (*OPS, *reversed(OPS))
        for case in both(op, ranks, per_host=per_host, deterministic=deterministic and per_host == 1)
    ]
    done = [Trace() for _ in range(ranks)]
    for rank, trace in enumerate(done):
        for case in cases:
            run(case, rank, trace)
    turns = [trace.turns for trace in done]
    assert replay(turns, cases[0].nodes, BUFFER) >= replay(turns, cases[0].nodes)


# --- the simulation itself -------------------------------------------------------------------------------------------


def _send(to: int, length: int) -> Turn:
    return Turn(to=to, sent=length)


def _take(frm: int, length: int) -> Turn:
    return Turn(frm=frm, got=length)


def test_replay_finds_a_deadlock() -> None:
    crossing = [[_send(1, 100), _take(1, 100)], [_send(0, 100), _take(0, 100)]]
    assert replay(crossing) == 1
    assert replay(crossing, buffer=100) == 1
    with pytest.raises(Deadlock, match="2 ranks wait for ever"):
        replay(crossing, buffer=99)
    assert replay([[Turn(1, 100, 1, 100)], [Turn(0, 100, 0, 100)]], buffer=0) == 1


def test_replay_counts_bytes_in_flight() -> None:
    ahead = [[_send(1, 60), _send(1, 60), _take(1, 1)], [_send(0, 1), _take(0, 60), _take(0, 60)]]
    assert replay(ahead, buffer=60) == 2
    with pytest.raises(Deadlock):
        replay([[_send(1, 60), _send(1, 60), _take(1, 1)], [_take(0, 60), _send(0, 1)]], buffer=0)


def test_replay_finds_messages_that_do_not_match() -> None:
    with pytest.raises(AssertionError, match="rank 0 sends 5 bytes to 1, which awaits 4"):
        replay([[_send(1, 5)], [_take(0, 4)]])
    with pytest.raises(Deadlock, match="rank 1 leaves messages of rank 0 unread"):
        replay([[_send(1, 5)], []])
    with pytest.raises(Deadlock, match="rank 1 in Turn"):
        replay([[], [_take(0, 5)]])
    with pytest.raises(Deadlock):
        replay([[Turn()], []], [(0, 1)])


def test_replay_measures_the_longest_chain() -> None:
    assert replay([[_send(1, 1), _send(2, 1)], [_take(0, 1)], [_take(0, 1)]]) == 2  # one message at a time
    assert replay([[_send(1, 1)], [_take(0, 1), _send(2, 1)], [_take(1, 1)]]) == 2
    meeting = [[_send(1, 1), Turn()], [_take(0, 1), Turn(), _send(0, 1)]]
    meeting[0].append(_take(1, 1))
    assert replay(meeting, [(0, 1)]) == 2


# --- the page --------------------------------------------------------------------------------------------------------

COUNTS = (2, 8, 64, 512, 4096)
HOSTS = (16, 64, 512, 4096)
LARGE = 64 << 20


def tabled(op: str, ranks: int, large: bool, **more: Any) -> Case:
    """8 bytes for each pair of ranks, or arrays of 64 MiB."""
    if large:
        return sized(op, ranks, LARGE, **more)
    return Case(op, ranks, 2, **more)


def amount(value: float) -> str:
    """Bytes, to three digits."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = next(units)
    while value >= 1000:
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"


def duration(us: float) -> str:
    """Microseconds, to two digits or three."""
    if us < 1000:
        return f"{us:.0f} us"
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_ranks(
    ops: Sequence[str], counts: Sequence[int], cell: Callable[[Cost], str], large: bool, **more: Any
) -> str:
    per_host = more.pop("per_host", 1)
    rows = []
    for op in ops:
        each = [tabled(op, n, large, per_host=per_host or n, **more) for n in counts]
        rows.append([op, *(cell(cost(case)) for case in each)])
    return table(["n =", *map(str, counts)], rows)


def most(c: Cost) -> str:
    return f"{c.rounds} / {c.messages} / {amount(c.sent)}"


def total(c: Cost) -> str:
    return f"{c.total_messages} / {amount(c.total_sent)}"


def at_board(c: Cost) -> str:
    return f"{c.steps} / {amount(c.copied)} / {amount(c.reduced)}"


def over_hosts(c: Cost) -> str:
    return f"{c.steps} / {c.rounds} / {c.messages} / {amount(c.sent)}"


def memory() -> str:
    """Staging memory and connections, of the rank that needs most."""
    rows = [
        ["connections of rings, trees, exchanges and circulant graphs"],
        ["connections of all_to_all, of a deterministic reduction, at the root of gather and scatter"],
        ["sizes in an all_to_all, twice (32 n^2 B)"],
        ["flags and semaphores of a host of n ranks (128 n + 64 n^2 B)"],
        ["slots of a host of n ranks (2 MiB n)"],
    ]
    for n in COUNTS:
        cells = (
            str(len(neighbours(n))),
            str(n - 1),
            amount(32 * n * n),
            amount(128 * n + 64 * n * n),
            amount(n << 21),
        )
        for row, text in zip(rows, cells, strict=True):
            row.append(text)
    return table(["n =", *map(str, COUNTS)], rows)


class Model:
    """Times in microseconds, from four of the measured points."""

    def __init__(self) -> None:
        self.measured = {name: _figures(name) for name in ("tcp_2ranks", "shm_2ranks", "shm_4ranks")}
        tcp, shm = self.measured["tcp_2ranks"], self.measured["shm_2ranks"]
        self.step = shm[8]
        at = cost(sized("all_reduce", 2, LARGE, per_host=2))
        self.move = (shm[LARGE] - at.steps * self.step) / (at.copied + at.reduced)
        self.round = tcp[8]
        at = cost(sized("all_reduce", 2, LARGE))
        self.byte = (tcp[LARGE] - at.rounds * self.round - at.reduced * self.move) / at.sent

    def sockets(self, rounds: float, sent: float, reduced: float) -> float:
        return rounds * self.round + sent * self.byte + reduced * self.move

    def predicted(self, name: str, size: int) -> float:
        ranks = int(name[4])
        c = cost(sized("all_reduce", ranks, size, per_host=ranks if name.startswith("shm") else 1))
        crowd = max(1.0, ranks / 2)  # two cores
        if name.startswith("tcp"):
            return self.sockets(c.rounds, c.sent, c.reduced)
        return crowd * (c.steps * self.step + (c.copied + c.reduced) * self.move)


def _figures(name: str) -> dict[int, float]:
    found = json.loads((ROOT / "benchmarks" / f"all_reduce_{name}.json").read_text())
    ours = [row for row in found["results"] if row["contender"] == "gloo"]
    return {row["size"]: row["in_place"]["time"] for row in ours}


def parameters(model: Model) -> str:
    return table(
        ["", "what", "value", "from"],
        [
            ["alpha", "one round over sockets", f"{model.round:.1f} us", "TCP, 2 ranks, 8 B"],
            ["beta", "one byte over sockets", f"1 s / {1e-3 / model.byte:.1f} GB", "TCP, 2 ranks, 64 MiB"],
            ["sigma", "one step of the slots", f"{model.step:.1f} us", "shared memory, 2 ranks, 8 B"],
            [
                "gamma",
                "one byte copied or reduced",
                f"1 s / {1e-3 / model.move:.1f} GB",
                "shared memory, 2 ranks, 64 MiB",
            ],
        ],
    )


def prediction(model: Model) -> str:
    rows = []
    for size in model.measured["tcp_2ranks"]:
        row = [amount(size)]
        for name, figures in model.measured.items():
            expected = model.predicted(name, size)
            row += [
                f"{figures[size]:.0f}" if figures[size] >= 100 else f"{figures[size]:.1f}",
                f"{expected:.0f}" if expected >= 100 else f"{expected:.1f}",
                f"{figures[size] / expected:.1f}",
            ]
        rows.append(row)
    return table(
        [
            "size",
            *(
                f"{name[:3]} {name[4]}{what}"
                for name in model.measured
                for what in ("", ", model", ", ratio")
            ),
        ],
        rows,
    )


def alternatives(model: Model) -> str:
    """all_reduce as it is, by recursive doubling, by halving and doubling."""
    rows = []
    for size in (8, 1 << 10, 1 << 13, 1 << 16, 1 << 20, 1 << 23, LARGE):
        row = [amount(size)]
        for n in (8, 64, 512, 4096):
            k, exact = log2(n), size * (n - 1) / n
            c = cost(
                sized("all_reduce", n, max(size, 4 * n) if size * (n - 1) > over_sockets.SMALL else size)
            )
            if size * (n - 1) <= over_sockets.SMALL:
                c = cost(Case("all_reduce", n, size // 4))
            now = model.sockets(c.rounds, c.sent, c.reduced)
            doubling = model.sockets(k, k * size, k * size)
            halving = model.sockets(2 * k, 2 * exact, exact)
            row.append(f"{duration(now)} / {duration(doubling)} / {duration(halving)}")
        rows.append(row)
    return table(["n =", "8", "64", "512", "4096"], rows)


def hosts_and_rings(model: Model) -> str:
    """all_reduce of 64 MiB between hosts of 8: what the sockets take."""
    crossings: dict[str, list[str]] = {"by host, as it is": [], "by host, rings": [], "all over sockets": []}
    for n in HOSTS:
        hosts = n // 8
        board = cost(sized("all_reduce", n, LARGE, per_host=8))
        chunks, exact = board.steps - 2, LARGE * (hosts - 1) / hosts
        flat = cost(sized("all_reduce", n, LARGE))
        times = [
            model.sockets(board.rounds, board.sent, exact),
            model.sockets(log2(hosts) + 2 * (hosts - 1) * chunks, 2 * exact, exact),
            model.sockets(flat.rounds, flat.sent, flat.reduced),
        ]
        for row, time in zip(crossings.values(), times, strict=True):
            row.append(duration(time))
    return table(["n =", *map(str, HOSTS)], [[name, *row] for name, row in crossings.items()])


def tables() -> dict[str, str]:
    model = Model()
    reductions = ("all_reduce", "reduce", "reduce_scatter")
    return {
        "sockets, 8 B, the busiest rank": by_ranks(OPS, COUNTS, most, False),
        "sockets, 8 B, all ranks": by_ranks(OPS, COUNTS, total, False),
        "sockets, 64 MiB, the busiest rank": by_ranks(OPS, COUNTS, most, True),
        "sockets, 64 MiB, all ranks": by_ranks(OPS, COUNTS, total, True),
        "deterministic, 64 MiB": by_ranks(reductions, COUNTS, most, True, deterministic=True),
        "shared memory, 8 B": by_ranks(OPS, COUNTS[:3], at_board, False, per_host=0),
        "shared memory, 64 MiB": by_ranks(OPS, COUNTS[:3], at_board, True, per_host=0),
        "hosts, 8 B": by_ranks(OPS, HOSTS, over_hosts, False, per_host=8),
        "hosts, 64 MiB": by_ranks(OPS, HOSTS, over_hosts, True, per_host=8),
        "memory": memory(),
        "parameters": parameters(model),
        "prediction": prediction(model),
        "alternatives": alternatives(model),
        "hosts and rings": hosts_and_rings(model),
    }


MARKED = re.compile(r"<!-- table: ([^\n]*) -->\n(.*?)\n?<!-- end -->", re.S)


def test_the_page_has_the_computed_tables() -> None:
    found = {match[1]: match[2] for match in MARKED.finditer(PAGE.read_text())}
    expected = tables()
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        assert found[name] == text, (
            f"{name} (PYTHONPATH=. python tests/scaling/test_scaling.py writes the tables anew)"
        )


def main() -> None:
    written = tables()
    text = MARKED.sub(
        lambda m: f"<!-- table: {m[1]} -->\n{written.get(m[1], '')}\n<!-- end -->", PAGE.read_text()
    )
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
