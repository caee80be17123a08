"""Collective matmuls of a job, several in a row, each against NumPy: of blocks of several sizes.

A process of the job has one device.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcoll
from jaxcoll import _cuda

# m, k and n of a rank's block: small ones, and some that need larger windows.
SHAPES = ((3, 5, 7), (256, 512, 384), (2048, 1024, 1024), (1024, 8192, 512))
_IN_A_ROW = 4
_RUNS = 3


def products(mesh: Any, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> Iterator[str]:
    """Makes the products, all processes the same ones, and yields what was right.

    Raises:
        AssertionError: one is wrong.
    """
    for shape in shapes:
        for name in ("all_gather_matmul", "matmul_reduce_scatter"):
            _check(mesh, name, *shape)
            yield f"{name} of {shape}"


def on_gpus(mesh: Any) -> None:
    """Makes the products over peer memory, and then by NCCL; all processes call it.

    Raises:
        AssertionError: one is wrong, or did not go that way.
    """
    library, reason = _cuda.load()
    assert library is not None, reason
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("jaxcoll").addHandler(handler)
    count = len(list(products(mesh)))
    problem = _cuda.peer_problem(library, [device.id for device in mesh.devices.flat])
    assert problem is None, problem
    assert not any("go by NCCL" in text for text in said), said
    print(f"over peer memory: {count} products", flush=True)
    library.jaxcoll_cuda_set_peers(0)
    jaxcoll.reset()
    print(f"by NCCL: {len(list(products(mesh)))} products", flush=True)


def _check(mesh: Any, name: str, m: int, k: int, n: int) -> None:
    size, rank = mesh.size, jax.process_index()
    rng = np.random.default_rng(m + k + n)
    rows = m if name == "all_gather_matmul" else size * m
    # Small integers, which TF32 has, too: sums are exact.
    xs = rng.integers(-4, 5, (size, rows, k)).astype(np.float32)
    ws = rng.integers(-4, 5, (size, k, n)).astype(np.float32)

    def several(x: Any, w: Any) -> Any:
        """Returns products of operands that differ: what comes too early or late is seen."""
        call = getattr(jaxcoll, name)
        return jnp.stack([call(x[0] + i, w[0], "x", backend="native") for i in range(_IN_A_ROW)])

    f = jax.jit(
        jax.shard_map(
            lambda x, w: several(x, w)[None], mesh=mesh, in_specs=jax.P("x"),
            out_specs=jax.P("x"), check_vma=False,
        )
    )  # fmt: skip
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    x, w = (
        jax.make_array_from_callback(host.shape, sharding, lambda at, host=host: host[at])
        for host in (xs, ws)
    )
    expected = np.stack([_expected(name, xs + i, ws, rank, m) for i in range(_IN_A_ROW)])
    for y in [f(x, w) for _ in range(_RUNS)]:
        got = np.asarray(y.addressable_data(0))[0]
        wrong = int((got != expected).sum())
        assert wrong == 0, f"{name} of {(m, k, n)}: {wrong} of {got.size} elements are wrong"


def _expected(name: str, xs: Any, ws: Any, rank: int, m: int) -> Any:
    if name == "all_gather_matmul":
        return np.concatenate(xs) @ ws[rank]
    return sum(x[rank * m : (rank + 1) * m] @ w for x, w in zip(xs, ws, strict=True))
