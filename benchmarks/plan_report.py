"""The pages and the pictures of `plan_step.py`."""

from pathlib import Path
from typing import Any

from shared import head
from three_ways import (
    WAYS,
    bars,
    below_aim,
    losing,
    losses_text,
    model_text,
    peaks_text,
    rate,
    ratios_text,
    suptitle,
)

_SCHEDULE_COLORS = {"gpipe": "#b0563b", "1f1b": "#1b7837", "interleaved": "#1f6fb2"}
GOAL = 1.10  # of a pipeline's time over that of its bubble


def _plans(result: dict[str, Any]) -> str:
    """Returns the page on products."""
    lines = [
        *head("Products of strategies", result),
        "`TransformerLM` in float32, AdamW, `ParallelPlan` with its defaults: ZeRO-3, 1F1B of 4 "
        "micro-batches; a pipeline alone with the other schedules, too. Medians of the time of a "
        f"step; ratios are medians of those of {result['rounds']} rounds, above 1 ours is faster: "
        "the same step on lax, and the better of that and of `jax.jit` of the plain step on arrays "
        "with the same shardings (GSPMD; there the batch is split over `pipe`, too, and each layer "
        "gathered). *At most*: what the first ratio would be if calls took none of the cores' time "
        "in our steps, by the engine's records, but for the bubble where two processes are a "
        "pipeline (1/5 of it, interleaved 1/9). *MB on a device*: state, batch and temporary "
        "values, as the compiler says. The loss after all steps is compared, to 0.002.",
        "",
        "| processes x devices | mesh | width x layers, tokens | ours, lax, GSPMD: tokens/s "
        "| lax / ours | at most | better of both / ours | MB on a device | losses |",
        "|---|---|---|---|--:|--:|--:|---|---|",
    ]
    for row in result["rows"]:
        rates = ", ".join(f"{rate(row, way):,.0f}" for way in WAYS)
        lines.append(
            f"| {row['processes']} x {row['devices']} | {_mesh(row)} | {model_text(row)} | "
            f"{rates} | "
            f"{ratios_text(row)} | {peaks_text(row)} | "
            f"{losses_text(row)} |"
        )
    for section in (losing, below_aim):
        lines += section(result["rows"], _mesh)
    return "\n".join(lines) + "\n"


def _pipelines(result: dict[str, Any]) -> str:
    """Returns the page on pipelines."""
    lines = [
        *head("Pipelines of two processes, each on a core", result),
        "`PPClassifier`, 8 layers of width 512, micro-batches of 256 examples, SGD. *Ideal*: the "
        "time in which one of the processes sends all micro-batches through half of the layers, "
        "forward, and then, with these computed once more, backward, and communicates with nobody; "
        "both do so at the same time. *Bubble*: what a schedule's time is over the ideal where "
        "nothing else is lost, (M + 1) / M, interleaved (2 M + 1) / 2 M. *Ratio*: the time over "
        f"ideal x bubble, the median of {result['rounds']} rounds; the goal is at most {GOAL:.2f}. "
        "It can be below 1: the ideal keeps both cores busy all the time, but in a bubble one "
        "idles, and the other has the memory and the clock to itself. *Temporary*: bytes between a "
        "step's operands and results, as the compiler says. The loss after all steps is compared "
        "with that of the first schedule, to 0.002.",
        "",
        "| micro-batches | schedule | a step, ms | ideal, ms | bubble | ratio | temporary, MB "
        "| losses |",
        "|--:|---|--:|--:|--:|--:|--:|---|",
    ]
    lines += [
        f"| {row['micro-batches']} | {row['schedule']} | {row['ms']:.1f} | "
        f"{row['ideal ms']:.1f} | {row['limit']:.3f} | {row['ratio']:.2f} | "
        f"{row['temporary bytes'] / 1e6:.1f} | {losses_text(row)} |"
        for row in result["rows"]
    ]
    return "\n".join(lines) + "\n"


def _mesh(row: dict[str, Any]) -> str:
    schedule = "" if row["schedule"] == "1f1b" else f", {row['schedule']}"
    return " x ".join(row["axes"]) + schedule


def _draw_plans(result: dict[str, Any], path: Path) -> None:
    """Draws tokens per second, a panel for each layout and model."""
    from matplotlib.figure import Figure

    def panel_of(row: dict[str, Any]) -> str:
        return f"{row['processes']} x {row['devices']}, {model_text(row)} tokens"

    titles = list(dict.fromkeys(map(panel_of, result["rows"])))
    figure = Figure(figsize=(11, 0.5 + 2.1 * len(titles)), layout="constrained")
    panels = figure.subplots(len(titles), 1, squeeze=False)[:, 0]
    for axes, title in zip(panels, titles, strict=True):
        shown = [row for row in result["rows"] if panel_of(row) == title]
        bars(axes, shown, [_mesh(row) for row in shown], title)
        axes.tick_params(axis="y", labelsize=8)
        axes.margins(y=0.25)  # for the legend
    panels[0].legend(fontsize=8, ncols=4)
    suptitle(figure, result)
    figure.savefig(path, dpi=110)


def _draw_pipelines(result: dict[str, Any], path: Path) -> None:
    """Draws the ratios of each number of micro-batches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes, rows = figure.subplots(), result["rows"]
    counts = sorted({row["micro-batches"] for row in rows})
    for i, (name, color) in enumerate(_SCHEDULE_COLORS.items()):
        ratios = [row["ratio"] for row in rows if row["schedule"] == name]
        places = [j + 0.27 * (i - 1) for j in range(len(counts))]
        axes.bar(places, ratios, 0.25, label=name, color=color)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhline(GOAL, color="black", linewidth=0.8, linestyle=":", label="goal")
    axes.set_xticks(range(len(counts)), [f"{count} micro-batches" for count in counts], fontsize=8)
    axes.set_ylabel("time / (ideal x bubble)", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(y=0.25)
    axes.legend(fontsize=8, ncols=4)
    suptitle(figure, result)
    figure.savefig(path, dpi=110)


# By the names of the files.
PAGES = {"plan": _plans, "pipelines": _pipelines}
PICTURES = {"plan": _draw_plans, "pipelines": _draw_pipelines}
