"""Checkpoints: training goes on as if it had not stopped, on the same mesh or on another."""

import dataclasses
import functools as ft
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from processes.run_job import job_environment
from synchronizers import OPTIMIZERS
from training import assert_same, assert_trained_as, batch, mesh_of, start, train

from jaxcoll import (
    Checkpoints,
    clip_by_global_norm,
    data_parallel_train_step,
    fully_shard,
    make_mesh,
    pipelined,
    reshard,
)
from jaxcoll.models import PPClassifier, SimpleClassifier, TPClassifier
from jaxcoll.optax import synchronize

PLAIN = SimpleClassifier(num_classes=4, hidden=12)
DEEP = PPClassifier(num_classes=4, num_layers=5, width=12, split=False)
ADAM = optax.adamw(0.1)


def sharded(mesh: Any, stage: Any) -> tuple[Any, Any]:
    """A dimension of 12 that 8 ranks don't divide, and an optimizer with counters and moments."""
    del mesh
    optimizer = optax.chain(clip_by_global_norm(1.0), ADAM)
    return fully_shard(PLAIN, stage=stage, min_weight_size=16), optimizer


def synchronized(mesh: Any, compression: Any) -> tuple[Any, Any]:
    """What int8 has lost is a part of the state; without compression an array of no values is."""
    return PLAIN, optax.chain(synchronize("data", compression, mesh=mesh, hosts=2), ADAM)


def synchronized_under(mesh: Any, name: Any) -> tuple[Any, Any]:
    return PLAIN, OPTIMIZERS[name](compression="int8", mesh=mesh, hosts=2)


def split_twice(mesh: Any, stage: Any) -> tuple[Any, Any]:
    model = TPClassifier(num_classes=4, hidden=24, mesh=mesh)
    return fully_shard(model, stage=stage, min_weight_size=16), ADAM


def in_stages(mesh: Any, schedule: Any) -> tuple[Any, Any]:
    """Five layers on two ranks: stored in another order than the model's, with room for more."""
    del mesh
    return pipelined(DEEP, 3, schedule=schedule), ADAM


@pytest.mark.parametrize(
    ("make", "how", "axes"),
    [
        pytest.param(sharded, 1, {"data": 8}, marks=pytest.mark.full),
        (sharded, 3, {"data": 8}),
        (synchronized, "int8", {"data": 4}),
        pytest.param(synchronized, None, {"data": 4}, marks=pytest.mark.full),
        (synchronized_under, "before MultiSteps", {"data": 4}),
        *(
            pytest.param(synchronized_under, name, {"data": 4}, marks=pytest.mark.full)
            for name in ("masked", "inject_hyperparams")
        ),
        (split_twice, 3, {"data": 2, "tensor": 2}),
        pytest.param(in_stages, "1f1b", {"data": 2, "pipe": 2}, marks=pytest.mark.full),
        (in_stages, "interleaved", {"data": 2, "pipe": 2}),
    ],
)
def test_resumed_to_the_last_bit(make: Any, how: Any, axes: dict[str, int], tmp_path: pathlib.Path):
    data, mesh = batch(), mesh_of(**axes)
    model, optimizer = make(mesh, how)
    step = data_parallel_train_step(model)
    state = start(model, data, mesh, optimizer)
    state, _ = train(step, state, data, mesh, state.specs)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
    with Checkpoints(tmp_path) as checkpoints:
        again = checkpoints.restore(start(model, data, mesh, optimizer))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert_same(again, state)
    after, seen = train(step, again, data, mesh, again.specs)
    expected, wanted = train(step, state, data, mesh, state.specs)
    assert seen == wanted
    assert_same(after, expected)


@pytest.mark.parametrize(
    ("make", "how", "axes"),
    [(sharded, 3, {"data": 8}), (in_stages, "interleaved", {"data": 2, "pipe": 2})],
)
def test_on_a_mesh_with_explicit_axes(
    make: Any, how: Any, axes: dict[str, int], tmp_path: pathlib.Path
):
    """As JAX's own `make_mesh` makes them: types forbid to slice a dimension that is split."""
    data, plain = batch(), mesh_of(**axes)
    mesh = make_mesh(axes, allow_unused=True, axis_types=jax.sharding.AxisType.Explicit)
    model, optimizer = make(mesh, how)
    state, usual = (start(model, data, of, optimizer) for of in (mesh, plain))
    assert_same(state.unpadded(), usual.unpadded())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        for like in (state, usual):
            again = checkpoints.restore(like)
            assert_same(again, like)
            assert jax.tree.map(placed, again) == jax.tree.map(placed, like)
    assert_same(reshard(usual, state.specs, mesh=mesh), state)


# Model of a mesh, and the mesh; without one, everything is on one device.
Layout = tuple[Any, dict[str, int] | None]
PLAIN_ON_8: Layout = (lambda mesh: PLAIN, {"data": 8})
PLAIN_ON_1: Layout = (lambda mesh: PLAIN, None)
TENSOR: Layout = (
    lambda mesh: TPClassifier(num_classes=4, hidden=12, mesh=mesh),
    {"data": 2, "tensor": 2},
)


def zero(stage: Any, ranks: int) -> Layout:
    return lambda mesh: fully_shard(PLAIN, stage=stage, min_weight_size=16), {"data": ranks}


DEEP_ON_1: Layout = (lambda mesh: DEEP, None)


def stages(schedule: Any, ranks: int) -> Layout:
    return lambda mesh: in_stages(mesh, schedule)[0], {"data": 2, "pipe": ranks}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plain", "layouts"),
    [
        (PLAIN, (PLAIN_ON_8, TENSOR)),
        (PLAIN, (zero(3, 8), zero(1, 3), PLAIN_ON_1)),
        pytest.param(PLAIN, (PLAIN_ON_1, zero(3, 8), TENSOR, zero(2, 8)), marks=pytest.mark.full),
        pytest.param(
            DEEP,
            (stages("interleaved", 2), DEEP_ON_1, stages("1f1b", 3), stages("interleaved", 2)),
            marks=pytest.mark.long,
        ),
    ],
    ids=["data to tensor", "padded to plain", "plain to padded", "stages to stages"],
)
def test_on_other_meshes(plain: Any, layouts: tuple[Layout, ...], tmp_path: pathlib.Path):
    """Each goes on from the checkpoint of the one before: the training of one device."""
    with jax.enable_x64(True):
        data, alone = batch(), mesh_of(data=1)
        expected: Any = start(plain, data, optimizer=ADAM)
        for number, (model_of, axes) in enumerate(layouts):
            mesh = mesh_of(**axes) if axes else None
            model = model_of(mesh)
            fresh = state = start(model, data, mesh, ADAM)
            if number:
                with Checkpoints(tmp_path) as checkpoints:
                    state = checkpoints.restore(fresh)
                    assert checkpoints.extras() == {"layout": number - 1, "losses": [1.5, None]}
                assert jax.tree.structure(state) == jax.tree.structure(fresh)
                assert jax.tree.map(placed, state) == jax.tree.map(placed, fresh)
            step = data_parallel_train_step(model)
            state, _ = train(step, state, data, mesh or alone, state.specs)
            expected, _ = train(data_parallel_train_step(plain), expected, data, alone)
            assert_trained_as(state.unpadded().params, expected.params)
            with Checkpoints(tmp_path) as checkpoints:
                checkpoints.save(state, layout=number, losses=(1.5, None))


def placed(leaf: Any) -> Any:
    return leaf.shape, leaf.dtype, getattr(leaf.sharding, "spec", None), leaf.devices()


@ft.cache
def small(model: Any = PLAIN, optimizer: Any = ADAM) -> Any:
    state = start(model, batch(), optimizer=optimizer)
    return dataclasses.replace(state, rng=jax.random.key(0, impl="rbg"))


def at(step: int) -> Any:
    """Returns a state of which all says its step's number."""
    params = jax.tree.map(lambda leaf: jnp.full_like(leaf, step), small().params)
    rng = jax.random.key(step, impl="rbg")
    return dataclasses.replace(small(), step=jnp.int32(step), params=params, rng=rng)


def test_which_are_there(tmp_path: pathlib.Path):
    state, folder = small(), tmp_path / "new" / "folder"
    (folder / "4.orbax-checkpoint-tmp").mkdir(parents=True)  # as a killed run leaves it
    with Checkpoints(folder, max_to_keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in (2, 5, 7):
            checkpoints.save(at(step), loss=step / 2)
        checkpoints.save(at(7), loss=0.0)  # the last step may be a periodic one too
        assert checkpoints.latest_step() == 7
        assert checkpoints.extras() == {"loss": 3.5}
        assert checkpoints.extras(5) == {"loss": 2.5}
        assert_same(checkpoints.restore(state), at(7))
        assert_same(checkpoints.restore(state, 5), at(5))
        with pytest.raises(ValueError, match=r"restore: step: expected one of .* 5, 7, got 2\."):
            checkpoints.restore(state, 2)
        with pytest.raises(ValueError, match=r"extras: step: expected one of .* 5, 7, got 2\."):
            checkpoints.extras(2)
        with Checkpoints(folder) as others:
            others.restore(state)
            others.save(at(8))
        assert checkpoints.latest_step() == 8
    assert sorted(path.name for path in folder.glob("[!_]*")) == [*"578"]


def test_a_state_that_is_donated_says_how_it_lay(tmp_path: pathlib.Path):
    state = start(fully_shard(PLAIN, min_weight_size=16), batch(), mesh_of(data=2), ADAM)
    kept = jax.tree.map(jnp.copy, state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        assert_same(checkpoints.restore(state), kept)


def test_bad_arguments(tmp_path: pathlib.Path):
    state = small()
    with pytest.raises(ValueError, match="max_to_keep: expected 1 or more, or None, got 0"):
        Checkpoints(tmp_path, max_to_keep=0)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(FileNotFoundError, match=f"restore: expected a .* in {tmp_path}, got"):
            checkpoints.restore(state)
        with pytest.raises(FileNotFoundError, match="extras: expected a checkpoint in"):
            checkpoints.extras()
        with pytest.raises(TypeError, match="save: state: expected a TrainState, got dict"):
            checkpoints.save(state.params)
        with pytest.raises(
            TypeError, match=r"save: losses: expected .* JSON .* got list: .*tolist"
        ):
            checkpoints.save(state, step=1, losses=[np.float32(1)])
        assert checkpoints.latest_step() is None
        checkpoints.save(at(3))
        with pytest.raises(TypeError, match="restore: like: expected a TrainState, got dict"):
            checkpoints.restore(state.params)
        with pytest.raises(TypeError, match=r"like: step: expected an array on .* without a"):
            checkpoints.restore(jax.eval_shape(lambda: state))
        with pytest.raises(ValueError, match=f"step after 3, the newest in {tmp_path}, got 2"):
            checkpoints.save(at(2))
    again = pytest.raises(ValueError, match=r"expected a step after 3, .* got 3\. Restore that")
    with Checkpoints(tmp_path) as of_another_run, again:
        of_another_run.save(at(3))


def test_a_checkpoint_that_does_not_fit(tmp_path: pathlib.Path):
    with jax.enable_x64(True):
        doubled = start(PLAIN, batch(), optimizer=ADAM)
    wider, momentum = SimpleClassifier(num_classes=4, hidden=16), optax.sgd(0.1, momentum=0.9)
    bias = "['hidden_layer']['bias']"
    others = [
        (f"params{bias}", "float32[12]", "float32[16]", small(wider)),
        (f"params{bias}", "float32[12]", "float64[12]", doubled),
        (f"opt_state[0].trace{bias}", "no such leaf", "float32[12]", small(optimizer=momentum)),
        ("opt_state[0].count", "int32[]", "no such leaf", small(optimizer=optax.sgd(0.1))),
        ("rng", "key<rbg>[]", "key<fry>[]", start(PLAIN, batch(), optimizer=ADAM)),
    ]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(3))
        for name, saved, got, like in others:
            text = f"restore: like: {name}: expected {saved} as saved, got {got}. Make it with"
            with pytest.raises(ValueError, match=re.escape(text)):
                checkpoints.restore(like)


def test_no_checkpoint_of_ours(tmp_path: pathlib.Path):
    file, of_others, halved = tmp_path / "file", tmp_path / "others", tmp_path / "halved"
    file.write_text("")
    with pytest.raises(ValueError, match=f"directory, or none yet, got the file {file}"):
        Checkpoints(file)
    with ocp.CheckpointManager(of_others) as manager:
        manager.save(4, args=ocp.args.StandardSave({"w": np.ones(3)}))
    with Checkpoints(halved) as checkpoints:
        checkpoints.save(at(4))
    shutil.rmtree(halved / "4" / "record")
    for folder, lacking in ((of_others, '"state", "record"'), (halved, '"record"')):
        with Checkpoints(folder) as checkpoints:
            text = f"step: 4: expected .* in {folder}/4, but it has no {lacking}: another program"
            with pytest.raises(ValueError, match="restore: " + text):
                checkpoints.restore(small())
            with pytest.raises(ValueError, match="extras: " + text):
                checkpoints.extras()


SAVE_FOR_EVER = """
import itertools, sys
from parallel.test_checkpoints import Checkpoints, at, small

checkpoints = Checkpoints(sys.argv[1], max_to_keep=2)
first = checkpoints.latest_step() or 0
if first:
    checkpoints.restore(small())
for step in itertools.count(first + 1):
    checkpoints.save(at(step), step=step)
    print(step, flush=True)
"""


@pytest.mark.full
def test_killed_at_any_moment(tmp_path: pathlib.Path):
    """The newest is at most the step in flight behind, and all that are there are whole."""
    chance, state = random.Random(0), small()
    for _ in range(4):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)]
        saving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=job_environment())
        assert saving.stdout
        with saving:
            said = [saving.stdout.readline() for _ in range(3)]
            time.sleep(chance.uniform(0, 0.5))
            saving.kill()
            said += saving.stdout.readlines()
        last = int(said[-1])
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.latest_step() in (last, last + 1)
            for step in there(tmp_path):
                assert_same(checkpoints.restore(state, step), at(step))
                assert checkpoints.extras(step) == {"step": step}


def there(folder: pathlib.Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
