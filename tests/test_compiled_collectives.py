"""What `_compiled` reads in compiled programs: their collectives, groups, and lines."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat, _compiled

pytestmark = pytest.mark.skipif(
    _compat.door_problem() is not None, reason="this JAX is not known well enough"
)

AXES = ("a", "b", "c")
SHAPE = (2, 2, 2)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(SHAPE), AXES)


def read(f: Any, *arguments: Any) -> list[_compiled.Collective]:
    compiled = jax.jit(f).lower(*arguments).compile()
    return _compiled.collectives_of(compiled.runtime_executable(), len(jax.devices()))


def groups_over(*axes: str) -> set[tuple[int, ...]]:
    """Returns the groups of ranks that differ along these axes alone."""
    ranks = np.arange(8).reshape(SHAPE)
    rest = [i for i, axis in enumerate(AXES) if axis not in axes]
    along = [AXES.index(axis) for axis in axes]
    rows = ranks.transpose(*rest, *along).reshape(-1, 2 ** len(axes))
    return {tuple(row) for row in rows.tolist()}


@pytest.mark.parametrize("axes", [("a",), ("b",), ("c",), ("a", "c"), ("c", "b"), AXES])
@pytest.mark.parametrize("op", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_groups_are_those_of_the_mesh(op: str, axes: tuple[str, ...]):
    calls = {
        "all-reduce": lambda x: lax.psum(x, axes),
        "all-gather": lambda x: lax.all_gather(x, axes, tiled=True),
        "reduce-scatter": lambda x: lax.psum_scatter(x, axes, tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True),
    }
    call = jax.shard_map(
        calls[op], mesh=mesh(), in_specs=P(AXES), out_specs=P(AXES), check_vma=False
    )
    (found,) = read(call, jnp.zeros((64, 3)))
    assert found.op == op
    assert {tuple(sorted(group)) for group in found.groups} == {
        tuple(sorted(group)) for group in groups_over(*axes)
    }
    assert sum(count for _, count in found.operands) == 24
    assert {dtype for dtype, _ in found.operands} == {"f32"}
    assert f"at {__file__}:" in found.origin, found.origin


def test_what_the_compiler_inserts():
    x = jax.device_put(jnp.zeros((8, 16)), NamedSharding(mesh(), P("a", ("b", "c"))))
    (rows,) = read(lambda x: x.sum(axis=1), x)
    assert rows.op == "all-reduce"
    assert set(rows.groups) == groups_over("b", "c")
    assert rows.operands == (("f32", 4),)
    assert rows.origin.startswith("jit(<lambda>)/reduce_sum at "), rows.origin
    both = read(lambda x: x.sum(), x)
    assert {frozenset(found.groups) for found in both} <= {
        frozenset(groups_over(*axes)) for axes in (("a",), ("b", "c"), AXES)
    }


def test_a_permutation_is_of_all():
    call = jax.shard_map(
        lambda x: lax.ppermute(x, "b", [(0, 1)]), mesh=mesh(), in_specs=P(AXES), out_specs=P(AXES)
    )
    (found,) = read(call, jnp.zeros(8, jnp.bfloat16))
    assert (found.op, found.groups) == ("collective-permute", (tuple(range(8)),))


def test_sizes_of_types():
    sizes = {"pred": 1, "s4": 1, "f8e4m3fn": 1, "bf16": 2, "f32": 4, "u64": 8, "c128": 16}
    assert {dtype: _compiled.bytes_of(dtype) for dtype in sizes} == sizes


def test_groups_that_are_not_understood():
    line = "  x = f32[4]{0} all-reduce(f32[4]{0} y), replica_groups=[2,4]<=[8], channel_id=1"
    with pytest.raises(ValueError, match="all-reduce whose groups are not those of jit"):
        list(_compiled.parse(line, 8))
