"""The table and the picture of benchmarks/matmul.py."""

from pathlib import Path
from typing import Any

import numpy as np
from shared import head

_WAYS = ("native", "auto", "two steps", "ring", "alone")


def _ranks(row: dict[str, Any]) -> str:
    count = row["processes"]
    return f"{count} processes" if count > 1 else f"{row['devices']} devices"


def markdown(result: dict[str, Any]) -> str:
    """Returns the results file."""
    rows = result["rows"]
    ratios = [row["auto ratio"] for row in rows]
    mean = float(np.exp(np.mean(np.log(ratios))))
    lines = [
        *head("Collective matmuls", result),
        "f32; blocks of (m, k) and (k, n). Medians in milliseconds. *Native* is one call, "
        "*auto* that or an own collective and XLA's matmul, *two steps* and *ring* are on "
        "`jax.lax`, *alone* is XLA's matmul of all blocks, without communication. Ratios are of "
        "lax's better one, by its median, to ours in each round, median, of 3 to "
        f"{result['rounds']} rounds; above 1 ours is faster. Where an aim seemed to be missed up "
        "to four times as many rounds ran, and all count. *Hidden* is (collective + alone - auto) "
        "/ min(collective, alone), of our collective alone: 1 where all communication ran beside "
        "computation, 0 where none did, and below 0 where both together took longer than one after "
        "the other.",
        "",
        f"One call multiplies with SciPy's BLAS, here with kernels for {result['blas']}. "
        f"`auto` against lax's better form, over all {len(rows)} rows: geometric mean {mean:.2f}, "
        f"least {min(ratios):.2f}; {sum(r < 0.95 for r in ratios)} rows below 0.95. "
        "Aims, in *misses*: not *slower than lax* (0.95); between processes from 1024 x 1024 x 256 "
        "on not *beyond alone* (1.05 times the matmul alone).",
        "",
        "| ranks | call | m, k, n | native | auto | two steps | ring | alone | native's ratio "
        "| auto's ratio | auto / alone | hidden | rounds | misses | results |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    for row in rows:
        times = " | ".join(f"{row[way]:.3f}" for way in _WAYS)
        lines.append(
            f"| {_ranks(row)} | {row['kind']} | {row['m']}, {row['k']}, {row['n']} | {times} "
            f"| {row['ratio']:.2f} | {row['auto ratio']:.2f} | {row['beside alone']:.2f} "
            f"| {row['hidden']:.2f} | {row['rounds']} | {row['misses']} "
            f"| {'equal' if row['equal'] else 'DIFFERENT'} |"
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
