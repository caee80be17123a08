"""Every op over groups across processes, inside them, and both: NumPy's values.

All calls are native, or none with JAXCOLL_BACKEND=lax.

    values.py (all | some) [hosts | parts]

`hosts`: the processes are on two hosts, or pretend to be. `parts`: groups have some processes each.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from helpers import DTYPES, EXAMPLES, OPS, Op, blocks, refused
from world import assert_blocks, mapped, mesh, native_calls, on_two_hosts, put, say

import jaxcoll

ON_HOSTS = "hosts" in sys.argv
Group = Callable[[np.ndarray], np.ndarray]


def by_groups(reference: Group, xs: np.ndarray, shape: tuple[int, int], axes: Any) -> np.ndarray:
    """Returns what `reference` makes of each group of the devices in `shape`, stacked."""
    rows = xs.reshape(*shape, *xs.shape[1:])
    if axes == (0, 1):
        return reference(xs)
    if axes == (1,):
        results = np.stack([reference(row) for row in rows])
    else:
        results = np.stack([reference(rows[:, i]) for i in range(shape[1])], axis=1)
    return results.reshape(-1, *results.shape[2:])


def check(op: Op, order: str, names: tuple[str, ...], dtypes: tuple[Any, ...]) -> None:
    over = mesh(order)
    shape = over.devices.shape
    axes = tuple(over.axis_names.index(name) for name in names)
    size = int(np.prod([shape[axis] for axis in axes]))
    xs = {
        str(np.dtype(dtype)): np.concatenate(
            [
                blocks(op, size, dtype) if group == 0 else blocks(op, size, dtype)[::-1]
                for group in range(over.size // size)
            ]
        )
        for dtype in dtypes
        if dtype is not None and not refused(op, np.dtype(dtype))
    }
    arguments = {name: put(x, over) for name, x in xs.items()}
    program = mapped(lambda tree: jax.tree.map(op.over(names)["ours"], tree), over)
    what = f"{op.name} over {names} of {dict(over.shape)}"
    if ON_HOSTS:
        results = program(arguments)
        if axes == (0, 1) and len(dtypes) == 1 and order == "processes first":
            (row,) = jaxcoll.explain(program, arguments).rows
            reason = "the group spans several hosts" if row.path == "lax" else ""
            spread = not op.name.startswith(("all_to_all", "ppermute"))
            assert (row.path, row.reason) == ("two-level" if spread else "lax", reason), row
    else:
        is_native = size > 1 and jaxcoll.config.backend != "lax"
        with (
            jaxcoll.using(backend="native" if is_native else jaxcoll.config.backend),
            native_calls(len(xs) * len(jax.local_devices()) if is_native else 0),
        ):
            results = jax.block_until_ready(program(arguments))
    for name, x in xs.items():
        expected = by_groups(op.reference, x, shape, axes)
        assert_blocks(results[name], expected, f"{what}, {name}")


def check_groups(op: Op, dtype: Any) -> None:
    """Groups of indices of one axis, in another order than the processes'."""
    over, groups = jax.sharding.Mesh(np.array(jax.devices()), ("x",)), [[3, 0], [1, 2]]
    xs = np.concatenate([blocks(op, 2, dtype), blocks(op, 2, dtype)[::-1]])
    expected = np.empty_like(np.concatenate([op.reference(xs[group]) for group in groups]))
    for group in groups:
        expected[group] = op.reference(xs[group])
    is_native = jaxcoll.config.backend != "lax" and not ON_HOSTS
    with native_calls(len(jax.local_devices()) if is_native else 0):
        program = mapped(op.over("x", axis_index_groups=groups)["ours"], over)
        result = jax.block_until_ready(program(put(xs, over)))
    assert_blocks(result, expected, f"{op.name} within {groups}")


def main() -> None:
    if ON_HOSTS:
        on_two_hosts()
    jax.config.update("jax_enable_x64", True)
    orders = ["parts"] if "parts" in sys.argv else ["processes first"]
    if jax.local_device_count() > 1:
        orders.append("devices first")
    for op in EXAMPLES if sys.argv[1] == "some" else OPS:
        dtypes = (np.int32 if "and" in op.name or "or" in op.name[-3:] else np.float32,)
        for order in orders:
            check(op, order, mesh(order).axis_names, dtypes)
        has_axes = len(orders) > 1 or orders == ["parts"]
        for order in (orders if op in EXAMPLES else orders[:1]) if has_axes else ():
            for name in mesh(order).axis_names:
                check(op, order, (name,), dtypes)
        if op.grouped and jax.device_count() == 4:
            check_groups(op, dtypes[0])
    for op in EXAMPLES:
        check(op, orders[0], mesh().axis_names, DTYPES)
    say("all values are right")


main()
