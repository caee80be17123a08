"""The picture of a timeline: its steps, and what those of each device are made of."""

from pathlib import Path
from typing import Any

from jaxcoll.diagnosis import timeline


def draw(found: list[timeline.Row], all_steps: list[timeline.Step], path: Path) -> None:
    """Draws the steps, what one of each device is made of, and how late each came.

    Needs matplotlib.
    """
    from matplotlib.figure import Figure

    width = max(5.0, 1.5 + 0.6 * len(found))
    figure = Figure(figsize=(width, 9.0), layout="constrained")
    times, shares, devices, late = figure.subplots(4, 1, height_ratios=(2, 1, 2, 1))
    _draw_times(times, all_steps)
    numbers = [step.number for step in all_steps]
    shares.plot(numbers, [step.exposed for step in all_steps], label="exposed", color="#b0563b")
    shares.plot(numbers, [step.overlap for step in all_steps], label="overlap", color="#1b7837")
    shares.sharex(times)
    shares.set_xlabel("step")
    shares.set_ylabel("share")
    shares.set_ylim(0, 1)
    shares.legend(fontsize=8, ncols=2)
    _draw_devices(devices, found)
    late.bar(
        [timeline.name_of(r.place) for r in found], [r.late_ms for r in found], color="#7b7b9d"
    )
    late.set_ylabel("ms that others\nwaited for it")
    late.set_xlabel("process.device")
    figure.savefig(path, dpi=110)


def _draw_times(axes: Any, all_steps: list[timeline.Step]) -> None:
    """Draws how long the steps took and what came late in them, the slowest with their number."""
    numbers = [step.number for step in all_steps]
    axes.plot(numbers, [step.ms for step in all_steps], color="#888888", lw=1, label="step")
    late = [step.late_ms for step in all_steps]
    axes.plot(numbers, late, color="#7b7b9d", lw=1, ls=":", label="its last to come, later by")
    slow = timeline.slowest(all_steps)
    for place, step in enumerate(slow):
        told = f"{step.number}" + (f", {timeline.name_of(step.last)} last" if step.last else "")
        side = -1 if step.number > len(all_steps) / 2 else 1
        axes.plot([step.number], [step.ms], "o", ms=4, color="#b0563b")
        axes.annotate(
            told,
            (step.number, step.ms),
            (5 * side, 9 * (len(slow) - 1 - place)),  # of neighbours each can be read
            textcoords="offset points",
            fontsize=8,
            ha="right" if side < 0 else "left",
        )
    axes.margins(y=0.25)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    # Above, where it hides no label.
    axes.legend(fontsize=8, ncols=2, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))


def _draw_devices(axes: Any, found: list[timeline.Row]) -> None:
    """Draws what a step of each device is made of."""
    names = [timeline.name_of(row.place) for row in found]
    bottom = [0.0] * len(found)
    for label, color, values in (
        ("waiting for ranks", "#b0563b", [row.waiting_ms for row in found]),
        ("moving data", "#1b7837", [row.moving_ms for row in found]),
        (
            "outside of calls",
            "#cccccc",
            [max(0.0, row.step_ms - row.waiting_ms - row.moving_ms) for row in found],
        ),
    ):
        axes.bar(names, values, bottom=bottom, label=label, color=color)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    axes.set_ylabel("ms of a step")
    axes.margins(y=0.25)
    axes.legend(fontsize=8, ncols=3, loc="upper center")
