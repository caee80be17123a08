"""The loop of a training run."""

import dataclasses
from collections.abc import Callable
from typing import Any

from support.budget import Budget
from support.checkpoints import Checkpoints
from support.progress import Progress
from support.timing import Step


def train(
    step: Step,
    state: Any,
    losses: list[float],
    batch_of: Callable[[int], Any],
    config: Any,
    run: Any,
    checkpoints: Checkpoints,
) -> Any:
    """Train from step `len(losses)` on, and keep checkpoints.

    Args:
        step: `(state, batch, number, position)` to `(state, loss)`.
        state: What it changes; donated.
        losses: Of the steps so far; each step's is appended.
        batch_of: The batch of a step.
        config: Has `steps`, `batch` and `context`.
        run: Has `minutes`, `stop_after` and `checkpoint_every`.
        checkpoints: Where they are kept.

    Returns:
        The state after the last step.
    """
    progress = Progress(config.steps, config.batch * config.context, first_step=len(losses))
    budget = Budget(config.steps, limit_s=60 * run.minutes, first_step=len(losses))
    last = run.stop_after or config.steps
    while budget.position < config.steps and len(losses) < last:
        number = len(losses)
        state, loss = step(state, batch_of(number), number, budget.position)
        losses.append(float(loss))
        budget.count_step()
        progress.update(losses[-1], budget.position)
        if len(losses) % run.checkpoint_every == 0:
            checkpoints.save(state, losses, dataclasses.asdict(config))
    progress.close()
    checkpoints.save(state, losses, dataclasses.asdict(config))
    return state
