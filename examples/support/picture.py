"""Draw a training run: how the loss fell, and where a step's time goes."""

import dataclasses
import pathlib
from typing import Literal

import numpy as np

from support.timing import Comparison, interval

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the picture needs matplotlib, which is not installed: pip install 'jaxcoll[demo]'"
    ) from error

_SMOOTHED_STEPS = 25
_INK, _MUTED, _GRID = "#222222", "#6b7280", "#e8eaed"
_MODEL, _BIGRAM = "#1d4ed8", "#7c3aed"
_PATHS = {"lax": ("jax.lax", "#c2410c"), "native": ("jaxcoll\nnative", "#0f766e")}
_COMPUTE = "#d4d9e0"


@dataclasses.dataclass(frozen=True)
class Picture:
    """What is drawn.

    Attributes:
        losses: Training loss of each step, nats per byte.
        held_out: Held-out loss of the trained model, nats per byte.
        bigram: Held-out loss of the bigram model, nats per byte.
        comparison: Step times; None if they were not measured.
        caption: What was run and on what: model, devices, cores, versions.
    """

    losses: list[float]
    held_out: float
    bigram: float
    comparison: Comparison | None
    caption: str


def save(contents: Picture, path: pathlib.Path) -> None:
    """Write the picture of a run to `path` as PNG."""
    figure = Figure(figsize=(12, 5.2), dpi=130, facecolor="white")
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, hspace=0.06))
    if contents.comparison is None:
        _draw_losses(figure.subplots(), contents)
    else:
        parts = figure.subfigures(1, 2, squeeze=False, width_ratios=[1.15, 1])[0]
        _draw_losses(parts[0].subplots(), contents)
        if contents.comparison.compute_s is None:
            _draw_whole_steps(parts[1].subplots(), contents.comparison)
        else:
            step, sync = parts[1].subplots(2, 1)
            _draw_step_times(step, contents.comparison, contents.comparison.compute_s)
            _draw_sync_times(sync, contents.comparison)
    figure.supxlabel(contents.caption, fontsize=8.5, color=_MUTED, x=0.012, ha="left")
    figure.savefig(path)


def _draw_losses(axes: Axes, contents: Picture) -> None:
    losses, bigram, held_out = np.array(contents.losses), contents.bigram, contents.held_out
    steps = np.arange(1, len(losses) + 1)
    # Centred, and narrower at both ends: a trailing mean would lag behind the fast fall.
    window = np.ones(min(_SMOOTHED_STEPS, len(losses)))
    smooth = np.convolve(losses, window, "same") / np.convolve(np.ones_like(losses), window, "same")
    axes.plot(steps, losses, color=_MODEL, alpha=0.22, linewidth=0.8, label="training, each step")
    label = f"training, mean over {len(window)} steps"
    axes.plot(steps, smooth, color=_MODEL, linewidth=1.8, label=label)
    label = f"held-out, bigram model: {bigram:.2f}"
    axes.axhline(bigram, color=_BIGRAM, linestyle="--", linewidth=1.5, label=label)
    label = f"held-out, Transformer: {held_out:.2f}"
    end = axes.plot(steps[-1:], [held_out], "D", color=_INK, markersize=7, label=label)[0]
    end.set(clip_on=False, zorder=5)  # it stands on the frame's edge
    _title(axes, "Loss on Python's standard library", "a uniform guess would cost ln 256 = 5.55")
    axes.set_xlabel("training step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_xlim(0, len(losses) + 0.5)
    axes.set_ylim(0, 1.05 * max(losses.max(), bigram))
    axes.legend(frameon=False, fontsize=9.5, loc="upper right")
    _tidy(axes, "y")


def _draw_whole_steps(axes: Axes, comparison: Comparison) -> None:
    furthest_ms = 0.0
    for y, (path, (_, colour)) in enumerate(_PATHS.items()):
        step_ms = 1e3 * float(np.median(comparison.step_s(path)))
        axes.barh(y, step_ms, height=0.4, color=colour)
        axes.text(step_ms, y, f"  {step_ms:.1f} ms", va="center", color=colour, fontweight="bold")
        furthest_ms = max(furthest_ms, step_ms)
    _title(axes, "Time per training step", _speedup(comparison))
    axes.set_xlim(0, 1.25 * furthest_ms)
    axes.set_xlabel(f"milliseconds, median of {len(comparison.lax_s)} alternating rounds")
    _name_paths(axes)


def _speedup(comparison: Comparison) -> str:
    low, high = interval(comparison.lax_s / comparison.native_s)
    return f"native is {comparison.speedup:.3f} times as fast as lax (95%: {low:.3f} to {high:.3f})"


def _draw_step_times(axes: Axes, comparison: Comparison, compute_s: np.ndarray) -> None:
    compute_ms = 1e3 * float(np.median(compute_s))
    for y, (path, (_, colour)) in enumerate(_PATHS.items()):
        low_ms, sync_ms, _ = _sync_ms(comparison, path)
        axes.barh(y, compute_ms, height=0.58, color=_COMPUTE)
        axes.barh(y, max(sync_ms, 0), height=0.58, left=compute_ms, color=colour)
        axes.text(compute_ms / 2, y, f"compute {compute_ms:.0f} ms", ha="center", va="center")
        total_ms = compute_ms + max(sync_ms, 0)
        # A busy machine hides what is short beside the rest; a number would then say nothing.
        label = f" + sync\n {sync_ms:.1f} ms" if low_ms > 0 else " + sync, lost\n in the noise"
        axes.text(total_ms, y, label, ha="left", va="center", color=colour, fontweight="bold")
    _title(axes, "Time per training step", _speedup(comparison))
    axes.set_xlim(0, 1.3 * compute_ms)
    axes.set_xlabel("milliseconds")
    _name_paths(axes)


def _draw_sync_times(axes: Axes, comparison: Comparison) -> None:
    furthest_ms = 0.0
    for y, (path, (_, colour)) in enumerate(_PATHS.items()):
        low_ms, sync_ms, high_ms = _sync_ms(comparison, path)
        axes.barh(y, sync_ms, height=0.58, color=colour)
        axes.plot([low_ms, high_ms], [y, y], color=_INK, linewidth=1.5, marker="|", markersize=9)
        axes.text(
            max(high_ms, 0), y, f"  {sync_ms:.1f} ms", va="center", color=colour, fontweight="bold"
        )
        furthest_ms = max(furthest_ms, high_ms, sync_ms)
    subtitle = "step with it minus step without any; lines: 95% interval of the median"
    _title(axes, "Of that, gradient sync (enlarged)", subtitle)
    axes.set_xlim(right=max(1.25 * furthest_ms, 0.1))
    axes.axvline(0, color=_INK, linewidth=0.8)
    axes.set_xlabel(f"milliseconds, median of {len(comparison.lax_s)} alternating rounds")
    _name_paths(axes)


def _sync_ms(comparison: Comparison, path: str) -> tuple[float, float, float]:
    sync_ms = 1e3 * comparison.sync_s(path)
    low_ms, high_ms = interval(sync_ms)
    return low_ms, float(np.median(sync_ms)), high_ms


def _title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(f"{title}\n", loc="left", fontsize=12.5, color=_INK, fontweight="bold")
    axes.annotate(
        subtitle,
        (0, 1),
        (0, 8),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9.5,
        color=_MUTED,
    )


def _name_paths(axes: Axes) -> None:
    axes.set_yticks(range(len(_PATHS)), [name for name, _ in _PATHS.values()], fontsize=10.5)
    axes.invert_yaxis()
    _tidy(axes, "x")


def _tidy(axes: Axes, grid_axis: Literal["x", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid_axis, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK)
