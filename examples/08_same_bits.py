"""Sums in the order of the ranks: the same bits every time, on every device, at every size."""

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcoll

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
# Numbers of very different size: another order gives another sum.
blocks = (rng.normal(size=(8, 4096)) * 10.0 ** rng.integers(-3, 4, (8, 4096))).astype(np.float32)


def sums(x: jax.Array) -> jax.Array:
    return jaxcoll.all_reduce(x, "data")


on_every_device = jax.jit(
    jax.shard_map(sums, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
)
first = np.asarray(on_every_device(blocks))
print("on all devices:    ", (first == first[0]).all())
print("in 100 runs:       ", all((on_every_device(blocks) == first).all() for _ in range(100)))

in_order = blocks[0].copy()
for block in blocks[1:]:
    in_order += block
print("as NumPy, by rank: ", (first[0] == in_order).all())
print("as NumPy, reversed:", (first[0] == blocks[::-1].cumsum(axis=0, dtype=np.float32)[-1]).all())

tree = {"whole": blocks, "part": blocks[:, :100], "one": blocks[:, 7:8]}
together = on_every_device(tree)
print(
    "of any length:     ",
    all((together["whole"][:, i] == first[:, i]).all() for i in (0, 7)),
    (together["part"] == first[:, :100]).all(),
    (together["one"] == first[:, 7:8]).all(),
)
