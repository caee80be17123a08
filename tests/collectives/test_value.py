"""Every op, on every number of ranks: NumPy's values, lax's values and types, one native call."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checks import assert_conforms, assert_same, auto_is_native, counted_calls, mesh
from helpers import OPS, SIZES, Op, blocks
from jax import lax


@pytest.mark.product(op=OPS, size=SIZES, check_vma=(True, False))
def test_values_and_types_are_those_of_numpy_and_lax(op: Op, size: int, check_vma: bool):
    xs = blocks(op, size)
    with counted_calls() as count:
        ys = assert_conforms(op, lambda f, x: f(x), mesh(size), xs, check_vma=check_vma)
    assert_same(ys, op.reference(xs))
    assert count.calls == (size if size > 1 and auto_is_native() else 0)


# Where the twin is made of several functions, its weak types are no model.
IN_LAX = [op for op in OPS if not op.name.endswith(("_prod", "_and", "_or", "_first", "_last"))]


@pytest.mark.product(op=IN_LAX, check_vma=(True, False))
def test_weak_types_are_those_of_lax(op: Op, check_vma: bool):
    def weakly(f: Any, x: Any) -> Any:
        weak = jnp.broadcast_to(jnp.asarray(3.0), x.shape)
        assert jax.typeof(weak).weak_type
        return jax.jit(lambda weak: f(lax.pcast(weak, "x", to="varying") if check_vma else weak))(
            weak
        )

    assert_conforms(op, weakly, mesh(2), check_vma=check_vma)


@pytest.mark.parametrize("op", [op for op in OPS if op.unvarying], ids=lambda op: op.name)
def test_unvarying_results_may_leave_the_map_unsharded(op: Op):
    xs = blocks(op, 4)
    leave = jax.shard_map(
        lambda x: op.ours(x[0], "x"), mesh=mesh(4), in_specs=jax.P("x"), out_specs=jax.P()
    )
    y = jax.jit(leave)(xs)
    assert y.sharding.is_fully_replicated
    assert_same(y, op.reference(xs)[0])
    for shard in y.addressable_shards:
        assert_same(shard.data, op.reference(xs)[0])


@pytest.mark.parametrize("op", [op for op in OPS if not op.unvarying], ids=lambda op: op.name)
def test_varying_results_may_not_leave_the_map_unsharded(op: Op):
    leave = jax.shard_map(
        lambda x: op.ours(x[0], "x"), mesh=mesh(4), in_specs=jax.P("x"), out_specs=jax.P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(leave, blocks(op, 4))
