"""Derivatives of every op: those of its twin, and those of the program on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_conforms, assert_same, mapped, mesh
from helpers import DIFFERENTIABLE, EXAMPLES, OPS, Op, blocks
from programs import DERIVATIVES, Function, vjp, weights

import jaxcoll

NOT_DIFFERENTIABLE = [op for op in OPS if not op.differentiable]


@pytest.mark.product(
    op=DIFFERENTIABLE, program=list(DERIVATIVES), check_vma=(True, False), size=(1, 2, 3, 4)
)
def test_derivatives_are_those_of_lax(op: Op, program: str, check_vma: bool, size: int):
    def derivatives(f: Function, x: Any) -> Any:
        return {derivative.__name__: derivative(f, x) for derivative in DERIVATIVES[program]}

    assert_conforms(
        op,
        derivatives,
        mesh(size),
        blocks(op, size, np.float64),
        check_vma=check_vma,
        smooth=True,
        rtol=1e-12,
    )


@pytest.mark.product(
    op=[op for op in DIFFERENTIABLE if op.name[11:] not in ("max", "min")], check_vma=(True, False)
)
def test_derivatives_of_complex_numbers(op: Op, check_vma: bool):
    xs = blocks(op, 3, np.complex128)
    assert_conforms(op, vjp, mesh(3), xs, check_vma=check_vma, smooth=True, rtol=1e-12)


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check_vma"])
@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_results_that_the_loss_does_not_read(op: Op, check_vma: bool):
    """One leaf of a tree, or the whole call, has no cotangent at all."""
    ours = op.over("x")["ours"]
    xs = blocks(op, 2, np.float64)

    def slopes(x: Any) -> Any:
        def loss(tree: Any) -> Any:
            ours(tree["c"])
            return (ours({"a": tree["a"], "b": tree["b"]})["a"] ** 2).sum()

        alone = jax.grad(lambda x: (ours(x) ** 2).sum())(x)
        return jax.grad(loss)({"a": x, "b": x + 1, "c": x + 2}), alone

    got, alone = jax.jit(mapped(slopes, mesh(2), check_vma=check_vma))(xs)
    assert_same(got, {"a": alone, "b": np.zeros_like(xs), "c": np.zeros_like(xs)})


@pytest.mark.product(op=DIFFERENTIABLE)
def test_derivatives_around_the_map_are_those_of_one_device(op: Op):
    def total(f: Function) -> Function:
        def compute(xs: Any) -> Any:
            ys = f(xs)
            return (ys * ys * weights(ys)).sum()

        return compute

    xs = blocks(op, 3, np.float64)
    on_mesh = mapped(op.over("x")["ours"], mesh(3))
    on_one = jax.vmap(op.over("batch", smooth=True)["twin"], axis_name="batch")
    if op.name == "ppermute_partial":  # lax has no rule for it under vmap

        def on_one(xs: Any) -> Any:
            return jnp.concatenate([jnp.zeros_like(xs[:1]), xs[:-1]])

    assert_same(
        jax.jit(jax.grad(total(on_mesh)))(xs), jax.jit(jax.grad(total(on_one)))(xs), rtol=1e-12
    )


@pytest.mark.parametrize("extremum", ["max", "min"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check_vma"])
def test_ties_share_the_cotangent_of_an_extremum(extremum: str, check_vma: bool):
    sign = 1 if extremum == "max" else -1
    xs = sign * np.array([[5.0, 1.0, 2.0, 0.0], [5.0, 4.0, 2.0, 0.0], [3.0, 4.0, 2.0, 1.0]])
    op = next(op for op in OPS if op.name == f"all_reduce_{extremum}")
    cotangent = np.array([6.0, 12.0, 18.0, 24.0])

    def pull(x: Any) -> Any:
        y, pull = jax.vjp(op.over("x")["ours"], x)
        return pull(jnp.asarray(cotangent) + 0 * y)[0]

    gradient = jax.jit(mapped(pull, mesh(3), check_vma=check_vma))(xs)
    # Where axes are not typed, every rank has a cotangent of its own, as with lax.psum.
    scale = 1 if check_vma else 3
    want = np.array([[3.0, 0.0, 6.0, 0.0], [3.0, 6.0, 6.0, 0.0], [0.0, 6.0, 6.0, 24.0]])
    assert_same(gradient, scale * want)


@pytest.mark.parametrize("op", NOT_DIFFERENTIABLE, ids=lambda op: op.name)
def test_ops_without_derivative_say_so(op: Op):
    reduction = op.name.removeprefix("all_reduce_")
    xs = blocks(op, 2)
    if xs.dtype.kind != "f":  # integers have no tangents to begin with
        tangents = np.zeros(xs.shape, jax.dtypes.float0)
        on_mesh = mapped(op.over("x")["ours"], mesh(2))
        _, t = jax.jvp(on_mesh, (xs,), (tangents,))
        assert t.dtype == jax.dtypes.float0
        return
    with pytest.raises(NotImplementedError, match=rf'op="{reduction}".* has no derivative.*"max"'):
        jax.jit(jax.grad(lambda xs: mapped(op.over("x")["ours"], mesh(2))(xs).sum()))(xs)


def test_integers_travel_beside_floats_without_gradient():
    tree = {"f": np.arange(6.0).reshape(2, 3), "i": np.arange(6).reshape(2, 3)}

    def slope(tree: Any) -> Any:
        def total(f: Any) -> Any:
            reduced = jaxcoll.all_reduce({**tree, "f": f}, "x")
            return (reduced["f"] * reduced["i"].astype(f.dtype)).sum()

        return jax.grad(total)(tree["f"])

    gradient = jax.jit(mapped(slope, mesh(2)))(tree)
    assert_same(gradient, np.stack([tree["i"].sum(axis=0)] * 2).astype(np.float64))
