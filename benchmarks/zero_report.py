"""The table and the picture of `zero_step.py`."""

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

# A further way of data parallelism.
BUCKETS = "in buckets"
BUCKET_BYTES = 2**20


def markdown(result: dict[str, Any]) -> str:
    """Returns the page of results."""
    lines = [
        *head("Data-parallel and fully sharded training steps", result),
        "`TransformerLM` in float32, AdamW. Medians of the time of a step; ratios are medians of "
        f"those of {result['rounds']} rounds, above 1 ours is faster: the same step on lax, and "
        "the better of that and of `jax.jit` on arrays with the same shardings (GSPMD). *At "
        "most*: what the first ratio would be if calls took none of the cores' time in our steps, "
        "by the engine's records. *MB on a device*: state, batch and temporary values, as the "
        "compiler says. Stage 1 has whole gradients; with its shardings GSPMD keeps parts of "
        "them, as stage 2 does. *kept*: `reshard_after_forward=False`. The loss after all steps "
        "is compared, to 0.002.",
        "",
        "| processes x devices | mesh | width x layers, tokens | strategy | ours, lax, GSPMD: ms "
        "| tokens/s, ours | lax / ours | at most | better of both / ours | MB on a device "
        "| losses |",
        "|---|---|---|---|---|--:|--:|--:|--:|---|---|",
    ]
    for row in result["rows"]:
        times = ", ".join(f"{row['ms'][way]:.1f}" for way in WAYS)
        lines.append(
            f"| {row['processes']} x {row['devices']} | {_mesh(row)} | {model_text(row)} | "
            f"{row['strategy']} | {times} | {rate(row, 'auto'):,.0f} | "
            f"{ratios_text(row)} | {peaks_text(row)} | "
            f"{losses_text(row)} |"
        )
    for section in (losing, below_aim):
        lines += section(result["rows"], _name)
    lines += [
        "",
        "## Gradients in buckets",
        "",
        f"Data parallelism that sums gradients in calls of {BUCKET_BYTES >> 20} MiB, as soon as "
        "they are ready (`bucket_bytes`), in turn with one call for all at the end, the default: "
        "its time over that of one call; below 1 buckets are faster.",
        "",
        "| processes x devices | mesh | width x layers, tokens | in buckets / one call |",
        "|---|---|---|--:|",
    ]
    for row in result["rows"]:
        if BUCKETS in row["ratio"]:
            lines.append(
                f"| {row['processes']} x {row['devices']} | {_mesh(row)} | {model_text(row)} | "
                f"{row['ratio'][BUCKETS]:.2f} |"
            )
    return "\n".join(lines) + "\n"


def _name(row: dict[str, Any]) -> str:
    return f"{_mesh(row)}, {row['strategy']}"


def _mesh(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {size}" for name, size in row["axes"].items())


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws tokens per second: a panel for each layout and model."""
    from matplotlib.figure import Figure

    def panel_of(row: dict[str, Any]) -> str:
        return f"{row['processes']} x {row['devices']} ({_mesh(row)}), {model_text(row)} tokens"

    rows = result["rows"]
    panels = list(dict.fromkeys(map(panel_of, rows)))
    figure = Figure(figsize=(11, 0.5 + 2.1 * len(panels)), layout="constrained")
    for axes, title in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        shown = [row for row in rows if panel_of(row) == title]
        bars(axes, shown, [row["strategy"] for row in shown], title)
        axes.tick_params(axis="y", labelsize=8)
        axes.margins(y=0.25)  # for the legend
    figure.axes[0].legend(fontsize=8, ncols=3)
    suptitle(figure, result)
    figure.savefig(path, dpi=110)
