"""What an installed jaxcoll must be able to do with nothing but jax and numpy beside it.

Run by the release tests and by cibuildwheel in an empty environment, outside the source tree. With
the argument `lax` for an installation without the native extension.
"""

import importlib.util
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import _native


def run(collective: Callable[[jax.Array], jax.Array], x: jax.Array, path: str) -> np.ndarray:
    """One call on two devices, which must take the path."""
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    mapped = jax.shard_map(collective, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    report = jaxcoll.explain(mapped, x)
    assert {row.path for row in report.rows} == {path}, report
    return np.asarray(jax.jit(mapped)(x))


def main(path: str = "native") -> None:
    for extra in ("flax", "optax", "matplotlib"):
        assert importlib.util.find_spec(extra) is None, f"{extra} is here: no empty environment"
    jaxcoll.simulate_cpu_devices(2)
    if path == "native":
        jaxcoll.initialize(accelerate=True)
    x = jnp.arange(8.0)
    low, high = np.split(np.arange(8.0), 2)
    calls = {
        "all_reduce": (lambda x: jaxcoll.all_reduce(x, "i"), [low + high, low + high]),
        "all_gather": (lambda x: jaxcoll.all_gather(x, "i", tiled=True), [low, high, low, high]),
        "reduce_scatter": (lambda x: jaxcoll.reduce_scatter(x, "i", tiled=True), [low + high]),
        "all_to_all": (
            lambda x: jaxcoll.all_to_all(x, "i", 0, 0, tiled=True),
            [low[:2], high[:2], low[2:], high[2:]],
        ),
        "ppermute": (lambda x: jaxcoll.ppermute(x, "i", [(0, 1), (1, 0)]), [high, low]),
        "broadcast": (lambda x: jaxcoll.broadcast(x, "i", root=1) + 0 * x, [high, high]),
    }
    for name, (collective, expected) in calls.items():
        np.testing.assert_array_equal(
            run(collective, x, path), np.concatenate(expected), err_msg=name
        )
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    split = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("i")))
    assert float(jax.jit(jnp.sum)(split)) == 28
    assert (_native.num_mpi_calls() > 0) == (path == "native"), "XLA's own collectives"
    print(f"jaxcoll {jaxcoll.__version__}: {len(calls)} collectives run on the {path} path")


if __name__ == "__main__":
    main(*sys.argv[1:])
