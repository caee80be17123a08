"""Data parallelism: split batches, a model on every device, averaged gradients."""

from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll._config import logger
from jaxcoll._errors import one_of
from jaxcoll._sharding import divisible_dimension, leaf_name
from jaxcoll.collectives.all_reduce import all_reduce
from jaxcoll.mesh import check_mesh_axis
from jaxcoll.parallel.shares import place


class DataParallel(nnx.Module):
    """Shardings, placement and gradient averaging for data-parallel training.

    It holds nothing, so that every method has a static twin, `..._static`, with the same arguments.

    Source: the API of `artifex.generative_models.training.distributed.data_parallel`.
    """

    def __init__(self) -> None:
        """Makes an object without state."""

    @staticmethod
    def create_data_parallel_sharding_static(mesh: Mesh, data_axis: str = "data") -> NamedSharding:
        """Returns the sharding that splits the first dimension over an axis.

        Raises:
            ValueError: the mesh has no such axis.
        """
        check_mesh_axis("create_data_parallel_sharding", "data_axis", mesh, data_axis)
        return NamedSharding(mesh, P(data_axis))

    @staticmethod
    def shard_batch_static(
        batch: Any, sharding: NamedSharding, *, batch_is_global: bool = False
    ) -> Any:
        """Returns the batch, a tree of arrays, spread over the devices of a sharding.

        In a job of several processes, each gives its share of every leaf: what its devices hold, in
        the order of the whole. Where the batch is split over the processes that is one part for
        each, and the result has the sizes of all shares together; processes whose devices hold the
        same rows give the same. All have shares of one shape. With `batch_is_global` all give the
        same whole. Contents are not compared.

        Args:
            batch: a tree of arrays. One that spans processes already goes to the sharding as it is.
            sharding: where to. Its processes call this together, in the same order; where all its
                devices are this process's own, no other is asked.
            batch_is_global: whether every process gives the whole.

        Raises:
            ValueError: a leaf can't be split so, or the processes' leaves differ in name, shape or
                dtype. The text names the leaf and who has what; all processes raise it.
            CollectiveError: a process of the sharding does not come.

        Cost: between processes one `all_gather` of 8 bytes each, which is waited for.
        """
        return place("shard_batch", batch, sharding, is_global=batch_is_global)

    @staticmethod
    def shard_model_state_static(
        state: Any, mesh: Mesh, param_sharding: Literal["replicate", "shard"] = "replicate"
    ) -> Any:
        """Returns a model's state, parameters or optimizer state on all devices of a mesh.

        Args:
            state: a tree of arrays.
            mesh: where to.
            param_sharding: `"replicate"`: a copy on every device. `"shard"`: each leaf is split
                along its largest dimension that the mesh's first axis divides. Leaves without one,
                scalars among them, are replicated, and named in a line of the log.

        Raises:
            ValueError: another `param_sharding`.
        """
        call = "shard_model_state"
        if param_sharding == "replicate":
            return DataParallel.replicate_params_static(state, mesh)
        if param_sharding != "shard":
            known = ("replicate", "shard")
            raise ValueError(one_of(call, "param_sharding", param_sharding, known))
        axis = mesh.axis_names[0]
        replicated = []

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            dimension = divisible_dimension(jax.numpy.shape(leaf), mesh.shape[axis])
            if dimension is None:
                replicated.append(leaf_name(path))
                return NamedSharding(mesh, P())
            return NamedSharding(mesh, P(*[None] * dimension, axis))

        shardings = jax.tree_util.tree_map_with_path(sharding, state)
        if replicated:
            logger.info(
                'jaxcoll: %s: no dimension that axis "%s" of size %d divides, hence replicated: %s',
                *(call, axis, mesh.shape[axis], ", ".join(replicated)),
            )
        return jax.device_put(state, shardings)

    @staticmethod
    def all_reduce_gradients_static(
        gradients: Any, reduce_type: Literal["mean", "sum"] = "mean", axis_name: str = "batch"
    ) -> Any:
        """Returns the gradients' mean or sum over a mapped axis: one `all_reduce` of the tree.

        Call it inside `jax.shard_map`, or `jax.pmap` with that `axis_name`.

        Raises:
            ValueError: another `reduce_type`.
            NameError: the axis is not mapped here; the text says which are.
        """
        if reduce_type not in ("mean", "sum"):
            known = ("mean", "sum")
            raise ValueError(one_of("all_reduce_gradients", "reduce_type", reduce_type, known))
        try:
            return all_reduce(gradients, axis_name, op=reduce_type)
        except NameError as error:
            hint = "Pass the axis to reduce over as axis_name."
            raise NameError(f"all_reduce_gradients: {error} {hint}") from None

    @staticmethod
    def replicate_params_static(params: Any, mesh: Mesh) -> Any:
        """Returns the tree with a copy of every leaf on every device of a mesh."""
        return jax.device_put(params, NamedSharding(mesh, P()))

    def create_data_parallel_sharding(self, mesh: Mesh, data_axis: str = "data") -> NamedSharding:
        """As `create_data_parallel_sharding_static`."""
        return self.create_data_parallel_sharding_static(mesh, data_axis)

    def shard_batch(
        self, batch: Any, sharding: NamedSharding, *, batch_is_global: bool = False
    ) -> Any:
        """As `shard_batch_static`."""
        return self.shard_batch_static(batch, sharding, batch_is_global=batch_is_global)

    def shard_model_state(
        self,
        state: Any,
        mesh: Mesh,
        param_sharding: Literal["replicate", "shard"] = "replicate",
    ) -> Any:
        """As `shard_model_state_static`."""
        return self.shard_model_state_static(state, mesh, param_sharding)

    def all_reduce_gradients(
        self,
        gradients: Any,
        reduce_type: Literal["mean", "sum"] = "mean",
        axis_name: str = "batch",
    ) -> Any:
        """As `all_reduce_gradients_static`."""
        return self.all_reduce_gradients_static(gradients, reduce_type, axis_name)

    def replicate_params(self, params: Any, mesh: Mesh) -> Any:
        """As `replicate_params_static`."""
        return self.replicate_params_static(params, mesh)
