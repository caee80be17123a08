"""The checkpoints of a training run: its state, its losses and what it is."""

import os
import pathlib
import shutil
from typing import Any

import jaxcoll


class Checkpoints:
    """The checkpoints of one run, of which the newest is kept.

    Args:
        folder: Where; made if missing.
        keep: Keep what an earlier run left there, to resume from it; otherwise it is deleted.
    """

    def __init__(self, folder: pathlib.Path, *, keep: bool):
        # By `jaxcoll run --max-restarts`, after a rank has failed.
        self._is_restarted = os.environ.get("JAXCOLL_RESTART", "0") != "0"
        if (
            not keep
            and not self._is_restarted
            and int(os.environ.get("JAXCOLL_PROCESS_ID", 0)) == 0
        ):
            # Or its steps would pass for this run's: checkpoints are numbered by step alone.
            shutil.rmtree(folder, ignore_errors=True)
        self._folder = folder
        self._checkpoints = jaxcoll.Checkpoints(folder, max_to_keep=1)

    def are_of_this_job(self) -> bool:
        """Say whether this run is one that was restarted, and left a checkpoint before."""
        return self._is_restarted and self._checkpoints.latest_step() is not None

    def save(self, state: jaxcoll.TrainState, losses: list[float], config: dict[str, Any]) -> None:
        """Save the run as it is after step `len(losses)`.

        Args:
            state: Of that step.
            losses: Of each step so far.
            config: What `latest_record` shall return, as plain JSON.
        """
        self._checkpoints.save(state, losses=losses, config=config)

    def latest_record(self) -> tuple[dict[str, Any], list[float]]:
        """Return the newest checkpoint's config and losses.

        Raises:
            FileNotFoundError: There is none.
        """
        if self._checkpoints.latest_step() is None:
            raise FileNotFoundError(
                f"--resume: expected a checkpoint in {self._folder}, got none; "
                "train without --resume first, with the same --out"
            )
        extras = self._checkpoints.extras()
        return extras["config"], extras["losses"]

    def restore(self, step: int, *, like: jaxcoll.TrainState) -> jaxcoll.TrainState:
        """Return the state saved after `step`, with the shapes and shardings of `like`."""
        return self._checkpoints.restore(like, step)
