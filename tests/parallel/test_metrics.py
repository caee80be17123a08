"""`DistributedMetrics`: every leaf counts, NumPy and Python numbers too."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcoll import DistributedMetrics

each = pytest.mark.parametrize("where", ["instance", "static"])
METHODS = (
    *("all_gather", "reduce_mean", "reduce_sum", "reduce_max", "reduce_min", "reduce_custom"),
    "collect_from_devices",
)


def of(where: str, name: str) -> Any:
    """Returns a method: of an instance, or its static twin."""
    if where == "instance":
        return getattr(DistributedMetrics(), name)
    return getattr(DistributedMetrics, f"{name}_static")


@pytest.mark.parametrize("name", METHODS)
def test_twins_have_one_signature(name: str):
    assert inspect.signature(of("instance", name)) == inspect.signature(of("static", name))


def on_ranks(f: Any, size: int = 4, axis: str = "x") -> Any:
    """Calls `f` with each rank's number, under a map; returns the results stacked."""
    over = jax.make_mesh((size,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))

    def body(rank: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], f(rank[0]))

    spec = jax.P(axis)
    mapped = jax.shard_map(body, mesh=over, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(np.arange(float(size))))


@each
@pytest.mark.parametrize(
    ("name", "expected"),
    [("reduce_mean", 1.5), ("reduce_sum", 6.0), ("reduce_max", 3.0), ("reduce_min", 0.0)],
)
def test_reductions(where: str, name: str, expected: float):
    def f(rank: Any) -> Any:
        return of(where, name)({"loss": rank, "per class": jnp.stack([rank, rank])}, "x")

    result = on_ranks(f)
    np.testing.assert_array_equal(result["loss"], [expected] * 4)
    np.testing.assert_array_equal(result["per class"], [[expected] * 2] * 4)


@each
def test_numbers_that_are_no_arrays_are_reduced_too(where: str):
    def f(rank: Any) -> Any:
        return of(where, "reduce_sum")({"a": 2.5, "b": np.float32(2), "c": 3, "d": rank}, "x")

    result = on_ranks(f)
    assert [result[name][0] for name in "abcd"] == [10, 8, 12, 6]


@each
def test_the_default_axis(where: str):
    result = on_ranks(lambda rank: of(where, "reduce_mean")({"loss": rank}), axis="batch")
    np.testing.assert_array_equal(result["loss"], [1.5] * 4)


@each
def test_gathered(where: str):
    result = on_ranks(lambda rank: of(where, "all_gather")({"a": rank, "b": 1.0}, "x"))
    np.testing.assert_array_equal(result["a"], [[0, 1, 2, 3]] * 4)
    np.testing.assert_array_equal(result["b"], [[1] * 4] * 4)


@each
def test_each_in_its_own_way(where: str):
    reductions = {"best": "max", "worst": "min", "count": "sum", "rank": None}

    def f(rank: Any) -> Any:
        metrics = dict.fromkeys(["loss", *reductions], rank)
        return of(where, "reduce_custom")(metrics, reductions, "x")

    result = on_ranks(f)
    assert {name: list(values) for name, values in result.items()} == {
        "loss": [1.5] * 4,
        "best": [3] * 4,
        "worst": [0] * 4,
        "count": [6] * 4,
        "rank": [0, 1, 2, 3],
    }
    result = on_ranks(lambda rank: of(where, "reduce_custom")({"loss": rank}, axis_name="x"))
    np.testing.assert_array_equal(result["loss"], [1.5] * 4)


@each
def test_unknown_reductions(where: str):
    reduce = of(where, "reduce_custom")
    with pytest.raises(ValueError, match=r"reduce_fn\['a'\]: expected one of .*got 'average'"):
        reduce({"a": 1.0}, {"a": "average"}, "x")
    with pytest.raises(
        ValueError, match=r'expected one of "loss", got .los.\. Did you mean "loss"'
    ):
        reduce({"loss": 1.0}, {"los": "sum"}, "x")


@each
def test_collected(where: str):
    metrics = {"loss": jnp.arange(4.0), "vector": jnp.ones((4, 2)), "step": 3}
    collected = of(where, "collect_from_devices")(metrics)
    assert collected["loss"] == [0, 1, 2, 3]
    assert [v.shape for v in collected["vector"]] == [(2,)] * 4
    assert collected["step"] == 3
