"""`MixedPrecisionPolicy`: the dtypes of computing, of communication, and of what is kept."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training import mesh_of, start

from jaxcoll import MixedPrecisionPolicy, data_parallel_train_step, fully_shard

# Small integers: their sums are exact in bfloat16, too.
INPUTS = np.arange(64, dtype=np.float32).reshape(8, 8) % 3
DATA = (INPUTS, np.zeros(8, np.int32))
seen: dict[str, Any] = {}


def init(rng: Any, x: Any) -> Any:
    del rng, x
    return {"w": jnp.full((8, 4), 1 / 3), "small": jnp.ones(4)}


def apply(params: Any, x: Any) -> Any:
    seen.update(w=params["w"].dtype, small=params["small"].dtype, inputs=x.dtype)
    return x @ params["w"] * params["small"]


def loss_fn(outputs: Any, batch: Any) -> Any:
    seen.update(outputs=outputs.dtype)
    return outputs.astype(jnp.float32).sum(), batch[0].shape[0]


def one_step(stage: Any, policy: MixedPrecisionPolicy | None) -> Any:
    """Returns the state before and after a step of SGD, on 2 x 2 ranks, and the program's text."""
    mesh, axes = mesh_of(replica=2, data=2), ("replica", "data")
    model = fully_shard((init, apply), stage=stage, min_weight_size=8, mp_policy=policy)
    state = start(model, DATA, mesh, optax.sgd(1.0))
    step = jax.shard_map(
        data_parallel_train_step(model, loss_fn=loss_fn, axis_name=axes),
        mesh=mesh,
        in_specs=(state.specs, jax.P(axes)),
        out_specs=(state.specs, jax.P()),
    )
    return state, jax.jit(step)(state, DATA)[0], str(jax.make_jaxpr(step)(state, DATA))


def dtypes_of(primitives: str, text: str) -> set[str]:
    """Returns the dtypes of the large arrays that go through some primitives."""
    return set(re.findall(rf"(\w+)\[[248],4\][^=\n]* = (?:{primitives})\[", text))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("reduce_dtype", [None, "float32", "bfloat16"])
def test_where_each_dtype_is(stage: Any, reduce_dtype: Any):
    policy = MixedPrecisionPolicy("bfloat16", reduce_dtype, "float32")
    before, after, text = one_step(stage, policy)
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
    gradient = np.repeat(INPUTS.sum(0)[:, None], 4, 1) / 8
    np.testing.assert_array_equal(after.params["w"], np.float32(1 / 3) - gradient)
    np.testing.assert_array_equal(before.params["w"], np.float32(1 / 3))


def test_inputs_that_are_not_cast():
    one_step(3, MixedPrecisionPolicy("bfloat16", cast_forward_inputs=False))
    assert seen["inputs"] == jnp.float32
    assert seen["w"] == jnp.bfloat16


def test_without_a_policy_nothing_is_cast():
    _, _, text = one_step(3, None)
    assert set(map(str, seen.values())) == {"float32"}
    assert "bf16" not in text


def test_half_precision_does_not_overflow():
    """Gradients of sums over 40,000 examples would, were they not taken of a mean."""
    data = (np.ones((40_000, 8), np.float32), np.zeros(40_000, np.int32))
    mesh = mesh_of(data=2)
    policy = MixedPrecisionPolicy("float16", output_dtype="float32")
    model = fully_shard((init, apply), min_weight_size=8, mp_policy=policy)
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
    weights = np.array([1.0, 0, 0, 0, 2, 1, 0, 0], np.float32)
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
