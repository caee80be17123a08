"""Save and restore a training run with Orbax: the arrays, and a JSON record beside them."""

import os
import pathlib
from typing import Any

import jax

try:
    import orbax.checkpoint as ocp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "checkpoints need Orbax, which is not installed: pip install 'jaxcoll[orbax]'"
    ) from error


class Checkpoints:
    """The checkpoints of one run, of which the newest is kept.

    Args:
        folder: Where; made if missing.
        keep: Keep what an earlier run left there, to resume from it; otherwise it is deleted.
    """

    def __init__(self, folder: pathlib.Path, *, keep: bool):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1,
            # The next step donates the arrays, so they must be on the disk before it runs.
            enable_async_checkpointing=False,
        )
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        # By `jaxcoll run --max-restarts`, after a rank has failed.
        self._is_restarted = os.environ.get("JAXCOLL_RESTART", "0") != "0"
        if not keep and not self._is_restarted:
            # Or its steps would pass for this run's: Orbax numbers checkpoints by step alone.
            for step in self._manager.all_steps():
                self._manager.delete(step)

    def are_of_this_job(self) -> bool:
        """Say whether this run is one that was restarted, and left a checkpoint before."""
        return self._is_restarted and self._manager.latest_step() is not None

    def save(self, state: Any, losses: list[float], config: dict[str, Any]) -> None:
        """Save the run as it is after step `len(losses)`.

        Args:
            state: Pytree of arrays.
            losses: Of each step so far.
            config: What `latest_record` shall return, as plain JSON.
        """
        step = len(losses)
        if self._manager.latest_step() == step:  # the last step may also be a periodic one
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_on_host(state)),
                record=ocp.args.JsonSave({"config": config, "losses": losses}),
            ),
        )

    def latest_record(self) -> tuple[dict[str, Any], list[float]]:
        """Return the newest checkpoint's config and losses.

        Raises:
            FileNotFoundError: There is none.
        """
        step = self._manager.latest_step()
        if step is None:
            raise FileNotFoundError(
                f"--resume: expected a checkpoint in {self._manager.directory}, got none; "
                "train without --resume first, with the same --out"
            )
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        record = self._manager.restore(step, args=args)["record"]
        return record["config"], record["losses"]

    def restore(self, step: int, *, like: Any) -> Any:
        """Return the state saved after `step`, with the shapes and shardings of `like`."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        return self._manager.restore(step, args=args)["state"]


def _on_host(state: Any) -> Any:
    """Return the arrays on the host, where Orbax need not compile a program for each.

    Not those of which other processes hold parts: all of them write theirs.
    """
    is_here = (
        leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(state)
    )
    return jax.device_get(state) if all(is_here) else state
