"""What goes wrong on one process is an error on all that wait for it, which names it."""

import re

import pytest
from checks import native_missing
from processes.run_job import run_job

import jaxcoll
from jaxcoll.diagnosis import doctor

pytestmark = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)
full = pytest.mark.full
LIMIT_S = 3  # of the jobs
BUSY_S = 8  # in which what takes a second or two is over on a busy machine too
LAYOUTS = [(2, 2), pytest.param(2, 1, marks=pytest.mark.long), pytest.param(3, 1, marks=full)]
CALLS = {  # what the text of the error names
    "order": ("all_reduce", "ppermute"),
    "shapes": ("f32[8]", "f32[9]"),
    "dtypes": ("f32[8]", "i32[8]"),
    "reductions": ("(32 bytes, op=sum)", "(32 bytes, op=max)"),
    "axes": ("(32 bytes, axis=0)", "(32 bytes, axis=1)"),
}
ERROR = r"after (\d+\.\d) s: .*jaxcoll\.CollectiveError: "


def fail(kind: str, tmp_path, *, processes: int = 2, devices: int = 1, expect: int | None = 0):
    return run_job(
        "failing.py", kind, tmp_path, processes=processes, devices=devices, expect=expect
    )


def error_of(lines: list[str]) -> tuple[float, str]:
    """Returns the seconds until the error of a rank, and its text."""
    for line in lines:
        if match := re.match(ERROR, line):
            return float(match[1]), line[match.end() :]
    raise AssertionError(lines)


@pytest.mark.parametrize(("processes", "devices"), LAYOUTS)
def test_different_calls_are_named_on_all_within_two_seconds(processes, devices, tmp_path):
    lines = fail(",".join(CALLS), tmp_path, processes=processes, devices=devices)
    for said in lines.values():
        assert said.count("works again") == len(CALLS)
        for calls in CALLS.values():
            end = said.index("works again") + 1
            seconds, text = error_of(said[:end])
            said = said[end:]
            assert seconds < BUSY_S
            assert "the processes called different collectives" in text
            for call in calls:
                assert call in text
            # Of three processes, two may differ before the last comes where the machine is busy.
            assert re.search(r"process [02] .*(waits in|came to it,) .*failing\.py:\d+ \(", text)
            assert re.search(r"process [12] .*waits in .*failing\.py:\d+ \(", text)


@full
@pytest.mark.parametrize(("kind", "at_least"), [("groups", 1), ("groups in Python", LIMIT_S + 2)])
def test_another_order_of_calls_over_different_groups(kind, at_least, tmp_path):
    """Who does something else than to await results may come to another call."""
    for said in fail(kind, tmp_path, processes=2, devices=2).values():
        assert ("not yet" in said) == ("in Python" in kind)
        assert "failed" not in said
        seconds, text = error_of(said)
        assert at_least <= seconds < at_least + BUSY_S
        assert re.search(
            r"process 0 waits in all_reduce over \"p\" of .*\(over_processes\)", text
        ), text
        assert re.search(r"process 1 waits in all_reduce over .*\(over_all_first\)", text), text
        assert "works again" in said


@full
@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("roots", (r"root=0\), .*\(from_own", r"root=1\), .*\(from_own")),
        ("pairs", (r"perm=0>1\), .*\(to_the", r"perm=1>0\), .*\(to_the")),
    ],
)
def test_different_roots_and_pairs_are_told_though_nobody_waits(kind, calls, tmp_path):
    for said in fail(kind, tmp_path).values():
        seconds, text = error_of(said)
        assert 1 <= seconds < 10 + BUSY_S
        assert "the processes called different collectives" in text
        for rank, call in enumerate(calls):
            assert re.search(rf"process {rank} has ended, before others .* {call}", text), text
        assert "works again" in said


@full
@pytest.mark.parametrize(("processes", "devices"), LAYOUTS)
def test_a_late_process_is_named_at_the_limit(processes, devices, tmp_path):
    lines = fail("late", tmp_path, processes=processes, devices=devices)
    ranks = ", ".join(str(devices + i) for i in range(devices))
    for said in lines.values():
        seconds, text = error_of(said)
        assert 2.9 < seconds < BUSY_S
        assert re.search(rf"for rank {ranks} \(process 1, pid \d+, running\)", text), text
        assert "(the limit is 3.0 s)" in text
        assert re.search(r"all_reduce over .* called at .*failing\.py:\d+ \(after\)", text)
        assert any(line.startswith("next: ") for line in said)
        assert "works again" in said


@full
def test_a_late_process_is_named_by_several_that_wait_in_a_gradient_outside_of_jit(tmp_path):
    """Neither of them may think that the other one compiles."""
    lines = fail("late in a gradient", tmp_path, processes=3)
    for rank in (0, 2):
        seconds, text = error_of(lines[rank])
        assert seconds < BUSY_S
        assert re.search(r"for rank 1 \(process 1, pid \d+, running\)", text), text
    assert all("works again" in said for said in lines.values())


@full
def test_meshes_with_another_order_of_devices_are_told_apart(tmp_path):
    for said in fail("meshes", tmp_path).values():
        seconds, text = error_of(said)
        assert seconds < BUSY_S
        assert re.search(r"process 0 waits in .*, in group \d[; ]", text), text
        assert "the groups differ in their devices, or in the order of them" in text
        assert "works again" in said


@full
def test_a_late_device_fails_the_other_processes_too(tmp_path):
    lines = fail("late device", tmp_path, processes=2, devices=2)
    for said in lines.values():
        _, text = error_of(said)
        assert re.search(r"for rank 3 \(process 1, pid \d+, running", text), text
        assert re.search(r"arrived: .*\brank 2 \(process 1(, device \d+)?\)", text), text
        assert any(re.match(r"rank 3: last call, ended .*\(healthy\)", line) for line in said), said
        assert "works again" in said


@pytest.mark.parametrize("processes", [3, pytest.param(2, marks=full)])
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=full)])
def test_a_killed_process_is_named_within_a_second(killed, processes, tmp_path):
    kind = "killed" if killed else "first killed"
    lines = fail(kind, tmp_path, processes=processes, expect=128 + 9)
    for rank, said in lines.items():
        if rank == killed:
            continue
        seconds, text = error_of(said)
        assert seconds < BUSY_S
        assert re.search(rf"rank {killed} \(process {killed}, pid \d+, gone\)", text), text
        assert "(the process is gone)" in text
        assert any(line.startswith("next: ") for line in said)
        ended = (
            rf"reset\(\): process {killed} \(pid \d+\) has ended, and no other can take its place "
            r"in this job: start the whole job anew, .*\. \(alone\)"
        )
        assert any(re.fullmatch(ended, line) for line in said), said


@pytest.mark.slow
def test_a_stopped_process_is_named_and_fails_when_it_goes_on(tmp_path):
    lines = fail("stopped", tmp_path)
    for said in lines.values():
        _, text = error_of(said)
        assert re.search(r"rank 1 \(process 1, pid \d+, stopped\)", text), text
        assert "works again" in said


@pytest.mark.slow
def test_a_process_that_resets_without_the_call(tmp_path):
    lines = fail("reset", tmp_path)
    seconds, text = error_of(lines[0])
    assert seconds < BUSY_S
    assert re.search(r"rank 1 \(process 1, pid \d+, running\)", text), text
    assert "(the process has called jaxcoll.reset() without this call)" in text
    assert "works again" in lines[0]
    assert "no error in the next call" in lines[1]


@pytest.mark.slow
def test_a_process_that_ends_without_the_call(tmp_path):
    _, text = error_of(fail("left", tmp_path)[0])
    assert re.search(r"rank 1 \(process 1, pid \d+, (leaving|ended)\)", text), text


@pytest.mark.parametrize(
    ("end", "said"),
    [
        pytest.param("pass", "", marks=full),
        ("{}['x']", "\n  ended with KeyError: 'x', at {file}:8 (<module>)"),
        pytest.param(
            *("sys.exit('no data')", "\n  ended with SystemExit: no data, at {file}:8 (<module>)"),
            marks=full,
        ),
        pytest.param("os.kill(os.getpid(), 9)", None, marks=full),
    ],
)
def test_how_a_process_has_ended(end, said, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(f"""import os, sys
import jax, numpy as np
import jaxcoll
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
f = jax.jit(jax.shard_map(lambda x: jaxcoll.all_reduce(x, "x"), mesh=mesh,
                          in_specs=jax.P(), out_specs=jax.P(), check_vma=False))
jax.block_until_ready(f(np.ones(3)))
if jax.process_index() == 1: {end}
else:
    try:
        jax.block_until_ready(f(np.ones(3)))
    except Exception as error:
        print(jaxcoll.error_info(error).text.replace("\\n", "|"), flush=True)
        raise
""")
    lines = run_job(str(file), processes=2, expect=None, JAXCOLL_DUMP_DIR=str(tmp_path / "dumps"))
    text = lines[0][0].replace("|", "\n")
    info = jaxcoll.error_info("jaxcoll.CollectiveError: " + text)
    assert info is not None, text
    (missing,) = info.missing
    assert missing.state == ("gone" if said is None else "ended"), text
    assert ("(the process is gone)" in text) == (said is None), text
    assert ("ended with " in text) == bool(said), text
    assert said is None or said.format(file=file) in text, text
    assert "no Python code" not in text, text
    found, status = doctor.report([tmp_path / "dumps"])
    assert status == doctor.GONE
    if said:
        said = f"process 1 has {said.format(file=file).strip()}."
    else:
        said = "process 1 is gone." if said is None else "process 1 has come to the end of its"
    assert said in found, found
