"""Checkpoints of training states, independent of the mesh, with Orbax."""

import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from jaxcoll._errors import listed
from jaxcoll._sharding import fitted, leaf_name, untyped
from jaxcoll.parallel.reshard import reshard
from jaxcoll.parallel.state import TrainState

_REMOVED = ".removed"
_ITEMS = ("state", "record")  # what `save` makes of a checkpoint


class Checkpoints:
    """The checkpoints of one run: its states, each under its number of steps.

    A checkpoint holds a state as the model has it, `TrainState.unpadded`, with nothing of how it
    lay on devices: it is restored onto any mesh and under any strategy. It is there as a whole or
    not at all, so a run that is killed while it saves has lost that checkpoint alone.

    In a job of several processes all of them make the object and call its methods, on a file system
    that they share. With `pip install 'jaxcoll[orbax]'`.

    Args:
        directory: where; made if missing. One run at a time saves there.
        max_to_keep: how many stay, the newest; None: all.

    Raises:
        ValueError: fewer than 1 to keep; there is a file in the directory's place.

    Example:
        >>> with jaxcoll.Checkpoints("out") as checkpoints:
        ...     checkpoints.save(state, losses=losses)
        ...     state = checkpoints.restore(like=state)
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_to_keep: int | None = 3):
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(
                f"Checkpoints: max_to_keep: expected 1 or more, or None, got {max_to_keep}."
            )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            # The next step may donate the arrays, so they must be on the disk before it runs.
            enable_async_checkpointing=False,
            # One move, and then no half of a checkpoint can be taken for a whole one.
            todelete_subdir=_REMOVED,
        )
        self._directory = pathlib.Path(directory).resolve()
        if self._directory.is_file():
            raise ValueError(
                f"Checkpoints: directory: expected a directory, or none yet, got the file "
                f"{self._directory}."
            )
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._at: int | None = None  # the step that was saved or restored last

    def save(self, state: TrainState, /, **extras: Any) -> None:
        """Saves a state, and what else a run goes on from; both are on the disk on return.

        The step that was saved or restored last is not saved again: it is there.

        Args:
            state: after `state.step` steps, more than any that is there.
            extras: JSON, such as the data loader's position, losses, a configuration. Of several
                processes those of the first are kept.

        Raises:
            TypeError: not a `TrainState`, or extras that JSON can't hold.
            ValueError: the directory has a checkpoint of this step or of a later one, of another
                run or of one that was restored at an earlier step.

        Cost: what `TrainState.unpadded` costs, and a copy of the state in the host's memory.
        """
        call = "Checkpoints.save"
        _check_state(call, "state", state)
        for name, value in extras.items():
            _check_json(call, name, value)
        step, newest = int(state.step), self.latest_step()
        if step == self._at:
            return
        if newest is not None and step <= newest:
            raise ValueError(
                f"{call}: state: expected a step after {newest}, the newest in {self._directory}, "
                f"got {step}. Restore that one to go on from it, or save in another directory."
            )
        leaves = _by_name(state.unpadded())
        # Orbax does not take arrays without values.
        arrays = {name: _on_host(leaf) for name, leaf in leaves.items() if leaf.size}
        record = {"leaves": {n: _type(leaf) for n, leaf in leaves.items()}, "extras": extras}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record)
            ),
        )
        self._at = step
        if jax.process_index() == 0:
            self._sweep()

    def latest_step(self) -> int | None:
        """Returns the newest checkpoint's number of steps, or None."""
        return max(self._steps(), default=None)

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """Returns the state that was saved, laid out as another one.

        Args:
            like: of `create_train_state`, with the model and the optimizer of the run, on any mesh
                and under any strategy. Only its shapes and layout matter: it may be donated.
            step: which checkpoint; the newest without.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: there is none of this step, or it has other leaves than `like`, or of other
                shapes or dtypes; the text names the leaf.
            TypeError: `like` is not a `TrainState`, or a leaf of it has no sharding.

        Cost: each process reads what its devices hold. Then that of `reshard`, where `like` stores
            parameters in another way than the model has them.
        """
        call = "Checkpoints.restore"
        _check_state(call, "like", like)
        step = self._existing(call, step)
        plain = jax.eval_shape(TrainState.unpadded, jax.tree.map(untyped, like))
        stored = _by_name(like)
        # Where float64 is not enabled, a leaf may have it nevertheless.
        wanted = {
            name: jax.ShapeDtypeStruct(x.shape, stored[name].dtype)
            for name, x in _by_name(plain).items()
        }
        self._check_fits(call, step, wanted)
        laid_out = {name: _laid_out(name, wanted[name], x) for name, x in stored.items()}
        arrays = {name: leaf for name, leaf in laid_out.items() if leaf.size}
        args = ocp.args.Composite(state=ocp.args.StandardRestore(arrays))
        read = self._manager.restore(step, args=args)["state"]
        leaves = [
            read[name] if name in read else jnp.zeros(x.shape, x.dtype, device=x.sharding)
            for name, x in laid_out.items()
        ]
        state = jax.tree.unflatten(jax.tree.structure(plain), leaves)
        self._at = step
        is_on_mesh = any(isinstance(leaf.sharding, NamedSharding) for leaf in jax.tree.leaves(like))
        return reshard(state, like.specs) if is_on_mesh else state

    def extras(self, step: int | None = None) -> dict[str, Any]:
        """Returns what was saved beside a state, as JSON gives it back: tuples are lists.

        Args:
            step: which checkpoint; the newest without.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: there is none of this step.
        """
        return self._record(self._existing("Checkpoints.extras", step))["extras"]

    def close(self) -> None:
        """Ends the threads that write."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _steps(self) -> Sequence[int]:
        """Returns those on the disk, and the last of this job, which some hosts may not see yet."""
        self._manager.reload()
        return sorted({*self._manager.all_steps(), *([] if self._at is None else [self._at])})

    def _existing(self, call: str, step: int | None) -> int:
        steps = self._steps()
        if not steps:
            raise FileNotFoundError(
                f"{call}: expected a checkpoint in {self._directory}, got none. Is it the "
                "directory that was saved in?"
            )
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps))
            raise ValueError(
                f"{call}: step: expected one of those in {self._directory}, {there}, got {step!r}."
            )
        step = steps[-1] if step is None else step
        folder = self._directory / str(step)
        if lacking := [item for item in _ITEMS if not (folder / item).is_dir()]:
            raise ValueError(
                f"{call}: step: {step}: expected a checkpoint of Checkpoints.save in {folder}, but "
                f"it has no {listed(lacking)}: another program saved it, or files were deleted. "
                "Restore another step, or read it with Orbax itself."
            )
        return step

    def _record(self, step: int) -> dict[str, Any]:
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        return self._manager.restore(step, args=args)["record"]

    def _check_fits(self, call: str, step: int, wanted: dict[str, Any]) -> None:
        saved, got = self._record(step)["leaves"], {n: _type(x) for n, x in wanted.items()}
        for name in {**got, **saved}:
            if got.get(name) != saved.get(name):
                raise ValueError(
                    f"{call}: like: {name}: expected {saved.get(name, 'no such leaf')} as saved, "
                    f"got {got.get(name, 'no such leaf')}. Make it with the model and the "
                    f"optimizer of step {step} in {self._directory}."
                )

    def _sweep(self) -> None:
        """Deletes what is no checkpoint any more, or never became one."""
        for left in (_REMOVED, f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
            for path in self._directory.glob(left):
                shutil.rmtree(path, ignore_errors=True)


def _check_state(call: str, argument: str, state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{call}: {argument}: expected a TrainState, got {type(state).__name__}. "
            "jaxcoll.create_train_state makes one."
        )


def _check_json(call: str, name: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{call}: {name}: expected what JSON can hold, got {type(value).__name__}: {error}. "
            "Convert arrays with .tolist() or float()."
        ) from None


def _by_name(state: TrainState) -> dict[str, Any]:
    """Returns the leaves, such as `params['layer']['kernel']`."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {leaf_name(path).removeprefix("."): leaf for path, leaf in leaves}


def _on_host(leaf: jax.Array) -> Any:
    """Returns an array on the host, where Orbax need not compile a program to cut it into parts.

    Not one of which other processes hold parts: all of them write theirs. Nor random keys, which
    stay on a device.
    """
    is_here = leaf.is_fully_addressable or leaf.is_fully_replicated
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.device_get(leaf) if is_here and not is_key else leaf


def _type(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _laid_out(name: str, plain: Any, stored: Any) -> jax.ShapeDtypeStruct:
    """Returns the model's leaf where the stored one lies."""
    sharding = getattr(stored, "sharding", None)
    if sharding is None:
        raise TypeError(
            f"Checkpoints.restore: like: {name}: expected an array on devices, got one without a "
            "sharding. Pass what create_train_state returned."
        )
    for dimension, (size, own) in enumerate(zip(stored.shape, plain.shape, strict=True)):
        if size != own:
            sharding = fitted(sharding, plain.shape, dimension)
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=sharding)
