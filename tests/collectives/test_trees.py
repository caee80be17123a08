"""Trees: one native call for all leaves, whatever their dtypes, types and places."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, auto_is_native, counted_calls, mapped, mesh, type_of
from helpers import EXAMPLES, Op, blocks
from jax import lax

import jaxcoll

REDUCTIONS = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}


def num_custom_calls(f: Any, *arguments: Any) -> int:
    """Counts the native all-reduces in a lowered program."""
    return len(
        re.findall("custom_call @jaxcoll_all_reduce", jax.jit(f).lower(*arguments).as_text())
    )


def many_dtypes(size: int) -> Any:
    """Returns a nested tree, stacked by rank."""
    rng = np.random.default_rng(0)

    def leaf(dtype: Any, *shape: int) -> np.ndarray:
        return rng.integers(0, 5, (size, *shape)).astype(dtype)

    return {
        "layers": [(leaf(np.float32, 3, 5), leaf(np.float16, 7)), (leaf(np.float64), None)],
        "count": leaf(np.int32),
        "mask": leaf(np.bool_, 9),
        "none": None,
        "empty": leaf(np.float32, 0, 4),
        "bytes": leaf(np.uint8, 61),
    }


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check_vma"])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_values_and_types_are_those_of_lax(op: Any, check_vma: bool):
    types: dict[str, Any] = {}

    def both(tree: Any) -> Any:
        results = {"ours": jaxcoll.all_reduce(tree, "x", op), "twin": REDUCTIONS[op](tree, "x")}
        types.update({name: jax.tree.map(type_of, result) for name, result in results.items()})
        return results

    results = jax.jit(mapped(both, mesh(4), check_vma=check_vma))(many_dtypes(4))
    assert types["ours"] == types["twin"]
    assert_same(results["ours"], results["twin"])


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check_vma"])
def test_a_tree_is_one_native_call(check_vma: bool):
    f = mapped(lambda tree: jaxcoll.all_reduce(tree, "x"), mesh(4), check_vma=check_vma)
    assert num_custom_calls(f, many_dtypes(4)) == auto_is_native()
    with counted_calls() as count:
        jax.block_until_ready(jax.jit(f)(many_dtypes(4)))
    assert count.calls == 4 * auto_is_native()


def test_a_tree_is_reduced_in_place():
    if not auto_is_native():
        pytest.skip("a matter of the native call")
    tree = many_dtypes(4)

    def f(tree: Any) -> Any:
        return jaxcoll.all_reduce(
            jax.tree.map(lambda leaf: leaf | leaf if leaf.dtype == bool else leaf + leaf, tree), "x"
        )

    text = jax.jit(mapped(f, mesh(4))).lower(tree).as_text()
    assert text.count("output_operand_alias<") == len(jax.tree.leaves(tree))


@pytest.mark.parametrize("derivative", ["grad", "vmap", "remat"])
def test_a_tree_stays_one_native_call(derivative: str):
    tree = {"a": np.ones((4, 3)), "b": np.ones((4, 2, 2)), "c": np.ones(4)}

    def reduce(tree: Any) -> Any:
        return jaxcoll.all_reduce(tree, "x")

    def square(tree: Any) -> Any:
        return sum((leaf * leaf).sum() for leaf in jax.tree.leaves(reduce(tree)))

    f = {"grad": jax.grad(square), "vmap": reduce, "remat": jax.checkpoint(reduce)}[derivative]
    if derivative == "vmap":
        tree = jax.tree.map(lambda leaf: np.stack([leaf, leaf], axis=1), tree)
        f = jax.vmap(reduce)
    assert num_custom_calls(mapped(f, mesh(4)), tree) == auto_is_native()
    if derivative == "grad":  # without typed axes the cotangents are reduced as well
        assert num_custom_calls(mapped(f, mesh(4), check_vma=False), tree) == 2 * auto_is_native()


def test_leaves_that_vary_differently():
    """Over x and y, only x, only y, and neither: one call, and lax's values and types."""
    types: dict[str, Any] = {}

    def both(x: Any) -> Any:
        tree = {
            "both": x,
            "x": lax.psum(x, "y"),
            "y": lax.psum(x, "x"),
            "neither": lax.psum(x, ("x", "y")),
        }
        results = {"ours": jaxcoll.all_reduce(tree, "x"), "twin": {}}
        for name, leaf in tree.items():
            cast = leaf if name in ("both", "x") else lax.pcast(leaf, "x", to="varying")
            results["twin"][name] = lax.psum(cast, "x")
        types.update({name: jax.tree.map(type_of, result) for name, result in results.items()})
        return results

    xs = np.arange(8.0).reshape(8, 1)
    f = mapped(both, mesh(2, 4))
    results = jax.jit(f)(xs)
    assert types["ours"] == types["twin"]
    assert_same(results["ours"], results["twin"])
    assert num_custom_calls(f, xs) == auto_is_native()


@pytest.mark.parametrize("tree", [(), {}, None, [None, {}], {"a": ()}], ids=str)
def test_trees_without_leaves(tree: Any):
    seen = []

    def f(x: Any) -> Any:
        seen.append(jaxcoll.all_reduce(tree, "x"))
        seen.append(jaxcoll.all_gather(tree, "x"))
        seen.append(jaxcoll.reduce_scatter(tree, "x"))
        seen.append(jaxcoll.all_to_all(tree, "x", 0, 0))
        seen.append(jaxcoll.ppermute(tree, "x", [(0, 1)]))
        seen.append(jaxcoll.broadcast(tree, "x"))
        return x

    jax.jit(mapped(f, mesh(2)))(np.zeros(2))
    assert seen == [tree] * 6


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check_vma"])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_constants_as_in_lax(op: Any, check_vma: bool):
    """They are the same on every rank: multiplied, not sent."""
    constants = {
        "int": 3,
        "float": 2.5,
        "complex": 1j if op in ("sum", "mean") else 1,
        "numpy": np.arange(3, dtype=np.int16),
        "scalar": np.float32(7),
        "jax": jnp.arange(2.0),
    }
    types: dict[str, Any] = {}

    def both(x: Any) -> Any:
        twin = {name: REDUCTIONS[op](value, "x") for name, value in constants.items()}
        results = {"ours": jaxcoll.all_reduce({**constants, "x": x}, "x", op), "twin": twin}
        traced = results["ours"].pop("x")
        types.update({name: jax.tree.map(type_of, result) for name, result in results.items()})
        return results, traced

    f = mapped(both, mesh(4), check_vma=check_vma)
    with jax.numpy_dtype_promotion("standard"):
        results, _ = jax.jit(f)(np.arange(4.0))
    assert types["ours"] == types["twin"]
    assert_same(results["ours"], results["twin"])


def test_a_constant_is_not_sent():
    f = mapped(lambda x: x + jaxcoll.all_reduce(1.0, "x"), mesh(4))
    assert_same(jax.jit(f)(np.zeros(4)), np.full(4, 4.0))
    assert num_custom_calls(f, np.zeros(4)) == 0


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_every_op_takes_a_tree(op: Op):
    x, y = blocks(op, 4), blocks(op, 4, np.int16)
    tree = {"a": x, "b": [y, None]}
    results = jax.jit(mapped(op.over("x")["ours"], mesh(4)))(tree)
    assert_same(results, {"a": op.reference(x), "b": [op.reference(y), None]})
