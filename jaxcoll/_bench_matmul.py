"""`jaxcoll bench` of collective matmuls: one native call, or our collective and XLA's matmul.

Of one process, or of a job: `jaxcoll run -n 2 -m jaxcoll bench all_gather_matmul` measures between
processes.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import lax

from jaxcoll import _crossovers
from jaxcoll._explain import explain
from jaxcoll._timing import measure
from jaxcoll.collectives import _matmul
from jaxcoll.collectives.all_gather_matmul import all_gather_matmul
from jaxcoll.collectives.matmul_reduce_scatter import matmul_reduce_scatter

AXIS = "ranks"
OPS = _crossovers.MATMULS
# From which ratio on two steps are the faster way, for all that one run can tell.
_MARGIN = 1.03
# Rows and columns of the blocks are multiples of this.
_STEP = 16


@dataclasses.dataclass(frozen=True)
class Row:
    """One op on square blocks.

    Attributes:
        op: which.
        side: rows and columns of a rank's blocks.
        products: multiplications of all ranks.
        path: what `backend="auto"` takes now.
        one_us: median time of one native call.
        two_us: of our collective and XLA's matmul.
        lax_us: of lax's collective and XLA's matmul.
        two_over_one: median over rounds of their times' ratio.
        wrong: elements of this process in which the three differ.
    """

    op: str
    side: int
    products: int
    path: str
    one_us: float
    two_us: float
    lax_us: float
    two_over_one: float
    wrong: int


def sides_of(sizes: Sequence[int]) -> list[int]:
    """Returns the sides of float32 blocks of about so many bytes."""
    return sorted({max(1, round(math.sqrt(size / 4) / _STEP)) * _STEP for size in sizes})


def run(ops: Sequence[str], sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    """Measures each op on blocks of each size, over all devices of the job."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    for op in ops:
        for side in sides_of(sizes):
            yield _row(op, side, rounds, mesh)


def _row(op: str, side: int, rounds: int, mesh: jax.sharding.Mesh) -> Row:
    p, spec = mesh.size, jax.P(AXIS)
    rng = np.random.default_rng(0)
    rows = side if op == "all_gather_matmul" else p * side
    x, w = (
        jax.device_put(
            rng.integers(-3, 4, (p * count, side)).astype(np.float32), jax.NamedSharding(mesh, spec)
        )
        for count in (rows, side)
    )

    def program(f: Callable[..., Any]) -> Any:
        mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped)

    functions = {name: program(f) for name, f in _ways(op).items()}
    results = {name: np.asarray(f(x, w).addressable_data(0)) for name, f in functions.items()}
    (decision,) = explain(functions.pop("auto"), x, w).rows
    programs = {name: ft.partial(f, x, w) for name, f in functions.items()}
    # The processes of a job make as many rounds as each other.
    timing = measure(programs, rounds, budget_s=math.inf if jax.process_count() > 1 else 1.5)
    return Row(
        op=op,
        side=side,
        products=p * p * side**3,
        path=decision.path,
        one_us=timing.median_us("one call"),
        two_us=timing.median_us("two steps"),
        lax_us=timing.median_us("lax"),
        two_over_one=timing.ratio("two steps", "one call"),
        wrong=sum(int((result != results["lax"]).sum()) for result in results.values()),
    )


def _ways(op: str) -> dict[str, Callable[..., Any]]:
    """Returns functions of x and w."""
    two_steps: Any = {
        "axes": AXIS,
        "axis": _matmul.ROWS,
        "dtype": np.dtype(np.float32),
        "backend": "auto",
    }
    if op == "all_gather_matmul":
        return {
            "one call": lambda x, w: all_gather_matmul(x, w, AXIS, backend="native"),
            "two steps": lambda x, w: _matmul.gather_then_multiply(x, w, **two_steps),
            "lax": lambda x, w: lax.all_gather(x, AXIS, tiled=True) @ w,
            "auto": lambda x, w: all_gather_matmul(x, w, AXIS, backend="auto"),
        }
    return {
        "one call": lambda x, w: matmul_reduce_scatter(x, w, AXIS, backend="native"),
        "two steps": lambda x, w: _matmul.multiply_then_scatter(x, w, **two_steps),
        "lax": lambda x, w: lax.psum_scatter(x @ w, AXIS, tiled=True),
        "auto": lambda x, w: matmul_reduce_scatter(x, w, AXIS, backend="auto"),
    }


def crossovers(rows: Sequence[Row]) -> dict[str, _crossovers.OneCall]:
    """Returns up to where one call serves best, of ops with two sizes or more, and where not.

    Two neighbouring sizes have to say that two steps are faster; one call serves up to 0
    multiplications where the smallest say so.
    """
    found = {}
    for op in OPS:
        of_op = sorted((row for row in rows if row.op == op), key=lambda row: row.products)
        if len(of_op) < 2:
            continue
        loses = [row.two_over_one < 1 / _MARGIN for row in of_op]
        lost = [i for i in range(len(loses) - 1) if loses[i] and loses[i + 1]]
        if not lost:
            found[op] = _crossovers.OneCall(of_op[-1].products, 0)
        else:
            products = of_op[lost[0] - 1].products if lost[0] else 0
            found[op] = _crossovers.OneCall(products, of_op[lost[-1] + 1].products)
    return found


def ranks_are_in() -> Literal["one process", "several processes"]:
    """Says which of the two this job measures."""
    return "several processes" if jax.process_count() > 1 else "one process"


_HEAD = ("op", "side", "auto", "one call", "two steps", "lax", "x", "#wrong")


def head() -> str:
    """Returns the table's head."""
    return _line(_HEAD)


def text(row: Row) -> str:
    """Returns a row of the table."""
    times = [f"{us:.1f}" for us in (row.one_us, row.two_us, row.lax_us)]
    return _line(
        [row.op, str(row.side), row.path, *times, f"{row.two_over_one:.2f}", str(row.wrong)]
    )


def _line(cells: Sequence[str]) -> str:
    widths = (6, 10, 11, 11, 11, 7, 8)
    return f"{cells[0]:<23}" + "".join(f"{c:>{w}}" for c, w in zip(cells[1:], widths, strict=True))
