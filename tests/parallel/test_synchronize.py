"""`jaxcoll.optax.synchronize`: the mean of gradients in an optimizer, compressed between hosts."""

import dataclasses
import logging
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from synchronizers import OPTIMIZERS
from training import (
    SGD,
    STEPS,
    assert_copies_are_equal,
    assert_trained_as,
    batch,
    mesh_of,
    reference,
    start,
    train,
)

from jaxcoll import clip_by_global_norm, data_parallel_train_step, fully_shard
from jaxcoll.models import SimpleClassifier, TPClassifier
from jaxcoll.optax import SynchronizeState, synchronize
from jaxcoll.parallel.quantization import BLOCK, dequantized, quantized

PLAIN = SimpleClassifier(num_classes=4, hidden=12)


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def averaged(
    grads: Any, size: int, compression: Any, hosts: int, steps: int = 1, typed: bool = True
) -> tuple[Any, Any]:
    """Returns each step's means, one row for each rank, and the last errors.

    Args:
        grads: a tree of arrays, one row for each rank.
        size: ranks.
        compression: see `synchronize`.
        hosts: as if the ranks were there.
        steps: how many times the same gradients are averaged.
        typed: whether axes are typed.
    """
    mesh = mesh_of(data=size)
    optimizer = synchronize("data", compression, mesh=mesh, hosts=hosts)
    state = optimizer.init(jax.tree.map(lambda leaf: leaf[0], grads))

    def step(grads: Any, state: Any) -> Any:
        mean, state = optimizer.update(jax.tree.map(lambda leaf: leaf[0], grads), state)
        return jax.tree.map(lambda leaf: leaf[None], mean), state

    specs: Any = dataclasses.replace(state, error=jax.P("data"))
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(jax.P("data"), specs),
            out_specs=(jax.P("data") if not typed else jax.P(), specs),
            check_vma=typed,
        )
    )
    means = []
    for _ in range(steps):
        mean, state = mapped(grads, state)
        means.append(mean)
    return means, state.error


# ---- Values --------------------------------------------------------------------------------------


def test_eight_bits_and_a_scale():
    x = jnp.concatenate(
        [jnp.linspace(-3, 5, BLOCK), jnp.zeros(BLOCK), jnp.full(BLOCK, 1e-30)], dtype=jnp.float32
    )
    values, scales = quantized(x)
    assert values.dtype == jnp.int8
    assert scales.shape == (3,)
    error = np.abs(dequantized(values, scales) - x).reshape(3, BLOCK)
    assert (error.max(1) <= np.asarray(scales) / 2 * (1 + 1e-5)).all()
    assert error[0].max() > scales[0] / 3
    for bad in (jnp.inf, jnp.nan):
        _, scales = quantized(x.at[3].set(bad))
        assert np.isnan(scales[0])
        assert np.isfinite(scales[1:]).all()


@pytest.mark.slow
@pytest.mark.product(
    grid=((2, 2), (4, 2), (8, 2), (3, 3), (8, 4), (4, 1)), compression=(None, "bf16", "int8")
)
def test_means_that_are_exact(grid: tuple[int, int], compression: Any):
    """Integers up to 127, one of them in each block: what 8 bits, and bfloat16, can hold."""
    size, hosts = grid
    rng = np.random.default_rng(0)
    sums: dict[str, Any] = {
        "a": rng.integers(-127, 128, (3, 700)).astype(np.float32),
        "b": np.float32(127),
        "c": np.zeros((0, 4), np.float32),
        "d": rng.integers(-127, 128, 5),
    }
    sums["a"].reshape(-1)[::BLOCK] = 127
    sums["d"][0] = 127
    if compression is not None:
        sums["d"] = sums["d"].astype(np.float64)

    def parts(total: Any) -> Any:
        share = rng.integers(-1, 2, (size, *np.shape(total))).astype(np.asarray(total).dtype)
        # The sum of a host is a multiple of the number of ranks in 127ths of its largest value.
        return size * np.broadcast_to(total, share.shape).copy()

    grads = {name: parts(total) for name, total in sums.items()}
    for typed in (True, False):
        (mean,), _ = averaged(grads, size, compression, hosts, typed=typed)
        for name, total in sums.items():
            assert mean[name].dtype == (grads[name] / 1).dtype
            for row in np.asarray(mean[name]):
                np.testing.assert_array_equal(row, size * total)


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_how_much_is_lost(compression: Any):
    """At most half a step on each host, of what its ranks have together."""
    size, hosts = 8, 2
    grads = {"w": np.random.default_rng(0).normal(size=(size, 40, 50)).astype(np.float32)}
    exact = grads["w"].astype(np.float64).mean(0)
    (mean,), error = averaged(grads, size, compression, hosts)
    of_hosts = grads["w"].reshape(hosts, -1, 40, 50).sum(1) / size
    step = 2.0**-8 if compression == "bf16" else 1 / 127
    bound = sum(np.abs(of_host).max() for of_host in of_hosts) * step / 2
    lost = np.abs(np.asarray(mean["w"][0]) - exact).max()
    assert 0.1 * bound < lost < 1.001 * bound
    assert bool(error.size) == (compression == "int8")


def test_what_is_lost_comes_later():
    """The sum of many means is as near to that of the gradients as one mean is."""
    size, steps = 4, 40
    grads = {"w": np.random.default_rng(0).normal(size=(size, 1000)).astype(np.float32)}
    means, error = averaged(grads, size, "int8", 2, steps)
    total = sum(np.asarray(mean["w"][0], np.float64) for mean in means)
    exact = grads["w"].astype(np.float64).mean(0)
    one = np.abs(np.asarray(means[0]["w"][0]) - exact).max()
    assert np.abs(total - steps * exact).max() < 4 * one
    assert np.abs(np.asarray(error)).max() > 0


def test_what_is_not_finite_is_not_kept():
    grads = {"w": np.ones((4, 600), np.float32)}
    grads["w"][1, 5] = np.nan
    (mean,), error = averaged(grads, 4, "int8", 2)
    assert np.isnan(mean["w"][0, :BLOCK]).all()
    assert np.isfinite(mean["w"][0, BLOCK:]).all()
    assert np.isfinite(error).all()


def test_what_travels_between_hosts():
    """Eight bits a value, and a scale for 256 of them; all else stays on a host."""
    mesh = mesh_of(data=8)
    optimizer = synchronize("data", "int8", mesh=mesh, hosts=2)
    params = {"w": jnp.zeros(64 * BLOCK, jnp.float32)}
    state = optimizer.init(params)
    specs: Any = dataclasses.replace(state, error=jax.P("data"))
    mapped = jax.shard_map(
        optimizer.update, mesh=mesh, in_specs=(jax.P("data"), specs), out_specs=(jax.P(), specs)
    )
    grads = {"w": jnp.zeros((8 * 64 * BLOCK,), jnp.float32)}
    with jax.enable_x64(False):
        import jaxcoll

        with jaxcoll.using(backend="lax"):
            text = jax.jit(mapped).lower(grads, state).as_text()
    across = re.findall(r"all_gather.*?\[\[0, 4\].*?-> tensor<([^>]+)>", text, re.DOTALL)
    assert sorted(across) == ["2x16xf32", f"2x{16 * BLOCK}xi8"]


# ---- Training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("compression", [pytest.param(None, marks=pytest.mark.full), "int8"])
def test_under_other_transformations(name: str, compression: Any):
    data, mesh = batch(), mesh_of(data=4)
    optimizer = OPTIMIZERS[name](compression=compression, mesh=mesh, hosts=2)
    alone = OPTIMIZERS[name](compression=None, mesh=mesh_of(data=1))
    alone = alone.gradient_transformation() if isinstance(alone, optax.MultiSteps) else alone
    state = start(PLAIN, data, mesh, optimizer)
    states = [node for node in jax.tree.leaves(state.opt_state, is_leaf=is_state) if is_state(node)]
    assert {node.error.sharding.spec for node in states} == {jax.P("data")}
    assert all(bool(node.error.size) == (compression == "int8") for node in states)
    plain = start(PLAIN, data, mesh_of(data=1), alone)
    step = data_parallel_train_step(PLAIN)
    after, _ = train(step, state, data, mesh, state.specs)
    expected, _ = train(step, plain, data, mesh_of(data=1), plain.specs)
    if compression is None or name == "MultiSteps":
        assert_trained_as(after.params, expected.params)
        return
    first, wanted, got = (jax.device_get(s.params) for s in (plain, expected, after))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), wanted, first)
    lost = jax.tree.map(lambda a, b: np.abs(a - b).max(), wanted, got)
    pairs = zip(*map(jax.tree.leaves, (lost, moved)), strict=True)
    assert all(1e-5 * b < a < 0.05 * b for a, b in pairs)  # compressed, and not by much


def is_state(node: Any) -> bool:
    return isinstance(node, SynchronizeState)


@pytest.mark.slow
@pytest.mark.product(size=(1, 2, 3, 4, 8), accumulate=(1, 2))
def test_trains_as_on_one_device(size: int, accumulate: int):
    """In the step, whose own sum it replaces: nothing is summed twice."""
    data, mesh = batch(), mesh_of(data=size)
    optimizer = optax.chain(synchronize(mesh=mesh), SGD)
    state = start(PLAIN, data, mesh, optimizer)
    expected, _ = reference(PLAIN, jax.device_get(state.params), data, SGD)
    step = data_parallel_train_step(PLAIN, accumulate=accumulate)
    state, _ = train(step, state, data, mesh, state.specs)
    assert_trained_as(state.params, expected)


@pytest.mark.parametrize("typed", [True, False])
def test_leaves_that_it_leaves_out_are_summed_by_the_step(typed: bool):
    """Those of another optimizer: nothing averages them there."""
    data, mesh = batch(), mesh_of(data=4)
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "mean" if "kernel" in str(path) else "adam", start(PLAIN, data).params
    )

    def optimizer(first: Any) -> Any:
        return optax.partition({"mean": optax.chain(first, SGD), "adam": optax.adam(0.1)}, labels)

    state = start(PLAIN, data, mesh, optimizer(synchronize(mesh=mesh)))
    expected, _ = reference(PLAIN, jax.device_get(state.params), data, optimizer(optax.identity()))
    step = jax.jit(
        jax.shard_map(
            data_parallel_train_step(PLAIN),
            mesh=mesh,
            in_specs=(state.specs, jax.P("data")),
            out_specs=(state.specs, jax.P()),
            check_vma=typed,
        )
    )
    for _ in range(STEPS):
        state, _ = step(state, data)
    assert_copies_are_equal(state.params)
    assert_trained_as(state.params, expected)


BEFORE = {
    "clip": (
        optax.clip_by_global_norm(0.1),
        r"\['bias'\], .* before that \w+ in .* reads each rank's",
    ),
    "our clip": (
        clip_by_global_norm(0.1),
        r"\['bias'\], .* before that \w+ in .* reads each rank's",
    ),
    "momentum": (optax.trace(0.9), r"\['bias'\], .* before that the state keeps each rank's own"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_would_read_gradients_that_are_not_averaged_is_refused(name: str):
    before, text = BEFORE[name]
    data, mesh = batch(), mesh_of(data=4)
    state = start(PLAIN, data, mesh, optax.chain(before, synchronize(mesh=mesh), SGD))
    step = data_parallel_train_step(PLAIN)
    with pytest.raises(ValueError, match=text + r".*Put it first: optax\.chain\(jaxcoll"):
        train(step, state, data, mesh, state.specs)
    after = start(PLAIN, data, mesh, optax.chain(synchronize(mesh=mesh), before, SGD))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(after.specs, jax.P("data")), out_specs=(after.specs, jax.P())
    )
    jax.eval_shape(mapped, after, data)


def test_beside_tensor_parallelism():
    data, mesh = batch(), mesh_of(data=2, tensor=2)
    model = TPClassifier(num_classes=4, hidden=24, mesh=mesh)
    optimizer = optax.chain(synchronize(mesh=mesh), SGD)
    state = start(model, data, mesh, optimizer)
    plain = SimpleClassifier(num_classes=4, hidden=24)
    expected, _ = reference(plain, jax.device_get(state.params), data, SGD)
    state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    assert_trained_as(state.params, expected)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mask", [{"hidden": True}, lambda params: [True]])
def test_a_mask_of_another_structure(mask: Any, split: bool):
    """Also where parameters are split, and the optimizer is looked at before."""
    inner = optax.trace(0.9) if split else synchronize()
    model: Any = fully_shard(PLAIN, min_weight_size=1) if split else PLAIN
    text = (
        r"(?s)create_train_state: optimizer: its init refuses .* params\['hidden_layer'\]\['bias'\]"
        r", .*\. Masks and labels, .* must have the structure of the parameters"
    )
    with pytest.raises(ValueError, match=text):
        start(model, batch(), mesh_of(data=4), optax.chain(optax.masked(inner, mask), SGD))


def test_flattened_beside_parameters_that_are_split():
    """On one rank too, where a part is the whole: what belongs to which is not to be told."""
    optimizer = optax.flatten(optax.chain(synchronize(), SGD))
    model = TPClassifier(num_classes=4, hidden=24, mesh=mesh_of(data=4, tensor=2))
    with pytest.raises(ValueError, match=r"optimizer: .* not element by element: concatenate in"):
        start(model, batch(), mesh_of(data=4, tensor=2), optimizer)
    model = TPClassifier(num_classes=4, hidden=24, mesh=mesh_of(data=4, tensor=1))
    text = r"optimizer: parameters are split, .* as that of optax\.flatten does .* Leave that out"
    with pytest.raises(ValueError, match=text):
        start(model, batch(), mesh_of(data=4, tensor=1), optimizer)


# ---- Texts ---------------------------------------------------------------------------------------


def test_it_says_that_it_is_off_under_multi_steps(caplog: pytest.LogCaptureFixture):
    mesh = mesh_of(data=4)
    optimizer = OPTIMIZERS["MultiSteps"](compression="int8", mesh=mesh, hosts=2)
    with caplog.at_level(logging.WARNING, logger="jaxcoll"):
        start(PLAIN, batch(), mesh, optimizer)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "compression='int8' is off under optax.MultiSteps" in line
    assert "use accumulate= of the step instead, or put it before, optax.chain(" in line
    before = OPTIMIZERS["before MultiSteps"](compression="int8", mesh=mesh, hosts=2)
    caplog.clear()
    start(PLAIN, batch(), mesh, before)
    assert not caplog.records


def test_it_says_that_it_is_off(caplog: pytest.LogCaptureFixture):
    data, mesh = batch(), mesh_of(data=2)
    with caplog.at_level(logging.WARNING, logger="jaxcoll"):
        start(PLAIN, data, mesh, optax.chain(synchronize("data", "int8", mesh=mesh), SGD))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "optax.synchronize: compression='int8' is off: there is one process" in line


def test_errors():
    data, mesh = batch(), mesh_of(data=4)
    with pytest.raises(ValueError, match=r"optax.synchronize: compression: expected one of"):
        synchronize("data", "int4")
    with pytest.raises(ValueError, match=r"optax.synchronize: axis_name: 'dat' is not an axis"):
        synchronize("dat", mesh=mesh)
    with pytest.raises(TypeError, match=r"axis_name: expected the name of a mesh axis.* got None"):
        synchronize(cast("str", None))
    with pytest.raises(TypeError, match=r"optax.synchronize: mesh: expected .*Mesh, got str"):
        synchronize(mesh=cast("jax.sharding.Mesh", "data"))
    with pytest.raises(TypeError, match="hosts: expected a whole number, at least 1, got '2'"):
        synchronize("data", "int8", mesh=mesh, hosts=cast("int", "2"))
    with pytest.raises(
        ValueError, match=r"optimizer: optax.synchronize: axis_name: 'dat' .* which has \"data\""
    ):
        start(PLAIN, data, mesh, optax.chain(synchronize("dat"), SGD))
    with pytest.raises(ValueError, match=r"hosts: 4 ranks can't be on 3 hosts alike"):
        synchronize("data", "int8", mesh=mesh, hosts=3).init({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"synchronize averages whole gradients.*leave one of"):
        start(fully_shard(PLAIN), data, mesh, optax.chain(synchronize(mesh=mesh), SGD))
    several = optax.MultiSteps(optax.chain(synchronize(mesh=mesh), SGD), every_k_schedule=2)
    with pytest.raises(ValueError, match=r"synchronize averages whole gradients.*leave one of"):
        start(fully_shard(PLAIN), data, mesh, several)
    at_times = optax.apply_if_finite(optax.chain(synchronize(mesh=mesh), SGD), 3)
    with pytest.raises(ValueError, match=r"leaves it out at times, ApplyIfFiniteState.*outside"):
        start(PLAIN, data, mesh, at_times)
    both = mesh_of(data=2, tensor=2)
    model = TPClassifier(num_classes=4, hidden=24, mesh=both)
    halved = optax.chain(synchronize("data", "bf16", mesh=both, hosts=2), SGD)
    with pytest.raises(ValueError, match=r"'bf16' is for models whose parameters are on every"):
        start(model, data, both, halved)
    state = start(PLAIN, data, mesh, optax.chain(synchronize(("data",), mesh=mesh), SGD))
    other = mesh_of(replica=2, data=2)
    step, axes = data_parallel_train_step(PLAIN, axis_name=tuple(other.shape)), ("replica", "data")
    with pytest.raises(ValueError, match=r"averages over \('data',\), but the batch is split over"):
        train(step, jax.device_get(state), data, other, jax.P(), axes)
    with pytest.raises(NameError, match=r"optax.synchronize"):
        synchronize("data").update({"w": jnp.ones(3)}, synchronize("data").init({}))
    with pytest.raises(TypeError, match=r"expected floating-point gradients, got int64"):
        averaged({"w": np.ones((4, 3), int)}, 4, "int8", 2)
    other = synchronize("data", "int8", mesh=mesh_of(data=8), hosts=2)
    state = start(PLAIN, data, mesh_of(data=8), optax.chain(other, SGD))
    small = synchronize("data", "int8", mesh=mesh, hosts=2)
    step = data_parallel_train_step(PLAIN)
    state = jax.tree.map(lambda leaf: leaf, state)
    replaced = start(PLAIN, data, mesh, optax.chain(small, SGD))
    wrong = jax.tree.map(
        lambda node: dataclasses.replace(node, error=jnp.zeros(4)) if is_state(node) else node,
        replaced,
        is_leaf=is_state,
    )
    with pytest.raises(ValueError, match=r"its state has 1 values on each of 4 ranks, where 512"):
        train(step, wrong, data, mesh, replaced.specs)
