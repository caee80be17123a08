"""The table of ops on real GPUs, against NumPy; one process of a job, or alone.

python tests/gpu/job.py conform [COORDINATOR COUNT INDEX]
python tests/gpu/job.py late COORDINATOR COUNT INDEX      the last process never calls
"""

import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))


_EACH_DTYPE = ("all_reduce_sum", "all_reduce_mean", "reduce_scatter_sum_0")


def main(what: str, *where: str) -> None:
    import jax

    import jaxcoll

    if where:
        coordinator, count, index = where[0], int(where[1]), int(where[2])
        jax.distributed.initialize(coordinator, count, index, local_device_ids=[0])
        jaxcoll.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    print(jaxcoll.info(), flush=True)
    {"conform": conform, "late": late}[what](mesh)


def run(f: Any, xs: Any, mesh: Any) -> list[tuple[int, Any]]:
    """Returns the results of the local ranks, after their numbers."""
    import jax
    import numpy as np

    sharding = jax.NamedSharding(mesh, jax.P("x"))
    x = jax.make_array_from_callback(xs.shape, sharding, lambda at: xs[at])
    ys = jax.jit(
        jax.shard_map(
            lambda x: f(x[0])[None],
            mesh=mesh,
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
            check_vma=False,
        )
    )(x)
    return [
        (shard.index[0].start or 0, np.asarray(shard.data)[0]) for shard in ys.addressable_shards
    ]


def conform(mesh: Any) -> None:
    """Runs every op natively, twice, with each dtype that it takes, and both matmuls."""
    import jax
    import matmuls
    import numpy as np
    from checks import assert_same
    from helpers import DTYPES, OPS, blocks, refused

    import jaxcoll

    size = mesh.size
    num_right = num_on_lax = 0
    jax.config.update("jax_enable_x64", True)
    for op in OPS:
        dtypes = DTYPES if op.name in _EACH_DTYPE else (None,)
        for dtype in dtypes:
            if dtype is not None and refused(op, dtype):
                continue
            xs = np.asarray(blocks(op, size, dtype))
            expected = op.reference(xs)
            for _ in range(2):
                try:
                    found = run(lambda x, op=op: op.ours(x, "x", backend="native"), xs, mesh)
                except jaxcoll.NativeUnavailableError as error:
                    print(f"on lax: {op.name} {dtype}: {error}", flush=True)
                    num_on_lax += 1
                    break
                for rank, y in found:
                    assert_same(y, expected[rank])
                    num_right += 1
    for kind in ("gather_rows", "scatter_rows", "scatter_columns"):
        for dtype in (np.float32, np.float64):
            x, w = matmuls.operands(kind, size, 24, 16, 40, dtype)
            both = np.concatenate([x.reshape(size, -1), w.reshape(size, -1)], axis=1)

            def multiply(packed: Any, kind: str = kind, x: Any = x, w: Any = w) -> Any:
                own_x = packed[: x[0].size].reshape(x.shape[1:])
                own_w = packed[x[0].size :].reshape(w.shape[1:])
                return matmuls.function(kind)(own_x, own_w, "x", backend="native")

            for rank, y in run(multiply, both, mesh):
                assert_same(y, matmuls.reference(kind, x, w)[rank])
                num_right += 1
    print(f"right: {num_right}, on lax: {num_on_lax}", flush=True)


def late(mesh: Any) -> None:
    """All processes make the communicator; then the last one stays away."""
    import jax
    import numpy as np

    import jaxcoll

    xs = np.ones((mesh.size, 8), np.float32)

    def total(x: Any) -> Any:
        return jaxcoll.all_reduce(x, "x", backend="native")

    run(total, xs, mesh)
    jaxcoll.config.timeout_s = 5.0
    if jax.process_index() == jax.process_count() - 1:
        time.sleep(20)
        print("was late", flush=True)
        return
    begun = time.monotonic()
    try:
        with jaxcoll.watch():
            run(total, xs, mesh)
    except jaxcoll.CollectiveError as error:
        print(f"raised after {time.monotonic() - begun:.0f} s: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
