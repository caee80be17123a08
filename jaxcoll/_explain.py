"""`explain`: which path every collective of a function takes, and why."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

import jaxcoll._lax_rules  # noqa: F401  (notes lax's own collectives, too)
from jaxcoll import _compat, _decisions
from jaxcoll._config import freshly_traced
from jaxcoll._decisions import Decision

_HEAD = ("op", "axes", "operand", "bytes", "ranks", "path", "order", "called at", "why not native")


@dataclasses.dataclass(frozen=True)
class Report:
    """What `explain` found. Prints as a table.

    Attributes:
        rows: one for each collective in the lowered program, in its order. A function that the
            program calls several times (a `jax.jit` inside) is lowered once.
        warnings: what is likely a mistake, one text each.
    """

    rows: tuple[Decision, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        if not self.rows:
            lines = ["no collectives could be listed" if self.warnings else "no collectives"]
        else:
            table = [_HEAD, *map(_cells, self.rows)]
            used = [i for i, title in enumerate(_HEAD) if any(row[i] for row in table[1:])]
            lines = _aligned([[row[i] for i in used] for row in table])
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Says which path every collective of `fn(*args, **kwargs)` takes, and why.

    The function is traced and lowered, as a call would do under the settings of this moment, and
    neither compiled nor run. Warnings don't become errors, also with `config.strict`.

    Args:
        fn: a function that contains `jax.shard_map` or `jax.pmap`, with or without `jax.jit`.
        *args: its arguments; arrays, or `jax.ShapeDtypeStruct` in their place.
        **kwargs: its arguments by name.

    Returns:
        A `Report`.

    Example:
        >>> print(jaxcoll.explain(train_step, state, batch))
        op              axes  operand           bytes    ranks  path    order    called at
        all_reduce sum  data  float32[512] + 3  2.1 MiB  8      native  by rank  train.py:31 (step)
    """
    if problem := _compat.problem():
        return Report((), (f"{problem}: all of them run on jax.lax",))
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    with _decisions.recording() as recording, freshly_traced():
        jitted.trace(*args, **kwargs).lower()
    return Report(tuple(recording.decisions), tuple(recording.warnings))


def _cells(row: Decision) -> tuple[str, ...]:
    ranks = "?" if row.group_size is None else str(row.group_size)
    operand = _operand(row.dtypes[0], row.shapes[0]) if row.shapes else ""
    if len(row.shapes) > 1:
        operand += f" + {len(row.shapes) - 1}"
    return (
        f"{row.op} {row.reduction}" if row.reduction else row.op,
        ", ".join(row.axes),
        operand,
        _bytes(row.bytes),
        ranks,
        row.path,
        row.order,
        row.source,
        row.reason,
    )


def _operand(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
