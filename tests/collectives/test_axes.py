"""Several axes, some of them, and groups of indices."""

from typing import Any

import jax
import numpy as np
import pytest
from checks import (
    assert_conforms,
    assert_same,
    auto_is_native,
    counted_calls,
    mapped,
    mesh,
    type_of,
)
from helpers import BY_NAME, EXAMPLES, GROUPED, OPS, Op, blocks
from jax import lax

import jaxcoll

ALL_REDUCES = [op for op in OPS if op.name.startswith("all_reduce")]


def on_mesh(stacked: np.ndarray, axes: tuple[str, ...], sizes: tuple[int, int]) -> np.ndarray:
    """Sorts what is stacked by rank on `axes` by device of an ("x", "y") mesh."""
    if axes == ("y", "x"):
        x_size, y_size = sizes
        blocks_yx = stacked.reshape(y_size, x_size, *stacked.shape[1:])
        return blocks_yx.swapaxes(0, 1).reshape(stacked.shape)
    return stacked


@pytest.mark.product(
    op=OPS, axes=[("x", "y"), ("y", "x")], sizes=[(2, 4), (1, 3)], check_vma=(True, False)
)
def test_over_two_axes_in_either_order(
    op: Op, axes: tuple[str, str], sizes: tuple[int, int], check_vma: bool
):
    if axes == ("y", "x") and op.name.startswith("ppermute"):
        pytest.skip("lax counts along the mesh, not the tuple, or refuses")
    size = sizes[0] * sizes[1]
    xs = blocks(op, size)
    sorted_xs = on_mesh(xs, axes, sizes)
    with counted_calls() as count:
        ys = assert_conforms(
            op, lambda f, x: f(x), mesh(*sizes), sorted_xs, axis=axes, check_vma=check_vma
        )
    assert count.calls == (size if auto_is_native() else 0)
    assert_same(ys, on_mesh(op.reference(xs), axes, sizes))


def test_a_permutation_in_another_order_of_axes_is_what_lax_makes_of_it():
    """It counts along the mesh, not along the tuple; newer versions refuse."""
    op = BY_NAME["ppermute_ring"]
    ours, twin = (jax.jit(mapped(f, mesh(2, 4))) for f in op.over(("y", "x")).values())
    xs = blocks(op, 8)
    try:
        expected = twin(xs)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="same order"):
            ours(xs)
    else:
        assert_same(ours(xs), expected)


@pytest.mark.product(op=OPS, axis=["x", ("y",)], sizes=[(2, 4), (2, 3)], check_vma=(True, False))
def test_over_one_axis_of_a_mesh(op: Op, axis: Any, sizes: tuple[int, int], check_vma: bool):
    dim = "xy".index(axis[0])
    rows = [np.roll(blocks(op, sizes[dim]), i, axis=-1) for i in range(sizes[1 - dim])]
    xs, ys = np.stack(rows), np.stack([op.reference(row) for row in rows])
    if dim == 0:
        xs, ys = xs.swapaxes(0, 1), ys.swapaxes(0, 1)
    xs, ys = (a.reshape(-1, *a.shape[2:]) for a in (xs, ys))
    results = assert_conforms(
        op, lambda f, x: f(x), mesh(*sizes), xs, axis=axis, check_vma=check_vma
    )
    assert_same(results, ys)


def test_over_two_of_three_axes():
    xs = np.arange(16.0).reshape(8, 2)

    def over(axes: Any) -> Any:
        return jax.jit(mapped(lambda x: jaxcoll.all_gather(x, axes), mesh(2, 2, 2)))(xs)

    cube = xs.reshape(2, 2, 2, 2)
    for x, y, z in np.ndindex(2, 2, 2):
        device = 4 * x + 2 * y + z
        assert_same(over(("z", "x"))[device], cube[:, y, :].swapaxes(0, 1).reshape(4, 2))
        assert_same(over(("x", "z"))[device], cube[:, y, :].reshape(4, 2))


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ("x", "batch"), ("batch", "x")], ids=str)
def test_every_root_of_two_axes(axes: tuple[str, str]):
    xs = np.arange(6)
    check_vma = "batch" not in axes

    def from_each_root(x: Any) -> Any:
        return [jaxcoll.broadcast(x, axes, root=root) for root in range(6)]

    if check_vma:
        f, stacked = mapped(from_each_root, mesh(2, 3)), on_mesh(xs, axes, (2, 3))
    else:
        over_batch = jax.vmap(from_each_root, axis_name="batch")
        f = mapped(over_batch, mesh(2), check_vma=False)
        stacked = xs.reshape(2, 3) if axes[0] == "x" else xs.reshape(3, 2).T
    for root, y in enumerate(jax.jit(f)(stacked)):
        assert_same(y, np.full(stacked.shape, root))


GROUPS = {
    "pairs": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "strided": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "reversed": [[3, 2, 1, 0], [7, 6, 5, 4]],
    "singles": [[i] for i in range(8)],
}


def by_groups(op: Op, groups: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns operands of all ranks and what `op` makes of each group."""
    xs = np.concatenate([blocks(op, len(groups[0]))] * len(groups))
    ys = {}
    for group in groups:
        ys.update(zip(group, op.reference(xs[group]), strict=True))
    return xs, np.stack([ys[rank] for rank in range(len(xs))])


@pytest.mark.product(op=GROUPED, groups=list(GROUPS), check_vma=(True, False))
def test_groups_of_one_size(op: Op, groups: str, check_vma: bool):
    xs, ys = by_groups(op, GROUPS[groups])
    types = []

    def within_groups(x: Any) -> Any:
        y = op.ours(x, "x", axis_index_groups=GROUPS[groups])
        types.append(type_of(y))
        return y

    with counted_calls() as count:
        results = jax.jit(mapped(within_groups, mesh(8), check_vma=check_vma))(xs)
        assert_same(results, ys)
    assert count.calls == (8 if groups != "singles" and auto_is_native() else 0)
    # Groups differ, so the result varies, whatever lax says of its own.
    assert types[0][-1] == ({"x"} if check_vma else set())
    if not check_vma:
        assert_conforms(
            op, lambda f, x: f(x), mesh(8), xs, check_vma=False, axis_index_groups=GROUPS[groups]
        )


WITH_GRADIENTS = [op for op in (*ALL_REDUCES, *EXAMPLES[1:]) if op.grouped and op.differentiable]


@pytest.mark.product(op=WITH_GRADIENTS, check_vma=(True, False))
def test_gradients_within_groups(op: Op, check_vma: bool):
    groups = GROUPS["strided"]
    xs = by_groups(op, groups)[0].astype(np.float64)

    def slope(f: Any, x: Any) -> Any:
        def loss(x: Any) -> Any:
            y = f(x)
            return (y * y * (lax.axis_index("x") + 1).astype(y.dtype)).sum()

        return jax.grad(loss)(x)

    def ours_only(x: Any) -> Any:
        return slope(op.over("x", axis_index_groups=groups)["ours"], x)

    def twin_only(x: Any) -> Any:
        return slope(op.over("x", smooth=True, axis_index_groups=groups)["twin"], x)

    # lax takes groups only where axes are not typed; each rank's gradient is the same there.
    ours = jax.jit(mapped(ours_only, mesh(8), check_vma=check_vma))(xs)
    twin = jax.jit(mapped(twin_only, mesh(8), check_vma=False))(xs)
    assert_same(ours, twin, rtol=1e-12)


@pytest.mark.product(op=ALL_REDUCES, check_vma=(True, False))
def test_groups_of_several_sizes(op: Op, check_vma: bool):
    groups = [[0, 3, 4], [1], [2, 5]]
    xs = blocks(op, 6)

    def reduce(x: Any) -> Any:
        return op.ours(x, "x", axis_index_groups=groups)

    if op.name.removeprefix("all_reduce_") in ("mean", "prod", "and", "or"):
        with pytest.raises(ValueError, match=r"groups of one size .* got sizes \[3, 1, 2\]"):
            jax.eval_shape(mapped(reduce, mesh(6), check_vma=check_vma), xs)
        return
    ys = np.empty_like(xs)
    for group in groups:
        ys[group] = op.reference(xs[group])
    results = jax.jit(mapped(reduce, mesh(6), check_vma=check_vma))(xs)
    assert_same(results, ys)


@pytest.mark.parametrize("name", ["all_gather_0", "reduce_scatter_sum_0", "all_to_all_0_2"])
def test_groups_of_several_sizes_are_refused_where_shapes_depend_on_them(name: str):
    op = BY_NAME[name]

    def f(x: Any) -> Any:
        return op.ours(x, "x", axis_index_groups=[[0, 1, 2], [3]])

    with pytest.raises(ValueError, match=r"groups of one size .* got sizes \[3, 1\]"):
        jax.eval_shape(mapped(f, mesh(4)), blocks(op, 4))


@pytest.mark.parametrize(
    "groups", [[[0, 1], [2]], [[0, 1], [1, 2, 3]], [[0, 1, 2, 4]], []], ids=str
)
def test_groups_that_do_not_partition_the_axis(groups: list[list[int]]):
    def f(x: Any) -> Any:
        return jaxcoll.all_reduce(x, "x", axis_index_groups=groups)

    with pytest.raises(ValueError, match=r"axis_index_groups: expected every index of range\(4\)"):
        jax.eval_shape(mapped(f, mesh(4)), np.zeros(4))
