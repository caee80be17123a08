"""Of jobs that don't go on: who is to blame, where, and what the doctor says. Real faults."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checks import native_missing
from processes.run_job import JOBS, ROOT, job_environment, run_job

from jaxcoll import cli
from jaxcoll.diagnosis import black_box, doctor, top

pytestmark = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)
full = pytest.mark.full

EXAMPLE = ROOT / "examples" / "debug_a_hang.py"
LIMIT_S, GRACE_S, START_S = 3.0, 5.0, 60.0
END_S = 10.0  # `jaxcoll run` has patience with a rank that does not end, such as a stopped one
LINES = {  # of the example: what the ranks that wait are said to wait in
    name: next(i for i, line in enumerate(EXAMPLE.read_text().splitlines(), 1) if found in line)
    for name, found in {
        "average": 'jaxcoll.all_reduce(grads, "data"',
        "reshaped_average": "jaxcoll.all_reduce(grads[::2]",
        "evaluate": "jaxcoll.all_reduce(loss.sum()",
    }.items()
}


@dataclasses.dataclass
class Run:
    """Of the example: each line that it said, and when, its exit status, and when it ended."""

    lines: list[tuple[float, str]]
    code: int
    ended: float

    @property
    def said(self) -> str:
        return "".join(line for _, line in self.lines)

    def moments(self, what: str) -> list[float]:
        return [at for at, line in self.lines if what in line]


def debug(fault: str, processes: int, folder: Path) -> Run:
    """Runs the example with a fault."""
    launcher = ["-m", "jaxcoll", "run", "-n", str(processes)] if processes > 1 else []
    with subprocess.Popen(
        [sys.executable, *launcher, EXAMPLE.relative_to(ROOT), "--fault", fault],
        env=job_environment() | {"JAXCOLL_DUMP_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    ) as process:
        guard = threading.Timer(START_S + LIMIT_S + GRACE_S + END_S, process.kill)
        guard.start()
        try:
            assert process.stdout is not None
            lines = [(time.monotonic(), line) for line in process.stdout]
            return Run(lines, process.wait(), time.monotonic())
        finally:
            guard.cancel()


def place(name: str) -> str:
    return rf"debug_a_hang\.py:{LINES[name]} \({name}\)"


# Fault, processes, the doctor's finding, what it says, what the error says.
FAULTS = [
    pytest.param(
        *("stops", 4, doctor.BEHIND, r"rank 2 \(process 2.*behind[^%]*It is stopped", "average"),
        marks=pytest.mark.long,
    ),
    pytest.param(*("dies", 4, doctor.GONE, r"process 2 is gone", "average"), marks=full),
    pytest.param(
        *("skips", 4, doctor.MISMATCH, r"rank 2:\n.*evaluate\), execution 11", "average"),
        marks=full,
    ),
    ("shape", 4, doctor.MISMATCH, r"rank 2:\n.*reshaped_average\), execution 1\n", "average"),
    ("stops", 1, doctor.BEHIND, r"rank 2 \(process 0, device 2\) is behind", "average"),
    pytest.param(*("skips", 1, doctor.MISMATCH, r"rank 2:\n.*evaluate\)", "average"), marks=full),
    pytest.param(
        *("shape", 1, doctor.MISMATCH, r"rank 2:\n.*reshaped_average\)", "average"), marks=full
    ),
]


@pytest.mark.parametrize(
    ("fault", "processes", "status", "found", "waits"), FAULTS, ids=lambda v: str(v)[:10]
)
def test_a_fault_is_diagnosed(fault, processes, status, found, waits, tmp_path):
    run = debug(fault, processes, tmp_path)
    said = run.said
    assert run.code not in (0, -signal.SIGKILL), said
    (began,) = run.moments(f"step 10: rank 2 {fault}")
    raised = run.moments("CollectiveError: ")
    assert raised, said
    assert max(raised) - began < LIMIT_S + GRACE_S, said
    assert run.ended - began < LIMIT_S + GRACE_S + END_S, said
    assert re.search(place(waits), said), said
    # The right rank, in the error itself.
    assert re.search(r" for rank 2 \(|(process|device) 2 waits in ", said), said
    if fault == "shape":
        assert re.search(place("reshaped_average"), said), said
    text, got = doctor.report([tmp_path])
    assert got == status, text
    assert re.search(found, text), text
    assert re.search(place(waits), text), text
    if fault == "dies":  # what a dead rank did last
        assert re.search(rf"rank 2: last call, ended .*{place('evaluate')}", said), said
        assert re.search(rf"Its last call ended .*{place('evaluate')}", text), text
        seen = r"Python stack, \d+\.\d s ago(, before its last call ended)?:\n"
        stack = seen + r'.*File .*debug_a_hang\.py", line \d+, in <module>'
        assert re.search(stack, said), said
        assert re.search(r'File .*debug_a_hang\.py", line \d+, in main', text), text
    if processes > 1:  # the right rank's error on all the others, in time
        assert f'more: jaxcoll doctor "{tmp_path}"' in said
        assert len(raised) >= processes - 1
    if (fault, processes) == ("stops", 4):
        for page in PAGES:
            assert not unlike(
                page.read_text(), said.splitlines() + text.splitlines(), "rank 2", count=2
            )


# What documents show of a run, and what is another each time; "…" stands for the rest of a line.
PAGES = [ROOT / "README.md", ROOT / "docs/how-to/find-a-missing-rank.md"]
VARIES = (
    r'\d+\.\d s|pid \d+|"/[^"]*"|line \d+, in main|\d+ of \d+ calls|\d+ calls|on \S+$|'
    r"\d+\.\d ms|\d+%|\d+ times|"
    r"(?:in Python|waiting for results)(?: for \d+\.\d s)?"
)


# Heads of a stack, which may be of before a stopped rank's last call ended or of after that.
SEEN = re.compile(
    r"(in Python[^;]*; )?Python stack, \d+\.\d s ago(, before its last call ended)?:|"
    r"It was in Python for .* when it was seen last, .*, at|Its Python stack, .* had not ended:"
)


def unlike(page: str, said: list[str], about: str, *, count: int) -> list[str]:
    """Returns the lines that are not what was said, of a page's blocks on the example.

    Of the `count` ones of them that are about something.
    """
    blocks = re.findall(r"^```(?:text|console)\n(.*?)^```", page, re.M | re.S)
    shown = [block for block in blocks if EXAMPLE.name in block and about in block]
    assert len(shown) == count
    lines = [line for line in "".join(shown).splitlines() if line.strip("…") and line[0] != "$"]
    assert lines
    lines, said = ([SEEN.sub("SEEN", line) for line in part] for part in (lines, said))
    return [line for line in lines if not any(map(re.compile(like(line)).fullmatch, said))]


def like(line: str) -> str:
    """Returns the pattern of a line that is shown."""
    parts = re.split(f"({VARIES}|…)", line)
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [".*" if part == "…" else f"(?:{VARIES})" for part in parts[1::2]]
    return "".join(parts)


def test_one_process_cannot_show_how_a_process_dies(tmp_path):
    run = debug("dies", 1, tmp_path)
    assert run.code == 2
    assert "error: --fault dies: expected several processes" in run.said


@pytest.mark.parametrize("processes", [1, pytest.param(4, marks=full)])
def test_a_straggler_is_named(processes, tmp_path):
    run = debug("slow", processes, tmp_path)
    assert run.code == 0, run.said
    text, status = doctor.report([tmp_path])
    assert status == doctor.SLOW, text
    straggler = "process 2, device 0" if processes > 1 else "process 0, device 2"
    assert f"{straggler} is a straggler" in text
    # The others wait where it comes late: what it does before is what is slow.
    at = text.index("They waited longest, in all, in\n")
    assert re.search(place("average"), text[at:].splitlines()[1]), text
    if processes > 1:
        page = ROOT / "docs/how-to/find-a-missing-rank.md"
        assert not unlike(page.read_text(), text.splitlines(), "straggler", count=1)


def test_without_a_fault_nothing_is_wrong(tmp_path):
    run = debug("none", 1, tmp_path)
    assert run.code == 0, run.said
    assert "30 steps, loss 32.0" in run.said
    assert not list(tmp_path.iterdir())


@full
def test_the_end_of_a_chain_is_named():
    """Not only who is waited for, who may be waiting as well."""
    lines = run_job("chained.py", processes=4)
    (said,) = lines[0]
    assert said.startswith('missing [1]: \'all_reduce over "columns"')
    assert "rank 1: waits, since" in said
    assert re.search(
        r"process 3, pid \d+, stopped, for which process 1 waits: last call, ended .* "
        r'all_reduce over "columns" .*chained\.py',
        said,
    ), said


@full
def test_who_compiles_or_pauses_is_waited_for():
    for rank, said in run_job("excused.py", processes=2, devices=2).items():
        compiles, pauses, within, reports, too_long, compiles_too_long = said
        assert re.fullmatch(r"compiles: came after \d+\.\d s", compiles)
        assert re.fullmatch(r"pauses: came after \d+\.\d s", pauses)
        assert re.fullmatch(r"pauses, waited for by one that is: came after \d+\.\d s", within)
        assert reports.strip() == "reports:"  # of `watch`, which waits as the engine does
        assert too_long.startswith("pauses too long: missing: rank 2")
        assert compiles_too_long.startswith("compiles too long: missing: rank 2")
        if rank == 0:
            assert "compiling" in compiles_too_long


# How a script goes on, and its exit code.
ENDS = {
    **{"dropped": 1, "never": 1, "early": 1, "status": 3},
    **{"caught": 0, "plainly": 0, "afterwards": 0, "reset": 0},
}


@pytest.mark.parametrize(
    ("how", "devices"),
    [
        ("dropped", 1),
        # In CI each with one number of devices.
        *(
            pytest.param(how, devices, marks=full if devices == 1 + i % 2 else pytest.mark.long)
            for i, how in enumerate(ENDS)
            for devices in (1, 2)
            if (how, devices) != ("dropped", 1)
        ),
    ],
)
def test_failed_work_that_nobody_awaits(how, devices):
    said = run_job("unawaited.py", how, processes=2, devices=devices, expect=ENDS[how])
    assert "started" in said[0]  # and the script came to its end


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(how, marks=full) for how in ("second", "thread")),
        *(pytest.param(how, marks=pytest.mark.long) for how in ("first", "xla")),
    ],
)
def test_who_caught_an_error_where_the_program_was_started_knows_of_it(how):
    said = run_job("inline.py", how, processes=2, accelerate=how == "xla", expect=0)
    assert said[0] == ["caught"]


def test_an_error_where_the_program_was_started_is_said_once(tmp_path):
    command = [sys.executable, "-P", "-m", "jaxcoll", "run", "-n", "2"]
    done = subprocess.run(
        [*command, str(JOBS / "inline.py"), "raised"],
        env={**job_environment(), "JAXCOLL_DUMP_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    for rank in range(2):
        said = [line for line in done.stderr.splitlines() if line.startswith(f"[{rank}] ")]
        assert sum("all_reduce over" in line for line in said) == 1, done.stderr
        assert any("ValueError: INTERNAL: jaxcoll.CollectiveError" in line for line in said)
    dumps = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
    phases = [dump["phase"] for dump in dumps]
    assert "in a call" in phases  # of both, but on a machine where nobody looks for a second
    assert {*phases} <= {"in a call", "in Python"}


IN_ONE_PROCESS = """
import jaxcoll, sys, time
jaxcoll.config.timeout_s = 1.0
jaxcoll.simulate_cpu_devices(3)
import jax, numpy as np
mesh = jax.make_mesh((3,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def load(rank, x):
    if x < 0: raise ValueError("no such file")
    if x > 10: time.sleep(2)
    return x
def f(x):
    here = jax.ShapeDtypeStruct(x.shape, x.dtype)
    x = jax.pure_callback(load, here, jax.lax.axis_index("x"), x)
    return jaxcoll.all_reduce(x, "x", backend="native")
g = jax.jit(jax.shard_map(
    f, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False))
print(g(np.float32([1, 2, 3])))
if len(sys.argv) > 1:
    held = g(np.float32([1, 2, float(sys.argv[1])]))
print("end", flush=True)
"""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        pytest.param(None, None, marks=full),
        ("30", r"waited 1\.\d s .* for rank 2 .*\n(.*\n)*.*, in load"),
        ("-3", r"for rank 2 .*; a callback of this process has raised ValueError: no such file"),
    ],
)
def test_work_that_nobody_awaits_in_one_process(value, said):
    """At the very end. And where nothing fails, nothing is said."""
    command = [sys.executable, "-c", IN_ONE_PROCESS, *([value] if value else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[6. 6. 6.]\nend\n", done.stderr
    assert done.returncode == (0 if said is None else 1)
    if said is None:
        assert done.stderr == ""
    else:
        (_, _, text) = done.stderr.partition("jaxcoll: work that was not awaited has failed: ")
        assert re.search(said, text), done.stderr
        assert "jaxcoll/_steps.py" not in text
        assert "jaxcoll/diagnosis" not in text


@full
def test_processes_that_are_late_for_one_another_in_different_groups():
    """Each waits in a call for the other's callback, for longer than a mismatch would take."""
    lines = run_job("crossing.py", 13, processes=2, devices=2)
    assert all("the sums are right" in said for said in lines.values())


@full
def test_a_failure_like_one_that_is_known():
    script = (
        "import jaxcoll, time\n"
        "jaxcoll.simulate_cpu_devices(2)\n"
        "import jax, numpy as np\n"
        "mesh = jax.make_mesh((2,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "def f(x):\n"
        "    return jax.lax.cond(x.sum() > 0, lambda x: jaxcoll.all_reduce(x, 'x'),\n"
        "        lambda x: jaxcoll.all_reduce(x, 'x', 'max'), x)\n"
        "g = jax.jit(jax.shard_map(\n"
        "    f, mesh=mesh, in_specs=jax.P('x'), out_specs=jax.P('x'), check_vma=False))\n"
        "x = np.array([1.0, -1.0], np.float32)\n"
        "try:\n"
        "    jax.block_until_ready(g(x))\n"
        "except Exception:\n"
        "    print('caught')\n"
        "g(x)\n"
        "time.sleep(5)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "caught\n", done.stderr
    assert done.returncode == 1, done.stderr


@full
def test_an_error_that_follows_from_a_callback_of_the_users():
    """Who got that one knows why the others waited in vain; what else fails is news."""
    script = (
        "import jaxcoll, sys, time\n"
        "jaxcoll.config.timeout_s = 0.5\n"
        "jaxcoll.simulate_cpu_devices(3)\n"
        "import jax, numpy as np\n"
        "mesh = jax.make_mesh((3,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "def load(rank, x):\n"
        "    if x < 0: raise ValueError('no such file')\n"
        "    if x > 10: time.sleep(1)\n"
        "    return x\n"
        "def f(x):\n"
        "    here = jax.ShapeDtypeStruct(x.shape, x.dtype)\n"
        "    x = jax.pure_callback(load, here, jax.lax.axis_index('x'), x)\n"
        "    return jaxcoll.all_reduce(x, 'x')\n"
        "g = jax.jit(jax.shard_map(\n"
        "    f, mesh=mesh, in_specs=jax.P('x'), out_specs=jax.P('x'), check_vma=False))\n"
        "if 'before' in sys.argv:\n"
        "    g(np.float32([1, 2, 30]))\n"
        "    time.sleep(2)\n"
        "try:\n"
        "    jax.block_until_ready(g(np.float32([1, 2, -3])))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, 'no such file' in str(error))\n"
        "print(g(np.float32([1, 2, 3])))\n"
        "if 'after' in sys.argv:\n"
        "    g(np.float32([1, 2, 30]))\n"
        "    time.sleep(2)\n"  # no thread of Python's is to come back when Python has ended
    )
    for also, code in (("nothing", 0), ("before", 1), ("after", 1)):
        done = subprocess.run(
            [sys.executable, "-c", script, also], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "JaxRuntimeError True\n[6. 6. 6.]\n", done.stderr
        assert done.returncode == code, done.stderr
        assert ("work that was not awaited has failed" in done.stderr) == bool(code)


@full
def test_who_ends_while_its_last_step_computes_is_waited_for():
    """Beyond the five seconds in which a process that ends is expected to come to its calls."""
    lines = run_job("leaving.py", 14, processes=2)
    assert lines[1] == ["the end"]
    waited, end = lines[0]
    seconds = re.fullmatch(r"after (\d+\.\d) s", waited)
    assert seconds is not None
    assert float(seconds[1]) > 5.5
    assert end == "the end"


@pytest.mark.parametrize("how", [pytest.param("plain", marks=full), "watched"])
def test_an_interrupt_ends_a_process_that_waits(how, tmp_path):
    """Not when the limit is over, which is of 40 s."""
    lines = run_job(
        *("interrupted.py", tmp_path, how), processes=2, devices=2, expect=128 + signal.SIGINT
    )
    (seconds,) = lines[1]
    assert float(seconds) < 15
    assert not lines[0]


@pytest.mark.parametrize(
    ("processes", "devices"),
    [pytest.param(2, 2, marks=full), pytest.param(3, 1, marks=pytest.mark.long)],
)
def test_who_ends_at_once_has_dumped(processes, devices, tmp_path):
    """With the line that the error is raised at, before a handler of it has run."""
    lines = run_job(
        "exits.py",
        processes=processes,
        devices=devices,
        expect=7,
        JAXCOLL_DUMP_DIR=str(tmp_path),
    )
    job = (JOBS / "exits.py").read_text().splitlines()
    (fails,) = (i for i, line in enumerate(job, 1) if "the call that fails" in line)
    for rank in {*range(processes)} - {1}:
        assert lines[rank] == ["caught"]
        dump = json.loads((tmp_path / f"process_{rank}.json").read_text())
        assert "for rank 1 " in dump["reason"] or "for rank 2, 3 " in dump["reason"]
        assert f'exits.py", line {fails}, in <module>' in dump["stack"]
        assert any(f'exits.py", line {fails},' in stack for stack in dump["threads"].values())


ENDS_AT_ONCE = """
import jaxcoll, os
jaxcoll.config.timeout_s = 1.0
jaxcoll.simulate_cpu_devices(2)
import jax, numpy as np
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
add = lambda x: jaxcoll.all_reduce(x, "x", backend="native")
f = jax.jit(jax.shard_map(
    lambda x: jax.lax.cond(x.sum() > 0, add, lambda x: x, x),
    mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False))
try:
    jax.block_until_ready(f(np.float32([1, 0])))
except RuntimeError:
    os._exit(7)
"""


def test_who_ends_at_once_has_dumped_in_one_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE],
        env=job_environment() | {"JAXCOLL_DUMP_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    dump = json.loads((tmp_path / "process_0.json").read_text())
    assert "for rank 1 (device 1)" in dump["reason"] or "(partition 1)" in dump["reason"]
    assert dump["stack"].startswith('File "<string>", line 12, in <module>\n')
    assert dump["phase"] == "waiting for results"


def test_a_signal_asks_for_a_dump(tmp_path):
    """Also a process whose main thread hears nothing."""
    script = (
        "import jaxcoll, signal, time\n"
        "from jaxcoll.diagnosis import watcher\n"
        "watcher.start()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=job_environment() | {"JAXCOLL_DUMP_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGUSR2)
        file = tmp_path / "process_0.json"
        until = time.monotonic() + 30
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        dump = json.loads(file.read_text())
        assert dump["pid"] == process.pid
        assert any("line 6, in <module>" in stack for stack in dump["threads"].values())
        assert process.poll() is None
    finally:
        process.kill()
        _, errors = process.communicate()
    assert f"dumped to {file}" in errors


def test_another_process_reads_a_black_box():
    code = (
        "import sys\n"
        "from jaxcoll.diagnosis import black_box\n"
        "box = black_box.of_process(int(sys.argv[1]))\n"
        "print(box.about()['pid'])\n"
    )
    assert black_box.own() is not None
    done = subprocess.run(
        [sys.executable, "-c", code, str(os.getpid())],
        env=job_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{os.getpid()}\n"


@full
def test_top_of_a_job(capsys):
    """By the launcher's pid or by the job's name; and of a rank that is stopped."""
    job = subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxcoll", "run", "-n", "2", JOBS / "running.py"],
        env=job_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    pids: dict[int, int] = {}
    try:
        assert job.stdout is not None
        (name,) = {job.stdout.readline().split()[1] for _ in range(2)}
        boxes = top.find(str(job.pid))
        pids = {box.about()["process"]: pid for pid, box in boxes.items()}
        assert sorted(pids) == [0, 1]
        assert top.find(name).keys() == boxes.keys()

        def rows() -> list[dict[str, str]]:
            before = {pid: top.look(box) for pid, box in boxes.items()}
            time.sleep(0.2)
            now = {pid: top.look(box) for pid, box in boxes.items()}
            return [dict(zip(top.COLUMNS, row, strict=True)) for row in top.rows(before, now)]

        first, second = rows()
        for rank, row in enumerate((first, second)):
            assert (row["process"], row["pid"], row["device"]) == (str(rank), str(pids[rank]), "0")
            assert row["state"] in black_box.PHASES
            assert float(row["calls/s"]) > 0
        os.kill(pids[1], signal.SIGSTOP)
        until = time.monotonic() + 30
        while not (first["call"].startswith("all_reduce") and first["calls/s"] == "0"):
            assert time.monotonic() < until
            first, second = rows()
        assert first["state"] in black_box.PHASES
        assert (second["state"], second["calls/s"]) == ("stopped", "0")
        assert first["in calls"] == "100%"
        assert cli.main(["top", name, "--seconds", "0.05", "--times", "1"]) == 0
        assert "stopped" in capsys.readouterr().out
    finally:
        if 1 in pids:
            os.kill(pids[1], signal.SIGCONT)
        job.terminate()
        job.communicate(timeout=60)


def traced(fault: str, folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Runs two processes, of which the second one has a fault, and draws their timeline."""
    file = folder / "timeline.json"
    launcher = ["-m", "jaxcoll", "run", "-n", "2", "--trace", str(file)]
    done = subprocess.run(
        [sys.executable, *launcher, EXAMPLE, *("--fault", fault, "--rank", "1")],
        env=job_environment() | {"JAXCOLL_DUMP_DIR": str(folder / "dumps")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
        cwd=ROOT,
    )
    return file, done


@full
def test_a_timeline_of_a_job(tmp_path):
    """Its straggler is where it says, on the clock of all processes."""
    file, done = traced("slow", tmp_path)
    assert done.returncode == 0, done.stdout
    assert f"timeline: {file}" in done.stdout
    events = json.loads(file.read_text())["traceEvents"]
    calls = [e for e in events if e.get("cat") == "call"]
    assert len(calls) == 2 * 2 * 30
    waits = [e["pid"] for e in events if e.get("cat") == "waiting" and e["dur"] > 40e3]
    # 20 times for the straggler; and now and then for a core, on a busy machine.
    assert waits.count(0) >= 18
    assert waits.count(1) < 9
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("dumps", "timeline.json", "timeline.png")
    ]


@full
def test_a_timeline_has_what_a_process_did_that_was_killed(tmp_path):
    file, done = traced("dies", tmp_path)
    assert done.returncode == 128 + 9, done.stdout
    assert "has left nothing" not in done.stdout
    calls = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("cat") == "call"]
    of = [sum(e["pid"] == process for e in calls) for process in range(2)]
    assert 0 < of[0] - 2 <= of[1] <= of[0]
    assert not [path for path in tmp_path.iterdir() if "process_" in path.name]


@full
def test_a_step_on_lax_that_a_process_does_not_begin():
    lines = run_job("watched.py", processes=2, JAXCOLL_BACKEND="lax")
    reports = [line for line in lines[0] if line.startswith("reported: ")]
    assert len(reports) == 2, lines
    report, listing = reports
    assert "all_reduce" in listing
    assert re.search(r"step 4 of step has not ended within \d\.\d s", report)
    assert "process 1 has begun 3 calls of step, this one 4; it is in Python" in report
    assert "watched.py" in report


FAULTS_OF_A_JOB = 10


@pytest.mark.parametrize(
    ("processes", "devices", "seed"),
    [
        pytest.param(4, 1, 0, marks=full),
        *(pytest.param(4, 1, seed, marks=pytest.mark.long) for seed in range(1, 10)),
        *(pytest.param(2, 2, seed, marks=pytest.mark.long) for seed in range(3)),
    ],
)
def test_random_faults(processes, devices, seed, tmp_path):
    """Over a hundred in all: every one diagnosed right, none hangs, and nothing is left behind."""
    before = set(Path("/dev/shm").iterdir())
    lines = run_job(
        *("faulty.py", seed, FAULTS_OF_A_JOB),
        processes=processes,
        devices=devices,
        expect=128 + 9,
        JAXCOLL_DUMP_DIR=str(tmp_path),
    )
    dead = [rank for rank, said in lines.items() if len(said) < FAULTS_OF_A_JOB]
    assert len(dead) == 1, lines
    for rank, said in lines.items():
        assert len(said) == FAULTS_OF_A_JOB - (rank in dead), lines
        assert all(line.endswith("diagnosed") for line in said)
    assert nothing_left(tmp_path, before, processes=processes)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=full if seed == 0 else pytest.mark.long) for seed in range(3)],
)
def test_random_faults_of_devices(seed, tmp_path):
    """The same on 4 devices of one process."""
    before = set(Path("/dev/shm").iterdir())
    job = [sys.executable, "-P", ROOT / "tests/processes/jobs/faulty_devices.py"]
    done = subprocess.run(
        [*job, str(seed), str(FAULTS_OF_A_JOB)],
        env=job_environment() | {"JAXCOLL_DUMP_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("diagnosed\n") == FAULTS_OF_A_JOB
    assert nothing_left(tmp_path, before, processes=1)


def nothing_left(dumps: Path, before: set[Path], *, processes: int) -> bool:
    """Tells whether of a job there are its dumps alone: no process, no shared memory."""
    named = f"JAXCOLL_DUMP_DIR={dumps}".encode()
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if named in (process / "environ").read_bytes().split(b"\0"):
                running.append(process)
    ours = [path for path in set(Path("/dev/shm").iterdir()) - before if "jaxcoll" in path.name]
    files = sorted(path.name for path in dumps.iterdir())
    assert not running
    assert not ours
    return files == [f"process_{i}.json" for i in range(processes)]
