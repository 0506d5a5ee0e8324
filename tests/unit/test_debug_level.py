"""Debug levels and the loggers of unicoll."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import unicoll as dist
from unicoll.errors import DistArgumentError, DistTypeError
from unicoll.net.stores import HashStore
from unicoll.process import debug_level, logs

TOP = logging.getLogger("unicoll")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("UNICOLL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "UNICOLL_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(debug_level, "_level", None)
    logs.set_rank(None)  # of the last job of this process
    yield
    monkeypatch.undo()
    logs.configure(None)
    logs.set_rank(None)


@pytest.mark.parametrize(
    ("ours", "torchs", "level"),
    [
        ("", "", "OFF"),
        ("INFO", "", "INFO"),
        ("detail", "", "DETAIL"),
        ("", "DETAIL", "DETAIL"),
        ("", "info", "INFO"),
        ("off", "DETAIL", "OFF"),
        ("INFO", "bad", "INFO"),
    ],
)
def test_the_level_comes_from_the_environment(
    ours: str, torchs: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNICOLL_DEBUG", ours)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", torchs)
    assert dist.get_debug_level() is dist.DebugLevel[level]
    dist.set_debug_level(dist.DebugLevel.INFO)
    assert dist.get_debug_level() is dist.DebugLevel.INFO
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() is dist.DebugLevel[level]


@pytest.mark.parametrize(
    "name", ["UNICOLL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "UNICOLL_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"]
)
def test_an_unknown_value_names_the_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "loud")
    with pytest.raises(DistArgumentError, match=f"{name}=loud is none of"):
        dist.set_debug_level_from_env()
    with pytest.raises(DistArgumentError, match=f"{name}=loud is none of"):
        dist.init_process_group(rank=0, world_size=1, store=HashStore())
    assert not dist.is_initialized()


@pytest.mark.torch
def test_the_levels_are_torchs() -> None:
    torchs = pytest.importorskip("torch.distributed").DebugLevel
    assert {name: int(level) for name, level in torchs.__members__.items()} == dict(
        dist.DebugLevel.__members__
    )
    assert [str(level) for level in dist.DebugLevel] == [str(level) for level in torchs.__members__.values()]


def _job() -> None:
    dist.init_process_group(rank=0, world_size=1, store=HashStore())
    dist.all_reduce(np.ones(3, np.float32))
    dist.destroy_process_group()


def _lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines on stderr of a job of one rank."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    _job()
    text: str = sys.stderr.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


def test_nothing_is_shown_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, level = [*TOP.handlers], TOP.level
    assert _lines(monkeypatch) == []
    assert (TOP.handlers, TOP.level) == (handlers, level)


def test_records_have_time_rank_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    root = [*logging.getLogger().handlers]
    monkeypatch.setenv("UNICOLL_DEBUG", "INFO")
    lines = _lines(monkeypatch)
    host = re.escape(os.uname().nodename)
    line = re.compile(rf"\[(rank 0 )?{host}\] \d\d:\d\d:\d\d\.\d\d\d INFO unicoll\.\w+: \S.*")
    assert [one for one in lines if not line.fullmatch(one)] == []
    text = "\n".join(lines)
    for part in (
        f"[{os.uname().nodename}] ",
        "unicoll.job: joining",
        "cpu arrays: backend unicoll (gloo)",
        "joined as rank 0 of 1 in ",
        "unicoll.group: created group 'world' (cpu:gloo): rank 0 of 1",
        "destroying group 'world'",
        "left the job",
    ):
        assert part in text
    assert "all_reduce" not in text
    assert logging.getLogger().handlers == root


def test_detail_logs_each_call_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICOLL_DEBUG", "DETAIL")
    lines = [line for line in _lines(monkeypatch) if "DEBUG unicoll.calls: " in line]
    assert len(lines) == 1
    assert "all_reduce(float32[3], SUM) #1 on group 'world', gloo, at " in lines[0]
    assert f"{__file__}:" in lines[0]


def test_the_level_of_an_existing_group_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        for count, level in enumerate(("OFF", "DETAIL", "INFO", "DETAIL", "OFF"), 1):
            dist.set_debug_level(dist.DebugLevel[level])
            for _ in range(2):
                dist.all_reduce(np.ones(count))
            assert dist.iprobe() is None
    finally:
        dist.destroy_process_group()
    text: str = sys.stderr.getvalue()  # type: ignore[attr-defined]
    logged = re.findall(r"DEBUG unicoll\.calls: all_reduce\(float64\[(\d)\]", text)
    assert logged == ["2", "2", "4", "4"]


@pytest.mark.parametrize(
    ("ours", "torchs", "debug", "shown"),
    [
        ("warning", "INFO", "DETAIL", logging.WARNING),
        ("info", "", "OFF", logging.INFO),
        ("", "ERROR", "DETAIL", logging.ERROR),
        ("", "FATAL", "", logging.ERROR),
        ("", "WARNING", "DETAIL", logging.WARNING),
        ("", "1", "INFO", logging.WARNING),
        ("", "INFO", "", logging.INFO),
        ("", "0", "OFF", logging.INFO),
        ("", "info", "INFO", logging.DEBUG),
        ("", "INFO", "DETAIL", logging.DEBUG),
    ],
)
def test_the_log_level_with_the_debug_level(
    ours: str, torchs: str, debug: str, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of torch.distributed's documentation; its two lowest levels are one here."""
    before = [*TOP.handlers]
    monkeypatch.setenv("UNICOLL_LOG_LEVEL", ours)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", torchs)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    dist.set_debug_level_from_env()
    assert [handler.level for handler in TOP.handlers if handler not in before] == [shown]


def test_an_applications_own_handler_gets_rank_and_host(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "unicoll"):
        _job()
    created = next(record for record in caplog.records if "created group" in record.getMessage())
    assert created.name == "unicoll.group"
    assert (created.rank, created.host) == (0, os.uname().nodename)  # type: ignore[attr-defined]
    TOP.warning("of the logger itself")
    assert caplog.records[-1].rank == 0  # type: ignore[attr-defined]


def test_a_level_that_is_set_back_leaves_the_loggers_as_they_were() -> None:
    for wrong in (1, "INFO", None):
        with pytest.raises(DistTypeError, match="set_debug_level: expected a DebugLevel"):
            dist.set_debug_level(wrong)  # type: ignore[arg-type]
    before = TOP.level, [*TOP.handlers]
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    assert (TOP.level, len(TOP.handlers)) == (logging.DEBUG, len(before[1]) + 1)
    dist.set_debug_level(dist.DebugLevel.INFO)
    assert (TOP.level, len(TOP.handlers)) == (logging.INFO, len(before[1]) + 1)
    dist.set_debug_level(dist.DebugLevel.OFF)
    assert (TOP.level, TOP.handlers) == before
