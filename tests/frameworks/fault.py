"""A fault of rank 1 in its fourth step, for programs of docs/frameworks.md, which import this module first.

The test copies the file into a folder ``site-packages``: its frames are those of an installed package, not the user's.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

STEP = 4
TIMEOUT_S = 8
MARK = Path("asleep")
"""Exists when rank 1 sleeps."""
_FAULT = os.environ["FAULT"]
_is_culprit = os.environ["RANK"] == "1"
_steps = itertools.count(1)


def _after_step(*_: Any) -> None:
    if next(_steps) != STEP:
        return
    if _FAULT == "raise":
        raise ValueError("the data of rank 1 are wrong")
    if _FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    MARK.touch()
    time.sleep(4 * TIMEOUT_S)


def _fewer_batches(self: DataLoader[Any], iterate: Any = DataLoader.__iter__) -> Iterator[Any]:
    return itertools.islice(iterate(self), STEP - 1)


def _with_timeout(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: make(*args, **options | {"timeout": timedelta(seconds=TIMEOUT_S)})


dist.init_process_group = _with_timeout(dist.init_process_group)
dist.new_group = _with_timeout(dist.new_group)
if _is_culprit and _FAULT == "uneven":
    DataLoader.__iter__ = _fewer_batches  # type: ignore[method-assign]
elif _is_culprit:
    register_optimizer_step_post_hook(_after_step)
