"""The output of a failed program, and of ``--help``."""

from __future__ import annotations

import re
import signal
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.launcher.launching import BOUND, LaunchFolder, environment, with_late_ranks
from unicoll import errors
from unicoll.__main__ import VERBS
from unicoll.process import excepthook
from unicoll.process.formatting import ranks_text, shortened
from unicoll.run.tracebacks import Tracebacks

FOLDED = "  ... inside unicoll (UNICOLL_DEBUG=DETAIL shows these frames)"
MISSPELT = """
    import unicoll as dist
    dist.init_process_group("nccll")
    """
LOST = """
    import os, sys
    import numpy as np
    import unicoll as dist
    dist.init_process_group()
    if dist.get_rank() == 1:
        {}
    dist.all_reduce(np.ones(4, np.float32))
    """


def parts(stderr: str) -> tuple[list[str], list[str]]:
    """The lines above the summary, and the lines of the summary."""
    above, rule, summary = stderr.partition("\n\n====")
    assert rule, stderr
    assert stderr.endswith("=\n")
    above = with_late_ranks(f"{above}\n")
    return above.splitlines(), summary.splitlines()


# Programs under the launcher.


@pytest.fixture(autouse=True)
def grace(folder: LaunchFolder) -> None:
    """Ranks that start late on a busy machine have the time to fail by themselves."""
    folder.flags = ["--grace", "30"]


def test_a_traceback_of_all_ranks_is_printed_once(folder: LaunchFolder) -> None:
    done = folder.launch("-n", "4", folder.script(MISSPELT))
    assert done.returncode == 1
    above, summary = parts(done.stderr)
    assert above == [
        "ranks 0-3:",
        "Traceback (most recent call last):",
        f'  File "{folder.path}/work.py", line 3, in <module>',
        '    dist.init_process_group("nccll")',
        FOLDED,
        "unicoll.errors.BackendUnavailableError: there is no backend 'nccll'; known are fake, gloo, mpi, nccl, xccl",
    ]
    (others,) = [line for line in summary if "pids" in line]
    assert re.fullmatch(r"  ranks .* \(exitcode 1, pids \d+, \d+, \d+\): the same as rank \d below", others)


@pytest.mark.every(n=2)
@pytest.mark.parametrize("program", [MISSPELT, "import unicoll\nunicoll.barrier()"])
def test_detail_shows_all_frames(folder: LaunchFolder, program: str) -> None:
    assert FOLDED in parts(folder.launch("-n", "2", folder.script(program)).stderr)[0]
    done = folder.launch("-n", "2", folder.script(program), UNICOLL_DEBUG="DETAIL")
    above, _ = parts(done.stderr)
    assert above[0] == "ranks 0, 1:"
    assert sum("unicoll/" in line for line in above) >= 2
    assert FOLDED not in above


def test_a_wrong_shape_is_reported_once(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import numpy as np
        import unicoll as dist
        dist.init_process_group()
        dist.all_reduce(np.ones(2, np.float32))
        dist.all_reduce(np.ones(4 + (dist.get_rank() == 1), np.float32))
        """
    )
    above, _ = parts(folder.launch("-n", "3", script).stderr)
    assert above[0] == "ranks 0-2:"
    assert above[4] == FOLDED
    assert [line.rpartition(" at ")[0] for line in above[6:]] == [
        "  rank 0: all_reduce(float32[4], SUM) #2",
        "  rank 1: all_reduce(float32[5], SUM) #2",
        "  rank 2: all_reduce(float32[4], SUM) #2",
    ]
    assert all(line.endswith(f"{folder.path}/work.py:6") for line in above[6:])


@pytest.mark.every(n=0)
@pytest.mark.parametrize(
    ("how", "status", "cause"),
    [
        ("1 / 0", 1, "ended with ZeroDivisionError: division by zero"),
        ("sys.exit(3)", 3, "has left the job: sys.exit(3)"),
        ("sys.exit('words')", 1, "has left the job: sys.exit('words')"),
        ("os._exit(3)", 3, "died: its process ended without leaving the job (exit code 3)"),
    ],
)
def test_reports_of_a_lost_rank(folder: LaunchFolder, how: str, status: int, cause: str) -> None:
    done = folder.launch("-n", "3", folder.script(LOST.format(how)))
    assert done.returncode == status
    above, _ = parts(done.stderr)
    lost = [line for line in above if "RankLostError" in line]
    assert len(lost) == 1
    assert re.search(r"rank 1 \(host [^ ]+, pid \d+\) " + re.escape(cause) + "$", lost[0]), lost
    assert done.stderr.count("\nTraceback") == (2 if how == "1 / 0" else 1)
    assert with_late_ranks(done.stderr).count("ranks 0, 2") == 2  # once above, once in the summary


TERMINATED = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(600)"


@pytest.mark.parametrize(
    ("how", "timeout", "end"),
    [
        ("sys.exit(0)", 60.0, r"0 \(pid: \d+\)"),
        (TERMINATED, 2.0, r"none before the launcher stopped it \(pid: \d+\)"),
    ],
)
def test_the_root_cause_is_the_rank_that_did_not_fail(
    folder: LaunchFolder,
    how: str,
    timeout: float,
    end: str,
) -> None:
    """Ranks 0 and 2 fail, because rank 1 has not called what they wait in."""
    program = LOST.format(how).replace("np.float32)", f"np.float32), timeout={timeout}")
    done = folder.launch("-n", "3", "--grace=10", folder.script(program))
    assert done.returncode == 1
    _, summary = parts(done.stderr)
    text = "\n".join(summary)
    _, _, root = text.partition("Root Cause")
    assert re.search(r"\n  rank      : 1 \(local_rank: 1\)\n", root), text
    assert re.search(rf"\n  exitcode  : {end}\n", root), text
    assert re.search(
        r"\n  traceback : none; rank [02] names it: unicoll.errors.\w+: all_reduce.* rank 1 ", root
    ), text


def test_the_root_cause_is_the_rank_that_calls_too_often(folder: LaunchFolder) -> None:
    """The other ranks end without an error."""
    script = folder.script(
        """
        import unicoll as dist
        dist.init_process_group()
        dist.barrier()
        if dist.get_rank() == 0:
            dist.barrier()
        """
    )
    _, summary = parts(folder.launch("-n", "3", script).stderr)
    assert any(line.startswith("  rank      : 0 ") for line in summary), summary


def test_the_stacks_of_a_crash_are_printed_once(folder: LaunchFolder) -> None:
    crash = "f = lambda n: n and f(n - 1) or ctypes.string_at(0); f(50)"
    crash = f"import ctypes, faulthandler; faulthandler.enable(); {crash}"
    done = folder.launch("-n", "2", folder.script(LOST.format(crash)))
    assert done.returncode == 128 + signal.SIGSEGV
    assert done.stderr.count("in string_at") == 1


def test_chained_exceptions_are_kept_and_folded(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import unicoll as dist
        try:
            dist.init_process_group("nccll")
        except dist.BackendUnavailableError as error:
            raise ValueError("bad settings") from error
        """
    )
    above, _ = parts(folder.launch("-n", "2", script).stderr)
    assert above[0] == "ranks 0, 1:"
    assert above.count(FOLDED) == 1
    assert "The above exception was the direct cause of the following exception:" in above
    assert above[-1] == "ValueError: bad settings"


def test_a_redirected_worker_has_its_traceback_in_its_log(folder: LaunchFolder) -> None:
    done = folder.launch("-n", "2", "--log-dir=logs", "-r", "2", folder.script(MISSPELT))
    above, _ = parts(done.stderr)
    for rank in (0, 1):
        (log,) = (folder.path / "logs").glob(f"*/attempt_0/{rank}/stderr.log")
        assert log.read_text().splitlines() == above[1:]


USERS_HOOK = """
import sys
import unicoll as dist
sys.excepthook = lambda kind, value, trace: print("hook:", kind.__name__, file=sys.stderr)
dist.init_process_group()
raise ValueError("of all")
"""


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("source", "status", "printed", "times"),
    [
        (
            "import os; os.environ['TORCHELASTIC_ERROR_FILE'] = '/dev/full/error'; 1 / 0",
            1,
            "ZeroDivisionError: division by zero",
            0,
        ),
        (
            "import os; os.environ['TORCHELASTIC_ERROR_FILE'] = 'elsewhere.json'; 1 / 0",
            1,
            "ZeroDivisionError: division by zero",
            0,
        ),
        (
            "import os\nif os.fork() == 0: raise ValueError('of a child')\nos.wait()",
            0,
            "ValueError: of a child",
            0,
        ),
        (USERS_HOOK, 1, "hook: ValueError", 1),
    ],
    ids=["no error file", "another error file", "forked child", "hook of the user"],
)
def test_what_the_launcher_does_not_fold_is_printed_by_each_rank(
    folder: LaunchFolder, source: str, status: int, printed: str, times: int
) -> None:
    """Exceptions without a record, and those of a hook, whose record is folded beside."""
    done = folder.launch("-n", "2", folder.script(source))
    assert done.returncode == status
    for rank in (0, 1):
        assert done.stderr.count(f"[default{rank}]:{printed}\n") == 1
    assert done.stderr.count("\nValueError: of all\n") == times


def test_a_single_worker_prints_its_traceback(folder: LaunchFolder) -> None:
    done = folder.launch(folder.script(MISSPELT))
    above, _ = parts(done.stderr)
    assert above[0].startswith("Traceback")
    assert FOLDED in above
    assert done.stderr.count("Traceback") == 1


def test_a_traceback_does_not_wait_for_running_ranks(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, time
        while os.environ["RANK"] == "1" and not os.path.exists("seen"):
            time.sleep(0.02)
        raise ValueError(f"of rank {os.environ['RANK']}")
        """
    )
    launcher = folder.start("-n", "2", "--grace=60", script)
    assert launcher.stderr is not None
    first = [launcher.stderr.readline().decode() for _ in range(5)]
    assert first[0] == "rank 0:\n"
    assert first[-1] == "ValueError: of rank 0\n"
    (folder.path / "seen").touch()
    rest = launcher.stderr.read().decode()
    assert launcher.wait(BOUND) == 1
    assert rest.startswith("rank 1: the same as rank 0\n\n====")


def test_an_interrupt_is_printed_once(folder: LaunchFolder) -> None:
    script = folder.script(
        """
        import os, pathlib, time
        pathlib.Path(f"pid.{os.environ['RANK']}").write_text(f"{os.getpid()}\\n")
        time.sleep(600)
        """
    )
    launcher = folder.start("-n", "3", script)
    folder.pids(3)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=BOUND)
    assert launcher.returncode == 130
    assert err.decode().count("KeyboardInterrupt\n") == 1
    assert "ranks 0-2:\nTraceback" in with_late_ranks(err.decode())


# Without the launcher.


@pytest.mark.every(n=2)
@pytest.mark.parametrize("setting", ["", "UNICOLL_DEBUG=DETAIL", "TORCH_SHOW_CPP_STACKTRACES=1"])
def test_a_plain_process_folds_frames(folder: LaunchFolder, setting: str) -> None:
    script = folder.script("import unicoll\nunicoll.init_process_group('nccll')\n")
    done = folder.python(script, env=environment(**dict([setting.split("=")] if setting else [])))
    assert done.returncode == 1
    assert (FOLDED in done.stderr) == (not setting)
    assert ("backend_choice.py" in done.stderr) == bool(setting)
    assert done.stderr.rstrip().splitlines()[-1].startswith("unicoll.errors.BackendUnavailableError: ")


IN_THREAD = """
import sys, threading
import unicoll as dist
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
if "plain" in sys.argv:
    threading.excepthook = threading.__excepthook__
def work():
    {}
threading.Thread(target=work, name="loader").start()
"""
WAITS = "dist.HashStore().wait(['never'], 0.1)"


@pytest.mark.parametrize("setting", ["", "UNICOLL_DEBUG=DETAIL"])
def test_an_error_in_a_thread_is_folded(folder: LaunchFolder, setting: str) -> None:
    script = folder.script(IN_THREAD.format(WAITS))
    done = folder.python(script, env=environment(**dict([setting.split("=")] if setting else [])))
    _, header, text = done.stderr.partition(
        "Exception in thread loader:\nTraceback (most recent call last):\n"
    )
    assert header, done.stderr
    assert f"\n    {WAITS}\n" in text
    assert text.count(FOLDED) == (not setting)
    assert ("/unicoll/" in text) == bool(setting)
    assert "\nunicoll.errors.StoreTimeoutError: wait: " in text


@pytest.mark.every(n=3)
@pytest.mark.parametrize(
    ("statement", "printed"),
    [
        ("1 / 0", True),
        ("sys.exit(3)", False),
        ("threading.current_thread().name = ''; 1 / 0", True),
        (f"sys.stderr = None; {WAITS}", True),
        (f"del threading.current_thread()._stderr; sys.stderr = None; {WAITS}", False),
    ],
)
def test_other_errors_in_threads_are_printed_as_by_python(
    folder: LaunchFolder, statement: str, printed: bool
) -> None:
    script = folder.script(IN_THREAD.format(statement))
    done, plain = folder.python(script), folder.python(script, "plain")
    assert (done.stderr, done.returncode) == (plain.stderr, plain.returncode)
    assert ("Exception in thread" in done.stderr) == printed


def test_the_hook_of_threads_replaces_only_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def users(arguments: threading.ExceptHookArgs) -> None:
        pass

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for first, expected in [
        (threading.__excepthook__, excepthook.show_in_thread),
        (excepthook.show_in_thread, excepthook.show_in_thread),
        (users, users),
    ]:
        monkeypatch.setattr(threading, "excepthook", first)
        excepthook.install()
        assert threading.excepthook is expected


def test_the_level_counts_before_there_is_a_group(folder: LaunchFolder) -> None:
    script = folder.script("import unicoll\nunicoll.FileStore('/missing/store')")
    done = folder.launch("-n", "1", script, UNICOLL_DEBUG="DETAIL")
    assert "in open_log" in done.stderr
    assert FOLDED not in done.stderr


def raised_inside(statement: str) -> str:
    """The traceback of an exception that is raised in a file of unicoll and called by a user's file."""
    file = str(Path(excepthook.__file__).with_name("group.py"))
    names = {"errors": errors}
    exec(compile(f"def inner(): {statement}\ndef outer(): inner()", file, "exec"), names)
    try:
        names["outer"]()  # type: ignore[operator]
    except BaseException as error:
        return excepthook.as_text(type(error), error, error.__traceback__)
    raise AssertionError


def test_the_frame_of_an_unexpected_error_is_kept() -> None:
    assert raised_inside("raise errors.DistError('said')").count("group.py") == 0
    assert raised_inside("raise KeyboardInterrupt").count("group.py") == 0
    text = raised_inside("raise KeyError('a bug')")
    assert text.count("group.py") == 1
    assert "in inner" in text
    assert FOLDED in text


# Which tracebacks are the same.


def test_ranks_as_text() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 0]) == "ranks 0, 1"
    assert ranks_text([7, 0, 1, 2, 5]) == "ranks 0-2, 5, 7"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("words that fit", "words that fit"),
        ("of the very limit: 20", "of the very ..."),
        ("of exactly 20 places", "of exactly 20 places"),
        ("up to sixteen (a) and", "up to sixteen ..."),
        ("it may end here (one two) three", "it may end here ..."),
        ("it may end [0] (a b) c", "it may end [0] ..."),
        ("it may end f(x, y) then", "it may end ..."),
        ("too early (then it is in the bracket)", "too early (then ..."),
        ("out (then inner (one two))", "out (then inner ..."),
        ("a /very/long/path/of/one/word", "a /very/long/path..."),
        ("one-word-without-an-end", "one-word-without-..."),
        ("  two   spaces       and more", "  two   spaces ..."),
    ],
)
def test_a_text_is_shortened_after_a_word_and_before_a_bracket(text: str, expected: str) -> None:
    assert shortened(text, 20) == expected


def test_pids_and_ranks_do_not_make_tracebacks_distinct() -> None:
    found = Tracebacks()
    for rank in range(3):
        found.add(rank, f"E: pid 10{rank} at #{rank + 1}: <object at 0x7f{rank}>\n")
        found.add(10 + rank, f"E: rank {10 + rank} has no data\n")
    lines = found.take().splitlines()
    assert lines[::2] == ["ranks 0-2 (this is rank 0's):", "ranks 10-12 (this is rank 10's):"]
    assert found.take() == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("rank 0: float32[4]", "rank 0: float32[5]"),
        ('  File "x.py", line 1', '  File "x.py", line 2'),
        ("rank 1 died", "rank 2 died"),
    ],
)
def test_different_tracebacks_are_printed_with_their_ranks(one: str, other: str) -> None:
    found = Tracebacks()
    found.add(8, one)
    found.add(9, other)
    found.add(7, one)
    assert found.take(last=8) == f"rank 9:\n{other}\nranks 7, 8:\n{one}\n"


# --help.


@pytest.mark.parametrize("module", ["unicoll.run", "unicoll.launch", "unicoll.bench"])
def test_help_begins_with_valid_examples(
    module: str, folder: LaunchFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unicoll.bench.args import parse as bench
    from unicoll.run.args import parse as run

    done = folder.python("-m", module, "--help", env=environment(COLUMNS="110"))
    paragraphs = done.stdout.split("\n\n")
    assert paragraphs[0].startswith(f"usage: python -m {module} ")
    assert len(paragraphs[0].splitlines()) == 1
    assert paragraphs[2].startswith("examples:\n")
    assert "one value" in paragraphs[-2].splitlines()[0]
    examples = re.findall(rf"python -m {module} (.*?)(?:   .*)?$", paragraphs[2], re.MULTILINE)
    assert len(examples) >= 3
    monkeypatch.setattr("unicoll.run.args._check_target", lambda *_: None)
    for example in examples:
        options = (bench if module == "unicoll.bench" else run)(example.split())
        assert options is not None


def test_the_command_names_its_verbs(folder: LaunchFolder) -> None:
    for words, status, stream in (([], 2, "stderr"), (["--help"], 0, "stdout"), (["nope"], 2, "stderr")):
        done = folder.python("-m", "unicoll", *words)
        assert (done.returncode, *(verb in getattr(done, stream) for verb in VERBS)) == (
            status,
            *(True,) * len(VERBS),
        )
        assert ("there is no verb 'nope'" in done.stderr) is (words == ["nope"])
    assert folder.python("-m", "unicoll", "--version").stdout == f"unicoll {version('unicoll')}\n"
    assert folder.python("-m", "unicoll", "trace").stderr.startswith("usage: python -m unicoll.trace ")


def test_the_console_script_has_its_own_name(folder: LaunchFolder) -> None:
    folder.script(
        "import sys; sys.argv[0] = '/somewhere/unirun'; from unicoll.run import main; main()", "start.py"
    )
    assert folder.python("start.py", "--help").stdout.startswith("usage: unirun ")
    assert folder.python("start.py").stderr.startswith("unirun: error")
