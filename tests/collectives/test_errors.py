"""Bad input: what the error says, and how to mend it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import mapped, mesh
from helpers import EXAMPLES, Op, blocks

import jaxcoll


def trace(f: Any, xs: Any = None) -> None:
    """Traces `f` on 4 ranks with blocks of shape (4, 6)."""
    jax.eval_shape(mapped(f, mesh(4)), np.zeros((4, 4, 6), np.float32) if xs is None else xs)


Case = tuple[str, Any, type[Exception], str]

ARGUMENTS: list[Case] = [
    (
        "unknown_op",
        lambda x: jaxcoll.all_reduce(x, "x", "maxx"),
        ValueError,
        'all_reduce: op: expected one of "sum", "mean", "max", "min", "prod", "and", "or", got '
        "'maxx'. Did you mean \"max\"?",
    ),
    (
        "op_that_is_no_name",
        lambda x: jaxcoll.all_reduce(x, "x", jnp.add),
        ValueError,
        'all_reduce: op: expected one of "sum"',
    ),
    (
        "op_that_has_no_hash",
        lambda x: jaxcoll.all_reduce(x, "x", ["sum"]),
        ValueError,
        'all_reduce: op: expected one of "sum", "mean", "max", "min", "prod", "and", "or", '
        "got ['sum']",
    ),
    (
        "unknown_op_to_scatter",
        lambda x: jaxcoll.reduce_scatter(x, "x", op="max"),
        ValueError,
        'reduce_scatter: op: expected one of "sum", "mean", got \'max\'',
    ),
    (
        "array_dimension_for_axis_name",
        lambda x: jaxcoll.all_reduce(x, 0),
        TypeError,
        "all_reduce(x, 0): axis_name: expected the name of a mesh axis or a tuple of names, got 0. "
        "To reduce over an array dimension, use jax.numpy.",
    ),
    (
        "axis_twice",
        lambda x: jaxcoll.all_reduce(x, ("x", "x")),
        ValueError,
        'all_reduce(x, ("x", "x")): axis_name: an axis stands twice',
    ),
    (
        "all_gather_axis",
        lambda x: jaxcoll.all_gather(x, "x", axis=2, tiled=True),
        ValueError,
        'all_gather(x, "x"): x: axis: expected an array dimension in [-2, 2), got 2.',
    ),
    (
        "all_gather_new_axis",
        lambda x: jaxcoll.all_gather(x, "x", axis=3),
        ValueError,
        'all_gather(x, "x"): x: axis: expected an array dimension in [-3, 3), got 3.',
    ),
    (
        "all_gather_axis_type",
        lambda x: jaxcoll.all_gather(x, "x", axis="0"),
        TypeError,
        "all_gather(x, \"x\"): x: axis: expected an int, got '0'.",
    ),
    (
        "scatter_not_divisible",
        lambda x: jaxcoll.reduce_scatter(x, "x", scatter_dimension=1, tiled=True),
        ValueError,
        'reduce_scatter(x, "x"): x: scatter_dimension=1: expected a length divisible by the 4 '
        "ranks, got shape (4, 6). Pad the array.",
    ),
    (
        "scatter_not_one_each",
        lambda x: jaxcoll.reduce_scatter(x, "x", scatter_dimension=1),
        ValueError,
        'reduce_scatter(x, "x"): x: scatter_dimension=1: expected length 4, one slice for each '
        "rank, got shape (4, 6). To split a longer dimension, pass tiled=True.",
    ),
    (
        "scatter_dimension",
        lambda x: jaxcoll.reduce_scatter(x, "x", scatter_dimension=5),
        ValueError,
        "scatter_dimension: expected an array dimension in [-2, 2), got 5.",
    ),
    (
        "exchange_not_divisible",
        lambda x: jaxcoll.all_to_all(x, "x", 1, 0, tiled=True),
        ValueError,
        'all_to_all(x, "x"): x: split_axis=1: expected a length divisible by the 4 ranks, got '
        "shape (4, 6). Pad the array.",
    ),
    (
        "exchange_not_one_each",
        lambda x: jaxcoll.all_to_all(x, "x", 1, 0),
        ValueError,
        'all_to_all(x, "x"): x: split_axis=1: expected length 4, one block for each rank, got '
        "shape (4, 6). To split a longer dimension, pass tiled=True.",
    ),
    (
        "exchange_concat_axis",
        lambda x: jaxcoll.all_to_all(x, "x", 0, 2),
        ValueError,
        "concat_axis: expected an array dimension in [-2, 2), got 2.",
    ),
    (
        "source_twice",
        lambda x: jaxcoll.ppermute(x, "x", [(0, 1), (0, 2)]),
        ValueError,
        'ppermute(x, "x"): perm: expected each source at most once, got 0 twice in [(0, 1), (0, 2)]'
        ". To send one block to all ranks, use broadcast.",
    ),
    (
        "target_twice",
        lambda x: jaxcoll.ppermute(x, "x", [(0, 2), (1, 2)]),
        ValueError,
        'ppermute(x, "x"): perm: expected each target at most once, got 2 twice in [(0, 2), '
        "(1, 2)]",
    ),
    (
        "target_out_of_range",
        lambda x: jaxcoll.ppermute(x, "x", [(0, 4)]),
        ValueError,
        'ppermute(x, "x"): perm: expected each target in range(4), got 4 in [(0, 4)].',
    ),
    (
        "source_out_of_range",
        lambda x: jaxcoll.ppermute(x, "x", [(-1, 0)]),
        ValueError,
        'ppermute(x, "x"): perm: expected each source in range(4), got -1 in [(-1, 0)].',
    ),
    (
        "perm_of_numbers",
        lambda x: jaxcoll.ppermute(x, "x", [1, 2, 3, 0]),
        ValueError,
        'ppermute(x, "x"): perm: expected pairs (source, target) of axis indices, got [1, 2, 3, '
        "0].",
    ),
    (
        "root_out_of_range",
        lambda x: jaxcoll.broadcast(x, "x", root=4),
        ValueError,
        'broadcast(x, "x"): root: expected an index in range(4), got 4.',
    ),
    (
        "root_type",
        lambda x: jaxcoll.broadcast(x, "x", root=x),
        TypeError,
        'broadcast(x, "x"): root: expected an int, got',
    ),
]


@pytest.mark.parametrize("case", ARGUMENTS, ids=lambda case: case[0])
def test_arguments(case: Case):
    _, f, error, text = case
    with pytest.raises(error) as info:
        trace(f)
    assert text in str(info.value)


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_a_tree_with_a_bad_leaf_names_it(op: Op):
    with pytest.raises(TypeError) as info:
        trace(lambda x: op.ours({"layers": [x, "weights.bin"]}, "x"), blocks(op, 4))
    assert "x['layers'][1]: expected an array, got str ('weights.bin'). Remove it" in str(
        info.value
    )


def test_a_tree_with_a_leaf_of_the_wrong_shape_names_it():
    def f(x: Any) -> Any:
        return jaxcoll.reduce_scatter({"good": x, "bad": [x[:3]]}, "x", tiled=True)

    with pytest.raises(
        ValueError, match=r"x\['bad'\]\[0\]: scatter_dimension=0: .*got shape \(3, 6\)"
    ):
        trace(f)


def test_a_tree_with_a_leaf_of_the_wrong_dtype_names_it():
    def f(x: Any) -> Any:
        return jaxcoll.all_reduce({"good": x.astype(int), "bad": x}, "x", "or")

    with pytest.raises(TypeError, match=r"x\['bad'\]: 'or' is for bool and integers, got float32"):
        trace(f)
