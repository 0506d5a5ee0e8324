"""The exceptions for a library's result codes."""

from __future__ import annotations

from unicoll.device_collectives.interface import CollectiveLibrary, ResultCode
from unicoll.errors import DistBackendError, DistError


def error_for(
    code: int,
    library: CollectiveLibrary,
    comm: int,
    what: str,
    group: str | None,
    op: str | None,
    seq: int | None,
    departed: str = "",
) -> DistError:
    """The exception for one of a library's codes.

    Args:
        code: the result code.
        library: the library that returned it; its last error is added.
        comm: the communicator, or 0.
        what: the function, or the call's description.
        group, op, seq: attributes of the exception, as far as they are known.
        departed: a member that has left the job, which may be the cause; "" if none has.
    """
    name = library.name
    unknown = ResultCode(f"code {code}", DistBackendError, "unknown to this version of unicoll")
    entry = library.codes.get(code) or unknown
    detail = _one_line(library.last_error(comm))
    where = f" on group {group!r}" if group is not None and repr(group) not in what else ""
    message = (
        f"{what}{where}: {entry.name} of {name} {library.version_text}: {entry.meaning};"
        f"{f' {departed};' if departed else ''} {f'{name} reports: {detail}' if detail else library.log_hint}"
    )
    return entry.error(message, group=group, op=op, seq=seq)


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
