"""Several jobs' rows as one, tables and the plot of a results file of several processes."""

import statistics
from pathlib import Path
from typing import Any

from process_aims import (
    AT_THE_LEAST,
    MEAN_AIMS,
    OTHERS,
    STEP_AIMS,
    aim,
    at_most,
    mean,
    verdict_of,
    verdict_of_step,
)
from report import KIB, MIB, size_text

COLORS = {"lax": "#b0563b", "mpi4jax": "#5a8f3c", "native": "#1f6fb2"}
LABELS = {"lax": "jax.lax on Gloo", "mpi4jax": "mpi4jax on Open MPI", "native": "jaxcoll"}


def pooled(jobs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the rows of several jobs as one: medians, and sums of what was counted.

    A row of one job depends on where its processes' memory and cores happen to lie: of more than
    two, the jobs' own ratios stand beside their medians.
    """
    rows = []
    for of in zip(*jobs, strict=True):
        row = {name: _pooled(name, [row[name] for row in of if name in row]) for name in of[0]}
        if len(of) > 2:
            for ratio in (*(f"{other}_over_native" for other in OTHERS), "native_over_least"):
                if ratio in row:
                    row[f"{ratio}_by_job"] = [of_job[ratio] for of_job in of]
        rows.append(row)
    return rows


def _pooled(name: str, values: list[Any]) -> Any:
    if name in ("rounds", "lax_rounds", "wrong"):
        return sum(values)
    if name == "line_ns":
        return [ns for of_job in values for ns in of_job]
    if isinstance(values[0], float):
        return round(statistics.median(values), 3)
    if isinstance(values[0], str):
        return ", ".join(dict.fromkeys(values))
    return values[0]


def markdown(results: dict[str, Any]) -> str:
    """Returns all tables; times are medians in us, ratios medians of paired rounds."""
    head, rows = results["environment"], results["processes"]
    lines = [
        "# Several processes of one host: jaxcoll, jax.lax on Gloo, mpi4jax on Open MPI",
        "",
        f"`{results['command']}`, {head['date']}, {head['cores']} cores of {head['cpu']}, "
        f"jax {head['jax']}, Python {head['python']}. One device a process. Of several jobs "
        "(`--jobs`) rows are medians.",
        "",
        "Times are medians in microseconds; ratios (theirs / ours, above 1 ours is faster) are "
        "medians of rounds in which all variants ran in turn: lax's of the *lax rounds*, with ours "
        "and the least beside it, all others of the *rounds* without it. *chained* is the extra "
        "time for each call of a longer chain in one program, *single* a whole program with one "
        "call.",
        "",
        "*least* is the same program with calls that do nothing but move the bytes "
        "(`benchmarks/bare.cc`), in the same rounds: through memory that the processes share "
        "(*window*) or by the system's call that reads another process (*read*), whichever is "
        "faster. *at most* is theirs / least: the ratio of a library that does nothing else. Of a "
        "row that misses its aim, *limit* says that this is below the aim, too, or that ours takes "
        f"at most {AT_THE_LEAST:g} times the least; *open* that neither holds, or that somebody "
        "undercuts the least by a tenth, which then says nothing.",
        "",
        "*line* is what a cache line takes to the other process's core and back, in ns, before and "
        "after a measurement: where a virtual machine's cores are moved, it differs from row to "
        "row, and short calls with it.",
    ]
    for processes in sorted({row["processes"] for row in rows}):
        lines += ["", f"## {processes} processes", ""]
        lines += [
            "| op | bytes per rank | how | jaxcoll | lax | mpi4jax | least | way | lax/ours | "
            "at most | aim | | mpi4jax/ours | at most | aim | | line | lax rounds | rounds | "
            "wrong |"
        ]
        numbers = "--:|--:|--:|---|" * 2 + "--:|--:|--:|--:|"
        lines += ["|---|--:|---|" + "--:|" * 4 + "---|" + numbers]
        for row in rows:
            if row["processes"] == processes:
                cells = [row["op"], size_text(row["bytes"]), row["how"]]
                names = ("native_us", "lax_us", "mpi4jax_us", "least_us", "least_way")
                cells += [row.get(name, "") for name in names]
                for other in OTHERS:
                    cells += [row.get(f"{other}_over_native", ""), _text(at_most(row, other))]
                    cells += [_text(aim(row, other)), verdict_of(row, other)]
                cells.append(", ".join(map(str, row.get("line_ns", ()))))
                cells += [row.get("lax_rounds", ""), row["rounds"], row["wrong"]]
                lines.append(_line(*cells))
    lines += ["", "## Aims", "", "A mean is at most that of the rows' own *at most*; a row whose "]
    lines[-1] += "least says nothing counts with the best that anybody took."
    lines += ["", *_counts(rows), "", "### Missed", "", *_missed(rows)]
    lines += [*_by_job(rows), *_own_part_of_xla(rows)]
    lines += ["", "## Geometric means and least ratios, all ops", ""]
    lines += ["| processes | how | against | up to 64 KiB | above | least | where |"]
    lines += ["|--:|---|---|--:|--:|--:|---|"]
    for processes in sorted({row["processes"] for row in rows}):
        for how in ("chained", "single"):
            for other in ("lax", "mpi4jax"):
                lines += _summary(rows, processes, how, other)
    if steps := results["train_step"]:
        lines += ["", "## A data-parallel training step", "", *step_lines(steps)]
    return "\n".join(lines) + "\n"


def step_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the table of training steps (train_step.py)."""
    lines = [
        "*alone* is the same step without communication; *at most* is lax's time over that.",
        "",
        "| processes | parameters | tokens a step | jaxcoll ms | lax ms | alone ms | lax/ours | "
        "at most | aim | | rounds |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|",
    ]
    for row in rows:
        numbers = [row["processes"], f"{row['parameters']:,}", f"{row['tokens_per_step']:,}"]
        names = ("native_ms", "lax_ms", "alone_ms", "lax_over_native", "lax_over_alone")
        wanted = _text(STEP_AIMS.get(row["processes"]))
        lines.append(
            _line(*numbers, *(row[n] for n in names), wanted, verdict_of_step(row), row["rounds"])
        )
    return lines


def _line(*cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


def _counts(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| processes | how | against | met | limit | open | mean | at most | aim | |"]
    lines += ["|--:|---|---|--:|--:|--:|--:|--:|--:|---|"]
    for processes, how in dict.fromkeys((row["processes"], row["how"]) for row in rows):
        for other in OTHERS:
            chosen = [
                row
                for row in rows
                if (row["processes"], row["how"]) == (processes, how) and aim(row, other)
            ]
            if chosen:
                found = [verdict_of(row, other) for row in chosen]
                of_mean, best, said = mean(chosen, other)
                cells = [f"{of_mean:.2f}", "" if best is None else f"{best:.2f}"]
                cells += [_text(MEAN_AIMS.get(other)), said]
                numbers = [found.count(verdict) for verdict in ("met", "limit", "open")]
                lines.append(_line(processes, how, other, *numbers, *cells))
    return lines


def _missed(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| processes | op | bytes per rank | how | against | ratio | at most | aim | "
        "jaxcoll/least | |",
        "|--:|---|--:|---|---|--:|--:|--:|--:|---|",
    ]
    for other in OTHERS:
        for row in rows:
            if (said := verdict_of(row, other)) in ("limit", "open"):
                cells = [row["processes"], row["op"], size_text(row["bytes"]), row["how"], other]
                cells += [row[f"{other}_over_native"], _text(at_most(row, other))]
                cells += [_text(aim(row, other)), row.get("native_over_least", ""), said]
                lines.append(_line(*cells))
    return lines


def _by_job(rows: list[dict[str, Any]]) -> list[str]:
    names = [f"{other}_over_native_by_job" for other in OTHERS] + ["native_over_least_by_job"]
    chosen = [row for row in rows if row["how"] == "chained" and any(n in row for n in names)]
    if not chosen:
        return []
    lines = ["", "### Chained, by job", ""]
    lines += ["| processes | op | bytes per rank | lax/ours | mpi4jax/ours | jaxcoll/least |"]
    lines += ["|--:|---|--:|---|---|---|"]
    for row in chosen:
        cells = [row["processes"], row["op"], size_text(row["bytes"])]
        lines.append(_line(*cells, *(", ".join(map(str, row.get(n, ()))) for n in names)))
    return lines


def _own_part_of_xla(rows: list[dict[str, Any]]) -> list[str]:
    chosen = [row for row in rows if "nothing_us" in row and row["how"] == "chained"]
    if not chosen:
        return []
    lines = [
        "",
        "### What of a short call is XLA's own",
        "",
        "*XLA*: the same chain with calls that return at once.",
        "",
        "| processes | op | bytes per rank | jaxcoll | mpi4jax | least | XLA |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in chosen:
        names = ("native_us", "mpi4jax_us", "least_us", "nothing_us")
        cells = [row["processes"], row["op"], size_text(row["bytes"])]
        lines.append(_line(*cells, *(row.get(name, "") for name in names)))
    return lines


def _summary(rows: list[dict[str, Any]], processes: int, how: str, other: str) -> list[str]:
    key = f"{other}_over_native"
    chosen = [r for r in rows if (r["processes"], r["how"]) == (processes, how) and key in r]
    if not chosen:
        return []
    small = [row[key] for row in chosen if row["bytes"] <= 64 * KIB]
    large = [row[key] for row in chosen if row["bytes"] > 64 * KIB]
    means = [f"{statistics.geometric_mean(of):.2f}" if of else "" for of in (small, large)]
    least = min(chosen, key=lambda row: row[key])
    where = f"{least['op']}, {size_text(least['bytes'])}"
    return [f"| {processes} | {how} | {other} | {means[0]} | {means[1]} | {least[key]} | {where} |"]


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws time per call over size, a panel for each op and number of processes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in results["processes"] if row["how"] == "chained"]
    ops = list(dict.fromkeys(row["op"] for row in rows))
    counts = sorted({row["processes"] for row in rows})
    measured = [variant for variant in COLORS if any(f"{variant}_us" in row for row in rows)]
    figure, panels = plt.subplots(
        len(counts),
        len(ops),
        figsize=(3.1 * len(ops), 2.6 * len(counts)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for i, processes in enumerate(counts):
        for j, op in enumerate(ops):
            panel = panels[i][j]
            points = [row for row in rows if (row["op"], row["processes"]) == (op, processes)]
            for variant in measured:
                drawn = [row for row in points if f"{variant}_us" in row]
                panel.plot(
                    [row["bytes"] for row in drawn],
                    [row[f"{variant}_us"] for row in drawn],
                    marker="o",
                    markersize=3,
                    color=COLORS[variant],
                    label=LABELS[variant],
                )
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.grid(alpha=0.3)
            panel.set_title(f"{op}, {processes} processes", fontsize=9)
            if i == len(counts) - 1:
                panel.set_xlabel("bytes per rank", fontsize=8)
                panel.set_xticks([256, 64 * KIB, 16 * MIB], ["256 B", "64 KiB", "16 MiB"])
            if j == 0:
                panel.set_ylabel("us per call", fontsize=8)
            panel.tick_params(labelsize=8)
    panels[0][0].legend(fontsize=7)
    head = results["environment"]
    figure.suptitle(
        f"Chained collectives across processes, {head['cores']} cores, f32, jax {head['jax']} "
        "(lower is better)",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
