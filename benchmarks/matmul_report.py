"""What benchmarks/matmul.py makes of its times: figures and aims, the table and the picture."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from shared import head

_WAYS = ("native", "auto", "two steps", "ring", "alone")
THEIRS = ("two steps", "ring")
NOT_SLOWER = 0.95  # lax's better form over auto
# Auto over the matmul alone, between processes, from that many multiplications of a rank's block.
NEAR, LARGE = 1.05, 1024 * 1024 * 256


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Returns medians in ms, medians over the rounds of ratios in each, and aims missed, or "".

    Args:
        row: a shape's, with `times`: seconds by way and round.
    """
    times = dict(row["times"])
    moves = [times.pop(way) for way in ("shared", "read") if way in times]
    if moves:
        times["moved"] = min(moves, key=statistics.median)
    better = min(THEIRS, key=lambda way: statistics.median(times[way]))
    rounds = [dict(zip(times, of, strict=True)) for of in zip(*times.values(), strict=True)]
    found: dict[str, Any] = {
        "ratio": statistics.median(t[better] / t["native"] for t in rounds),
        "auto ratio": statistics.median(t[better] / t["auto"] for t in rounds),
        "beside alone": statistics.median(t["auto"] / t["alone"] for t in rounds),
        # 1: all communication, or all computation, was hidden.
        "hidden": statistics.median(
            (t["collective"] + t["alone"] - t["auto"]) / min(t["collective"], t["alone"])
            for t in rounds
        ),
        "rounds": len(rounds),
        **{way: 1e3 * statistics.median(of) for way, of in times.items()},
    }
    if moves:
        found["beside least"] = statistics.median(
            t["auto"] / (t["alone"] + t["moved"]) for t in rounds
        )
    return {**found, "misses": _misses({**row, **found})}


def _misses(row: dict[str, Any]) -> str:
    missed = ["slower than lax"] if row["auto ratio"] < NOT_SLOWER else []
    if is_large(row) and row["beside alone"] > NEAR:
        missed.append("limit" if row["beside least"] <= NEAR else "beyond alone")
    return ", ".join(missed)


def is_large(row: dict[str, Any]) -> bool:
    """Tells whether a row has an aim beside the matmul alone."""
    return row["processes"] > 1 and row["m"] * row["k"] * row["n"] >= LARGE


def _of_large(rows: list[dict[str, Any]]) -> str:
    """Says how large rows between processes stand beside the matmul alone."""
    of = [row["misses"] for row in rows if is_large(row)]
    if not of:
        return ""
    limit, beyond = (sum(name in missed for missed in of) for name in ("limit", "beyond alone"))
    return (
        f" Of {len(of)} such rows {len(of) - limit - beyond} are within 5% of the matmul alone, "
        f"{limit} more within 5% of the least, {beyond} beyond."
    )


def _ranks(row: dict[str, Any]) -> str:
    count = row["processes"]
    ranks = f"{count} processes" if count > 1 else f"{row['devices']} devices"
    return f"{ranks}, {row['cores']} cores" if "cores" in row else ranks


def markdown(result: dict[str, Any]) -> str:
    """Returns the results file."""
    rows = result["rows"]
    ratios = [row["auto ratio"] for row in rows]
    mean = float(np.exp(np.mean(np.log(ratios))))
    lines = [
        *head("Collective matmuls", result),
        "f32; blocks of (m, k) and (k, n). Medians in milliseconds. *Native* is one call, "
        "*auto* that or an own collective and XLA's matmul, as *path* says, *two steps* and "
        "*ring* are on `jax.lax`, *alone* is XLA's matmul of all blocks, without communication. "
        "Ratios are of "
        "lax's better one, by its median, to ours in each round, median, of 5 to "
        f"{result['rounds']} rounds of a job; above 1 ours is faster. Shapes that missed an aim, "
        "and all that have one beside the matmul alone, ran in two more jobs, and all rounds "
        "count; the others' figures are one job's. *Hidden* is (collective + alone - auto) / "
        "min(collective, alone), of our collective alone: 1 where all communication ran beside "
        "computation, 0 where none did, below 0 where both together took longer than one after the "
        "other; where the collective is short beside the matmul it is noise. Between processes "
        "*moved* is what a process takes to copy the others' blocks once, in pieces that stay in "
        "its cache, from memory that they share or by reading the other's, whichever is faster, "
        "and *least* is alone and moved: on two cores a process has one, which does both. Ranks "
        "with a number of cores, of more that there are, have one each, and one thread.",
        "",
        f"One call multiplies with SciPy's BLAS, here with kernels for {result['blas']}. "
        f"`auto` against lax's better form, over all {len(rows)} rows: geometric mean {mean:.2f}, "
        f"least {min(ratios):.2f}; {sum(r < 0.95 for r in ratios)} rows below 0.95. Not measured: "
        "more than 2**35 multiplications of all ranks, blocks gathered or scattered along the last "
        "dimension, other dtypes. Aims, in *misses*: not *slower than lax* (0.95); between "
        "processes from 1024 x 1024 x 256 on not *beyond alone*, 1.05 of it, or *limit* where it "
        "is within 1.05 of the least." + _of_large(rows),
        "",
        "| ranks | call | m, k, n | path | native | auto | two steps | ring | alone | moved "
        "| native's ratio | auto's ratio | auto / alone | auto / least | hidden | rounds "
        "| misses | results |",
        "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    for row in rows:
        times = " | ".join(f"{row[way]:.3f}" for way in _WAYS)
        moved = f"{row['moved']:.3f}" if "moved" in row else ""
        least = f"{row['beside least']:.2f}" if "moved" in row else ""
        lines.append(
            f"| {_ranks(row)} | {row['kind']} | {row['m']}, {row['k']}, {row['n']} "
            f"| {row['path']} | {times} | {moved} | {row['ratio']:.2f} | {row['auto ratio']:.2f} "
            f"| {row['beside alone']:.2f} | {least} | {row['hidden']:.2f} | {row['rounds']} "
            f"| {row['misses']} | {'equal' if row['equal'] else 'DIFFERENT'} |"
        )
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws lax's better time over auto's as a map: a panel for each layout and call."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    rows = result["rows"]
    layouts = list(dict.fromkeys(map(_ranks, rows)))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    heights = sorted({row["m"] for row in rows})
    widths = sorted({(row["k"], row["n"]) for row in rows})
    figure = Figure(figsize=(7 * len(kinds), 0.6 + 3.2 * len(layouts)), layout="constrained")
    panels = figure.subplots(len(layouts), len(kinds), squeeze=False)
    norm = TwoSlopeNorm(0, -1, 1)  # of binary logarithms
    image = None
    for (i, layout), (j, kind) in ((a, b) for a in enumerate(layouts) for b in enumerate(kinds)):
        axes, map_ = panels[i][j], np.full((len(heights), len(widths)), np.nan)
        for row in rows:
            if (_ranks(row), row["kind"]) == (layout, kind):
                y, x = heights.index(row["m"]), widths.index((row["k"], row["n"]))
                map_[y, x] = row["auto ratio"]
                axes.text(x, y, f"{row['auto ratio']:.2f}", ha="center", va="center", fontsize=7)
        image = axes.imshow(np.log2(map_), cmap="RdYlGn", norm=norm, aspect="auto")
        axes.set_title(f"{kind}, {layout}", fontsize=10)
        axes.set_xticks(range(len(widths)), [f"{k}, {n}" for k, n in widths], rotation=60)
        axes.set_yticks(range(len(heights)), list(map(str, heights)))
        axes.tick_params(labelsize=7)
        axes.set_xlabel("k, n", fontsize=8)
        axes.set_ylabel("m", fontsize=8)
    assert image is not None
    bar = figure.colorbar(image, ax=panels, shrink=0.5, ticks=[-1, 0, 1])
    bar.ax.set_yticklabels(["0.5: lax faster", "1", "2: ours faster"], fontsize=8)
    of = result["environment"]
    figure.suptitle(
        f"Time of lax's better form over jaxcoll's; {of['cores']} cores of {of['cpu']}, "
        f"{of['date']}; white: not measured",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
