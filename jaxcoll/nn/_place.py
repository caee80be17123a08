"""Where a layer runs: on this rank's parts, inside a map over its axis, or on global arrays."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat
from jaxcoll._errors import did_you_mean, listed
from jaxcoll.mesh import check_auto, check_mesh_axis
from jaxcoll.parallel.regions import copy_to


def call_of(layer: Any) -> str:
    """Returns a linen layer's class and where in the model it is: `TPMLP "block_0/mlp"`."""
    path = () if layer.scope is None else layer.path
    name = type(layer).__name__
    return f'{name} "{"/".join(path)}"' if path else name


@dataclasses.dataclass(frozen=True)
class Place:
    """The axis over which a layer's weights are split, and how it comes to be mapped.

    Attributes:
        call: the layer's name and, where it has one, its path in the model, for texts.
        axis_name: the axis, or None for a layer that is not split.
        mesh: for global arrays.
    """

    call: str
    axis_name: str | None
    mesh: Mesh | None

    @property
    def is_mapped(self) -> bool:
        """Tells whether this is code for one rank."""
        return self.axis_name is not None and self.axis_name in _compat.bound_axes()

    @property
    def local_axis(self) -> str | None:
        """The axis for code on this rank's parts; None where arrays are whole.

        Raises:
            ValueError: the mesh of a map, or of `jax.set_mesh`, around this code has no such axis.
                Without one nobody knows.
        """
        if self.axis_name is None or self.is_mapped:
            return self.axis_name
        around = jax.sharding.get_abstract_mesh().axis_names
        if around and self.axis_name not in around:
            raise ValueError(
                f"{self.call}: axis_name: {self.axis_name!r} is not an axis of the mesh around "
                f"this call, which has {listed(around)}.{did_you_mean(self.axis_name, around)} For "
                "a layer that is not split, pass axis_name=None."
            )
        return None

    @property
    def num_ranks(self) -> int:
        """Ranks of the axis.

        Raises:
            ValueError: the axis is neither mapped nor an axis of the mesh.
        """
        if self.axis_name is None:
            return 1
        if self.is_mapped:
            return lax.axis_size(self.axis_name)
        if self.mesh is None:
            raise ValueError(
                f'{self.call}: mesh: axis "{self.axis_name}" is not mapped here. Pass mesh=, so '
                "that the layer maps itself, or call it inside jax.shard_map over that axis."
            )
        check_mesh_axis(self.call, "axis_name", self.mesh, self.axis_name)
        check_auto(self.call, self.mesh)
        return self.mesh.shape[self.axis_name]

    def check_divides(self, what: str, count: int) -> None:
        """Raises ValueError where the ranks can't share `count` of something evenly."""
        if count % self.num_ranks:
            raise ValueError(
                f"{self.call}: {what}: {count} can't be split over the {self.num_ranks} ranks of "
                f'axis "{self.axis_name}". Use a multiple of {self.num_ranks}, or fewer ranks.'
            )

    def whole(self, local: int) -> int:
        """Returns the length of a dimension that is split, of all ranks."""
        return local * (self.num_ranks if self.is_mapped else 1)

    def run(
        self,
        f: Callable[..., jax.Array],
        inputs: Sequence[tuple[jax.Array, int | None]],
        weights: Sequence[tuple[jax.Array | None, P]],
        result: tuple[int, int | None],
        **options: Any,
    ) -> jax.Array:
        """Returns `f(*inputs, *weights, axis_name)`, mapped over the mesh where that is needed.

        All axes of the mesh are manual, as native calls need: the first dimension of all inputs is
        split over those that are not the layer's, where they divide it. Called eagerly, it is
        compiled once, for all layers that are alike: JAX compiles an eager map at each call.

        Args:
            f: on this rank's parts; its last argument is the axis, or None. A function of a module,
                for what is compiled is found by it.
            inputs: arrays, each with its dimension that is split over the axis, from the end.
            weights: arrays, or None, each with its spec.
            result: number of dimensions, and which is split, from the end.
            **options: for `f`, hashable.
        """
        arrays, given = tuple(x for x, _ in inputs), tuple(w for w, _ in weights)
        if self.axis_name is None or self.is_mapped:
            return f(*arrays, *given, self.axis_name, **options)
        ends = [(x.ndim, split) for x, split in inputs]
        batch_axes = self._batch_axes(arrays[0].shape, [*ends, result])

        def spec(ndim: int, split: int | None) -> P:
            names: list[Any] = [None] * ndim
            if batch_axes:
                names[0] = batch_axes
            if split is not None:
                names[split] = self.axis_name
            return P(*names)

        on_mesh = _compiled_on_mesh if _compat.runs_eagerly() else _on_mesh
        return on_mesh(
            arrays,
            given,
            f=f,
            options=tuple(options.items()),
            place=self,
            batch_axes=batch_axes,
            in_specs=(
                tuple(spec(*end) for end in ends),
                tuple(None if w is None else w_spec for w, w_spec in weights),
            ),
            out_specs=spec(*result),
        )

    def _batch_axes(
        self, shape: tuple[int, ...], ends: Sequence[tuple[int, int | None]]
    ) -> tuple[str, ...]:
        """Returns the mesh's other axes, if the first dimension of all can be split over them."""
        assert self.mesh is not None
        others = tuple(axis for axis in self.mesh.axis_names if axis != self.axis_name)
        is_free = all(ndim > (1 if split is None else -split) for ndim, split in ends)
        count = math.prod(self.mesh.shape[axis] for axis in others)
        return others if is_free and shape[0] % count == 0 else ()


def _on_mesh(
    arrays: tuple[jax.Array, ...],
    weights: tuple[jax.Array | None, ...],
    *,
    f: Callable[..., jax.Array],
    options: tuple[tuple[str, Any], ...],
    place: Place,
    batch_axes: tuple[str, ...],
    in_specs: Any,
    out_specs: P,
) -> jax.Array:
    """Maps `f` over all axes of a mesh."""
    assert place.mesh is not None  # num_ranks has checked

    def on_parts(arrays: Any, weights: Any) -> jax.Array:
        # Other ranks have other examples: the gradients of all are summed.
        return f(*arrays, *copy_to(weights, batch_axes), place.axis_name, **dict(options))

    mapped = jax.shard_map(on_parts, mesh=place.mesh, in_specs=in_specs, out_specs=out_specs)
    return mapped(arrays, weights)


_compiled_on_mesh = jax.jit(
    _on_mesh, static_argnames=("f", "options", "place", "batch_axes", "in_specs", "out_specs")
)
