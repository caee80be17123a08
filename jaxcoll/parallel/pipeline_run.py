"""A pipeline's forward and backward passes, tick by tick as a schedule says.

A stage's input is kept from its forward to its backward pass, which computes the stage once more.
What a rank has nothing to do for is not computed, where it would not communicate; elsewhere on
whatever there is, and thrown away.

Source: tasks in ticks of a forward and a backward half, one program for all ranks, as derived for
1F1B: F(m) at tick m + r, B(m) at tick m + 2 (p - 1) - r.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll.collectives.all_reduce import all_reduce
from jaxcoll.collectives.ppermute import ppermute
from jaxcoll.parallel.gated import gated, typed_like
from jaxcoll.parallel.pipeline_cut import Cut
from jaxcoll.parallel.stages import Layers
from jaxcoll.parallel.tick_table import Section, TickTable

Function = Callable[..., Any]
Row = dict[str, jax.Array]
Metrics = dict[str, tuple[jax.Array, jax.Array]]
Arrived = tuple[list[jax.Array], jax.Array]  # and the number of its slots


def value_and_grad(
    cut: Cut,
    table: TickTable,
    layers: Layers,
    axis_name: str,
    params: tuple[list[jax.Array], list[jax.Array]],
    batch: Any,
    key_of: Callable[[jax.Array], Any],
    scale: float,
) -> tuple[Metrics, list[jax.Array], list[jax.Array]]:
    """Returns metrics, and the gradients of the loss's sum over all micro-batches.

    Args:
        cut: the model's parts.
        table: what to do when.
        layers: how they are spread.
        axis_name: of the pipeline.
        params: those outside of the layers, each rank's own copy, and this rank's layers as they
            are stored.
        batch: `(micro-batches, ...)`.
        key_of: a micro-batch's key, by its number.
        scale: what the loss is divided by while it is differentiated.

    Returns:
        Metrics and the gradients of what is outside of the layers, summed over the pipeline; and
        of this rank's layers. In float32 at least.
    """
    run = _Run(cut, table, layers, axis_name, params, batch, key_of, scale)
    carry = run.start()
    for section in table.sections:
        carry = run.section(section, carry)
    metrics, of_rest, of_chunks = carry["sums"]
    of_rest, metrics = all_reduce((of_rest, metrics), axis_name)
    stored = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in of_chunks]
    return metrics, [leaf * scale for leaf in of_rest], [leaf * scale for leaf in stored]


class _Run:
    def __init__(
        self,
        cut: Cut,
        table: TickTable,
        layers: Layers,
        axis_name: str,
        params: tuple[list[jax.Array], list[jax.Array]],
        batch: Any,
        key_of: Callable[[jax.Array], Any],
        scale: float,
    ) -> None:
        self._cut, self._table, self._layers, self._axis = cut, table, layers, axis_name
        self._batch, self._key_of, self._scale = batch, key_of, scale
        self._size, self._rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
        self._rest, stored = params
        shape = (layers.num_chunks, layers.width)
        self._chunks = [leaf.reshape(*shape, *leaf.shape[1:]) for leaf in stored]
        self._numbers = layers.numbers(self._rank)

    # ---- What goes from tick to tick -------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        """Returns empty slots and sums."""

        def slots(count: int, values: Sequence[jax.Array]) -> list[jax.Array]:
            shapes = ((x, (count + 1, *x.shape)) for x in values)
            return [typed_like(jnp.zeros(shape, x.dtype), x) for x, shape in shapes]

        first = typed_like(jnp.int32(0), self._rank)
        row = {"micro": first, "chunk": first}
        micro, key, _, _ = self._of_tick(row)
        metrics = jax.eval_shape(lambda: self._cut.after(self._rest, micro, key, self._cut.x))
        return {
            "inputs": slots(self._table.num_inputs, self._cut.x),
            "cotangents": slots(self._table.num_cotangents, self._moving(self._cut.x)),
            "sums": [
                jax.tree.map(lambda leaf: typed_like(_zeros(leaf), self._rank), metrics),
                [_wide_zeros(leaf) for leaf in self._rest],
                [_wide_zeros(leaf) for leaf in self._chunks],
            ],
        }

    def section(self, section: Section, carry: dict[str, Any]) -> dict[str, Any]:
        """Returns what there is after the ticks of a section."""
        halves = {"forward": section.forward, "backward": section.backward}
        rows = {
            name: {column: jnp.asarray(values)[:, self._rank] for column, values in half.items()}
            for name, half in halves.items()
            if half is not None
        }
        # What arrives in a tick is stored before the next one: were it stored in the tick itself,
        # where what it replaces may still be read, XLA would copy all slots in each tick.
        arrived: dict[str, Arrived] = {}
        if section.forward is not None:
            arrived["inputs"] = self._cut.x, self._nowhere(self._table.num_inputs)
        if section.backward is not None:
            arrived["cotangents"] = (
                self._moving(self._cut.x),
                self._nowhere(self._table.num_cotangents),
            )
        carry, arrived = lax.scan(
            lambda state, row: (self._tick(_stored(*state), row), None), (carry, arrived), rows
        )[0]
        return _stored(carry, arrived)

    def _nowhere(self, count: int) -> jax.Array:
        return typed_like(jnp.int32(count), self._rank)

    def _tick(
        self, carry: dict[str, Any], row: dict[str, Row]
    ) -> tuple[dict[str, Any], dict[str, Arrived]]:
        """Returns sums and slots, and what arrives, with the slots that it goes to."""
        carry, arrived = dict(carry), {}
        if "forward" in row:
            y = self._forward(carry, row["forward"])
            arrived["inputs"] = self._passed_on(y, +1), row["forward"]["target"]
        if "backward" in row:
            found, dx = self._backward(carry, row["backward"])
            carry["sums"] = self._added(carry["sums"], found, row["backward"]["chunk"])
            arrived["cotangents"] = self._passed_on(dx, -1), row["backward"]["target"]
        return carry, arrived

    def _added(self, sums: list[Any], found: list[Any], chunk: jax.Array) -> list[Any]:
        metrics, of_rest, of_chunks = sums
        metrics = jax.tree.map(jnp.add, metrics, found[0])
        of_rest = [total + part for total, part in zip(of_rest, found[1], strict=True)]
        of_chunks = [
            lax.dynamic_update_index_in_dim(total, _at(total, chunk) + part, chunk, 0)
            for total, part in zip(of_chunks, found[2], strict=True)
        ]
        return [metrics, of_rest, of_chunks]

    def _passed_on(self, values: list[jax.Array], step: int) -> list[jax.Array]:
        """Returns what the neighbour has sent; of one chunk on each rank the ends have one only."""
        if self._size == 1:
            return values
        ranks = range(self._size)
        pairs = [(i, (i + step) % self._size) for i in ranks]
        if self._layers.num_chunks == 1:
            pairs = [(i, i + step) for i in ranks if i + step in ranks]
        return [ppermute(value, self._axis, pairs) for value in values]

    # ---- One tick --------------------------------------------------------------------------------

    def _of_tick(self, row: Row) -> tuple[Any, Any, list[jax.Array], jax.Array]:
        """Returns a micro-batch, its key, a chunk, and the numbers of its layers."""
        micro = jax.tree.map(lambda leaf: _at(leaf, row["micro"]), self._batch)
        chunk = [_at(leaf, row["chunk"]) for leaf in self._chunks]
        return micro, self._key_of(row["micro"]), chunk, _at(self._numbers, row["chunk"])

    def _input(self, row: Row, rest: Any, micro: Any, key: Any, slots: Any) -> list[jax.Array]:
        """Returns a stage's input: of the first one what comes before it."""
        kept = [_at(leaf, row["source"]) for leaf in slots]
        return gated(self._is_first(row), lambda: self._before(rest, micro, key), kept)

    def _before(self, rest: Any, micro: Any, key: Any) -> list[jax.Array]:
        return list(map(typed_like, self._cut.before(rest, micro, key), self._cut.x))

    def _is_first(self, row: Row) -> jax.Array:
        return (self._rank == 0) & (row["chunk"] == 0)

    def _is_last(self, row: Row) -> jax.Array:
        return (self._rank == self._size - 1) & (row["chunk"] == self._layers.num_chunks - 1)

    def _forward(self, carry: dict[str, Any], row: Row) -> list[jax.Array]:
        micro, key, chunk, numbers = self._of_tick(row)

        def compute() -> list[jax.Array]:
            x = self._input(row, self._rest, micro, key, carry["inputs"])
            return self._cut.stage(self._rest, micro, key, chunk, numbers, x)

        return gated(row["is_on"], compute, self._cut.x)

    def _backward(self, carry: dict[str, Any], row: Row) -> tuple[Any, list[jax.Array]]:
        """Returns what there is to add, and what goes to the stage before."""
        micro, key, chunk, numbers = self._of_tick(row)
        metrics_of_none = jax.tree.map(_zeros, carry["sums"][0])
        of_no_rest = [_zeros(leaf) for leaf in self._rest]

        def compute() -> Any:
            x = self._input(row, self._rest, micro, key, carry["inputs"])

            def stage(rest: Any, chunk: Any, moving: Any) -> tuple[Any, Any]:
                y = self._cut.stage(rest, micro, key, chunk, numbers, self._with(x, moving))
                return self._moving(y), y

            def loss(rest: Any, moving: Any) -> tuple[jax.Array, Metrics]:
                metrics = self._cut.after(rest, micro, key, self._with(y, moving))
                return metrics["loss"][0] / self._scale, metrics

            def after() -> Any:
                value, pullback, metrics = jax.vjp(loss, self._rest, self._moving(y), has_aux=True)
                return metrics, *pullback(jnp.ones_like(value))

            def before() -> list[jax.Array]:
                made = lambda rest: self._moving(self._before(rest, micro, key))  # noqa: E731
                return jax.vjp(made, self._rest)[1](of_x)[0]

            _, through_stage, y = jax.vjp(stage, self._rest, chunk, self._moving(x), has_aux=True)
            arrived = [_at(leaf, row["cotangent"]) for leaf in carry["cotangents"]]
            metrics, of_after, of_y = gated(
                self._is_last(row), after, (metrics_of_none, of_no_rest, arrived)
            )
            of_rest, of_chunk, of_x = through_stage(of_y)
            of_before = gated(self._is_first(row), before, of_no_rest)
            of_rest = [sum(parts) for parts in zip(of_rest, of_after, of_before, strict=True)]
            return metrics, of_rest, of_chunk, of_x

        nothing = (
            metrics_of_none,
            of_no_rest,
            [_zeros(leaf) for leaf in chunk],
            self._moving(self._cut.x),
        )
        *found, of_x = gated(row["is_on"], compute, nothing)
        return found, of_x

    def _moving(self, x: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arrays that have derivatives."""
        return [leaf for leaf in x if _is_inexact(leaf)]

    def _with(self, x: Sequence[jax.Array], moving: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns all of x, those that have derivatives replaced."""
        given = iter(moving)
        return [next(given) if _is_inexact(leaf) else leaf for leaf in x]


def _at(leaf: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def _stored(carry: dict[str, Any], arrived: dict[str, Arrived]) -> dict[str, Any]:
    """Returns slots that have what arrived, and all else as it was."""
    slots = {
        name: [
            lax.dynamic_update_index_in_dim(slot, value, number, 0)
            for slot, value in zip(carry[name], values, strict=True)
        ]
        for name, (values, number) in arrived.items()
    }
    return {**carry, **slots}


def _zeros(like: jax.Array) -> jax.Array:
    return typed_like(jnp.zeros(like.shape, like.dtype), like)


def _wide(dtype: Any) -> Any:
    """Returns the dtype in which gradients are added."""
    return jnp.promote_types(dtype, jnp.float32)


def _wide_zeros(like: jax.Array) -> jax.Array:
    return typed_like(jnp.zeros(like.shape, _wide(like.dtype)), like)


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
