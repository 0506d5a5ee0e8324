"""The nodes of a launch as its attempts see them: the ranks of this one, and how an attempt ends on
all of them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from unicoll.run.args import LaunchOptions
from unicoll.run.job import LocalJob

if TYPE_CHECKING:
    from unicoll.net.stores import Store


class Cause(NamedTuple):
    """Why an attempt has failed, for all nodes.

    Attributes:
        summary: one line.
        exit_code: the launcher's.
        entry: lines of the report.
        consequence: True if it only reports the failure of another rank.
        time: on the clock of ``time.monotonic``; where causes of several nodes are compared, on
            that of node 0.
    """

    summary: str
    exit_code: int
    entry: Sequence[str]
    consequence: bool
    time: float


class NodeEnd(NamedTuple):
    """How an attempt has ended on a node: why it has failed, and whether its workers can be started
    again."""

    cause: Cause | None
    may_restart: bool


class FailureElsewhere(NamedTuple):
    """Why the attempt has failed on another node.

    Attributes:
        text: one line.
        at_once: True if the workers of this node may not notice it: the launcher there is lost, or
            has stopped its own.
    """

    text: str
    at_once: bool


class Placement(NamedTuple):
    """The workers of this node in one attempt.

    Attributes:
        attempt: number of earlier restarts.
        node_rank: this node's.
        first_rank: rank of local rank 0.
        world_size: number of workers of all nodes.
        environment: the workers' variables that are equal on all nodes.
        store: the workers' store.
        first_cause: why the first attempt has failed, if another launcher knows it.
    """

    attempt: int
    node_rank: int
    first_rank: int
    world_size: int
    environment: Mapping[str, str]
    store: Store
    first_cause: Cause | None = None


class Nodes(ABC):
    """The nodes of a launch, as its attempts see them."""

    @abstractmethod
    def start(self, attempt: int, first_cause: Cause | None) -> Placement:
        """Begin an attempt, once all nodes do; DistError or OSError if it cannot be begun.

        The placement may have a larger number of the attempt, and the cause of an earlier failure,
        if this launcher was started later than the others.

        Args:
            first_cause: why the first attempt has failed.
        """

    def announce(self, what: str, final: bool = False) -> None:  # noqa: B027 - one node needs none
        """Tell the other nodes that the attempt has failed on this one; no restart comes after a
        ``final`` failure."""

    def failure(self) -> FailureElsewhere | None:
        """Why the attempt has failed on another node; None if it has not."""
        return None

    def telling(self) -> AbstractContextManager[None]:
        """A block that uses the workers' store; the launcher says what it waits for if that does
        not answer."""
        return nullcontext()

    def succeeded(self) -> bool:
        """True if all nodes' workers have succeeded; to call when this node's have."""
        return True

    def agree(self, end: NodeEnd) -> NodeEnd:
        """End the attempt; the end that all nodes agree on."""
        return end

    def close(self) -> None:  # noqa: B027 - one node needs none
        """Leave the other nodes; idempotent."""


class OneNode(Nodes):
    """A job whose only node is this one."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._job: LocalJob | None = None

    def start(self, attempt: int, first_cause: Cause | None) -> Placement:
        self._job = job = LocalJob(os.environ, self._options.master_port)
        return Placement(attempt, 0, 0, self._options.nproc, job.environment, job.store)

    def agree(self, end: NodeEnd) -> NodeEnd:
        self.close()
        return end

    def close(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()
