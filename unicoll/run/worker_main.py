"""The first program of each worker process. The launcher starts it by its path; it does not import
unicoll.

    python worker_main.py LAUNCHER_PID print|record script|module|command TARGET [ARGUMENT ...]

It ensures that the process ends with the launcher, and then runs the user's target: a script or a
module runs in this process as plain ``python`` runs it (``sys.argv``, ``sys.path[0]``,
``__main__``, exit codes, ``KeyboardInterrupt``), a command replaces the process. An uncaught
exception is recorded in the file TORCHELASTIC_ERROR_FILE, in torch's format. With ``print`` the
interpreter also prints it as usual; with ``record`` the launcher prints the record, and the worker
prints only exceptions that could not be recorded.
"""

from __future__ import annotations

import sys

# Type checkers know this name; it saves the import of typing in every worker.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType, TracebackType
    from typing import Any

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9

# The pid of the worker; forked children have another one.
_pid = 0
# The exception that the launcher prints in place of this process.
_recorded: BaseException | None = None
# Modules of unicoll.process by their names, or copies that were loaded from their files.
_modules: dict[str, Any] = {}


def main() -> None:
    """Run the target of the command line above."""
    launcher, reporting, kind, target, *arguments = sys.argv[1:]
    if _adds_script_directory():
        # The entry is this file's directory. The user's script must not import modules from there,
        # and neither must this file, whose other imports come later.
        del sys.path[0]
    import os

    # The program may change the variable. Then its record is in another file, and the worker prints
    # the exception itself.
    launcher_reads = os.environ.get("TORCHELASTIC_ERROR_FILE") if reporting == "record" else None
    die_with(int(launcher))
    if kind == "command":
        _exec_command(target, arguments)
    sys.argv = [target, *arguments]
    _enable_faulthandler()
    sys.excepthook = _show
    try:
        if kind == "module":
            _run_module(target)
        else:
            _run_script(target)
    except BaseException as error:
        _hide_own_frames(error)
        _end_with(error, launcher_reads)
        raise


def _adds_script_directory() -> bool:
    return not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def die_with(launcher: int) -> None:
    """Make the kernel kill this process when its parent dies; exit if the launcher is already
    dead."""
    import os

    global _pid
    _pid = os.getpid()
    try:
        import ctypes

        # The setting is kept when a command replaces this process.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        # Not Linux, or no libffi: the guard process still cleans up.
        pass
    # The launcher may have died before the line above. PYTHON_EXEC may be a wrapper that forks, so
    # that the parent is another process anyway: exit only if the launcher is dead.
    if os.getppid() != launcher:
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            os._exit(1)
        except PermissionError:
            pass


def _exec_command(command: str, arguments: list[str]) -> None:
    import os
    import signal

    # Python ignores these, and exec keeps ignored signals ignored.
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command, [command, *arguments])
    except OSError as error:
        sys.stderr.write(f"{command}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _enable_faulthandler() -> None:
    import faulthandler

    try:
        faulthandler.enable(all_threads=True)
    except (AttributeError, OSError, RuntimeError, ValueError):
        # Standard error cannot be used.
        pass


def _run_script(script: str) -> None:
    import os

    if os.path.isdir(script) or script.endswith((".zip", ".pyz")):
        import runpy

        _fresh_main()
        sys.path.insert(0, os.path.abspath(script))
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    if _adds_script_directory():
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    path = os.path.abspath(script)
    module = _fresh_main()
    names = vars(module)
    names["__file__"] = path
    names["__cached__"] = None
    names["__loader__"] = _loader(path)
    exec(_code(path), names)


def _run_module(name: str) -> None:
    import os
    import runpy

    if _adds_script_directory():
        try:
            sys.path.insert(0, os.getcwd())
        except FileNotFoundError:
            # The entry is the same as for `python -m` when the directory has been removed.
            sys.path.insert(0, "")
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _fresh_main() -> ModuleType:
    """Replace ``__main__`` by an empty module for the rest of the process; pickle and
    multiprocessing use it."""
    module = type(sys)("__main__")
    vars(module)["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
        vars(module)["__annotations__"] = {}
    sys.modules["__main__"] = module
    return module


def _loader(path: str) -> object:
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    return (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)


def _code(path: str) -> CodeType:
    import io

    with io.open_code(path) as file:
        if path.endswith(".pyc"):
            import pkgutil

            code: CodeType = pkgutil.read_code(file)
            return code
        source = file.read()
    return compile(source, path, "exec", dont_inherit=True)


def _hide_own_frames(error: BaseException) -> None:
    """Make the traceback start in the user's code, for any ``sys.excepthook``."""
    own_files = {__file__, "<frozen runpy>", getattr(sys.modules.get("runpy"), "__file__", None)}
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own_files:
        traceback = traceback.tb_next
    hook = sys.excepthook

    def show_trimmed(
        kind: type[BaseException], value: BaseException, _full: TracebackType | None
    ) -> None:
        hook(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = show_trimmed
    error.__traceback__ = traceback


def _end_with(error: BaseException, launcher_reads: str | None) -> None:
    """Record an uncaught exception, also for the other ranks.

    If it is recorded in the file ``launcher_reads``, the launcher prints the traceback.
    """
    global _recorded
    import os

    if os.getpid() != _pid:
        # In a forked child the worker continues, and this is not its end.
        return
    # Not in the hook: after an import there Python may not treat the error as a KeyboardInterrupt.
    _excepthook()
    if not isinstance(error, SystemExit):
        path = record(error)
        if path is not None and path == launcher_reads:
            _recorded = error
    # A program that has joined a job has loaded this module. The other ranks get the exception as
    # the reason of this rank's end.
    process_end = sys.modules.get("unicoll.bootstrap.process_end")
    if process_end is not None:
        process_end.set_exit_cause(error)


def _show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """The innermost ``sys.excepthook``: prints exceptions that the launcher does not print."""
    if value is _recorded:
        return
    excepthook = _excepthook()
    (excepthook.show if excepthook is not None else sys.__excepthook__)(kind, value, trace)


def _excepthook() -> Any:
    """:mod:`unicoll.process.excepthook`; None on failure."""
    return _module("excepthook")


def _module(name: str) -> Any:
    """A module of :mod:`unicoll.process`, by its path if the program does not import it; None on
    failure."""
    if (found := _modules.get(name) or sys.modules.get(f"unicoll.process.{name}")) is None:
        try:
            import os
            from importlib.util import module_from_spec, spec_from_file_location

            path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "process", f"{name}.py")
            spec = spec_from_file_location(f"_unicoll_{name}", path)
            assert spec is not None
            assert spec.loader is not None
            found = module_from_spec(spec)
            spec.loader.exec_module(found)
        except Exception:
            return None
    _modules[name] = found
    return found


def record(error: BaseException, final: bool = True) -> str | None:
    """Write the exception to torch's error file, with its exact time and classes.

    ``final`` is False if the program may go on.

    Returns the path of the file, or None if it cannot be written.
    """
    try:
        import os
        import time

        # First: the launcher orders the failures by it, and what follows takes time.
        wall, monotonic = time.time(), time.monotonic_ns()
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not path:
            return None
        import json
        import traceback

        kind = type(error)
        excepthook = _excepthook()
        shown = (
            excepthook.as_text(kind, error, error.__traceback__) if excepthook is not None else ""
        )
        text = "".join(traceback.format_exception(kind, error, error.__traceback__))
        summary = traceback.format_exception_only(kind, error)[-1].strip()
        cause = excepthook.origin(error) if excepthook is not None else error
        content = {
            "message": {
                "message": summary,
                "extraInfo": {"py_callstack": text, "timestamp": str(int(wall))},
            },
            "unicoll": {
                "monotonic_ns": monotonic,
                "classes": [f"{c.__module__}.{c.__qualname__}" for c in type(cause).__mro__],
                "named": _named_ranks(cause),
                "traceback": shown or text,
                "final": final,
            },
        }
        # The launcher may read the file at any time, and must not find a part of it.
        _module("files").write_whole(path, json.dumps(content).encode())
    except Exception:
        return None
    return path


def _named_ranks(error: BaseException) -> list[int]:
    """The ranks that an error of unicoll names as missing or lost, or as the only one whose call
    differs."""
    if type(error).__module__ != "unicoll.errors":
        return []
    missing = [int(rank) for rank in getattr(error, "missing", ())]
    names_rank = type(error).__name__ in ("RankLostError", "CollectiveMismatchError")
    named = getattr(error, "rank", None) if names_rank else None
    return missing or ([] if named is None else [int(named)])


if __name__ == "__main__":
    main()
