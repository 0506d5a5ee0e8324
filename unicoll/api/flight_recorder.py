"""The flight recorder's dump on request."""

from __future__ import annotations

import os

from unicoll.errors import DistArgumentError, NotInitializedError


def dump_flight_recorder(directory: str | os.PathLike[str] | None = None) -> str:
    """Write this rank's last calls, with the stacks of its threads, for ``python -m unicoll.trace``; returns the path.

    The file is ``rank_R.json``; ``nccl_trace_rank_R`` beside it has the calls in the format of PyTorch's flight
    recorder. Files of an earlier dump are replaced. Every rank writes its own files, so all ranks call this function,
    in any order, with a directory that they share. ``UNICOLL_FLIGHT_RECORDER`` is the number of calls that are kept.

    Args:
        directory: made if it does not exist; it has to belong to this user or root, and not every user may write to
            it unless it has the sticky bit, as /tmp. None is the directory that ``UNICOLL_TRACE_DIR`` had in
            init_process_group, or if it was not set a directory of the job's own among this host's temporary files.

    Raises:
        NotInitializedError: before init_process_group.
        DistArgumentError: ``directory`` cannot be written; the message has the reason.
    """
    from unicoll.bootstrap import flight_dump

    dumper = flight_dump.current()
    if dumper is None:
        raise NotInitializedError("dump_flight_recorder: there is no job: call init_process_group first")
    try:
        return dumper.dump(directory, "dump_flight_recorder() was called")
    except OSError as error:
        raise DistArgumentError(f"dump_flight_recorder: directory: {error}") from error
