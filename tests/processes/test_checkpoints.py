"""Checkpoints that all processes of a job write, read by one that is alone, or by a restart."""

import pathlib
import re

import jax
import optax
import pytest
from checks import native_missing
from processes.run_job import run_job
from training import STEPS, assert_trained_as, batch, mesh_of, start, train

from jaxcoll import Checkpoints, data_parallel_train_step
from jaxcoll.models import SimpleClassifier


@pytest.mark.skipif(native_missing() is not None, reason="the engine across processes is native")
@pytest.mark.full
def test_from_two_processes_to_one(tmp_path: pathlib.Path):
    for said in run_job("checkpoints.py", tmp_path, processes=2, devices=2).values():
        assert f"saved after {3 * STEPS} steps" in said, said
    plain, mesh = SimpleClassifier(num_classes=4, hidden=10), mesh_of(data=1)
    with jax.enable_x64(True):
        fresh = start(plain, batch(), optimizer=optax.adamw(0.1))
        with Checkpoints(tmp_path, max_to_keep=None) as checkpoints:
            state, expected = checkpoints.restore(fresh), checkpoints.restore(fresh, 0)
            assert checkpoints.extras() == {"leg": 2}
        for _ in range(3):
            expected, _ = train(data_parallel_train_step(plain), expected, batch(), mesh)
    assert int(state.step) == 3 * STEPS
    assert_trained_as(state.params, expected.params)


@pytest.mark.skipif(native_missing() is not None, reason="the engine across processes is native")
@pytest.mark.long
def test_killed_in_the_middle_of_a_save(tmp_path: pathlib.Path):
    """One rank, the other, or both: what a restart goes on from is the save before, or that one."""
    lines = run_job("killed_saving.py", tmp_path, processes=2, devices=2, max_restarts=3)
    in_the_middle = 0
    for rank, said in lines.items():
        last, begun = 0, []
        for line in said:
            if match := re.fullmatch(r"saved step (\d+)", line):
                last = int(match[1])
            elif match := re.fullmatch(r"begins after step (\d+)(, beside a half of \d+)?", line):
                assert int(match[1]) in (last, last + 1), (rank, said)
                in_the_middle += match[2] is not None
                begun.append(int(match[1]))
        assert len(begun) == 4, (rank, said)
        assert begun[0] == 0, (rank, said)
        assert said[-1] == "the bits of a run that was not killed", (rank, said)
    assert in_the_middle, lines
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 8
    assert not list(tmp_path.glob("*tmp*"))
