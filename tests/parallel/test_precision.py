"""`MixedPrecisionPolicy`: the dtypes of computing, of communication, and of what is kept."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equations import equations
from flax import nnx
from jax import lax
from training import mesh_of, start

from jaxcoll import (
    ColumnParallelDense,
    MixedPrecisionPolicy,
    data_parallel_train_step,
    fully_shard,
)

# Small integers: their sums are exact in bfloat16, too. No activations have a parameter's shape.
INPUTS = np.arange(64 * 8, dtype=np.float32).reshape(64, 8) % 3
DATA = (INPUTS, np.zeros(64, np.int32))
seen: dict[str, Any] = {}


def init(rng: Any, x: Any) -> Any:
    del rng, x
    return {"w": jnp.full((8, 4), 1 / 3), "small": jnp.ones(4)}


def apply(params: Any, x: Any) -> Any:
    return scaled(x @ params["w"], params["w"], params["small"], x)


def scaled(y: Any, w: Any, small: Any, x: Any) -> Any:
    seen.update(w=w.dtype, small=small.dtype, inputs=x.dtype)
    return y * small


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", nn.initializers.constant(1 / 3), (8, 4))
        return scaled(x @ w, w, self.param("small", nn.initializers.ones, (4,)), x)


class OfNnx(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.full((8, 4), 1 / 3))
        self.small = nnx.Param(jnp.ones(4))

    def __call__(self, x: Any) -> Any:
        return scaled(x @ self.w[...], self.w[...], self.small[...], x)


class InTensorParallel(nn.Module):
    mesh: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = ColumnParallelDense(
            4,
            use_bias=False,
            kernel_init=nn.initializers.constant(1 / 3),
            gather_output=True,
            mesh=self.mesh,
        )(x)
        # The result has the dtype of both operands.
        return scaled(y, y, self.param("small", nn.initializers.ones, (4,)), x)


def init_layers(rng: Any, x: Any) -> Any:
    return init(rng, x) | {"w": jnp.full((2, 8, 4), 1 / 3)}


def scan(params: Any, x: Any) -> Any:
    def layer(y: Any, w: Any) -> Any:
        return scaled(x @ w, w, params["small"], x) + y, None

    zeros = jnp.zeros((x.shape[0], 4), params["w"].dtype) * x[:, :1]
    return lax.scan(layer, zeros, params["w"])[0]


FORMS = {
    "pair": lambda mesh: (init, apply),
    "linen": lambda mesh: OfLinen(),
    "nnx": lambda mesh: OfNnx(),
    "scan": lambda mesh: (init_layers, scan),
    "tensor": InTensorParallel,
}


def loss_fn(outputs: Any, batch: Any) -> Any:
    seen.update(outputs=outputs.dtype)
    return outputs.astype(jnp.float32).sum(), batch[0].shape[0]


def one_step(stage: Any, policy: MixedPrecisionPolicy | None, form: str = "pair") -> Any:
    """Returns the state before and after a step of SGD, on 2 x 2 ranks, and the program's text."""
    mesh, axes = mesh_of(replica=2, data=2, tensor=1 + (form == "tensor")), ("replica", "data")
    model = fully_shard(FORMS[form](mesh), stage=stage, min_weight_size=8, mp_policy=policy)
    state = start(model, DATA, mesh, optax.sgd(1.0))
    step = jax.shard_map(
        data_parallel_train_step(model, loss_fn=loss_fn, axis_name=axes),
        mesh=mesh,
        in_specs=(state.specs, jax.P(axes)),
        out_specs=(state.specs, jax.P()),
    )
    return state, jax.jit(step)(state, DATA)[0], str(jax.make_jaxpr(step)(state, DATA))


def dtypes_of(primitives: str, text: str) -> set[str]:
    """Returns the dtypes of the large parameter and its parts that go through some primitives."""
    shape = r"\[(?:2,)?[248],[24]\]"
    return set(re.findall(rf"(\w+){shape}[^=\n]* = (?:{primitives})\[", text))


def largest(tree: Any) -> Any:
    return max(jax.tree.leaves(tree), key=lambda leaf: leaf.size)


@pytest.mark.product(form=tuple(FORMS), stage=(1, 2, 3), reduce_dtype=(None, "float32", "bfloat16"))
def test_where_each_dtype_is(form: str, stage: Any, reduce_dtype: Any):
    policy = MixedPrecisionPolicy("bfloat16", reduce_dtype, "float32")
    before, after, text = one_step(stage, policy, form)
    assert seen == {"w": jnp.bfloat16, "small": jnp.bfloat16, "inputs": jnp.bfloat16} | {
        "outputs": jnp.float32
    }
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {np.dtype(np.float32)}
    gathered = dtypes_of("all_gather|all_gather_invariant", text)
    assert gathered == ({"bf16"} if stage == 3 else {"f32"})
    reduced = dtypes_of("psum|psum_invariant|all_reduce|reduce_scatter", text)
    halves = reduce_dtype == "bfloat16"
    if stage == 3 and reduce_dtype is None:
        assert reduced == {"bf16", "f32"}  # the parts' sums over replicas are in float32
    else:
        assert reduced == ({"bf16"} if halves else {"f32"})
    # The sums are exact, and rounded nowhere; the parameters are not rounded either.
    gradient = np.repeat(INPUTS.sum(0)[:, None], 4, 1) / 64
    w = largest(after.params)
    np.testing.assert_array_equal(w, np.broadcast_to(np.float32(1 / 3) - gradient, w.shape))
    np.testing.assert_array_equal(largest(before.params), np.float32(1 / 3))


def test_a_layer_of_a_scan_at_a_time():
    """As stage 2 sums its gradients, which no pair of values above brings about in 16 bits."""
    test_where_each_dtype_is("scan", 2, "bfloat16")


@pytest.mark.parametrize(("stage", "stacked"), [(2, True), (3, True), (3, False)])
def test_gradients_of_one_parameter_are_added_in_float32(stage: Any, stacked: bool):
    """Not in the 16 bits in which its parts travel, as its two uses have them."""

    def init(rng: Any, x: Any) -> Any:
        del rng, x
        return dict.fromkeys(("w", "other"), jnp.zeros((2, 8, 4) if stacked else (8, 4)))

    def through(x: Any, w: Any) -> Any:
        return lax.scan(lambda y, w: (y + x @ w, None), 0 * x[:, :4], w)[0] if stacked else x @ w

    def apply(params: Any, x: Any) -> Any:
        w = params["w"]
        return through(x, w) + through(x, params["other"]) + through(2 * x, w)

    policy, mesh = MixedPrecisionPolicy(reduce_dtype="bfloat16"), mesh_of(data=2)
    model = fully_shard(
        (init, apply), stage=stage, min_weight_size=8, mp_policy=policy, bucket_bytes=1
    )
    state = start(model, DATA, mesh, optax.sgd(1.0))
    step = jax.shard_map(
        data_parallel_train_step(model, loss_fn=loss_fn),
        mesh=mesh,
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
    )
    # Of the program: XLA may add in more bits than it says.
    added = equations(jax.make_jaxpr(step)(state, DATA).jaxpr, "add", "add_any")
    assert "bfloat16" not in {str(each.outvars[0].aval.dtype) for each in added}


def test_inputs_that_are_not_cast():
    one_step(3, MixedPrecisionPolicy("bfloat16", cast_forward_inputs=False))
    assert seen["inputs"] == jnp.float32
    assert seen["w"] == jnp.bfloat16


def test_without_a_policy_nothing_is_cast():
    _, _, text = one_step(3, None)
    assert set(map(str, seen.values())) == {"float32"}
    assert "bf16" not in text


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_precision_does_not_overflow(stage: Any):
    """Gradients of sums over 100,000 examples would, were they not taken of a mean."""
    data = (np.ones((200_000, 8), np.float32), np.zeros(200_000, np.int32))
    mesh = mesh_of(data=2)
    policy = MixedPrecisionPolicy("float16", output_dtype="float32")
    model = fully_shard((init, apply), stage=stage, min_weight_size=8, mp_policy=policy)
    state = start(model, data, mesh, optax.sgd(1.0))
    step = jax.shard_map(
        data_parallel_train_step(model, loss_fn=loss_fn),
        mesh=mesh,
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
    )
    after, _ = jax.jit(step)(state, data)
    np.testing.assert_allclose(after.params["w"], 1 / 3 - 1, rtol=1e-2)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_differ_between_ranks(stage: Any):
    """All ranks divide by the same, also while they differentiate, or parts would not fit."""
    weights = np.zeros(64, np.float32)
    weights[[0, 40, 50]] = 1, 2, 1
    data = {"inputs": INPUTS, "weights": weights}

    def weighted(outputs: Any, batch: Any) -> Any:
        return (outputs.sum(1) * batch["weights"]).sum(), batch["weights"].sum()

    mesh = mesh_of(data=4)
    policy = MixedPrecisionPolicy("bfloat16", "float32", "float32")
    model = fully_shard((init, apply), stage=stage, min_weight_size=8, mp_policy=policy)
    state = start(model, data, mesh, optax.sgd(1.0))
    step = jax.shard_map(
        data_parallel_train_step(model, loss_fn=weighted),
        mesh=mesh,
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
    )
    after, _ = jax.jit(step)(state, data)
    gradient = np.repeat((INPUTS * weights[:, None]).sum(0)[:, None], 4, 1) / 4
    np.testing.assert_array_equal(after.params["w"], np.float32(1 / 3) - gradient)


def test_errors():
    with pytest.raises(TypeError, match="MixedPrecisionPolicy: param_dtype: expected a dtype, got"):
        MixedPrecisionPolicy("halves")
    with pytest.raises(ValueError, match="output_dtype: expected a floating-point dtype, got int8"):
        MixedPrecisionPolicy(output_dtype=np.int8)
    with pytest.raises(ValueError, match=r"reduce_dtype: float16 can't hold sums.*use bfloat16"):
        MixedPrecisionPolicy(reduce_dtype=jnp.float16)
    with pytest.raises(TypeError, match=r"mp_policy: expected a jaxcoll.MixedPrecisionPolicy"):
        fully_shard((init, apply), mp_policy=jnp.bfloat16)
