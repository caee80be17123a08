"""`jaxcoll bench`: every op against lax on this machine, and where lax is the better path."""

import dataclasses
import functools as ft
import math
import re
from collections.abc import Iterator, Sequence

import jax

from jaxcoll import _crossovers, _native
from jaxcoll._chains import OPS, chain, operand, variants
from jaxcoll._explain import explain
from jaxcoll._timing import Timing, count_wrong, measure, slopes

# Bytes on the way in and out of a rank for each byte of bandwidth that nccl-tests calls "algbw".
_BUS_FACTOR = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    "ppermute": lambda p: 1.0,
    "broadcast": lambda p: 1.0,
}
# Within this factor, lax and native are the same for all that one run can tell.
_MARGIN = 0.95


@dataclasses.dataclass(frozen=True)
class Row:
    """One op at one size.

    Attributes:
        op: the collective.
        bytes: of a rank's operand.
        path: what `backend="auto"` takes at this size now.
        native_us: median time of a native call; NaN where there is none.
        native_p99_us: its 99th percentile over rounds.
        lax_us: median time of lax's.
        speedup: median over rounds of lax's time divided by native's.
        algbw: GB/s, of the result's bytes for `all_gather` and else of the operand's; of lax where
            there is no native call.
        busbw: GB/s, `algbw` times what the op has to move over a bus, as nccl-tests defines it.
        wrong: elements in which native and lax differ.
    """

    op: str
    bytes: int
    path: str
    native_us: float
    native_p99_us: float
    lax_us: float
    speedup: float
    algbw: float
    busbw: float
    wrong: int


_HEAD = ("op", "bytes", "auto", "native", "p99", "lax", "x", "algbw", "busbw", "#wrong")


def sizes_of(text: str) -> list[int]:
    """Returns the sizes of "8:64M": from the first to the last, each four times the one before.

    Raises:
        ValueError: anything else; the text says what.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)(?::(\d+)([KMG]?))?", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"--sizes: expected a size or a range such as 8:64M, got {text!r}.")
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    first = int(found[1]) * units[found[2].upper()]
    last = int(found[3]) * units[found[4].upper()] if found[3] else first
    if not 0 < first <= last:
        raise ValueError(f"--sizes: expected sizes above 0 in rising order, got {text!r}.")
    return [first * 4**i for i in range(64) if first * 4**i <= last]


def run(ops: Sequence[str], sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    """Measures each op at each size over all devices of this process.

    Native calls against lax's; lax's alone where none can be native.

    Sizes are rounded up to what the ranks can divide. Cost: about a second a row up to 64 KiB and
    several for larger ones.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("ranks",), axis_types=(_AUTO,))
    step = 4 * mesh.size
    for op in ops:
        for size in sorted({-(-size // step) * step for size in sizes}):
            yield _row(op, size, rounds, mesh)


_AUTO = jax.sharding.AxisType.Auto


def _row(op: str, size: int, rounds: int, mesh: jax.sharding.Mesh) -> Row:
    lengths = (32, 256) if size <= 64 << 10 else (2, 6)
    x = operand(size, mesh)
    functions = variants(op, mesh.size, () if _native.unavailable_reason() else ("native",))
    once = {name: chain(op, call, 1, mesh)(x) for name, call in functions.items()}
    wrong = sum(count_wrong(result, once["lax"]) for result in once.values())
    auto = chain(op, variants(op, mesh.size, ("auto",))["auto"], 1, mesh)
    (decision,) = explain(auto, x).rows
    timings = []
    for length in lengths:
        programs = {name: chain(op, call, length, mesh) for name, call in functions.items()}
        timings.append(measure({n: ft.partial(f, x) for n, f in programs.items()}, rounds))
    per_call = slopes(timings[0], timings[1], *lengths)
    if not per_call.seconds["lax"]:  # every round was disturbed: what the longer chain took
        longer = timings[1].seconds.items()
        per_call = Timing({n: [s / lengths[1] for s in seconds] for n, seconds in longer})
    ours = "native" if "native" in functions else "lax"
    us = per_call.median_us(ours)
    algbw = size * (mesh.size if op == "all_gather" else 1) / us / 1e3
    return Row(
        op=op,
        bytes=size,
        path=decision.path,
        native_us=us if ours == "native" else math.nan,
        native_p99_us=per_call.percentile_us(ours, 99) if ours == "native" else math.nan,
        lax_us=per_call.median_us("lax"),
        speedup=per_call.ratio("lax", ours) if ours == "native" else math.nan,
        algbw=algbw,
        busbw=algbw * _BUS_FACTOR[op](mesh.size),
        wrong=wrong,
    )


def crossovers(rows: Sequence[Row]) -> dict[str, int | None]:
    """Returns from which size on lax is faster, at that and all larger sizes; None if it is not.

    For each copy that was measured at two sizes or more: two neighbours have to agree.
    """
    found: dict[str, int | None] = {}
    for op in _crossovers.COPIES:
        of_op = sorted((row for row in rows if row.op == op), key=lambda row: row.bytes)
        slower: list[Row] = []
        for row in reversed(of_op):
            if row.speedup >= _MARGIN:
                break
            slower.append(row)
        if len(of_op) >= 2:
            found[op] = slower[-1].bytes if len(slower) >= 2 else None
    return found


def line(cells: Sequence[str]) -> str:
    """Returns one line of the table, aligned."""
    widths = (15, 11, 8, 10, 10, 10, 7, 8, 8, 8)
    left = f"{cells[0]:<{widths[0]}}"
    return left + "".join(f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True))


def head() -> str:
    """Returns the table's head."""
    return line(_HEAD)


def text(row: Row) -> str:
    """Returns a row of the table."""
    numbers = [_number(v, 1) for v in (row.native_us, row.native_p99_us, row.lax_us)]
    rates = [_number(v, 2) for v in (row.speedup, row.algbw, row.busbw)]
    return line([row.op, str(row.bytes), row.path, *numbers, *rates, str(row.wrong)])


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def known() -> tuple[str, ...]:
    """Returns the ops that can be measured."""
    return tuple(OPS)
