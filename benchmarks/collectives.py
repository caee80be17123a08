"""Every collective by size: chained in one program, and as a program of its own."""

import functools as ft
from typing import Any

import jax

from jaxcoll._chains import AXIS, OPS, chain, operand, variants
from jaxcoll._timing import count_wrong, measure, slopes

SIZES = (256, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
# Operands and results of all ranks, all variants: what 16 GiB hold with room to spare.
MAX_BYTES = 5 << 30


def run(num_devices: int, rounds: int, sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """Measures all ops and sizes on `num_devices`; one row for each and for chained and single."""
    mesh = jax.make_mesh((num_devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    rows = []
    for name in OPS:
        for size in sizes:
            widened = size * num_devices * (num_devices if name == "all_gather" else 1)
            if 3 * (widened + size * num_devices) > MAX_BYTES:
                rows.append(
                    {"op": name, "devices": num_devices, "bytes": size, "left_out": "memory"}
                )
                continue
            rows += _rows(name, size, num_devices, rounds, mesh)
    return rows


def _rows(name: str, size: int, p: int, rounds: int, mesh: Any) -> list[dict[str, Any]]:
    small = size <= 64 << 10
    lengths = (1, 32, 256) if small else (1, 2, 6)
    x = operand(size, mesh)
    functions = variants(name, p, ("native", "auto"))

    timings, wrong = {}, 0
    for length in lengths:
        programs = {v: chain(name, call, length, mesh) for v, call in functions.items()}
        if length == 1:
            expected = programs["lax"](x)
            wrong = sum(count_wrong(programs[v](x), expected) for v in ("native", "auto"))
        calls = {v: ft.partial(program, x) for v, program in programs.items()}
        timings[length] = measure(calls, rounds)
    chained = slopes(timings[lengths[1]], timings[lengths[2]], *lengths[1:])
    return [
        {
            "op": name,
            "devices": p,
            "bytes": size,
            "how": how,
            "wrong": wrong,
            **{f"{v}_us": round(t.median_us(v), 2) for v in functions},
            **{f"{v}_p90_us": round(t.percentile_us(v, 90), 2) for v in functions},
            "lax_over_native": round(t.ratio("lax", "native"), 3),
            "lax_over_auto": round(t.ratio("lax", "auto"), 3),
            "rounds": len(t.seconds["lax"]),
        }
        for how, t in (("chained", chained), ("single", timings[1]))
        if t.seconds["lax"]
    ]
