"""Every family of training over meshes across processes: the parameters of training on one device.

Each process trains the model on one of its own devices as well, and compares its parts.
"""

import functools as ft
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from compared import PLAIN, assert_parts, check, check_plan, local
from flax import nnx
from jax import lax
from training import STEPS
from world import put, say

import jaxcoll
from jaxcoll import (
    DataParallel,
    DeviceMeshManager,
    DistributedMetrics,
    fully_shard,
    pipeline_parallel_train_step,
    reshard,
    shard_module_params,
    sync_gradients,
)
from jaxcoll.models import PPClassifier, TPClassifier

ADAM = optax.adamw(0.1)
WORLD = jax.device_count()


def meshes(first: str, second: str) -> list[Any]:
    """Returns the axes across processes and inside them, and the other way round."""
    processes, devices = jax.process_count(), jax.local_device_count()
    grid = np.array(jax.devices()).reshape(processes, devices)
    return [jax.sharding.Mesh(grid, (first, second)), jax.sharding.Mesh(grid.T, (first, second))]


def families() -> None:
    for across, mesh in zip(("processes", "devices"), meshes("data", "other"), strict=True):
        both = ("data", "other")
        check(PLAIN, mesh, f"data parallel, {across} first", axes=both)
    for mesh in meshes("replica", "shard"):
        for stage in (1, 2, 3):
            model = fully_shard(PLAIN, "shard", stage=stage, min_weight_size=16, bucket_bytes=1)
            check(
                model,
                mesh,
                f"stage {stage} on {dict(mesh.shape)}",
                axes=("replica", "shard"),
                optimizer=ADAM,
            )
    for mesh in meshes("data", "tensor"):
        for overlap in (False, True):
            model = TPClassifier(num_classes=4, hidden=24, overlap=overlap, mesh=mesh)
            check(model, mesh, f"tensor parallel on {dict(mesh.shape)}")
    for mesh in meshes("data", "pipe"):
        model = PPClassifier(num_classes=4, num_layers=4, width=12)
        step = pipeline_parallel_train_step(model, num_micro_batches=2)
        check(model, mesh, f"pipeline on {dict(mesh.shape)}", step=step)


PLANS = [
    ("linen", {"pipe": 2, "tensor": 2}, {"schedule": "interleaved", "num_micro_batches": 3}),
    ("linen", {"pipe": 2, "fsdp": 2}, {"schedule": "1f1b", "num_micro_batches": 3}),
    ("nnx", {"data": 2, "pipe": 2}, {"schedule": "interleaved", "num_micro_batches": 3}),
    ("nnx", {"fsdp": 2, "tensor": 2}, {}),
]


def products() -> None:
    for library, axes, options in PLANS:
        check_plan(library, axes, **options)


class Mlp(nn.Module):
    """Two dense layers, each by `dense`."""

    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.tanh(self.dense(24, name="first", param_dtype=jnp.float64)(x))
        return self.dense(8, name="second", param_dtype=jnp.float64)(x)


def five_functions() -> None:
    """xlstm-jax's functions together."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 16)), rng.normal(size=(48, 8))
    shard = ft.partial(shard_module_params, axis_name="data", min_weight_size=8)
    module, plain = Mlp(shard(nn.Dense)), Mlp()
    mesh = jaxcoll.make_mesh({"data": -1})

    def loss(module: Any, params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((module.apply({"params": params}, x) - y) ** 2)

    def run(x: Any, y: Any) -> Any:
        params = module.init(lax.pcast(jax.random.key(0), "data", to="varying"), x)["params"]
        for _ in range(STEPS):
            grads = jax.grad(lambda p: loss(module, p, x, y))(params)
            grads = sync_gradients(grads, ("data",))
            params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
        whole = jaxcoll.gather_params(params, "data")
        return jax.tree.map(lambda leaf: leaf[None], whole)

    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    whole = mapped(*DataParallel().shard_batch((x, y), sharding, batch_is_global=True))

    params = plain.init(local(jax.random.key(0)), x)["params"]
    for _ in range(STEPS):
        grads = jax.grad(lambda p: loss(plain, p, x, y))(params)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * WORLD), params)
    assert_parts(nn.unbox(whole), stacked, "the five functions")


def placement() -> None:
    """Batches and states over all processes."""
    mesh = jaxcoll.make_mesh({"data": -1})
    manager = DataParallel()
    sharding = manager.create_data_parallel_sharding(mesh)
    share = 2 * jax.local_device_count()
    mine = np.arange(share) + share * jax.process_index()
    sharded = manager.shard_batch({"x": mine}, sharding)["x"]
    assert sharded.shape == (2 * WORLD,)
    assert_parts(sharded, np.arange(2 * WORLD), "a share each")
    whole = manager.shard_batch(np.arange(2 * WORLD), sharding, batch_is_global=True)
    assert_parts(whole, np.arange(2 * WORLD), "the whole batch from each")

    params = {"w": np.arange(WORLD * 8.0).reshape(WORLD * 2, 4), "b": np.ones(3)}
    state = manager.shard_model_state(params, mesh, "shard")
    assert_parts(state, params, "a state")
    back = reshard(state, jax.P(), mesh=mesh)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(back))
    assert_parts(back, params, "a state that was resharded")


def reductions() -> None:
    """Metrics and gradients, over a mesh of the manager's."""
    mesh = DeviceMeshManager().create_data_parallel_mesh()
    metrics, manager = DistributedMetrics(), DataParallel()

    def body(x: Any) -> Any:
        tree = {"loss": x[0], "per class": x * jnp.ones(3)}
        return {
            "mean": metrics.reduce_mean(tree, "data"),
            "sum": metrics.reduce_sum(tree, "data"),
            "max": metrics.reduce_max(tree, "data"),
            "min": metrics.reduce_min(tree, "data"),
            "custom": metrics.reduce_custom(tree, {"loss": "max", "per class": "max"}, "data"),
            "gradients": manager.all_reduce_gradients(tree, reduce_type="sum", axis_name="data"),
            "gathered": metrics.all_gather(tree, "data")["loss"],
        }

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False
    )
    ranks = np.arange(1.0, WORLD + 1)
    found = jax.jit(mapped)(put(ranks, mesh))
    expected = {name: getattr(np, name)(ranks) for name in ("mean", "sum", "max", "min")}
    expected |= {"custom": ranks.max(), "gradients": ranks.sum()}
    for name, value in expected.items():
        assert_parts(found[name], {"loss": value, "per class": np.full(3, value)}, name)
    assert_parts(found["gathered"], ranks, "all_gather")
    collected = metrics.collect_from_devices({"loss": put(ranks, mesh), "step": 3})
    assert collected == {"loss": list(ranks), "step": 3}


def sharded_linear() -> None:
    """A layer split over processes trains as the whole one does."""
    mesh = meshes("data", "model")[1]  # "model" across processes
    x, y = np.random.default_rng(0).normal(size=(2, 8, 8))
    layer = jaxcoll.ShardedLinear(8, 8, rngs=nnx.Rngs(0), mesh=mesh)
    wide = jax.tree.map(lambda p: p.astype(jnp.float64), nnx.state(layer, nnx.Param))
    nnx.update(layer, wide)
    weight = np.random.default_rng(1).normal(size=(8, 8))
    spec = jax.P(None, "model")
    split = jax.make_array_from_callback(
        (8, 8), jax.NamedSharding(mesh, spec), lambda index: weight[index]
    )
    layer.weight[...] = split
    assert split.sharding.shard_shape(split.shape) == (8, 8 // jax.process_count())

    @nnx.jit
    def step(layer: Any, x: Any, y: Any) -> None:
        grads = nnx.grad(lambda layer: jnp.mean((layer(x) - y) ** 2))(layer)
        new = jax.tree.map(lambda p, g: p - 0.3 * g, nnx.state(layer, nnx.Param), grads)
        nnx.update(layer, new)

    bias = np.zeros(8)
    for _ in range(STEPS):
        step(layer, x, y)
        error = 2 * (x @ weight + bias - y) / y.size
        weight, bias = weight - 0.3 * x.T @ error, bias - 0.3 * error.sum(axis=0)
    assert layer.weight[...].sharding.spec == spec
    assert_parts(layer.weight[...], weight, "the weight of a layer that is split")


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    families()
    products()
    five_functions()
    placement()
    reductions()
    sharded_linear()
    say("all families are right")


main()
