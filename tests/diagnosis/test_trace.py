"""The timeline, against times that the tests take themselves, and by hand."""

import collections
import contextlib
import json
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from checks import mapped, mesh, native_missing, zero_late

import jaxcoll
from jaxcoll import _compat
from jaxcoll.diagnosis import dumps, picture, timeline, trace
from jaxcoll.diagnosis.records import Call, Dumps, Place

needs_engine = pytest.mark.skipif(native_missing() is not None, reason="there is nothing to record")
LATE_S = 0.06
RANKS, STEPS = 4, 3


def step(x):
    late = zero_late("x", rank=2, seconds=LATE_S)
    return jaxcoll.all_gather(jaxcoll.all_reduce(x + late, "x"), "x")


@needs_engine
def test_a_block_of_this_process(tmp_path, capsys):
    x = np.ones((RANKS, 3), np.float32)
    with jaxcoll.using(backend="native"):
        compiled = jax.jit(mapped(step, mesh(RANKS))).lower(x).compile()
        jax.block_until_ready(compiled(x))
        with jaxcoll.trace(tmp_path / "t.json"):
            begin = time.monotonic()
            for _ in range(STEPS):
                jax.block_until_ready(compiled(x))
            took_us = 1e6 * (time.monotonic() - begin)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    calls = [e for e in events if e.get("cat") == "call"]
    assert collections.Counter(call["name"] for call in calls) == {
        "all_reduce sum": RANKS * STEPS,
        "all_gather": RANKS * STEPS,
    }
    reduces = [call for call in calls if call["name"] == "all_reduce sum"]
    assert {call["args"]["last to come"] for call in reduces} == {"rank 2"}
    assert {call["args"]["operands"] for call in reduces} == {"f32[3]"}
    assert {call["args"]["parameters"] for call in calls} == {"op=sum", "axis=0"}
    assert all("test_trace.py" in call["args"]["source"] for call in calls)
    assert min(call["ts"] for call in calls) == 0
    assert max(call["ts"] + call["dur"] for call in calls) <= took_us
    # Those that came in time waited while the late one slept, less what the scheduler took of it.
    waits = [e for e in events if e.get("cat") == "waiting" and e["dur"] > 0.2e6 * LATE_S]
    assert len(waits) == (RANKS - 1) * STEPS
    assert {wait["tid"] for wait in waits} == {0, 100, 300}
    slept_us = sum(call["dur"] for call in waits)
    assert slept_us <= (RANKS - 1) * took_us
    for begin in (e for e in events if e["ph"] == "s"):
        (end,) = [e for e in events if e["ph"] == "f" and e["id"] == begin["id"]]
        assert end["ts"] >= begin["ts"] - 1e-6
    arrows = [e for e in events if e["ph"] == "s" and e["tid"] == 200]
    assert len(arrows) >= (RANKS - 1) * STEPS
    said = capsys.readouterr().out
    assert "timeline: " in said
    device, number = said.splitlines()[3].split()[1:3]
    assert (device, number) == ("2", str(STEPS))
    assert (tmp_path / "t.png").stat().st_size > 1000


@needs_engine
def test_a_folder_is_refused_before_the_block_runs(tmp_path):
    refused = pytest.raises(IsADirectoryError, match=r"^trace\(path\): .* Name a file in it")
    with refused, jaxcoll.trace(tmp_path):
        pytest.fail("the block runs")


@needs_engine
def test_more_calls_than_a_black_box_keeps(tmp_path, caplog):
    """All of them are there, or it says how many came too fast."""

    def many(x):
        return jax.lax.fori_loop(
            0,
            3000,
            lambda _, c: jax.lax.pcast(jaxcoll.all_reduce(c, "x", op="max"), "x", to="varying"),
            x,
        )

    x = np.ones((2, 1), np.float32)
    with jaxcoll.using(backend="native"):
        compiled = jax.jit(mapped(many, mesh(2))).lower(x).compile()
        with jaxcoll.trace(tmp_path / "t.json"):
            for _ in range(3):
                jax.block_until_ready(compiled(x))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lost = sum(int(n) for n in re.findall(r"(\d+) calls came too fast", caplog.text))
    assert sum(e.get("cat") == "call" for e in events) + lost == 2 * 3 * 3000


@needs_engine
def test_what_an_earlier_block_has_left_is_of_no_timeline(tmp_path, monkeypatch, caplog):
    """A block that fails on process 0 leaves what the others write after that."""

    def block(process, *, fails=False):
        monkeypatch.setattr(_compat, "process_id_and_count", lambda: (process, 2))
        with contextlib.suppress(ZeroDivisionError), jaxcoll.trace(tmp_path / "t[1].json"):
            assert 1 / (not fails)

    def job(name):
        monkeypatch.setattr(dumps, "job", lambda: name)
        trace._counts.clear()

    def left():
        return {file.name.rpartition(".")[2] for file in tmp_path.iterdir()}

    monkeypatch.setattr(trace, "_PARTS_S", 0.0)
    monkeypatch.setattr(picture, "draw", lambda *_: None)
    job("an older one")
    block(1)
    assert left() == {"process_1"}
    job("this one")
    block(0)
    assert "process 1 has left nothing" in caplog.text
    assert left() == {"json"}  # nor is it left for another one
    job("this one again")
    block(0, fails=True)
    job("this one again")
    block(1)
    caplog.clear()
    block(0)  # of both the second block
    assert "process 1 has left nothing" in caplog.text
    caplog.clear()
    job("this one again")
    block(0)
    assert not caplog.text
    assert left() == {"json"}


FORKS = """
import os, sys
import jaxcoll
from jaxcoll.diagnosis import trace

folder = sys.argv[1]
trace.follow(folder + "/t.json")
with jaxcoll.trace(folder + "/block.json"):
    if os.fork() == 0:
        sys.exit()
    os.wait()
    print(os.listdir(folder), file=sys.stderr)
"""


@needs_engine
def test_a_forked_child_leaves_nothing(tmp_path):
    """Neither where it leaves the block, nor at its end."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == "[]\n"
    assert any(file.name.endswith(".process_0") for file in tmp_path.iterdir())  # its own


def dumps_of(*calls: Call) -> Dumps:
    site = {"text": "all_reduce", "op": "all_reduce", "ranks": 2}
    fused = {"text": "all_gather_matmul", "op": "all_gather_matmul", "ranks": 2}
    sites = {"1": [site], "2": [fused]}
    dump = {"host": "here", "pid": 1, "num_processes": 2, "sites": sites}
    return Dumps({0: dump, 1: dump}, list(calls))


def call(process, arrived, met, resumed, *, site=1, run=1, execution=1) -> Call:
    times = [1_000_000 * t for t in (arrived, met, resumed, resumed)]
    return Call(Place(process, 0), 1, site, 9, process, execution, run, *times)


def test_rows_by_hand():
    """Two steps of 100 ms; process 1 comes 30 ms late to the first call of each."""
    calls = []
    for step, begin in ((1, 1000), (2, 1100)):
        calls += [
            call(0, begin, begin, begin + 40, run=step, execution=2 * step),
            call(1, begin + 30, begin + 30, begin + 40, run=step, execution=2 * step),
            call(0, begin + 60, begin + 60, begin + 70, run=step, execution=2 * step + 1),
            call(1, begin + 50, begin + 50, begin + 70, run=step, execution=2 * step + 1),
        ]
    first, second = timeline.rows(dumps_of(*calls))
    assert (first.steps, first.calls, first.step_ms) == (2, 4, 100)
    assert (first.waiting_ms, first.moving_ms) == (30, 20)
    assert (second.waiting_ms, second.moving_ms) == (10, 20)
    assert first.exposed == pytest.approx(2 * 50 / 170)
    assert second.exposed == pytest.approx(2 * 30 / 140)
    assert (first.last, second.last) == (0.5, 0.5)
    assert (first.late_ms, second.late_ms) == (20, 60)
    assert first.overlap == 0


def test_those_that_come_late_together_by_hand():
    """Processes 2 and 3, by 30 and 31 ms in each of two steps."""
    calls = []
    for step, begin in ((1, 1000), (2, 1100)):
        for process, late in enumerate((0, 1, 31, 32)):
            calls.append(call(process, begin + late, 0, begin + 40, run=step, execution=step))
    rows = timeline.rows(dumps_of(*calls))
    assert [(row.last, row.late_ms) for row in rows] == [(0, 0), (0, 0), (1, 60), (1, 62)]


def test_the_slowest_steps_by_hand(tmp_path):
    """Of 50 steps of 10 ms: in the 17th process 1 comes 90 ms late to the second call."""
    calls, begin = [], 1000
    for step in range(1, 51):
        late = 90 if step == 17 else 0
        calls += [
            call(0, begin, begin, begin + 1, run=step, execution=2 * step),
            call(1, begin, begin, begin + 1, run=step, execution=2 * step),
            call(0, begin + 5, begin + 5, begin + late + 6, run=step, execution=2 * step + 1),
            call(1, begin + late + 5, 0, begin + late + 6, run=step, execution=2 * step + 1),
        ]
        begin += 10 + late
    steps = timeline.steps(dumps_of(*calls))
    assert [step.number for step in steps] == [*range(1, 51)]
    slow = timeline.slowest(steps)[0]
    assert (slow.number, slow.ms, slow.last, slow.late_ms) == (17, 100, Place(1, 0), 90)
    assert slow.exposed == pytest.approx((92 + 2) / 200)
    assert steps[16] == slow
    assert {(step.ms, step.late_ms) for step in steps[1:16]} == {(10, 0)}
    (line, *others) = timeline.slowest_table(steps).splitlines()[1:]
    assert line.split() == ["17", "100.000", "47%", "0%", "1.0", "90.0"]
    assert len(others) == 2
    assert timeline.steps(dumps_of()) == []
    picture.draw(timeline.rows(dumps_of(*calls)), steps, tmp_path / "t.png")
    picture.draw([], [], tmp_path / "nothing.png")


def test_a_step_is_what_met():
    """Process 1 makes two programs more, and numbers its runs from elsewhere."""
    calls, begin = [], 1000
    for step in range(1, 21):
        if step in (1, 8):  # alone, as an evaluation
            calls.append(call(1, begin, begin, begin + 5, run=200 + step, execution=-step))
        late = 40 if step == 13 else 6 if step == 8 else 1
        calls += [
            call(0, begin, begin, begin + late + 4, run=step, execution=step),
            call(1, begin + late, 0, begin + late + 4, run=100 + step, execution=step),
        ]
        begin += late + 5
    steps = timeline.steps(dumps_of(*calls))
    assert [step.number for step in steps] == [*range(1, 23)]
    (slow, *_) = timeline.slowest(steps)
    assert (slow.number, slow.ms, slow.last, slow.late_ms) == (15, 45, Place(1, 0), 40)
    assert slow.exposed == pytest.approx((44 + 4) / 90)
    assert {step.ms for step in steps[15:]} == {6}
    alone = [step for step in steps if step.last is None]
    assert [step.ms for step in alone] == [5, 6]
    assert all(step.ms > 0 for step in steps)


def test_steps_at_once():
    """Two executions on the same devices, whose calls are made in turn."""
    calls = [
        call(process, 1000 + begin, 0, 1000 + end, run=run, execution=execution)
        for process in (0, 1)
        for run, execution, begin, end in [
            (1, 1, 0, 10),
            (2, 2, 5, 30),
            (1, 3, 10, 20),
            (2, 4, 20, 40),
        ]
    ]
    first, second = timeline.steps(dumps_of(*calls))
    assert (first.ms, first.exposed, first.overlap) == (20, 1, 0)
    assert (second.ms, second.exposed) == (20, 1)
    assert second.overlap == pytest.approx(1 - 35 / 45)
    assert {row.steps for row in timeline.rows(dumps_of(*calls))} == {2}


def test_what_overlaps_counts_once_and_has_tracks_of_its_own():
    calls = [
        call(0, 1000, 1000, 1040),
        call(0, 1010, 1010, 1050, execution=2),
        call(0, 1045, 1045, 1060, execution=3),
    ]
    dumps = dumps_of(*calls)
    (row,) = timeline.rows(dumps)
    assert row.exposed == 1
    assert row.overlap == pytest.approx(1 - 60 / 95)
    slices = [e for e in timeline.events(dumps) if e.get("cat") == "call"]
    assert [e["tid"] for e in slices] == [0, 1, 0]


def test_a_collective_matmul_is_exposed_only_while_it_waits():
    calls = [call(0, 1000, 1020, 1100, site=2), call(1, 1020, 1020, 1100, site=2)]
    first, second = timeline.rows(dumps_of(*calls))
    assert first.exposed == pytest.approx(0.2)
    assert second.exposed == 0


def test_a_call_that_never_ended_is_drawn_as_waiting():
    open_call = Call(Place(0, 0), 1, 1, 9, 0, 5, 1, 10**9, 0, 0, 0)
    slices = [e for e in timeline.events(dumps_of(open_call)) if e["ph"] == "X"]
    assert [e["name"] for e in slices][:1] == ["all_reduce"]
    assert not any(e["name"] == "moving" for e in slices)
