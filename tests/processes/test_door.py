"""XLA's own collectives on the engine: values, groups, faults, and where they stay as they are."""

import re
import subprocess
import sys
from typing import Any

import jax
import pytest
from checks import native_missing
from processes.run_job import ROOT, job_environment, run_job

pytestmark = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)
BUSY_S = 8  # in which what takes a second or two is over on a busy machine too
full, long = pytest.mark.full, pytest.mark.long


def through_door(kind: str, processes: int = 2, devices: int = 2, **arguments):
    return run_job(
        "through_door.py", kind, processes=processes, devices=devices, accelerate=True, **arguments
    )


def assert_all(lines: dict[int, list[str]], text: str) -> None:
    for rank, said in lines.items():
        assert text in said, (rank, said)


@pytest.mark.parametrize(
    ("processes", "devices"),
    [
        *(pytest.param(*layout, marks=full) for layout in ((2, 2), (1, 4))),
        *(pytest.param(*layout, marks=long) for layout in ((3, 1), (4, 1), (2, 4))),
    ],
)
def test_every_op_of_lax_has_numpys_values(processes: int, devices: int):
    lines = run_job(
        "values.py", "all", processes=processes, devices=devices, accelerate=True,
        JAXCOLL_BACKEND="lax",
    )  # fmt: skip
    assert_all(lines, "all values are right")


@pytest.mark.parametrize(
    ("segment", "processes", "devices"),
    [
        pytest.param("1M", 3, 1, marks=full),
        *(pytest.param(*case, marks=long) for case in (("1M", 2, 2), ("", 2, 2), ("", 3, 1))),
    ],
)
def test_sizes_around_windows(processes: int, devices: int, segment: str):
    lines = run_job(
        "sizes.py", processes=processes, devices=devices, accelerate=True,
        JAXCOLL_BACKEND="lax", JAXCOLL_SEGMENT_BYTES=segment,
    )  # fmt: skip
    assert_all(lines, "all sizes are right")


@full
def test_training_steps_are_the_same_to_the_bit_on_any_layout():
    losses = []
    for processes, devices in ((2, 2), (4, 1), (1, 4)):
        lines = run_job(
            "sharded_programs.py", processes=processes, devices=devices, accelerate=True
        )
        assert_all(lines, "all programs are right")
        losses.append(lines[0])
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 4


@pytest.mark.parametrize(
    ("processes", "devices"),
    [pytest.param(2, 2, marks=full), *(pytest.param(*job, marks=long) for job in [(4, 1), (2, 4)])],
)
def test_groups_that_begin_with_the_same_device(processes: int, devices: int):
    assert_all(through_door("submeshes", processes, devices), "all meshes are right")


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), pytest.param(1, 4, marks=full)])
def test_both_doors_and_our_own_calls_in_one_program(processes: int, devices: int):
    assert_all(through_door("both_doors", processes, devices), "all steps are right")


@pytest.mark.parametrize(
    ("processes", "devices"), [pytest.param(2, 2, marks=full), pytest.param(4, 1, marks=long)]
)
def test_what_jaxs_documentation_does(processes: int, devices: int):
    assert_all(through_door("libraries", processes, devices), "all libraries work")


@pytest.mark.parametrize(
    ("processes", "devices"), [pytest.param(4, 1, marks=full), pytest.param(2, 2, marks=long)]
)
def test_flax_and_optax(processes: int, devices: int):
    assert_all(through_door("flax_and_optax", processes, devices), "Flax and Optax train")


@full
def test_groups_of_one_rank():
    assert_all(through_door("alone"), "alone it works")
    assert_all(through_door("devices_first"), "all local meshes are right")


@pytest.mark.slow
def test_what_xla_has_no_mpi_type_for():
    for said in through_door("refused", devices=1).values():
        (line,) = said
        # What a copy is for, and the line, depends on JAX's version.
        pattern = r"refused: jaxcoll: all-gather of f16\[4\] \(.+\): XLA has no MPI type for f16\."
        assert re.match(pattern, line), line


@full
def test_an_interrupt_while_a_program_is_compiled():
    for said in through_door("interrupted", processes=1, devices=4).values():
        assert said == ["interrupted", "goes on"]


@full
def test_programs_that_can_run_at_once():
    for said in through_door("two_kinds").values():
        (warning,) = [line for line in said if line.startswith("WARNING: ")]
        assert "programs for one and for several devices of this process communicate" in warning


@full
def test_a_program_from_the_compilation_cache(tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for _ in range(2):
        assert_all(through_door("submeshes", **cache), "all meshes are right")
    assert any(tmp_path.iterdir())


# ---- Faults --------------------------------------------------------------------------------------


def fail(kind: str, tmp_path, *, processes: int = 2, devices: int = 1, expect: int | None = 0):
    lines = run_job(
        "failing.py", kind, tmp_path, processes=processes, devices=devices, expect=expect,
        accelerate=True, JAXCOLL_BACKEND="lax",
    )  # fmt: skip
    errors = {}
    for rank, said in lines.items():
        for line in said:
            if match := re.match(r"after (\d+\.\d) s: .*jaxcoll\.CollectiveError: ", line):
                errors[rank] = float(match[1]), line[match.end() :]
    return lines, errors


@full
@pytest.mark.parametrize("kind", ["shapes", "dtypes"])
def test_different_calls_are_named_on_all_within_two_seconds(kind, tmp_path):
    lines, errors = fail(kind, tmp_path, devices=2)
    assert errors.keys() == {0, 1}
    for rank, (seconds, text) in errors.items():
        assert seconds < BUSY_S
        for process in range(2):
            assert re.search(
                rf"process {process} waits in all_reduce of XLA \(sum\): (float|int)32\[\d\] "
                r"\(\d+ bytes\), devices [\d, -]+, "
                r"for jit\(body\)/shard_map/psum at .*failing\.py:\d+",
                text,
            ), text
        assert "works again" in lines[rank]


@full
@pytest.mark.parametrize(("kind", "state"), [("late", "running"), ("stopped", "stopped")])
def test_a_process_that_does_not_come_is_named(kind, state, tmp_path):
    lines, errors = fail(kind, tmp_path)
    assert errors.keys() == {0, 1}
    for rank, (seconds, text) in errors.items():
        assert seconds < BUSY_S
        assert re.search(rf"for rank 1 \(process 1, pid \d+, {state}\)", text), text
        assert "works again" in lines[rank]


@full
def test_a_process_that_ends_without_the_call(tmp_path):
    _, errors = fail("left", tmp_path)
    assert re.search(r"rank 1 \(process 1, pid \d+, (leaving|ended)\)", errors[0][1]), errors


@full
def test_a_late_device(tmp_path):
    lines, errors = fail("late device", tmp_path, devices=2)
    for rank, (_, text) in errors.items():
        assert re.search(r"for rank 3 \(", text), text
        assert "works again" in lines[rank]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=full)])
def test_a_killed_process_is_named_within_a_second(killed, tmp_path):
    kind = "killed" if killed else "first killed"
    _, errors = fail(kind, tmp_path, processes=3, expect=128 + 9)
    assert errors.keys() == {0, 1, 2} - {killed}
    for seconds, text in errors.values():
        assert seconds < BUSY_S
        assert re.search(rf"rank {killed} \(process {killed}, pid \d+, gone\)", text), text


# ---- When the door opens -------------------------------------------------------------------------

OPENS = """
import os
import jax
import jaxcoll
{first}
jaxcoll.initialize(accelerate=True)
jaxcoll.initialize(accelerate=True)
{then}
from jaxcoll import _door, _native
mesh = jax.make_mesh((4,), ("x",))
x = jax.device_put(jax.numpy.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
assert float(jax.jit(jax.numpy.sum)(x)) == 28
print(_door.is_open(), _native.num_mpi_calls(), jax.process_count())
"""


def run_alone(first: str = "", then: str = "", **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", OPENS.format(first=first, then=then)],
        env=job_environment() | {"JAX_NUM_CPU_DEVICES": "4"} | environment,
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@full
def test_one_process_whose_script_has_imported_jax_before():
    said, _ = run_alone(then="assert 'MPITRAMPOLINE_LIB' not in os.environ")
    assert said == "True 4 1"


@full
def test_a_script_that_chooses_gloo_itself():
    said, _ = run_alone(then="jax.config.update('jax_cpu_collectives_implementation', 'gloo')")
    assert said == "True 4 1"


def test_jax_has_started():
    said, why = run_alone("jax.devices()")
    assert said == "False 0 1"
    assert "JAX has started already: call jaxcoll.initialize(accelerate=True) first" in why


def test_a_jaxlib_without_the_interface():
    said, why = run_alone("from jaxlib import _jax; del _jax.make_mpi_collectives")
    assert said == "False 0 1"
    assert "(jaxlib._jax.make_mpi_collectives is missing)" in why


@pytest.mark.slow
def test_another_mpi_library(tmp_path):
    library = tmp_path / "libmine.so"
    library.write_bytes(_library().read_bytes())  # as good as any other
    said, why = run_alone(MPITRAMPOLINE_LIB=str(library))
    assert said == "False 0 1"
    assert f"MPITRAMPOLINE_LIB names another MPI library ({library})" in why


def _library():
    from pathlib import Path

    from jaxcoll import _mpi_library

    path = _mpi_library.path()
    assert path is not None
    return Path(path)


@full
def test_processes_that_were_not_started_with_it():
    """The library comes into a process whose JAX was loaded without it."""
    lines = run_job("initialized_late.py", processes=2, devices=2)
    assert_all(lines, "open: True, calls: True")


@full
def test_several_hosts_stay_with_gloo():
    lines = run_job("initialized_late.py", "hosts", processes=2, devices=2)
    assert_all(lines, "open: False, calls: False")
    for said in lines.values():
        (why,) = [line for line in said if line.startswith("WARNING: ")]
        assert why.endswith("don't run on jaxcoll's engine: process 0: the job has several hosts; "
                            "process 1: the job has several hosts")  # fmt: skip


def test_accelerate_is_checked():
    import jaxcoll

    assert jax.devices()  # whatever it says, this process is not one of several
    wrong: Any = 1
    with pytest.raises(TypeError, match="accelerate: expected a bool, got 1"):
        jaxcoll.initialize(accelerate=wrong)
