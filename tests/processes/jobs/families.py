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
from jax import lax
from training import STEPS
from world import put, say

import jaxcoll
from jaxcoll import (
    DataParallel,
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
    """Batches, states and metrics over all processes."""
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

    metrics = jax.jit(
        jax.shard_map(
            lambda x: DistributedMetrics().reduce_mean({"loss": x.mean()}, "data"),
            mesh=mesh,
            in_specs=jax.P("data"),
            out_specs=jax.P(),
        )
    )(put(np.arange(WORLD * 1.0), mesh))
    assert float(metrics["loss"]) == (WORLD - 1) / 2


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    families()
    products()
    five_functions()
    placement()
    say("all families are right")


main()
