"""Metrics of all devices: reduced inside a mapped function, or collected outside of one."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import multihost_utils

from jaxcoll._errors import one_of
from jaxcoll.collectives.all_gather import all_gather
from jaxcoll.collectives.all_reduce import all_reduce

_REDUCTIONS = ("mean", "sum", "max", "min")


class DistributedMetrics(nnx.Module):
    """Reductions of metrics over a mapped axis.

    Metrics are a tree, mostly a dict, of arrays, NumPy arrays or Python numbers. A tree travels in
    one call. It holds nothing, so that every method has a static twin, `..._static`.

    Source: the API of `artifex.generative_models.training.distributed.metrics`.
    """

    @staticmethod
    def all_gather_static(metrics: Any, axis_name: str = "batch") -> Any:
        """Returns the metrics of all ranks, a new first dimension counting the ranks."""
        return jax.tree.map(lambda leaf: all_gather(jnp.asarray(leaf), axis_name), metrics)

    @staticmethod
    def reduce_mean_static(metrics: Any, axis_name: str = "batch") -> Any:
        """Returns the mean of every leaf over the ranks."""
        return all_reduce(_arrays(metrics), axis_name, op="mean")

    @staticmethod
    def reduce_sum_static(metrics: Any, axis_name: str = "batch") -> Any:
        """Returns the sum of every leaf over the ranks."""
        return all_reduce(_arrays(metrics), axis_name, op="sum")

    @staticmethod
    def reduce_max_static(metrics: Any, axis_name: str = "batch") -> Any:
        """Returns the largest value of every leaf's elements over the ranks."""
        return all_reduce(_arrays(metrics), axis_name, op="max")

    @staticmethod
    def reduce_min_static(metrics: Any, axis_name: str = "batch") -> Any:
        """Returns the smallest value of every leaf's elements over the ranks."""
        return all_reduce(_arrays(metrics), axis_name, op="min")

    @staticmethod
    def reduce_custom_static(
        metrics: Mapping[str, Any],
        reduce_fn: Mapping[str, str | None] | None = None,
        axis_name: str = "batch",
    ) -> dict[str, Any]:
        """Returns each metric reduced in a way of its own.

        Args:
            metrics: by name.
            reduce_fn: `"mean"`, `"sum"`, `"max"` or `"min"` by name; None leaves a metric as it is.
                Metrics that are not named are averaged.
            axis_name: a mapped axis.

        Raises:
            ValueError: another reduction, or one for a metric that there is not.
        """
        chosen = dict(reduce_fn or {})
        for name, op in chosen.items():
            if name not in metrics:
                raise ValueError(one_of("reduce_custom", "reduce_fn", name, list(metrics)))
            if op is not None and op not in _REDUCTIONS:
                where = f"reduce_fn[{name!r}]"
                raise ValueError(one_of("reduce_custom", where, op, _REDUCTIONS))
        reduced = dict(metrics)
        for op in _REDUCTIONS:
            part = {name: m for name, m in metrics.items() if chosen.get(name, "mean") == op}
            if part:
                reduced |= all_reduce(_arrays(part), axis_name, op=op)
        return reduced

    @staticmethod
    def collect_from_devices_static(metrics: Any) -> Any:
        """Returns, outside of a map, each leaf as a list with an entry for each device.

        Args:
            metrics: what a mapped function returned with a first dimension that counts devices.
                Scalars are left as they are. Where the devices are of several processes, all of
                these call it: what is on the others' is gathered first.
        """

        def entries(leaf: Any) -> Any:
            if jnp.ndim(leaf) == 0:
                return leaf
            is_array = isinstance(leaf, jax.Array)
            if is_array and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
                leaf = jnp.asarray(multihost_utils.process_allgather(leaf, tiled=True))
            return list(leaf)

        return jax.tree.map(entries, metrics)

    def all_gather(self, metrics: Any, axis_name: str = "batch") -> Any:
        """As `all_gather_static`."""
        return self.all_gather_static(metrics, axis_name)

    def reduce_mean(self, metrics: Any, axis_name: str = "batch") -> Any:
        """As `reduce_mean_static`."""
        return self.reduce_mean_static(metrics, axis_name)

    def reduce_sum(self, metrics: Any, axis_name: str = "batch") -> Any:
        """As `reduce_sum_static`."""
        return self.reduce_sum_static(metrics, axis_name)

    def reduce_max(self, metrics: Any, axis_name: str = "batch") -> Any:
        """As `reduce_max_static`."""
        return self.reduce_max_static(metrics, axis_name)

    def reduce_min(self, metrics: Any, axis_name: str = "batch") -> Any:
        """As `reduce_min_static`."""
        return self.reduce_min_static(metrics, axis_name)

    def reduce_custom(
        self,
        metrics: Mapping[str, Any],
        reduce_fn: Mapping[str, str | None] | None = None,
        axis_name: str = "batch",
    ) -> dict[str, Any]:
        """As `reduce_custom_static`."""
        return self.reduce_custom_static(metrics, reduce_fn, axis_name)

    def collect_from_devices(self, metrics: Any) -> Any:
        """As `collect_from_devices_static`."""
        return self.collect_from_devices_static(metrics)


def _arrays(metrics: Any) -> Any:
    return jax.tree.map(jnp.asarray, metrics)
