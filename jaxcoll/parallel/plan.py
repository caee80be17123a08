"""Any product of data, fully sharded, tensor and pipeline parallelism, on one mesh."""

import functools as ft
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat
from jaxcoll._errors import checked_count, did_you_mean, listed
from jaxcoll._sharding import check_divisible, leaf_name
from jaxcoll.mesh import make_mesh
from jaxcoll.parallel.batches import LossFn, check_loss_fn, cross_entropy
from jaxcoll.parallel.describe import describe
from jaxcoll.parallel.fully_shard import fully_shard
from jaxcoll.parallel.pipelined import pipe_of, with_pipe
from jaxcoll.parallel.pure_model import PureModel, as_pure
from jaxcoll.parallel.schedules import Kind
from jaxcoll.parallel.shares import place
from jaxcoll.parallel.state import TrainState, create_train_state
from jaxcoll.parallel.step import Step, build_step

# The slowest first: ranks that communicate most are next to each other.
_AXES = ("pipe", "data", "fsdp", "tensor")
# The way out where a state is refused.
_MOVE = (
    "Move one of another plan, with the same optimizer: jaxcoll.reshard(state, "
    "plan.init(...).specs, mesh=plan.mesh)."
)


class ParallelPlan:
    """How a model is trained on many devices: which axes there are, and what each is for.

    * `"data"`: each rank has examples of its own and a copy of the state.
    * `"fsdp"`: each rank has examples of its own and a part of the state, see
      `jaxcoll.fully_shard`.
    * `"tensor"`: layers are split; the model says so itself, as
      `jaxcoll.models.TransformerLM(axis_name="tensor", mesh=plan.mesh)`.
    * `"pipe"`: layers are spread over stages, see `jaxcoll.pipelined`.

    Args:
        axes: the size of each axis that is used; one may be -1, what the devices allow.
        devices: all of the job without.
        fsdp: options of `jaxcoll.fully_shard`, as `{"stage": 2}`.
        accumulate: micro-batches one after the other, whose gradients are added.
        num_micro_batches: of the pipeline.
        schedule: of the pipeline.
        num_chunks: of the pipeline, see `jaxcoll.pipelined`.
        stage_sizes: of the pipeline, see there.

    Attributes:
        mesh: of all axes, in the order pipe, data, fsdp, tensor.
        batch_axes: those over which a batch is split.

    Raises:
        TypeError: `axes` or `fsdp` is no dict.
        ValueError: an unknown axis, sizes that make no mesh of the devices, or options of an axis
            that is not there.

    Example:
        >>> plan = jaxcoll.ParallelPlan({"data": -1, "fsdp": 2, "pipe": 2}, schedule="1f1b")
        >>> state = plan.init(model, optax.adamw(1e-3), jax.random.key(0), batch)
        >>> step = plan.build_train_step(loss_fn)
        >>> state, metrics = step(state, batch)
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        *,
        devices: Sequence[Any] | None = None,
        fsdp: Mapping[str, Any] | None = None,
        accumulate: int = 1,
        num_micro_batches: int = 4,
        schedule: Kind = "1f1b",
        num_chunks: int | None = None,
        stage_sizes: Sequence[int] | None = None,
    ) -> None:
        _check_mapping("axes", axes, '{"data": -1}')
        if fsdp is not None:
            _check_mapping("fsdp", fsdp, '{"stage": 2}')
        for name in axes:
            if name not in _AXES:
                raise ValueError(
                    f"ParallelPlan: axes: expected names out of {listed(_AXES)}, got {name!r}."
                    f"{did_you_mean(str(name), _AXES)}"
                )
        if fsdp is not None and "fsdp" not in axes:
            raise ValueError('ParallelPlan: fsdp: options, but there is no axis "fsdp".')
        for name, value in (("num_chunks", num_chunks), ("stage_sizes", stage_sizes)):
            if value is not None and "pipe" not in axes:
                raise ValueError(
                    f'ParallelPlan: {name}: an option of the pipeline, but there is no axis "pipe".'
                )
        self.mesh: Mesh = make_mesh(
            {name: axes[name] for name in _AXES if name in axes}, devices=devices
        )
        self.batch_axes = tuple(name for name in ("data", "fsdp") if name in axes)
        self._fsdp = dict(fsdp or {})
        known = [name for name in inspect.signature(fully_shard).parameters][2:]
        for name in self._fsdp:
            if name not in known:
                raise ValueError(
                    f"ParallelPlan: fsdp: expected options of jaxcoll.fully_shard, "
                    f"{listed(known)}, got {name!r}.{did_you_mean(str(name), known)}"
                )
        self._accumulate = checked_count("ParallelPlan", "accumulate", accumulate, 1)
        self._pipe = pipe_of(
            "ParallelPlan", num_micro_batches, schedule, "pipe", num_chunks, stage_sizes
        )
        self._model: PureModel | None = None
        self._shapes: TrainState | None = None  # and how each lies

    def __repr__(self) -> str:
        return f"ParallelPlan({dict(self.mesh.shape)})"

    def init(
        self, model: Any, optimizer: optax.GradientTransformation, rng: jax.Array, batch: Any
    ) -> TrainState:
        """Returns the state that training begins with, each part of it made where it lies.

        The plan remembers the model, for `build_train_step`.

        Args:
            model: a Flax linen or NNX module, a function that makes an NNX module, as in
                `create_train_state`, or a pair `(init, apply)`; with an axis `"pipe"` one whose
                `__call__` takes `pipeline=`.
            optimizer: of Optax.
            rng: makes the first parameters, and stays for dropout.
            batch: an example; only the shapes and dtypes of its inputs matter.

        Raises:
            TypeError: a model of another kind, or one that can't be cut into stages.
            ValueError: what `jaxcoll.create_train_state` refuses; a model that is not split over an
                axis `"tensor"` of more than one rank.
        """
        call = "ParallelPlan.init"
        pure = as_pure(call, model)
        if "pipe" in self.mesh.shape:
            pure = with_pipe(call, pure, self._pipe)
        if "fsdp" in self.mesh.shape:
            pure = fully_shard(pure, "fsdp", **self._fsdp)
        state = create_train_state(pure, optimizer, rng, batch, self.mesh)
        if self.mesh.shape.get("tensor", 1) > 1 and "tensor" not in state.axes:
            raise ValueError(
                f'{call}: model: it splits nothing over "tensor", whose ranks would all do the '
                'same. Build it of layers with axis_name="tensor" and mesh=plan.mesh, or leave the '
                "axis out."
            )
        self._model, self._shapes = pure, jax.tree.map(_shape_of, state)
        return state

    def build_train_step(self, loss_fn: LossFn | None = None, *, donate: bool = True) -> Step:
        """Returns the train step of the model that `init` was given, jitted for global arrays.

        Args:
            loss_fn: see `jaxcoll.data_parallel_train_step`.
            donate: the state that is given is not to be used again, which saves its memory.

        Returns:
            `train_step(state, batch) -> (state, metrics)`. In a job of several processes the batch
            is of global arrays, see `shard_batch`.

        Raises:
            ValueError: there was no `init`. The step: a state that another plan, model or optimizer
                made, also a model of other widths, or one that was donated; a batch that the ranks
                can't share; a loss that differs between tensor ranks.
        """
        call = "ParallelPlan.build_train_step"
        if self._model is None or self._shapes is None:
            raise ValueError(f"{call}: no model yet: call init(model, optimizer, ...) before it.")
        check_loss_fn(call, loss_fn)
        loss_fn = _of_whole_outputs(call, cross_entropy if loss_fn is None else loss_fn)
        step = build_step(call, self._model, loss_fn, self.batch_axes, self._accumulate)
        mapped = jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(self._shapes.specs, P(self.batch_axes)),
            out_specs=(self._shapes.specs, P()),
        )
        expected = self._shapes

        @ft.wraps(mapped)
        def checked(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
            _check_shapes("train_step", state, expected)  # while it is traced, not in each step
            return mapped(state, batch)

        jitted = jax.jit(checked, donate_argnums=0 if donate else ())
        structure, devices = jax.tree.structure(expected), set(self.mesh.devices.flat)
        split = NamedSharding(self.mesh, P(self.batch_axes))

        @ft.wraps(jitted)
        def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
            if jax.tree.structure(state) != structure:
                if isinstance(state, TrainState) and _made(state) == _made(expected):
                    _check_shapes("train_step", state, expected)
                raise ValueError(
                    "train_step: state: expected one of this plan's last init, with its model and "
                    f"optimizer, got {_described(state, expected)}"
                )
            found = _devices_of(state.step)
            if found is not None and found != devices:
                raise ValueError(
                    f"train_step: state: it is on {len(found)} devices, which are not the "
                    f"{len(devices)} of this plan's mesh. {_MOVE}"
                )
            if any(map(_is_gone, jax.tree.leaves(state))):
                raise ValueError(
                    "train_step: state: it was donated to an earlier step: go on with the one that "
                    "that returned, or build_train_step(..., donate=False)."
                )
            _check_batch("train_step", batch, split)
            return jitted(state, batch)

        return train_step

    def shard_batch(self, batch: Any, *, batch_is_global: bool = False) -> Any:
        """Returns a batch as global arrays, split over `batch_axes`.

        See `DataParallel.shard_batch_static`: of several processes each gives its share, or with
        `batch_is_global` all give the whole.
        """
        sharding = NamedSharding(self.mesh, P(self.batch_axes))
        return place("ParallelPlan.shard_batch", batch, sharding, is_global=batch_is_global)

    def describe(self, state: TrainState) -> str:
        """Returns a text: the mesh, and how each leaf of a state lies on it, with bytes."""
        return f"{describe(self.mesh)}\n\n{describe(state)}"


def _check_mapping(argument: str, value: Any, example: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"ParallelPlan: {argument}: expected a dict, such as {example}, got "
            f"{type(value).__name__}."
        )


def _of_whole_outputs(call: str, loss_fn: LossFn) -> LossFn:
    """Returns the loss function, with an error where a tensor rank has a loss of its own."""

    @ft.wraps(loss_fn)
    def checked(outputs: Any, batch: Any) -> Any:
        values = loss_fn(outputs, batch)
        for leaf in jax.tree.leaves(values):
            if "tensor" in _compat.varying_axes(jax.typeof(leaf)):
                raise ValueError(
                    f'{call}: loss_fn: its loss differs between the ranks of "tensor": each has '
                    "a part of the model's outputs. Compute it from all of them, of logits that "
                    "are split over the vocabulary with jaxcoll.vocab_parallel_cross_entropy(..., "
                    '"tensor"), or gather the outputs.'
                )
        return values

    return checked


def _check_batch(call: str, batch: Any, sharding: NamedSharding) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name, shape = f"batch{jax.tree_util.keystr(path)}", np.shape(leaf)
        if not shape:
            raise ValueError(
                f"{call}: {name}: expected an array (examples, ...), got a scalar. Repeat it for "
                "each example."
            )
        if not shape[0]:
            raise ValueError(
                f"{call}: {name}: expected an array (examples, ...), got none, of shape {shape}. "
                "Leave out a batch without examples."
            )
        check_divisible(call, name, shape, sharding)


def _shape_of(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)  # none under a trace
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_shapes(call: str, state: TrainState, expected: TrainState) -> None:
    """Raises ValueError where parameters, or what the optimizer keeps, are of other shapes."""
    for name in ("params", "opt_state", "variables"):
        tree, want = getattr(state, name), getattr(expected, name)
        if jax.tree.structure(tree) != jax.tree.structure(want):
            return  # nothing to compare leaf by leaf
        for (path, leaf), like in zip(
            jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(want), strict=True
        ):
            if np.shape(leaf) != like.shape:
                raise ValueError(
                    f"{call}: state: {name}{leaf_name(path)}: expected shape {like.shape}, as of "
                    f"this plan's last init, got {np.shape(leaf)}. Make the state with this plan's "
                    f"init, and after it the step with build_train_step. {_MOVE}"
                )


def _made(state: TrainState) -> Any:
    """Returns of what kind of model, and how, a state was made, its sizes apart."""
    return state.kind, state.pipe, state.zero


def _is_there(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _is_gone(leaf: Any) -> bool:
    return _is_there(leaf) and leaf.is_deleted()


def _devices_of(leaf: Any) -> set[Any] | None:
    """Returns where an array was put; None: `jax.jit` puts it where the others are."""
    return leaf.sharding.device_set if _is_there(leaf) and leaf.committed else None


def _described(state: Any, expected: TrainState) -> str:
    """Says what a state is that another plan, or none, has made, and how to mend that."""
    kind = f"a {type(state).__name__}"
    if not isinstance(state, TrainState):
        return f"{kind}."
    if state.kind != expected.kind:
        return f"{kind} of a {state.kind}, not of a {expected.kind}."
    for made, wanted, lacks in (
        (state.pipe, expected.pipe, "not pipelined"),
        (state.zero, expected.zero, "without fully_shard"),
    ):
        if made != wanted:
            return (
                f"{kind} of a plan that is {made or lacks}; this one is {wanted or lacks}. {_MOVE}"
            )
    return f"{kind} of other parameters, or of another optimizer, or split in another way. {_MOVE}"
