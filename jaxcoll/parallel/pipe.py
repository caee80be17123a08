"""How a model's layers are spread over a pipeline, and its gradients there."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat
from jaxcoll._sharding import leaf_name
from jaxcoll.collectives.all_reduce import all_reduce
from jaxcoll.parallel import pipeline_run
from jaxcoll.parallel.batches import micro_batches
from jaxcoll.parallel.gated import typed_like
from jaxcoll.parallel.pipeline_cut import LossOf, counted, cut, given_layers, num_layers
from jaxcoll.parallel.schedules import Kind, PipelineSchedule
from jaxcoll.parallel.stages import Layers, Spread, sizes_for
from jaxcoll.parallel.tick_table import tick_table


@dataclasses.dataclass(frozen=True)
class Pipe:
    """What `jaxcoll.pipelined` says; see there.

    Attributes:
        axis_name: the axis.
        num_micro_batches: of a device's batch.
        kind: of schedule.
        num_chunks: of layers on each rank.
        stage_sizes: layers of each chunk in the model's order, or None: even ones.
    """

    axis_name: str
    num_micro_batches: int
    kind: Kind
    num_chunks: int
    stage_sizes: tuple[int, ...] | None = None

    def layers(
        self, call: str, count: int, num_ranks: int, where: str, *, is_named: bool = False
    ) -> Layers:
        """Returns how so many layers are spread, of which `where` tells where they are."""
        where = f'{where}, over "{self.axis_name}"'
        sizes = sizes_for(call, count, num_ranks * self.num_chunks, self.stage_sizes, where)
        return Layers(sizes, num_ranks, is_named)

    def __str__(self) -> str:
        return f'pipelined over "{self.axis_name}", {self.kind}, {self.num_micro_batches} at a time'

    # ---- On a mesh -------------------------------------------------------------------------------

    def spread(self, call: str, model: Any, boxed: Any, specs: Any, inputs: Any, mesh: Mesh) -> Any:
        """Returns how each parameter's layers are spread, in the order of the tree.

        Args:
            call: the public function, for texts.
            model: a pure model.
            boxed: shapes of its parameters.
            specs: of them, as the model has them.
            inputs: shapes of an example.
            mesh: where.
        """
        size = mesh.shape[self.axis_name]
        names, leaves, treedef = _named(boxed["params"])
        whole = treedef.flatten_up_to(specs)
        named = [len(spec) > 0 and spec[0] == self.axis_name for spec in whole]
        for name, leaf, is_named in zip(names, leaves, named, strict=True):
            if is_named and leaf.shape[0] % size:
                raise ValueError(
                    f'{call}: model: it splits {leaf.shape[0]} layers over "{self.axis_name}" '
                    f"itself, which {size} ranks can't share evenly: {counted(name, leaf)}. Leave "
                    "that to pipelined, without with_partitioning (PPClassifier: split=False)."
                )
        rest = {name: value for name, value in boxed.items() if name != "params"}
        found: list[int] = []

        def program(leaves: list[Any], rest: Any, inputs: Any) -> None:
            def loss_of(leaves: list[Any], micro: Any, key: Any, pipeline: Any) -> None:
                variables = {"params": treedef.unflatten(leaves), **rest}
                model.apply(variables, micro, key, pipeline=pipeline)

            found.extend(given_layers(call, loss_of, leaves, inputs, jax.random.key(0)))

        mapped = jax.shard_map(
            program, mesh=mesh, in_specs=(whole, P(), P()), out_specs=P(), check_vma=False
        )
        jax.eval_shape(mapped, leaves, rest, inputs)
        count = num_layers(call, {names[i]: leaves[i] for i in found})
        return tuple(
            self.layers(call, count, size, counted(name, leaves[i]), is_named=named[i])
            if i in found
            else None
            for i, name in enumerate(names)
        )

    def spec(self, spec: P) -> P:
        """Returns the spec of a parameter that holds layers."""
        return P(self.axis_name, *spec[1:])

    # ---- On a rank, inside a map over the axis ---------------------------------------------------

    def value_and_grad(
        self,
        call: str,
        loss_of: LossOf,
        params: Any,
        spread: Spread,
        batch: Any,
        rng: jax.Array,
        scale: float,
    ) -> tuple[Any, Any]:
        """Returns metrics, summed over the pipeline and all micro-batches, and gradients.

        Args:
            call: the public function, for texts.
            loss_of: the model and its loss, of a micro-batch.
            params: this rank's, each its own copy but for the axis of the pipeline.
            spread: of the state, or () where the model alone says how it is split.
            batch: of this device.
            rng: a key, into which the number of each micro-batch is folded.
            scale: what the loss is divided by while it is differentiated.
        """
        size, rank = lax.axis_size(self.axis_name), lax.axis_index(self.axis_name)
        names, leaves, treedef = _named(params)
        # Each rank is at another one.
        batch = micro_batches(call, "num_micro_batches", batch, self.num_micro_batches)
        batch = jax.tree.map(lambda x: typed_like(x, rank), batch)

        def key_of(number: jax.Array) -> jax.Array:
            return jax.random.fold_in(rng, number)

        first = typed_like(jnp.int32(0), rank)
        example = (jax.tree.map(lambda leaf: leaf[0], batch), key_of(first))
        if spread:
            numbers = [i for i, layers in enumerate(spread) if layers]
            layers = next(layers for layers in spread if layers)
            is_whole = False
        else:
            numbers = given_layers(call, loss_of, leaves, *example)
            held = {names[i]: leaves[i] for i in numbers}
            layers, is_whole = self._as_held(call, held, size)
        own = [typed_like(leaf, rank) for leaf in leaves]
        stored = [
            typed_like(layers.part(leaves[i], rank), rank) if is_whole else own[i] for i in numbers
        ]
        for i in numbers:
            if spread and (of := spread[i]):
                own[i] = _as_the_model_has_it(own[i], of)
        rest = [leaf for i, leaf in enumerate(own) if i not in numbers]
        chunk = [leaf[: layers.width] for leaf in stored]
        lack = min(layers.sizes) < layers.width
        of_chunk = layers.numbers(rank)[0]
        model = cut(call, loss_of, own, names, numbers, example, chunk, of_chunk, some_lack=lack)
        schedule = PipelineSchedule(self.kind, size, self.num_chunks)
        metrics, of_rest, of_layers = pipeline_run.value_and_grad(
            model,
            # In sections nothing is computed for nobody. Where predicates see to that, one section
            # compiles in half the time; but of GPipe, XLA would copy what is kept.
            tick_table(
                schedule,
                self.num_micro_batches,
                in_one=self.kind != "gpipe" and not model.communicates,
            ),
            layers,
            self.axis_name,
            (rest, stored),
            batch,
            key_of,
            scale,
        )
        if is_whole:
            placed = [layers.placed(leaf, rank) for leaf in of_layers]
            of_layers = all_reduce(placed, self.axis_name)
        found = dict(zip(numbers, of_layers, strict=True))
        others = iter(of_rest)
        grads = [found[i] if i in found else next(others) for i in range(len(leaves))]
        return metrics, treedef.unflatten(grads)

    def _as_held(self, call: str, held: Mapping[str, Any], size: int) -> tuple[Layers, bool]:
        """Returns how layers are spread that a state has as the model says; whether all of them."""
        is_whole = size == 1 or not all(
            self.axis_name in _compat.varying_axes(jax.typeof(leaf)) for leaf in held.values()
        )
        count = num_layers(call, held)
        where = counted(*next(iter(held.items())))
        layers = self.layers(call, count if is_whole else count * size, size, where)
        if not is_whole and not layers.is_as_stored:
            raise ValueError(
                f"{call}: state: its layers lie on the ranks in the model's order, but "
                f'"{self.kind}" needs another one. Give jaxcoll.pipelined(model, ...) to '
                "create_train_state, and to data_parallel_train_step."
            )
        return layers, is_whole


def _named(params: Any) -> tuple[list[str], list[Any], Any]:
    """Returns parameters' names for texts, themselves, and their structure."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = [f"params{leaf_name(path)}" for path, _ in leaves]
    return names, [leaf for _, leaf in leaves], treedef


def _as_the_model_has_it(stored: jax.Array, layers: Layers) -> jax.Array:
    """Returns an array of the shape that the model expects; it is not read."""
    count = layers.count // layers.num_ranks if layers.is_named else layers.count
    return typed_like(jnp.zeros((count, *stored.shape[1:]), stored.dtype), stored)
