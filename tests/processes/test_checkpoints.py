"""Checkpoints that all processes of a job write, read by one that is alone."""

import pathlib

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
        expected = fresh = start(plain, batch(), optimizer=optax.adamw(0.1))
        for _ in range(3):
            expected, _ = train(data_parallel_train_step(plain), expected, batch(), mesh)
        with Checkpoints(tmp_path) as checkpoints:
            state = checkpoints.restore(fresh)
            assert checkpoints.extras() == {"leg": 2}
    assert int(state.step) == 3 * STEPS
    assert_trained_as(state.params, expected.params)
