"""Collectives over ranks of several hosts, in two levels.

Natively on each host, and between hosts by what JAX runs on there. The ranks of a host first share
the work, so that each sends and receives its part between hosts: of S bytes, S divided by the ranks
of a host. Reductions add the ranks of a host in their order, then the hosts in the transport's.
`lax.psum_scatter` is not used between hosts, where Gloo's is wrong at times.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxcoll._types import HALF_PRECISION, MARK, Backend

Groups = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Levels:
    """The two levels of a group, as groups of its ranks.

    Attributes:
        inside: the ranks of each host, in order.
        across: the i-th rank of each host, for each i, in the order of the hosts' first ranks.
    """

    inside: tuple[tuple[int, ...], ...]
    across: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.inside))


def levels_of(hosts: Sequence[Sequence[str]]) -> Levels | str:
    """Returns the levels of groups whose ranks are on these hosts, or why there are none."""
    patterns = {tuple(_numbered(group)) for group in hosts}
    if len(patterns) > 1:
        return "the groups are spread over hosts in different ways"
    (pattern,) = patterns
    inside = tuple(
        tuple(rank for rank, host in enumerate(pattern) if host == number)
        for number in range(max(pattern) + 1)
    )
    if len({len(ranks) for ranks in inside}) > 1:
        return "the hosts have different numbers of the group's ranks"
    if len(inside[0]) == 1:
        return "each of the group's ranks is on another host"
    return Levels(inside, tuple(zip(*inside, strict=True)))


def _numbered(group: Sequence[str]) -> list[int]:
    known = {host: number for number, host in enumerate(dict.fromkeys(group))}
    return [known[host] for host in group]


@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """The collectives over some axes in two levels, as functions of a rank's array."""

    axes: tuple[str, ...]
    levels: Levels
    backend: Backend

    def all_reduce(self, reduction: str, *xs: Any) -> list[Any]:
        """Returns the reductions, in one call for each dtype; half precision is rounded once."""
        wide = [_widened(x) for x in xs]
        if reduction in _COMBINE:
            gathered = [self.all_gather(x[None], 0) for x in wide]
            results = [ft.reduce(_COMBINE[reduction], list(blocks)) for blocks in gathered]
        else:
            results = _joined(ft.partial(self._reduce, reduction), wide)
        return [result.astype(x.dtype) for result, x in zip(results, xs, strict=True)]

    def all_gather(self, x: Any, dimension: int) -> Any:
        """Returns all ranks' arrays joined along a dimension."""
        x = jnp.moveaxis(x, dimension, 0)
        blocks = self._across(lax.all_gather, x)  # (hosts, ...)
        blocks = self._inside(lax.all_gather, blocks)  # (ranks of a host, hosts, ...)
        order = np.argsort([rank for ranks in self.levels.across for rank in ranks])
        blocks = blocks.reshape(self.levels.size, *x.shape)[order]
        joined = blocks.reshape(self.levels.size * x.shape[0], *x.shape[1:])
        return jnp.moveaxis(joined, 0, dimension)

    def reduce_scatter(self, x: Any, dimension: int) -> Any:
        """Returns this rank's part, along a dimension, of the sum."""
        wide = jnp.moveaxis(_widened(x), dimension, 0)
        parts = wide.reshape(self.levels.size, wide.shape[0] // self.levels.size, *wide.shape[1:])
        # To the i-th rank of the host the parts of the i-th rank of every host.
        order = [rank for ranks in self.levels.across for rank in ranks]
        parts = self._inside(ft.partial(lax.psum_scatter, tiled=True), parts[np.array(order)])
        parts = self._across(
            ft.partial(lax.all_to_all, split_axis=0, concat_axis=0, tiled=True), parts
        )
        total = ft.reduce(jnp.add, list(parts))  # in the order of the hosts
        return jnp.moveaxis(total, 0, dimension).astype(x.dtype)

    def _reduce(self, reduction: str, flat: Any) -> Any:
        """Reduces on the host, each rank its share; the shares between hosts; and joins them."""
        width = len(self.levels.inside[0])
        padded = jnp.pad(flat, (0, -flat.size % width))
        if reduction in ("sum", "mean"):
            share = self._across(lax.psum, self._sum_on_host(padded))
        else:
            extremum = lax.pmax if reduction == "max" else lax.pmin
            share = self._across(extremum, self._share_of(extremum, padded))
        whole = self._inside(ft.partial(lax.all_gather, tiled=True), share)[: flat.size]
        return whole / self.levels.size if reduction == "mean" else whole

    def _sum_on_host(self, flat: Any) -> Any:
        return self._inside(ft.partial(lax.psum_scatter, tiled=True), flat)

    def _share_of(self, extremum: Callable[..., Any], flat: Any) -> Any:
        reduced = self._inside(extremum, flat)
        width = len(self.levels.inside[0])
        place = np.zeros(self.levels.size, np.int32)
        for ranks in self.levels.inside:
            place[list(ranks)] = np.arange(width)
        mine = jnp.asarray(place)[lax.axis_index(self.axes)]
        return lax.dynamic_slice_in_dim(reduced, mine * (flat.size // width), flat.size // width)

    def _inside(self, collective: Callable[..., Any], x: Any) -> Any:
        with set_xla_metadata(**{MARK: self.backend}):
            return collective(x, self.axes, axis_index_groups=self.levels.inside)

    def _across(self, collective: Callable[..., Any], x: Any) -> Any:
        with set_xla_metadata(**{MARK: "lax"}):
            return collective(x, self.axes, axis_index_groups=self.levels.across)


_COMBINE = {"prod": lax.mul, "and": lax.bitwise_and, "or": lax.bitwise_or}


def _joined(reduce: Callable[[Any], Any], xs: Sequence[Any]) -> list[Any]:
    """Applies a function of vectors, element by element, to all arrays of a dtype at once."""
    results: list[Any] = [None] * len(xs)
    for dtype in dict.fromkeys(x.dtype for x in xs):
        places = [i for i, x in enumerate(xs) if x.dtype == dtype]
        flat = reduce(jnp.concatenate([xs[i].ravel() for i in places]))
        parts = jnp.split(flat, np.cumsum([xs[i].size for i in places])[:-1])
        for i, part in zip(places, parts, strict=True):
            results[i] = part.reshape(xs[i].shape)
    return results


def _widened(x: Any) -> Any:
    return x.astype(np.float32) if x.dtype.name in HALF_PRECISION else x
