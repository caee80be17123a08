"""`jaxcoll.initialize`: who is one of several processes, and that nobody waits for ghosts."""

import contextlib
import logging
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from checks import native_missing

import jaxcoll
from jaxcoll import _compat, _crossovers, _engine, _initialize
from jaxcoll._clusters import Decision, decide

# What the managers set, as far as somebody reads it; host names and addresses are made up.
SLURM_ALLOCATION = {
    "SLURM_CLUSTER_NAME": "cluster",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[001-002]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[001-002]",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_SUBMIT_HOST": "login1",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
SLURM_TASK = {
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASK_PID": "12345",
}
SLURM_STEP = {
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# The shell of `salloc` where the administrator has it run on the first node, in a step of its own.
SLURM_SHELL = {
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "node001",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
SRUN = SLURM_ALLOCATION | SLURM_TASK | SLURM_STEP
OPEN_MPI = {
    "OMPI_APP_CTX_NUM_PROCS": "2",
    "OMPI_COMMAND": "python",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "0",
}
OPEN_MPI_4 = OPEN_MPI | {
    "OMPI_MCA_ess_base_vpid": "0",
    "OMPI_MCA_orte_hnp_uri": "2263613440.0;tcp://10.0.0.5,172.17.0.1:42161",
    "OMPI_MCA_orte_num_nodes": "1",
}
OPEN_MPI_5 = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-node001-4242@1", "PRTE_LAUNCHED": "1"}
POD = {
    "HOSTNAME": "train-0-x7k2p",
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
}
INDEXED_POD = POD | {"JOB_COMPLETION_INDEX": "0"}
ALONE = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_APP_CTX_NUM_PROCS")

ENVIRONMENTS: dict[str, tuple[dict[str, str], Decision]] = {
    "nothing": ({"PATH": "/bin"}, Decision(False, "nothing has started several")),
    "srun -n 2": (SRUN, Decision(True, "srun has started 2 tasks", {"num_processes": 2})),
    "srun -n 1": (
        SRUN | {"SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_STEP_NUM_TASKS": "1"},
        Decision(False, "srun has started this process alone"),
    ),
    "salloc -n 2": (
        SLURM_ALLOCATION,
        Decision(False, "a Slurm allocation, but srun has not started this process"),
    ),
    "salloc -n 2, on the node": (
        SLURM_ALLOCATION | SLURM_TASK | SLURM_SHELL,
        Decision(False, "srun has started this process alone"),
    ),
    "sbatch -n 2": (
        SLURM_ALLOCATION | SLURM_TASK | {"ENVIRONMENT": "BATCH"},
        Decision(False, "a Slurm allocation, but srun has not started this process"),
    ),
    "mpirun -n 2": (OPEN_MPI_4, Decision(True, "Open MPI has started 2 processes")),
    "mpirun -n 1": (
        OPEN_MPI_4 | dict.fromkeys(ALONE, "1"),
        Decision(False, "Open MPI has started this process alone"),
    ),
    "mpirun -n 2, Open MPI 5": (
        OPEN_MPI_5,
        Decision(True, "Open MPI has started 2 processes", {"cluster_detection_method": "mpi4py"}),
    ),
    "mpirun -n 2 in sbatch": (
        SRUN | OPEN_MPI_4 | {"SLURM_STEP_NUM_TASKS": "1"},
        Decision(True, "Open MPI has started 2 processes"),
    ),
    "settings of Open MPI": (
        {"OMPI_MCA_btl": "self,tcp"},
        Decision(False, "nothing has started several"),
    ),
    "indexed Job": (INDEXED_POD, Decision(True, "an indexed Job of Kubernetes")),
    "pod": (POD, Decision(False, "a Kubernetes pod, but not one of an indexed Job")),
    "srun -n 2 in a pod": (
        POD | SRUN,
        Decision(True, "srun has started 2 tasks", {"num_processes": 2}),
    ),
    "JAX_COORDINATOR_ADDRESS": (
        POD
        | SLURM_ALLOCATION
        | {
            "JAX_COORDINATOR_ADDRESS": "node001:7777",
            "JAX_NUM_PROCESSES": "3",
            "JAX_PROCESS_ID": "2",
        },
        Decision(
            True,
            "JAX_COORDINATOR_ADDRESS is node001:7777",
            {"num_processes": 3, "process_id": 2},
        ),
    ),
    "only JAX_COORDINATOR_ADDRESS": (
        SRUN | {"JAX_COORDINATOR_ADDRESS": "node001:7777"},
        Decision(True, "JAX_COORDINATOR_ADDRESS is node001:7777"),
    ),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_who_is_one_of_several(name: str):
    environment, decision = ENVIRONMENTS[name]
    assert decide(environment, lambda _: True) == decision


def test_kubernetes_without_its_package():
    decision = decide(INDEXED_POD, lambda package: package != "kubernetes")
    assert not decision.join
    assert "pip install 'jax[k8s]'" in decision.reason


# ---- In this process, where JAX has started ------------------------------------------------------


@pytest.fixture(autouse=True)
def _as_if_new(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_initialize, "_done", False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("value", ["", "auto", "0", " 0 "])
def test_one_process(value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("JAXCOLL_DISTRIBUTED", value)
    set_all(monkeypatch, SLURM_ALLOCATION)
    with caplog.at_level(logging.INFO, "jaxcoll"):
        jaxcoll.initialize()
        jaxcoll.initialize()
    off = value.strip() == "0"
    reason = "JAXCOLL_DISTRIBUTED=0" if off else ENVIRONMENTS["salloc -n 2"][1].reason
    assert caplog.messages == [f"jaxcoll.initialize(): one process: {reason}"]


def test_off_goes_before_a_job_that_is_real(monkeypatch: pytest.MonkeyPatch):
    set_all(monkeypatch, SRUN | {"JAXCOLL_DISTRIBUTED": "0"})
    jaxcoll.initialize()


@pytest.mark.parametrize("value", ["2", "yes", "off"])
def test_a_value_that_makes_no_sense(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXCOLL_DISTRIBUTED", value)
    with pytest.raises(ValueError, match=f'one of "auto", "0", "1", got {value!r}'):
        jaxcoll.initialize()


LAUNCHED = {
    "JAXCOLL_COORDINATOR": "127.0.0.1:1",
    "JAXCOLL_NUM_PROCESSES": "2",
    "JAXCOLL_PROCESS_ID": "0",
}


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        (LAUNCHED, "`jaxcoll run` has started this process as one of several"),
        (SRUN, "srun has started 2 tasks"),
        ({"JAXCOLL_DISTRIBUTED": "1"}, "JAXCOLL_DISTRIBUTED=1 (nothing has started several)"),
    ],
    ids=["run", "srun", "forced"],
)
def test_after_jax_has_started(
    variables: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
):
    import jax

    jax.devices()
    set_all(monkeypatch, variables)
    with pytest.raises(RuntimeError) as caught:
        jaxcoll.initialize()
    assert str(caught.value) == (
        f"jaxcoll.initialize(): {reason}, but JAX has started already, as one process. Call it "
        "first in the program, before anything that uses a device."
    )


def test_a_jax_that_is_not_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compat, "distributed_problem", lambda: "jax 99 is not known (x)")
    set_all(monkeypatch, LAUNCHED)
    text = "`jaxcoll run` can't be used: jax 99 is not known"
    with pytest.raises(RuntimeError, match=text):
        jaxcoll.initialize()


SETTINGS = _engine._card()["settings"]


def test_settings_that_agree():
    required = {"jax", "jaxcoll", "backend", "accelerate_lax", "reduction_order", "crossovers"}
    assert SETTINGS.keys() >= required
    _engine._compare("initialize", [_engine._card()["settings"] for _ in range(3)])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("process", [1, 2])
def test_each_setting_that_differs_is_named(name: str, process: int):
    cards = [dict(SETTINGS) for _ in range(3)]
    cards[process][name] = "another"
    text = (
        f"initialize(): {name} differs between the processes of the job: process 0 has "
        f"{SETTINGS[name]!r}, process {process} has 'another'."
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        _engine._compare("initialize", cards)


# ---- In processes of their own -------------------------------------------------------------------


def start(script: str, stdin: int | None = None, **more: str) -> subprocess.Popen[str]:
    ours = ("PJRT_NPROC", "XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    inherited = {k: v for k, v in os.environ.items() if k not in ours}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(script)],
        env=inherited | more,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, **more: str) -> str:
    with start(script, **more) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_what_many_devices_need():
    text = """
    import os, jax, jaxcoll
    jax.config.update("jax_num_cpu_devices", 4)
    jaxcoll.initialize()
    print(os.environ["PJRT_NPROC"], os.environ["XLA_FLAGS"])
    print(jax.process_count(), len(jax.devices()))
    """
    first, second = run(text, JAX_PLATFORMS="cpu").splitlines()
    assert int(first.split()[0]) >= 2 * 4
    assert "--xla_cpu_collective_call_terminate_timeout_seconds=600" in first
    assert second == "1 4"


def test_a_job_that_the_user_has_connected():
    text = f"""
    import jax, jaxcoll
    from jaxcoll import _engine
    _engine.attach = lambda: print("attached")
    jax.distributed.initialize({free_address()!r}, 1, 0)
    jaxcoll.initialize()
    jaxcoll.initialize()
    print(jax.distributed.is_initialized(), jax.process_count())
    """
    # Of one process, which has nobody to attach to.
    assert run(text, JAXCOLL_DISTRIBUTED="1", JAX_PLATFORMS="cpu") == "True 1\n"


def test_the_error_where_jax_finds_nothing():
    text = """
    import jaxcoll
    try:
        jaxcoll.initialize()
    except RuntimeError as error:
        print(error)
    """
    out = run(text, JAXCOLL_DISTRIBUTED="1")
    assert "jax.distributed.initialize() failed: coordinator_address should be defined." in out
    assert "set JAXCOLL_DISTRIBUTED=0 to run as one process" in out


JOINS = """
import os, sys, jax, jaxcoll
exec(os.environ.get("FIRST", ""))
jaxcoll.initialize()
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
f = jax.shard_map(lambda: jaxcoll.all_reduce(jax.lax.axis_index("x") + 1, "x"), mesh=mesh,
                  in_specs=(), out_specs=jax.P(), check_vma=False)
print("sum", int(jax.jit(f)()), jaxcoll.explain(f).rows[0].path)
"""


def joined(
    *environments: dict[str, str], script: str = JOINS, first: str = ""
) -> list[tuple[int, str, str]]:
    """Runs a process in each of the environments; returns their ends, outputs and errors."""
    processes = [start(script, JAX_PLATFORMS="cpu", FIRST=first, **of) for of in environments]
    try:
        ended = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *of) for p, of in zip(processes, ended, strict=True)]


def free_job_id() -> str:
    """Returns the number of a Slurm job for which JAX chooses a port that is free."""
    last = 2**12
    for number in range(1, last):
        with contextlib.suppress(OSError), socket.create_server(("", number + 65536 - last)):
            return str(number)
    raise AssertionError("no free port")


@pytest.mark.full
@pytest.mark.skipif(native_missing() is not None, reason="the path that is shown is native")
def test_tasks_of_srun_join():
    """With what `srun` sets for two tasks on one node, of which `salloc` has told four."""
    step = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}
    of_all = SRUN | step | {"SLURM_JOB_ID": free_job_id(), "SLURM_NTASKS": "4"}
    tasks = [of_all | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in range(2)]
    for status, out, err in joined(*tasks):
        assert status == 0, err
        assert out.splitlines()[-1] == "sum 3 native"


@pytest.mark.full
@pytest.mark.skipif(native_missing() is not None, reason="the path that is shown is native")
def test_processes_that_the_user_has_connected():
    address = free_address()
    for status, out, err in joined(
        *({"AT": address, "ME": str(n)} for n in range(2)),
        first="import logging; logging.basicConfig(level=logging.INFO); "
        "jax.distributed.initialize(os.environ['AT'], 2, int(os.environ['ME']))",
    ):
        assert status == 0, err
        assert out.splitlines()[-1] == "sum 3 native"
        assert "process 0 has JAX's coordination service: if it dies, JAX ends the others" in err


DIES = (
    JOINS
    + """
print("recoverable", jax.config.jax_enable_recoverability, flush=True)
if jax.process_index() == 1:
    os.kill(os.getpid(), 9)
try:
    jax.block_until_ready(jax.jit(f)())
except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter while JAX starts it
    print("missing", [(rank.rank, rank.state) for rank in jaxcoll.error_info(error).missing])
"""
)


@pytest.mark.full
@pytest.mark.skipif(native_missing() is not None, reason="the engine that names it is native")
def test_process_0_outlives_another_without_a_launcher():
    """And does not wait for it at its end."""
    job = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": "2"}
    begun = time.monotonic()
    first, second = joined(*(job | {"JAX_PROCESS_ID": str(n)} for n in range(2)), script=DIES)
    assert time.monotonic() - begun < 60
    assert second[0] == -signal.SIGKILL, second
    assert first[0] == 0, first
    assert first[1].splitlines()[-2:] == ["recoverable True", "missing [(1, 'gone')]"], first


@pytest.mark.full
@pytest.mark.skipif(native_missing() is not None, reason="settings are of the native engine")
@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("JAXCOLL_BACKEND", "lax", "backend"),
        ("JAXCOLL_ACCELERATE", "1", "accelerate_lax"),
        ("JAXCOLL_SEGMENT_BYTES", "8M", "segment bytes"),
        ("JAXCOLL_CROSSOVERS", "", "crossovers"),
    ],
)
def test_settings_that_differ_at_the_start(
    variable: str,
    value: str,
    named: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if named == "crossovers":
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(tmp_path / "crossovers.json"))
            value = str(_crossovers.write({"ppermute": 1 << 20}, 2, 8 << 20))
        _crossovers._measured.cache_clear()
    job = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": "2"}
    ranks = [job | {"JAX_PROCESS_ID": str(n)} for n in range(2)]
    ranks[1][variable] = value
    for status, _, err in joined(*ranks):
        assert status != 0
        assert f"initialize(): {named} differs between the processes of the job: process 0" in err


@pytest.mark.full
def test_a_job_whose_first_process_ends_first():
    """It has the service, without which the other would be ended."""
    text = """
    import time, jax, jaxcoll
    from jaxcoll import _compat, _engine
    _engine.attach = lambda: print("attached")
    jaxcoll.initialize()
    me, count = _compat.process_id_and_count()
    client = _compat.distributed_client()
    client.key_value_set(f"here/{me}", "")
    client.blocking_key_value_get(f"here/{1 - me}", 60_000)
    if me == 1:
        time.sleep(1)
        client.key_value_set("still", "")
    print(count)
    """
    job = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": "2"}
    with (
        start(text, **job, JAX_PROCESS_ID="0") as first,
        start(text, **job, JAX_PROCESS_ID="1") as second,
    ):
        ended = [process.communicate(timeout=100) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), ended
    assert [out for out, _ in ended] == ["attached\n2\n"] * 2


MEMBER = """
import os, signal, time
import jax, jaxcoll
from jaxcoll import _coordination
_coordination.HEARTBEAT_S = 4
jaxcoll.initialize()
from jax.experimental import multihost_utils
me = jax.process_index()
print("sum", multihost_utils.process_allgather(jax.numpy.float32(me)).sum())
if me == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(8)
print("alive", jax.numpy.arange(5).sum())
"""
SERVICE = """
import sys
from jaxcoll import _coordination
_coordination.HEARTBEAT_S = 4
service = _coordination.start(sys.stdin.readline().strip(), 2)
print("started")
sys.stdin.read()
service.shutdown()
"""


@pytest.mark.full
def test_the_others_outlive_process_0():
    """The service is in a process of its own, as with `jaxcoll run`."""
    address = free_address()
    with start(SERVICE, stdin=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{address}\n")
        server.stdin.flush()
        assert server.stdout.readline() == "started\n"
        job = {"JAXCOLL_COORDINATOR": address, "JAXCOLL_NUM_PROCESSES": "2"}
        ranks = [
            start(MEMBER, **job, JAXCOLL_PROCESS_ID=str(n), JAX_PLATFORMS="cpu") for n in range(2)
        ]
        ended = [rank.communicate(timeout=100) for rank in ranks]
        server.communicate()
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 0], ended
    shown = ["\n".join(re.findall("(?:sum|alive) .*", out)) for out, _ in ended]
    assert shown == ["sum 1.0", "sum 1.0\nalive 10"]


def test_what_processes_have_agreed_on_they_agree_on_again():
    """Compiled programs stand on it: the mean of three equal numbers can be another one."""
    costs = [0.1 + 0.37 * i for i in range(24)]
    for count in range(1, 9):
        measured = [costs[3 * i : 3 * i + 3] for i in range(count)]
        agreed = _engine.agreed_costs(measured)
        assert _engine.agreed_costs([agreed] * count) == agreed
        assert _engine.agreed_costs(measured[::-1]) == agreed
