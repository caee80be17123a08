"""`jaxcoll run`, from the command line to the script's first line and back."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from jaxcoll import _launcher, cli

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jaxcoll run is for Linux")

RUN = [sys.executable, "-P", "-m", "jaxcoll", "run"]


def environment(**more: str) -> dict[str, str]:
    """What a shell has: nothing of this process's devices."""
    ours = ("PJRT_NPROC", "XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PYTHONSAFEPATH")
    return {k: v for k, v in os.environ.items() if k not in ours} | more


def run(folder: pathlib.Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *arguments],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=200,
    )


def script(folder: pathlib.Path, text: str, name: str = "script.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return str(path)


# ---- Arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("script.py", "the following arguments are required: -n"),
        ("-n 2", "the following arguments are required: SCRIPT"),
        ("-n two script.py", "argument -n: invalid int value: 'two'"),
        ("-n 0 script.py", "-n: expected at least 1, got 0."),
        ("-n 2 none.py", "script: no such file: 'none.py'."),
        ("-n 2 --devices-per-process 0 script.py", "--devices-per-process: expected at least 1"),
        ("-n 2 --trace . script.py", "--trace: expected a file, got '.', which is a folder."),
        ("-n 2 --max-restarts -1 script.py", "--max-restarts: expected at least 0, got -1."),
        ("-n 2 --hosts 2 script.py", "--hosts, --host-id and --coordinator: expected all three"),
        ("-n 2 --host-id 1 --coordinator h:1 script.py", "expected all three or none."),
        ("-n 2 --hosts 0 --host-id 0 --coordinator h:1 script.py", "--hosts: expected at least 1"),
        (
            "-n 2 --hosts 2 --host-id 2 --coordinator h:1 script.py",
            "--host-id: expected 0 to 1 for 2 hosts, got 2.",
        ),
        ("-n 2 --hosts 2 --host-id 0 --coordinator h script.py", "expected HOST:PORT, got 'h'."),
        ("-n 2 --hosts 2 --host-id 0 --coordinator h:0 script.py", "expected HOST:PORT, got"),
        ("-n 2 --hosts 2 --host-id 0 --coordinator h:65536 script.py", "expected HOST:PORT, got"),
        (
            "-n 2 --hosts 2 --host-id 0 --coordinator no.invalid:7777 script.py",
            "--coordinator: 'no.invalid' is not the name of a host: ",
        ),
        (
            "-n 2 --max-restarts 1 --hosts 2 --host-id 0 --coordinator h:1 script.py",
            "--max-restarts: expected 0 with several hosts, got 1",
        ),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: str,
    text: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "")
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", *arguments.split()])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_a_port_that_is_taken(tmp_path: pathlib.Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run(
            tmp_path,
            *("-n", "1", "--hosts", "1", "--host-id", "0", "--coordinator", address),
            script(tmp_path, "print('ran')"),
        )
    assert done.returncode == 2
    assert f"got {address}: Address already in use." in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("cpus", "ranks", "divided"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 1, 2, 8, 9], 2, [[0, 1], [2, 8, 9]]),
        ([4, 6], 2, [[4], [6]]),
        ([4, 6], 5, [[4], [6], [4], [6], [4]]),
        ([3], 1, [[3]]),
    ],
)
def test_cpus_are_divided(cpus: list[int], ranks: int, divided: list[list[int]]):
    assert _launcher.blocks(cpus, ranks) == divided


# ---- Scripts -------------------------------------------------------------------------------------

SHOW = """
import os, sys
print("argv", sys.argv)
print("path", sys.path[0])
print("name", __name__, __file__)
print("main", sys.modules["__main__"].__dict__ is globals())
print("cpus", sorted(os.sched_getaffinity(0)))
for name in sorted(os.environ):
    if name.startswith(("JAX", "PJRT", "XLA", "_JAXCOLL", "MPI")):
        print(name, os.environ[name])
"""


def shown(output: str) -> dict[int, dict[str, str]]:
    """For each rank, what SHOW printed: the first word of a line and the rest."""
    ranks: dict[int, dict[str, str]] = {}
    for line in output.splitlines():
        label, name, value = line.split(" ", 2)
        ranks.setdefault(int(label.strip("[]")), {})[name] = value
    return ranks


@pytest.mark.full
def test_a_script_finds_what_python_would_give_it(tmp_path: pathlib.Path):
    path = script(tmp_path / "folder", SHOW)
    # What would hide Python's own modules, if the current folder were searched.
    script(tmp_path, "raise SystemExit('the wrong one')", "random.py")
    options = ["-n", "2", "--devices-per-process", "3", "--accelerate"]
    given = ["--lr", "3", "-n", "4", "--devices-per-process", "9", "-h", "a", "--", "b c"]
    done = run(tmp_path, *options, path, *given, XLA_FLAGS="--xla_dump_to=", http_proxy="no:1")
    assert done.returncode == 0, done.stderr
    ranks = shown(done.stdout)
    assert ranks.keys() == {0, 1}
    for number, rank in ranks.items():
        assert rank["argv"] == repr([path, *given])
        assert rank["path"] == str(tmp_path / "folder")
        assert rank["name"] == f"__main__ {path}"
        assert rank["main"] == "True"
        assert rank["JAX_PLATFORMS"] == "cpu"
        assert rank["JAX_NUM_CPU_DEVICES"] == rank["JAXCOLL_DEVICES_PER_PROCESS"] == "3"
        assert rank["JAXCOLL_PROCESS_ID"] == str(number)
        assert rank["JAXCOLL_NUM_PROCESSES"] == "2"
        assert rank["JAXCOLL_NUM_HOSTS"] == "1"
        assert rank["JAXCOLL_RESTART"] == "0"
        assert int(rank["PJRT_NPROC"]) == max(4 * 3, rank["cpus"].count(",") + 1)
        assert rank["XLA_FLAGS"].startswith("--xla_dump_to= --xla_cpu_collective_call_warn")
        # Not for the processes that a rank starts.
        assert "JAXCOLL_ACCELERATE" not in rank
        assert "MPITRAMPOLINE_LIB" not in rank
        assert "JAXCOLL_COORDINATOR" not in rank
        assert "_JAXCOLL_PIPES" not in rank
    assert ranks[0]["JAXCOLL_JOB"] == ranks[1]["JAXCOLL_JOB"]
    assert re.fullmatch(r"[0-9a-f]{16}", ranks[0]["JAXCOLL_JOB"])
    [line] = [line for line in done.stderr.splitlines() if line.startswith("jaxcoll:")]
    for number, rank in ranks.items():
        cpus = rank["cpus"].strip("[]")
        if "," not in cpus:
            assert f"rank {number} on CPU {cpus}" in line
        else:
            assert f"rank {number} on CPUs {cpus.split(',')[0]}-" in line


@pytest.mark.full
def test_a_module(tmp_path: pathlib.Path):
    path = script(tmp_path, SHOW, "package/module.py")
    done = run(tmp_path, "-n", "1", "--no-bind", "-m", "package.module", "-m", "x")
    assert done.returncode == 0, done.stderr
    [rank] = shown(done.stdout).values()
    assert rank["argv"] == repr([path, "-m", "x"])
    assert rank["path"] == str(tmp_path)
    assert rank["name"] == f"__main__ {path}"
    assert rank["cpus"] == repr(sorted(os.sched_getaffinity(0)))
    assert int(rank["PJRT_NPROC"]) == max(2, len(os.sched_getaffinity(0)))
    assert "MPITRAMPOLINE_LIB" not in rank
    assert done.stderr == ""


FAILS = """
import os, sys, time
if os.environ["JAXCOLL_PROCESS_ID"] == "1":
    {how}
time.sleep(100)
"""


@pytest.mark.full
def test_the_error_of_a_script(tmp_path: pathlib.Path):
    """The others end within their grace, and the traceback begins in the script."""
    path = script(tmp_path, FAILS.format(how="1 / 0").replace("100", "0.1"))
    done = run(tmp_path, "-n", "2", "--no-bind", path)
    assert done.returncode == 1
    # Without markers below a line, and what a package without the extension says.
    other = re.compile(r"\[\d\] (jaxcoll: | *[~^]+$)")
    lines = [line for line in done.stderr.splitlines() if not other.match(line)]
    assert lines == [
        "[1] Traceback (most recent call last):",
        f'[1]   File "{path}", line 4, in <module>',
        "[1]     1 / 0",
        "[1] ZeroDivisionError: division by zero",
        "jaxcoll: rank 1 failed first: exit code 1",
    ]


def test_restarts(tmp_path: pathlib.Path):
    path = script(
        tmp_path,
        """
        import os, sys
        print("run", os.environ["JAXCOLL_RESTART"], os.environ["JAXCOLL_JOB"])
        if os.environ["JAXCOLL_RESTART"] == "0":
            os.kill(os.getpid(), 9)
        sys.exit(5)
        """,
    )
    done = run(tmp_path, "-n", "1", "--max-restarts", "1", "--no-bind", path)
    assert done.returncode == 5
    assert done.stderr.splitlines() == [
        "jaxcoll: rank 0 failed first: killed by SIGKILL",
        "jaxcoll: restart 1 of 1",
        "jaxcoll: rank 0 failed first: exit code 5",
    ]
    runs = [line.split()[2:] for line in done.stdout.splitlines()]
    assert [number for number, _ in runs] == ["0", "1"]
    assert runs[0][1] != runs[1][1]


def test_no_restart_after_a_failure_at_the_start(tmp_path: pathlib.Path):
    path = script(tmp_path, "print('ran')")
    done = run(tmp_path, "-n", "1", "--max-restarts", "3", path, JAXCOLL_DISTRIBUTED="maybe")
    assert done.returncode == 1
    assert 'JAXCOLL_DISTRIBUTED: expected one of "auto", "0", "1", got \'maybe\'' in done.stderr
    assert "restart" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_control_c(ranks: int, tmp_path: pathlib.Path):
    path = script(tmp_path, "print('ready', flush=True)\nimport time; time.sleep(100)")
    with subprocess.Popen(
        [*RUN, "-n", str(ranks), "--no-bind", "--max-restarts", "2", path],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        ready = {process.stdout.readline() for _ in range(ranks)}
        assert ready == {f"[{rank}] ready\n" for rank in range(ranks)}
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    for rank in range(ranks):
        assert f"[{rank}] KeyboardInterrupt" in err
    assert err.splitlines()[-1] == "jaxcoll: ended by SIGINT"


# ---- Jobs of JAX ---------------------------------------------------------------------------------

SUM = """
import jax
import numpy as np
import jaxcoll

jax.distributed.initialize("nowhere:1", num_processes=9, process_id=5)
jaxcoll.initialize()
assert jax.distributed.is_initialized()
devices = jax.device_count()
assert (jax.process_count(), len(jax.local_devices())) == (2, 2)
mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
total = jax.shard_map(
    lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P()
)
values = np.arange(devices, dtype=np.float32) + 1
x = jax.make_array_from_callback((4,), jax.NamedSharding(mesh, jax.P("x")), values.__getitem__)
result = np.asarray(jax.jit(total)(x))
jax.distributed.shutdown()
print("sum", result.tolist(), "of", jax.process_index())
"""


def test_processes_compute_together(tmp_path: pathlib.Path):
    done = run(tmp_path, "-n", "2", "--devices-per-process", "2", script(tmp_path, SUM))
    assert done.returncode == 0, done.stderr
    found = re.findall(r"sum (.*) of (\d)", done.stdout)
    assert sorted(found) == [("[10.0]", "0"), ("[10.0]", "1")]


def test_the_launcher_starts_without_importing_jax(tmp_path: pathlib.Path):
    """Which takes longer than all else that it does; a script's `import jaxcoll` imports it."""
    path = script(tmp_path, 'import sys, jaxcoll; print("rank", "jaxcoll._config" in sys.modules)')
    launch = "from jaxcoll.cli import main; code = main(sys.argv[1:]); print(*sys.modules)"
    command = f"import sys; sys.orig_argv[:] = ['python', 'bin/jaxcoll', 'run']; {launch}"
    done = subprocess.run(
        [sys.executable, "-c", command, "run", "-n", "1", path],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    said, modules = done.stdout.splitlines()
    assert said == "[0] rank True"
    assert "jaxlib._jax" in modules.split()
    assert "jax" not in modules.split()


def test_two_hosts(tmp_path: pathlib.Path):
    """Both on this one. The first one's ranks are done before the second's, which need it."""
    path = script(
        tmp_path,
        """
        import sys, time
        from jaxcoll import _compat
        me, count = _compat.process_id_and_count()
        client = _compat.distributed_client()
        client.key_value_set(f"here/{me}", "")
        client.blocking_key_value_get(f"here/{count - 1 - me}", 60_000)
        if me >= 2:
            time.sleep(1)
            client.key_value_set(f"still/{me}", "")
        print("done", count)
        """,
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = ["-n", "2", "--hosts", "2", "--coordinator", address]
    options: dict[str, Any] = {"env": environment(), "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([*RUN, *common, "--host-id", "1", path], **options) as second,
        subprocess.Popen([*RUN, *common, "--host-id", "0", path], **options) as first,
    ):
        outputs = [process.communicate(timeout=100)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert [sorted(output.splitlines()) for output in outputs] == [
        ["[0] done 4", "[1] done 4"],
        ["[2] done 4", "[3] done 4"],
    ]
