"""The processes of a job, with ranks that are small programs without JAX."""

import io
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxcoll import _job
from jaxcoll._job import Job, Outcome, Rank, Signals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jaxcoll run is for Linux")

SLEEP = "import time; time.sleep(100)"


def rank(number: int, code: str, **more: object) -> Rank:
    command = [sys.executable, "-uIS", "-c", textwrap.dedent(code)]
    return Rank(number, command, dict(os.environ), **more)


def run(*codes: str, job: type[Job] = Job, **options: Any) -> tuple[Outcome, str, str]:
    """Runs one rank for each program; returns the outcome and what was written."""
    out, err = io.BytesIO(), io.BytesIO()
    ranks = [rank(number, code) for number, code in enumerate(codes)]
    with Signals() as signals:
        outcome = job(ranks, out, err, **({"own_s": 0.2, "end_s": 0.2} | options)).run(signals)
    return outcome, out.getvalue().decode("latin-1"), err.getvalue().decode("latin-1")


def is_gone(pid: int) -> bool:
    """Tells whether a process has ended, though nobody may have asked for its exit status."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def soon(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


# ---- Output --------------------------------------------------------------------------------------


def test_every_line_has_its_rank():
    code = "import sys; print('a\\n\\nb'); print('error', file=sys.stderr)"
    outcome, out, err = run(code, code)
    assert outcome == Outcome(0, None, False)
    assert sorted(out.splitlines()) == ["[0] ", "[0] a", "[0] b", "[1] ", "[1] a", "[1] b"]
    assert sorted(err.splitlines()) == ["[0] error", "[1] error"]


def test_labels_have_one_width():
    out = io.BytesIO()
    with Signals() as signals:
        Job([rank(n, "print('a')") for n in (9, 10)], out, io.BytesIO()).run(signals)
    assert sorted(out.getvalue().splitlines()) == [b"[ 9] a", b"[10] a"]


def test_lines_do_not_mix():
    code = """
    import sys, time
    for _ in range(20):
        for piece in "abcde":
            sys.stdout.write(piece * 3000)
            time.sleep(0.0005)
        sys.stdout.write("\\n")
    """
    _, out, _ = run(code, code, code)
    line = "".join(piece * 3000 for piece in "abcde")
    assert sorted(out.splitlines()) == sorted(f"[{n}] {line}" for n in range(3) for _ in range(20))


@pytest.mark.parametrize(
    ("written", "seen"),
    {
        "partial": (b"a\nb", b"[0] a\n[0] b\n"),
        "nothing": (b"", b""),
        "windows": (b"a\r\nb\r\n", b"[0] a\r\n[0] b\r\n"),
        "progress-bar": (b"\r1%\r2%\rdone\n", b"[0] \r[0] 1%\r[0] 2%\r[0] done\n"),
        "carriage-return-at-the-end": (b"a\r", b"[0] a\n"),
        "no-text": (b"\x00\xff\xfe\n\x80", b"[0] \x00\xff\xfe\n[0] \x80\n"),
    }.values(),
    ids=["partial", "nothing", "windows", "progress-bar", "carriage-return", "no-text"],
)
def test_lines(written: bytes, seen: bytes):
    _, out, _ = run(f"import os; os.write(1, {written!r})")
    assert out.encode("latin-1") == seen


def test_a_line_that_never_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_job, "_LONGEST_LINE", 1000)
    _, out, _ = run("import os; os.write(1, b'x' * 100_000)")
    assert out.count("x") == 100_000
    assert "\n[0] x" in out  # as much as was read at a time is a line


def test_output_is_passed_on_at_once(tmp_path: pathlib.Path):
    """The rank goes on once its line has been seen."""
    seen = tmp_path / "seen"

    class Noting(io.BytesIO):
        def write(self, data: Any) -> int:
            seen.touch()
            return super().write(data)

    code = f"""
    import os, time
    print("first")
    while not os.path.exists({str(seen)!r}):
        time.sleep(0.01)
    print("second")
    """
    out = Noting()
    with Signals() as signals:
        assert Job([rank(0, code)], out, io.BytesIO()).run(signals).code == 0
    assert out.getvalue() == b"[0] first\n[0] second\n"


def test_nobody_reads_any_more():
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb", buffering=0) as out, Signals() as signals:
        ranks = [rank(0, "print('a')\n" + SLEEP), rank(1, SLEEP)]
        outcome = Job(ranks, out, io.BytesIO(), end_s=0.2).run(signals)
    assert outcome == Outcome(128 + signal.SIGPIPE, "ended by SIGPIPE", False)


def test_stdin_is_empty():
    _, out, _ = run("import sys; print(repr(sys.stdin.read()))")
    assert out == "[0] ''\n"


# ---- How it ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "how"),
    [
        ("import sys; sys.exit(3)", 3, "exit code 3"),
        ("1 / 0", 1, "exit code 1"),
        ("import os; os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", 168, "killed by signal 40"),
    ],
)
def test_the_first_failure_ends_the_job(code: str, status: int, how: str):
    outcome, _, _ = run(SLEEP, code, SLEEP)
    said = f"rank 1 failed first: {how}; still there 0.2 s later: rank 0, 2"
    assert outcome == Outcome(status, said, False)


def test_a_rank_may_end_before_the_others():
    outcome, out, _ = run("print('short')", "import time; time.sleep(0.3); print('long')")
    assert outcome.code == 0
    assert out == "[0] short\n[1] long\n"


def test_the_others_may_report_an_error_of_their_own():
    late = "import sys, time; time.sleep(0.3); sys.exit('rank 1 is gone')"
    outcome, _, err = run(late, "import sys; sys.exit(7)", own_s=20)
    assert outcome == Outcome(7, "rank 1 failed first: exit code 7", False)
    assert err == "[0] rank 1 is gone\n"


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("sys.exit('CollectiveError: waited')", "; its error, above, may be about another rank"),
        ("sys.exit('ValueError: bad')", ""),
        ("print('CollectiveError:'); sys.exit(1)", ""),
        ("print('CollectiveError:', file=sys.stderr); os.kill(os.getpid(), 9)", ""),
    ],
)
@pytest.mark.parametrize("has_ended", [True, False])
def test_whose_error_may_be_about_another_rank(code: str, more: str, has_ended: bool):
    fails = f"import os, sys, time; time.sleep(0.5); {code}"
    other = "" if has_ended else "import sys, time; time.sleep(1); sys.exit(1)"
    outcome, _, _ = run(other, fails, mark=b"CollectiveError:", own_s=20)
    how = "killed by SIGKILL" if "kill" in code else "exit code 1"
    before = "; ended before: rank 0" if has_ended and more else ""
    assert outcome.text == f"rank 1 failed first: {how}{more}{before}"


ON_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("SIGTERM")))
print('ready')
time.sleep(100)
"""
IGNORES = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print('ready')
while True:
    time.sleep(1)
"""


def failing_when(file: pathlib.Path) -> tuple[str, str]:
    """Programs: one part that makes a file, and a rank that fails once it is there."""
    wait = f"""
    import os, sys, time
    while not os.path.exists({str(file)!r}):
        time.sleep(0.01)
    sys.exit(4)
    """
    return f"open({str(file)!r}, 'w')", wait


def test_the_others_get_sigterm(tmp_path: pathlib.Path):
    make, fails = failing_when(tmp_path / "ready")
    outcome, out, _ = run(ON_SIGTERM.replace("print('ready')", make), fails, end_s=20)
    assert outcome.code == 4
    assert out == "[0] SIGTERM\n"


def test_one_that_ignores_sigterm_is_killed(tmp_path: pathlib.Path):
    make, fails = failing_when(tmp_path / "ready")
    assert run(IGNORES.replace("print('ready')", make), fails)[0].code == 4


def test_a_killed_rank_goes_before_one_that_failed_because_of_it():
    """Where both are found dead at once."""

    class Late(Job):
        def _look_for_the_dead(self) -> None:
            assert soon(lambda: all(is_gone(p.pid) for p in self._processes.values()))
            super()._look_for_the_dead()

    outcome, _, _ = run("raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)", job=Late)
    assert outcome == Outcome(137, "rank 1 failed first: killed by SIGKILL", False)


def test_one_that_can_not_be_started():
    started: list[int] = []

    class Noting(Job):
        def _start(self, rank: Rank) -> None:
            super()._start(rank)
            started.extend(process.pid for process in self._processes.values())

    missing = Rank(1, ["/no/such/program"], {})
    with Signals() as signals, pytest.raises(FileNotFoundError):
        Noting([rank(0, SLEEP), missing], io.BytesIO(), io.BytesIO()).run(signals)
    assert len(started) == 1
    assert is_gone(started[0])


def test_what_ranks_leave_behind_is_killed():
    leaves = """
    import subprocess
    left = subprocess.Popen(["sleep", "100"])
    print(left.pid)
    """
    outcome, out, _ = run(leaves, leaves)
    assert outcome.code == 0
    pids = [int(line.split()[1]) for line in out.splitlines()]
    assert len(pids) == 2
    assert all(soon(lambda pid=pid: is_gone(pid)) for pid in pids)


def test_something_that_left_the_group_does_not_keep_the_launcher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_job, "_DRAIN_S", 0.2)
    leaves = """
    import subprocess
    print(subprocess.Popen(["sleep", "100"], start_new_session=True).pid)
    """
    outcome, out, _ = run(leaves)
    os.kill(int(out.split()[1]), signal.SIGKILL)
    assert outcome.code == 0


UP = f"import os; os.write(int(os.environ[{_job.PIPES!r}].split()[1]), b'1'); "


@pytest.mark.parametrize(
    ("codes", "may_restart"),
    [
        ((UP + "os._exit(1)", UP), True),
        (("raise SystemExit(1)", UP), False),
        ((UP, UP), False),
    ],
    ids=["all-up", "one-not-up", "no-failure"],
)
def test_restarts_are_for_failures_after_the_start(codes: tuple[str, ...], may_restart: bool):
    assert run(*codes, own_s=20)[0].may_restart is may_restart


# ---- Signals -------------------------------------------------------------------------------------


@pytest.fixture
def _own_handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


class _Ready(io.BytesIO):
    """Sends this process signals, one for each line `ready` of a rank."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = list(numbers)

    def write(self, data: Any) -> int:
        for _ in range(bytes(data).count(b"ready")):
            for number in self.numbers:
                # Two at once would be one to the launcher, as they are to a process.
                os.kill(os.getpid(), number)
                time.sleep(0.1)
        return super().write(data)


@pytest.mark.parametrize(
    ("number", "code", "heard"),
    [
        (signal.SIGINT, 130, "KeyboardInterrupt"),
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGHUP, 129, "SIGTERM"),
    ],
)
def test_signals_to_the_launcher(number: int, code: int, heard: str):
    out, err = _Ready(number), io.BytesIO()
    with Signals() as signals:
        outcome = Job([rank(0, ON_SIGTERM)], out, err, end_s=20).run(signals)
    assert outcome == Outcome(code, f"ended by {signal.Signals(number).name}", False)
    assert heard in (out.getvalue() + err.getvalue()).decode()


def test_ranks_that_ignore_signals_are_killed():
    with Signals() as signals:
        job = Job([rank(0, IGNORES)], _Ready(signal.SIGINT), io.BytesIO(), end_s=0.2)
        assert job.run(signals).code == 130


def test_another_signal_hurries():
    start = time.monotonic()
    with Signals() as signals:
        ready = _Ready(*[signal.SIGINT] * 3)  # SIGINT, SIGTERM, SIGKILL
        outcome = Job([rank(0, IGNORES)], ready, io.BytesIO(), end_s=1000).run(signals)
    assert outcome.code == 130
    assert time.monotonic() - start < 100


def test_who_was_hurried_was_not_there_still():
    """After a failure, which left the others time that a signal then took."""

    class Hurried(Job):
        def _look_for_the_dead(self) -> None:
            before = self._failed
            super()._look_for_the_dead()
            if self._failed is not before:
                os.kill(os.getpid(), signal.SIGTERM)

    outcome, _, _ = run(SLEEP, "raise SystemExit(4)", IGNORES, job=Hurried, own_s=1000)
    assert outcome == Outcome(4, "rank 1 failed first: exit code 4", False)


def test_dumps_are_asked_of_the_ranks():
    """Of those that hear it: it would end one that is starting."""
    hears = """
    import signal, sys, time
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(print("dumps")))
    print("ready")
    time.sleep(100)
    """
    deaf = "import time; print('deaf'); time.sleep(0.5)"
    out = _Ready(signal.SIGUSR2)
    with Signals() as signals:
        outcome = Job([rank(0, hears), rank(1, deaf)], out, io.BytesIO()).run(signals)
    assert outcome == Outcome(0, None, False)
    assert "[0] dumps" in out.getvalue().decode()


@pytest.mark.usefixtures("_own_handlers")
def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    code = "import signal; print(signal.getsignal(signal.SIGHUP).name, 'ready')"
    out = _Ready(signal.SIGHUP)
    with Signals() as signals:
        assert Job([rank(0, code)], out, io.BytesIO()).run(signals).code == 0
    assert out.getvalue() == b"[0] SIG_IGN ready\n"


def test_handlers_are_put_back():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGCHLD)]
    run("pass")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGCHLD)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_no_process_outlives_a_killed_launcher():
    launcher = """
    import os, sys
    from jaxcoll._job import Job, Rank, Signals
    code = "import os, subprocess; print(os.getpid(), subprocess.Popen(['sleep', '100']).pid); "
    code += "exec('while True: pass')"  # which lets no thread of its own run for long
    ranks = [Rank(n, [sys.executable, "-uISc", code], dict(os.environ)) for n in range(2)]
    with Signals() as signals:
        Job(ranks, open(1, "wb", 0), open(2, "wb", 0)).run(signals)
    """
    command = [sys.executable, "-c", textwrap.dedent(launcher)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.kill()
    pids = [int(pid) for line in lines for pid in line.split()[1:]]
    assert len(pids) == 4
    assert all(soon(lambda pid=pid: is_gone(pid)) for pid in pids)


# ---- CPUs ----------------------------------------------------------------------------------------


def test_ranks_run_on_their_cpus():
    mine = os.sched_getaffinity(0)
    cpus = [frozenset([min(mine)]), frozenset([max(mine)]), None]
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    out = io.BytesIO()
    with Signals() as signals:
        Job([rank(n, code, cpus=c) for n, c in enumerate(cpus)], out, io.BytesIO()).run(signals)
    shown = sorted(out.getvalue().decode().splitlines())
    assert shown == [f"[{n}] {sorted(c or mine)}" for n, c in enumerate(cpus)]
    assert os.sched_getaffinity(0) == mine


def test_no_descriptor_is_left():
    run("pass")
    before = len(os.listdir("/proc/self/fd"))
    run("pass", SLEEP.replace("100", "0.1"))
    run("raise SystemExit(1)", SLEEP)
    assert len(os.listdir("/proc/self/fd")) == before
