"""What a training run prints at its end."""

import dataclasses
import os
import pathlib
import textwrap
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from support import picture
from support.timing import Comparison, interval


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished training run.

    Attributes:
        losses: Training loss of each step, nats per byte.
        held_out: The model's loss on each held-out window, nats per byte. Shape `(b,)`.
        bigram: The bigram model's, on the same bytes. Shape `(b,)`.
        sample: Text that the model wrote; empty if none was wanted.
        comparison: Times of the step on native and on lax; None if not measured.
        tokens_per_step: Tokens that one step trains on.
        about: From `describe`.
    """

    losses: list[float]
    held_out: np.ndarray
    bigram: np.ndarray
    sample: str
    comparison: Comparison | None
    tokens_per_step: int
    about: str


def describe(params: Any, batch: int, context: int, mesh: Mesh) -> str:
    """Say in a line what is trained, and on what."""
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    # The cores that this process may use, where the system can say; of several, each has its own.
    has_affinity = hasattr(os, "sched_getaffinity") and jax.process_count() == 1
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    axes = {name: size for name, size in mesh.shape.items() if size > 1}
    product = " x ".join(f"{size} of {name}" for name, size in axes.items())
    shape = f" ({product})" if len(axes) > 1 else ""
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return (
        f"Transformer of {count:,} parameters, {batch} x {context} bytes per step, on "
        f"{mesh.size} simulated devices{shape}{several} sharing {num_cores} CPU cores, "
        f"JAX {jax.__version__}"
    )


def finish(result: Result, *, required_margin: float, path: pathlib.Path) -> bool:
    """Print the result and draw the picture.

    Args:
        result: What to report.
        required_margin: Nats per byte that the held-out loss must be below the bigram model's.
        path: Of the picture, PNG.

    Returns:
        Whether the margin was reached.
    """
    held_out, bigram = float(result.held_out.mean()), float(result.bigram.mean())
    differences = result.bigram - result.held_out
    margin = float(differences.mean())
    error = float(differences.std() / len(differences) ** 0.5)
    passed = margin >= required_margin
    if jax.process_index() > 0:  # the first one reports
        return passed
    if result.sample:
        print("\nsample:\n" + textwrap.indent(result.sample.strip("\n"), "    "))
    print(
        f"\nheld-out loss: {held_out:.4f} nats/byte\n"
        f"bigram model on the same bytes: {bigram:.4f} nats/byte\n"
        f"margin: {margin:.4f} nats/byte (standard error {error:.4f}), at least {required_margin} "
        f"is required: {'passed' if passed else 'NOT REACHED'}"
    )
    if result.comparison is not None:
        _print_comparison(result.comparison, result.tokens_per_step)
    picture.save(
        picture.Picture(result.losses, held_out, bigram, result.comparison, result.about), path
    )
    print(f"picture: {path}")
    return passed


def _print_comparison(comparison: Comparison, tokens_per_step: int) -> None:
    print(f"\nthe same step, medians of {len(comparison.lax_s)} alternating rounds:")
    for path in ("native", "lax"):
        step_s = np.median(comparison.step_s(path))
        line = f"  {path + ':':8}{tokens_per_step / step_s:8,.0f} tokens/s  {1e3 * step_s:7.1f} ms"
        print(f"{line} per step{_of_which_sync(comparison, path)}")
    low, high = interval(comparison.lax_s / comparison.native_s)
    print(
        f"  native is {comparison.speedup:.3f} times as fast: median of the rounds' ratios, "
        f"95%: {low:.3f} to {high:.3f}\n"
    )


def _of_which_sync(comparison: Comparison, path: str) -> str:
    if comparison.compute_s is None:
        return ""
    sync_s = comparison.sync_s(path)
    low_s, high_s = interval(sync_s)
    return (
        f", of which gradient sync {1e3 * np.median(sync_s):.1f} ms "
        f"(95%: {1e3 * low_s:.1f} to {1e3 * high_s:.1f})"
        f"{'' if low_s > 0 else ': lost in the noise of this machine'}"
    )
