"""Every op under `jax.vmap`: over a batched operand, over its own axis, and over both."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, auto_is_native, counted_calls, mapped, mesh
from helpers import EXAMPLES, OPS, Op, blocks

BATCH = 3


def batches(op: Op, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns operands (ranks, batch, ...) and what `op` makes of each batch element."""
    xs = blocks(op, size)
    batch = [xs, np.flip(xs, axis=0), np.flip(xs, axis=1)]
    return np.stack(batch, axis=1), np.stack([op.reference(x) for x in batch], axis=1)


@pytest.mark.alike
@pytest.mark.product(op=OPS, size=(1, 3, 4), check_vma=(True, False))
def test_over_a_batched_operand(op: Op, size: int, check_vma: bool):
    xs, ys = batches(op, size)
    dims = (0, 1, xs.ndim - 2)

    def vmap_over_every_dimension(x: Any) -> Any:
        f = op.over("x")["ours"]
        by_dim = [jax.vmap(f, in_axes=dim)(jnp.moveaxis(x, 0, dim)) for dim in dims]
        return by_dim, jax.vmap(f, out_axes=-1)(x)

    f = jax.jit(mapped(vmap_over_every_dimension, mesh(size), check_vma=check_vma))
    with counted_calls() as count:
        by_dim, into_last = jax.block_until_ready(f(xs))
    for y in by_dim:
        assert_same(y, ys)
    assert_same(into_last, np.moveaxis(ys, 1, -1))
    # A batch is one call.
    assert count.calls == (size * (len(dims) + 1) if size > 1 and auto_is_native() else 0)


@pytest.mark.alike
@pytest.mark.product(op=OPS, check_vma=(True, False))
def test_over_a_batch_of_batches_under_a_name(op: Op, check_vma: bool):
    xs, ys = batches(op, 2)

    def vmap_twice(x: Any) -> Any:
        inner = jax.vmap(op.over("x")["ours"], in_axes=-1)
        return jax.vmap(inner, axis_name="batch")(jnp.moveaxis(jnp.stack([x, x]), 1, -1))

    results = jax.jit(mapped(vmap_twice, mesh(2), check_vma=check_vma))(xs)
    assert_same(results, np.stack([ys, ys], axis=1))


@pytest.mark.product(op=OPS, check_vma=(True, False))
def test_around_the_map(op: Op, check_vma: bool):
    xs, ys = batches(op, 4)
    ours = mapped(op.over("x")["ours"], mesh(4), check_vma=check_vma)
    assert_same(jax.jit(jax.vmap(ours, in_axes=1, out_axes=1))(xs), ys)


@pytest.mark.product(op=OPS, size=(1, 3))
def test_over_the_axis_of_the_op_without_a_mesh(op: Op, size: int):
    xs = blocks(op, size)
    ours, twin = op.over("batch").values()
    if op.name == "ppermute_partial":
        with pytest.raises(NotImplementedError, match=r'whole permutation, because "batch" is'):
            jax.vmap(ours, axis_name="batch")(xs)
        return
    results = jax.jit(lambda xs: [jax.vmap(f, axis_name="batch")(xs) for f in (ours, twin)])(xs)
    assert_same(*results)
    assert_same(results[0], op.reference(xs))


def over_mesh_and_batch(op: Op, axes: tuple[str, str]) -> tuple[Any, Any, Any]:
    """Returns the function of a device, and operands and results as (device, batch, ...)."""
    xs = blocks(op, 8)
    ys = op.reference(xs)
    if axes == ("x", "batch"):
        xs, ys = (a.reshape(4, 2, *a.shape[1:]) for a in (xs, ys))
    else:
        xs, ys = (a.reshape(2, 4, *a.shape[1:]).swapaxes(0, 1) for a in (xs, ys))
    return jax.vmap(op.over(axes)["ours"], axis_name="batch"), xs, ys


TUPLES = (("x", "batch"), ("batch", "x"))


@pytest.mark.alike
@pytest.mark.product(op=OPS, axes=TUPLES)
def test_over_one_axis_of_a_tuple(op: Op, axes: tuple[str, str]):
    f, xs, ys = over_mesh_and_batch(op, axes)
    ours = jax.jit(mapped(f, mesh(4), check_vma=False))
    if op.name.startswith(("all_gather", "reduce_scatter", "ppermute")):
        # Where lax gives up, ours may not go on with a wrong result.
        with pytest.raises((AssertionError, NotImplementedError, ValueError)):
            ours(xs)
    else:
        assert_same(ours(xs), ys)


@pytest.mark.parametrize("axes", [("x", "batch"), "batch"], ids=str)
@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_a_vmapped_axis_can_not_be_typed(op: Op, axes: Any):
    f, xs, _ = over_mesh_and_batch(op, ("x", "batch"))
    f = jax.vmap(op.over(axes)["ours"], axis_name="batch")
    with pytest.raises(NotImplementedError, match=r'"batch" .* jax.vmap .* check_vma=False'):
        jax.eval_shape(mapped(f, mesh(4), check_vma=True), xs)
