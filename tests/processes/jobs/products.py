"""The collective matmuls over groups across processes, inside them, and both.

All calls are native, or none with JAXCOLL_BACKEND=lax.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from matmuls import KINDS, function, operands, reference
from world import assert_blocks, mapped, mesh, native_calls, put, say

import jaxcoll

MEASURES = [(1, 1, 1), (3, 5, 7), (64, 96, 33), (300, 700, 40), (90, 33, 1500), (520, 1100, 260)]


def check(kind: str, measures: tuple[int, int, int], names: tuple[str, ...], dtype: Any) -> None:
    over = mesh()
    sizes = dict(over.shape)
    size = int(np.prod([sizes[name] for name in names]))
    xs, ws = operands(kind, size, *measures, dtype)
    want = reference(kind, xs, ws)
    if names == ("p",):  # each device of a process is in a group of its own
        xs, ws, want = (np.repeat(stacked, sizes["d"], axis=0) for stacked in (xs, ws, want))
    elif names == ("d",):
        xs, ws, want = (np.concatenate([stacked] * sizes["p"]) for stacked in (xs, ws, want))
    program = mapped(lambda x, w: function(kind)(x, w, names), over)
    is_native = size > 1 and jaxcoll.config.backend != "lax"
    with (
        jaxcoll.using(backend="native" if is_native else jaxcoll.config.backend),
        native_calls(len(jax.local_devices()) if is_native else 0),
    ):
        ys = jax.block_until_ready(program(put(xs, over), put(ws, over)))
    assert_blocks(ys, want, f"{kind} of {measures}, {np.dtype(dtype)}, over {names}")


def in_one_call() -> Any:
    """Has products of a size that "auto" would leave to XLA made natively, unless all are lax's."""
    is_lax = jaxcoll.config.backend == "lax"
    return jaxcoll.using(backend="lax" if is_lax else "native")


def check_batch(kind: str) -> None:
    over = mesh()
    xs, ws = operands(kind, over.size, 64, 96, 33)
    xs = np.stack([xs, xs[..., ::-1, :]], axis=1)  # (ranks, 2, rows, inner)
    want = np.stack([reference(kind, xs[:, i], ws) for i in range(2)], axis=1)
    program = mapped(lambda x, w: function(kind)(x, w, over.axis_names), over)
    with in_one_call():
        ys = program(put(xs, over), put(ws, over))
    assert_blocks(ys, want, f"a batch of {kind}")


def check_bits(kind: str, measures: tuple[int, int, int]) -> None:
    """Sums of floats are the same in each run, and, of equal operands, on each rank."""
    over = mesh()
    xs, ws = (
        np.random.default_rng(0).normal(size=a.shape) for a in operands(kind, over.size, *measures)
    )
    ws[:] = ws[0]
    placed = [put(a.astype(np.float32), over) for a in (xs, ws)]

    def f(x: Any, w: Any) -> Any:
        return function(kind)(x, w, over.axis_names)

    program = mapped(f, over)
    with in_one_call():
        first, second = (
            np.stack([np.asarray(s.data)[0] for s in program(*placed).addressable_shards])
            for _ in range(2)
        )
    assert (first == second).all(), f"{kind}: other bits in another run"
    if "gather" in kind:
        of_all = multihost_utils.process_allgather(first)
        assert (of_all == first[0]).all(), f"{kind}: other bits on another rank"


def gradients(kind: str) -> None:
    """Those of float64 are those of NumPy, for a loss that is the sum of squares."""
    over = mesh()
    xs, ws = operands(kind, over.size, 6, 10, 4, np.float64)

    def loss(x: Any, w: Any) -> Any:
        return (function(kind)(x, w, over.axis_names) ** 2).sum() / 2

    dx, dw = mapped(jax.grad(loss, (0, 1)), over)(put(xs, over), put(ws, over))
    ys = reference(kind, xs, ws)
    dim = -2 if "rows" in kind else -1
    if "gather" in kind:
        whole = np.concatenate(list(xs), axis=dim)
        dws = np.stack([whole.T @ y for y in ys])
        total = sum(y @ w.T for y, w in zip(ys, ws, strict=True))
        dxs = np.stack(np.split(total, over.size, axis=dim))
    else:
        g = np.concatenate(list(ys), axis=dim)
        dxs, dws = np.stack([g @ w.T for w in ws]), np.stack([x.T @ g for x in xs])
    assert_blocks(dx, dxs, f"dx of {kind}")
    assert_blocks(dw, dws, f"dw of {kind}")


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    groups = [mesh().axis_names]
    if jax.local_device_count() > 1:
        groups += [("p",), ("d",)]
    for kind in KINDS:
        for measures in MEASURES:
            check(kind, measures, groups[0], np.float32)
        for names in groups[1:]:
            check(kind, MEASURES[2], names, np.float32)
        for dtype in (np.float64, jnp.bfloat16, np.float16):
            check(kind, MEASURES[2], groups[0], dtype)
        check_batch(kind)
        check_bits(kind, (300, 700, 40))
        # Of which x is read from where it lies; the last rows are few, alone or so that a BLAS has
        # another way for them.
        for measures in ((1100, 1100, 40), (1100, 1100, 8), (1025, 1100, 8)):
            check_bits(kind, measures)
        gradients(kind)
    say("all products are right")


main()
