"""Brings the pitfalls of docs/proof.md about, one at a time, and looks whether their tests fail.

    python tests/repo/pitfalls.py [part of a pitfall's text]

Each mutant is one edit of a module, made when a test imports it (`broken.py`), and names the test,
one of those in docs/proof.md, that has to notice. Ends with 1 if a mutant gets past its test. An
edit whose text the module no longer holds is an error: update it here.
"""

import dataclasses
import pathlib
import re
import subprocess
import sys
import time

BROKEN = pathlib.Path(__file__).with_name("broken.py")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A pitfall, the edit of a file below jaxcoll/, and the test below tests/ that must notice."""

    pitfall: str
    file: str
    old: str
    new: str
    test: str

    @property
    def module(self) -> str:
        """The file's module."""
        return "jaxcoll." + self.file.removesuffix(".py").replace("/", ".")


LAYERS = "nn/test_layers.py::test_values_and_gradients"
STRATEGIES = "parallel/test_strategies.py::test_trains_as_on_one_device"
PIPELINE = "parallel/test_pipeline.py::test_trains_as_on_one_device"
PARAMETERS = "nn/test_parameters.py"
PRECISION = "parallel/test_precision.py"
SHARDED = "parallel/test_fully_shard.py"
STEP = "parallel/test_step.py"

MUTANTS = [
    # ---- Scale of gradients ----------------------------------------------------------------------
    Mutant(
        "times the tensor-parallel ranks, for a loss that all of them have",
        "parallel/regions.py",
        "_reduced.defvjp(lambda tree, axes: (all_reduce(tree, axes), None), "
        "lambda axes, _, g: (g,))",
        "_reduced.defvjp(lambda tree, axes: (all_reduce(tree, axes), None), "
        "lambda axes, _, g: (all_reduce(g, axes),))",
        f"{LAYERS}[linen-untyped-plain-size2]",
    ),
    Mutant(
        "times the ranks, below an output layer whose sequence is split",
        "parallel/tensor.py",
        "y = all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel",
        "x = 2 * x - lax.stop_gradient(x)\n"
        "        y = all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel",
        "nn/test_training.py::test_trains_as_on_one_device[linen-sequence-size2-no_clips]",
    ),
    Mutant(
        "of a pipeline, whose loss is on one stage",
        "parallel/pipeline_run.py",
        'return (self._rank == self._size - 1) & (row["chunk"] == self._layers.num_chunks - 1)',
        'return row["chunk"] == self._layers.num_chunks - 1',
        f"{PIPELINE}[1f1b-(2, 2)-micro3-more0-functions-sgd]",
    ),
    Mutant(
        "a sum for a mean of sharded parameters, or the other way round",
        "parallel/fsdp.py",
        'scatter_dimension=axis, tiled=True, op="mean")',
        "scatter_dimension=axis, tiled=True)",
        "parallel/test_fsdp.py::test_gathering_gives_mean_gradients[size4-axis0]",
    ),
    Mutant(
        "parts over one axis, copies over another: divided by one of them",
        "parallel/step.py",
        "parts = all_reduce(as_sent(parts), others) if others else parts",
        'parts = all_reduce(as_sent(parts), others, "mean") if others else parts',
        f"{STRATEGIES}[ZeRO-3-hybrid 2 x 3-linen-sgd-accumulate1]",
    ),
    Mutant(
        "right for a replicated leaf, wrong for one that is split, or twice",
        "parallel/zero.py",
        "scatter_dimension=dim.index, tiled=True)",
        'scatter_dimension=dim.index, tiled=True, op="mean")',
        f"{STRATEGIES}[ZeRO-3-data 4-linen-sgd-accumulate1]",
    ),
    # ---- Axes of a sum ---------------------------------------------------------------------------
    Mutant(
        "parts of a parameter averaged over the axis that they are parts over",
        "parallel/fsdp.py",
        "over = tuple(axis for axis in axes if dimension_of(names, axis) is None)",
        "over = axes",
        "parallel/test_fsdp.py::test_gradients_are_averaged_where_the_parameter_is_replicated",
    ),
    Mutant(
        "a norm's scale, or a row's bias, not summed over ranks with other positions",
        "parallel/tensor.py",
        "        scale, bias = copy_to((scale, bias), axis_name)\n",
        "        pass\n",
        f"{LAYERS}[linen-untyped-plain-size2]",
    ),
    Mutant(
        "a tied parameter has the gradient of one of its uses",
        "parallel/piecewise.py",
        "self._cotangents[v] = cotangent if known is None else known + cotangent",
        "self._cotangents[v] = cotangent if known is None else known",
        "parallel/test_layer_by_layer.py::test_trains_as_on_one_device"
        "[tied-size2-bucket_bytes1-None-no_reshard_after_forward-accumulate1]",
    ),
    Mutant(
        "a parameter that the first and the last stage share",
        "parallel/pipeline_run.py",
        "[sum(parts) for parts in zip(of_rest, of_after, of_before, strict=True)]",
        "[sum(parts) for parts in zip(of_rest, of_after, strict=True)]",
        f"{PIPELINE}[1f1b-(2, 2)-micro3-more0-linen-sgd]",
    ),
    # ---- What is called replicated ---------------------------------------------------------------
    Mutant(
        "parts pass for copies",
        "parallel/step.py",
        "        _check_split(call, state, batch, axes)\n",
        "",
        f"{SHARDED}::test_parts_are_no_replicas",
    ),
    Mutant(
        "copies drift apart, without typed axes",
        "parallel/step.py",
        "last, metrics = all_reduce(([leaves[i] for i in buckets[-1]], metrics), axes)",
        "last, metrics = [leaves[i] for i in buckets[-1]], all_reduce(metrics, axes)",
        f"{STEP}::test_without_typed_axes",
    ),
    # ---- Bias of a row, order of a ring ----------------------------------------------------------
    Mutant(
        "added by every rank",
        "parallel/tensor.py",
        "        y = reduce_from(x @ kernel, axis_name)\n",
        "        return reduce_from(x @ kernel + (0 if bias is None else bias), axis_name)\n",
        f"{LAYERS}[linen-typed-plain-size2]",
    ),
    Mutant(
        "its gradient times the ranks",
        "parallel/tensor.py",
        "(copy_to(bias, axis_name) if axis_name and sequence_parallel else bias)",
        "(copy_to(bias, axis_name) if axis_name else bias)",
        f"{LAYERS}[linen-untyped-plain-size2]",
    ),
    Mutant(
        "added in each step of a ring",
        "parallel/tensor.py",
        "    return y if bias is None else y + bias\n",
        '    times = 1 if mode == "none" else lax.axis_size(axis_name)\n'
        "    return y if bias is None else y + times * bias\n",
        "parallel/test_tensor.py::test_two_layers_inside_a_map",
    ),
    Mutant(
        "blocks multiplied with those of another rank",
        "collectives/_matmul_ring.py",
        "source = (rank - step) % size",
        "source = (rank + step) % size",
        "collectives/test_matmuls.py::test_on_lax_as_a_ring[gather_rows-()-float32-size3]",
    ),
    Mutant(
        "halves of an odd number of features",
        "parallel/layouts.py",
        "        half = columns // 2\n",
        "        half = (columns + 1) // 2\n",
        "parallel/test_layouts.py::test_halves_of_an_odd_number_of_features",
    ),
    Mutant(
        "another tree of parameters on one rank",
        "nn/dense.py",
        'self._split("kernel",',
        'self._split("kernel" if core.place.num_ranks > 1 else "whole",',
        f"{PARAMETERS}::test_first_values_are_those_of_one_device[lecun_normal-column-size1]",
    ),
    Mutant(
        "a checkpoint of two ranks means something else on four, or in a ring",
        "parallel/tensor.py",
        "        y = matmul_reduce_scatter(x, kernel, axis_name)\n",
        "        y = matmul_reduce_scatter(x, jnp.flip(kernel, 0), axis_name)\n",
        f"{PARAMETERS}::test_a_checkpoint_of_one_mesh_serves_all",
    ),
    # ---- First values ----------------------------------------------------------------------------
    Mutant(
        "other ones on another mesh, or born in parts",
        "parallel/state.py",
        "program = first_values(lambda: pure.init(init_rng, inputs))",
        "key = jax.random.fold_in(init_rng, mesh.size) if mesh else init_rng\n"
        "    program = first_values(lambda: pure.init(key, inputs))",
        f"{SHARDED}::test_initialized_in_parts[pair]",
    ),
    Mutant(
        "a standard deviation of a rank's fan-in",
        "nn/dense.py",
        "split_init(init, spec, len(shape)), shape,",
        "split_init(lambda *a: init(*a) * self._core().place.num_ranks**0.5, spec, len(shape)), "
        "shape,",
        f"{PARAMETERS}::test_first_values_are_those_of_one_device[lecun_normal-row-size2]",
    ),
    Mutant(
        "the same part on each rank",
        "parallel/fsdp.py",
        "lax.dynamic_slice_in_dim(value, rank * part, part, dimension)",
        "lax.dynamic_slice_in_dim(value, 0 * rank, part, dimension)",
        "parallel/test_fsdp.py::test_initialized_in_parts",
    ),
    # ---- Dropout ---------------------------------------------------------------------------------
    Mutant(
        "the same on ranks with other examples, in two steps or micro-batches",
        "parallel/step.py",
        "        rng = jax.random.fold_in(rng, lax.axis_index(axes))\n",
        "",
        f"{STEP}::test_dropout_differs_between_devices_steps_and_micro_batches[linen]",
    ),
    Mutant(
        "the same on ranks with other examples, in two steps or micro-batches",
        "parallel/step.py",
        "rng = jax.random.fold_in(state.rng, state.step)",
        "rng = state.rng",
        f"{STEP}::test_dropout_differs_between_devices_steps_and_micro_batches[linen]",
    ),
    Mutant(
        "the same on ranks with other examples, in two steps or micro-batches",
        "parallel/step.py",
        "more = results(with_others, params, part, jax.random.fold_in(rng, number))",
        "more = results(with_others, params, part, jax.random.fold_in(rng, 0 * number))",
        f"{STEP}::test_dropout_differs_between_devices_steps_and_micro_batches[linen]",
    ),
    Mutant(
        "the same in two layers",
        "parallel/pure_model.py",
        "[jax.random.fold_in(rng, i) for i in range(len(key_leaves))]",
        "[rng for _ in key_leaves]",
        f"{STEP}::test_each_layer_drops_its_own[TwiceNnx]",
    ),
    Mutant(
        "the same in two parts of a sequence",
        "models/transformer.py",
        "TPDropout(self.dropout, axis_name=split)",
        "TPDropout(self.dropout, axis_name=None)",
        "nn/test_dropout.py::test_parts_of_a_sequence_and_layers_drop_their_own",
    ),
    Mutant(
        "other values on ranks that have the same activations",
        "nn/dropout.py",
        "Place(call_of(self), self.axis_name, None).local_axis",
        'Place(call_of(self), "tensor", None).local_axis',
        "nn/test_dropout.py::test_ranks_drop_their_own_or_the_same[linen]",
    ),
    Mutant(
        "the same in two heads, or in two ranks' hidden features",
        "nn/attention.py",
        'key_of_rank(self.make_rng("dropout"), place.local_axis)',
        'key_of_rank(self.make_rng("dropout"), None)',
        "nn/test_attention.py::test_each_rank_drops_weights_of_its_own",
    ),
    Mutant(
        "the same in two heads, or in two ranks' hidden features",
        "nn/mlp.py",
        "TPDropout(self.dropout, axis_name=self.axis_name)",
        "TPDropout(self.dropout, axis_name=None)",
        "nn/test_dropout.py::test_hidden_features_are_dropped_by_their_rank[linen]",
    ),
    Mutant(
        "of stages and ticks",
        "parallel/pipe.py",
        "            return jax.random.fold_in(rng, number)\n",
        "            return jax.random.fold_in(rng, 0 * number)\n",
        "parallel/test_pipeline_dropout.py::test_dropout_is_that_of_micro_batches[1f1b-over0-4]",
    ),
    Mutant(
        "of stages and ticks",
        "parallel/pipeline_run.py",
        'what goes to the stage before."""\n'
        "        micro, key, chunk, numbers = self._of_tick(row)\n",
        'what goes to the stage before."""\n'
        "        micro, key, chunk, numbers = self._of_tick(row)\n"
        "        key = jax.random.fold_in(key, 1)\n",
        "parallel/test_pipeline_dropout.py::test_dropout_is_that_of_micro_batches[1f1b-over0-4]",
    ),
    # ---- Pipelines -------------------------------------------------------------------------------
    Mutant(
        "what is computed in the bubble reaches a result or a gradient",
        "parallel/pipeline_run.py",
        '*found, of_x = gated(row["is_on"], compute, nothing)',
        "*found, of_x = compute()",
        "parallel/test_pipeline_bubbles.py::test_nothing_of_the_bubbles_comes_through[True-1f1b]",
    ),
    Mutant(
        "micro-batches: fewer than stages, no multiple of them, one, in another order",
        "parallel/tick_table.py",
        "inputs.take(stage % p, (stage, micro), sent + 1, used)",
        "inputs.take(stage % p, (stage, micro), sent + 1, sent + 1)",
        f"{PIPELINE}[1f1b-(2, 4)-micro3-more0-functions-sgd]",
    ),
    Mutant(
        "layers lost or run twice where the stages don't divide them",
        "parallel/stages.py",
        "tuple(least + (stage < more) for stage in range(num_stages))",
        "tuple(least for stage in range(num_stages))",
        "parallel/test_schedules.py::test_layers_are_all_there_once",
    ),
    # ---- Shapes ----------------------------------------------------------------------------------
    Mutant(
        "a dimension that the data-parallel ranks don't divide",
        "parallel/splits.py",
        "-(-size // num_ranks) * num_ranks",
        "size // num_ranks * num_ranks",
        f"{SHARDED}::test_dimensions_that_the_ranks_do_not_divide[3]",
    ),
    Mutant(
        "one that the tensor-parallel ranks don't divide loses its end",
        "parallel/partitioned.py",
        "            if rest:\n",
        "            if False:\n",
        "nn/test_errors.py::test_a_part_that_ranks_can_not_have_alike",
    ),
    Mutant(
        "heads, key-value heads, a vocabulary",
        "nn/_attention.py",
        '        self.place.check_divides("num_heads", self.num_heads)\n',
        "",
        "nn/test_errors.py::test_what_can_not_be_shared",
    ),
    Mutant(
        "key-value heads fewer than ranks: a rank attends with a part of one, or its weights get "
        "the gradients of one rank of those that share it",
        "nn/_attention.py",
        "first = lax.axis_index(axis_name) % num_sharing * width",
        "first = lax.axis_index(axis_name) // num_sharing * width",
        "nn/test_attention.py::test_more_ranks_than_key_value_heads",
    ),
    Mutant(
        "an axis is misspelt, and the layer acts as on one device",
        "nn/_place.py",
        "if around and self.axis_name not in around:",
        "if False:",
        "nn/test_errors.py::test_an_axis_that_the_mesh_around_does_not_have",
    ),
    Mutant(
        "scalars, counters and parameters of no values are split",
        "parallel/zero.py",
        "if not leaf.size or leaf.size < self.min_weight_size:",
        "if leaf.size < self.min_weight_size:",
        f"{SHARDED}::test_parameters_of_all_sizes",
    ),
    Mutant(
        "a parameter of exactly the least size that is split",
        "parallel/fsdp.py",
        "if value.size < min_weight_size:",
        "if value.size <= min_weight_size:",
        "parallel/test_fsdp.py::test_small_parameters_stay_whole",
    ),
    Mutant(
        "layers of a scan split along the scan",
        "parallel/zero.py",
        "taken=[*taken, 0] if i in stacked else taken)",
        "taken=taken)",
        "parallel/test_layer_by_layer.py::test_layers_are_never_split_among_ranks",
    ),
    Mutant(
        "layers of a scan computed in another order",
        "parallel/scattered_grads.py",
        'params["reverse"],',
        "False,",
        "parallel/test_layer_by_layer.py::test_gradients_of_whole_parameters"
        "[scanned backwards-size2]",
    ),
    Mutant(
        "the last examples of a batch that can't be split are left out",
        "parallel/batches.py",
        "        if shape[0] % count:\n",
        "        leaf = leaf[: shape[0] // count * count]\n        if False:\n",
        f"{STEP}::test_errors",
    ),
    # ---- Dtypes ----------------------------------------------------------------------------------
    Mutant(
        "the kept parameters are rounded, or computed with as they are kept",
        "parallel/step.py",
        'variables = {"params": policy.of_params(params), **state.variables}',
        'variables = {"params": params, **state.variables}',
        f"{PRECISION}::test_where_each_dtype_is[pair-stage1-None]",
    ),
    Mutant(
        "gradients travel in another dtype than was asked for",
        "parallel/zero.py",
        "grad = dim.padded(self.policy.of_gradients(grad))",
        "grad = dim.padded(grad)",
        f"{PRECISION}::test_where_each_dtype_is[pair-stage2-bfloat16]",
    ),
    Mutant(
        "a sum in float16 overflows before it is divided",
        "parallel/step.py",
        "return jnp.where(total == 0, 1, total)",
        "return jnp.ones_like(total)",
        f"{PRECISION}::test_half_precision_does_not_overflow[1]",
    ),
    Mutant(
        "a loss is scaled by a rank's own weight while it is differentiated",
        "parallel/step.py",
        "total = all_reduce(varying(lax.stop_gradient(weight), axes), axes)",
        "total = varying(lax.stop_gradient(weight), axes)",
        f"{PRECISION}::test_weights_that_differ_between_ranks[3]",
    ),
    Mutant(
        "micro-batches are added in 16 bits",
        "parallel/step.py",
        "lambda grad: grad.astype(_wide(grad.dtype)) * scale, grads",
        "lambda grad: grad * scale.astype(grad.dtype), grads",
        f"{SHARDED}::test_sums_beyond_sixteen_bits[0-bfloat16]",
    ),
    Mutant(
        "integers and booleans among what is differentiated",
        "parallel/step.py",
        "if not jnp.issubdtype(leaf.dtype, jnp.inexact):",
        "if False:",
        f"{SHARDED}::test_parameters_without_a_gradient",
    ),
    Mutant(
        "complex numbers, their gradients and their norm",
        "parallel/clipping.py",
        "jnp.real(wide * jnp.conj(wide))",
        "jnp.real(wide * wide)",
        f"{SHARDED}::test_global_norm",
    ),
    Mutant(
        "weak types get lost, or stick",
        "collectives/all_reduce.py",
        "return _compat.without_weak_type(aval)",
        "return aval",
        "collectives/test_value.py::test_weak_types_are_those_of_lax",
    ),
    Mutant(
        "the result has the dtype of the inside",
        "parallel/tensor.py",
        "    return (y if bias is None else y + bias).astype(x.dtype)\n",
        "    return y if bias is None else y + bias\n",
        "nn/test_errors.py::test_norms_compute_in_float32",
    ),
    # ---- Weights of losses, clipping -------------------------------------------------------------
    Mutant(
        "a mean of means where ranks, or micro-batches, have different counts, or none",
        "parallel/step.py",
        'return metrics["loss"][0] / scale, (metrics, others, scale)',
        'mean = metrics["loss"][0] / jnp.maximum(metrics["loss"][1], 1)\n'
        "            return mean, (metrics, others, scale)",
        f"{STEP}::test_weights_that_differ_between_devices[1-None]",
    ),
    Mutant(
        "nothing counted at all makes NaN of the parameters",
        "parallel/step.py",
        "divisor = jnp.where(weight == 0, 1, weight)",
        "divisor = weight",
        f"{STEP}::test_nothing_counted_is_no_gradient",
    ),
    Mutant(
        "micro-batches change the result",
        "parallel/step.py",
        "jax.tree.map(jnp.add, (grads, metrics), more[:2])",
        "jax.tree.map(jnp.maximum, (grads, metrics), more[:2])",
        f"{STEP}::test_data_parallel[2-3]",
    ),
    Mutant(
        "a loss that was averaged already",
        "parallel/step.py",
        '        _check_local(call, metrics["loss"][0], axes)\n',
        "",
        f"{STEP}::test_losses_that_are_reduced_already",
    ),
    Mutant(
        "by the norm of a rank's part, or with copies counted twice",
        "parallel/clipping.py",
        "totals = [all_reduce(total, axes) if axes else total",
        "over = tuple(_compat.bound_axes())\n"
        "    totals = [all_reduce(total, over) if over else total",
        f"{SHARDED}::test_clipping_by_the_norm_of_the_whole[1-1]",
    ),
    Mutant(
        "another transformation takes norms of parts",
        "parallel/state.py",
        "        check_elementwise(call, optimizer, params, parts, opt_specs)\n",
        "        pass\n",
        f"{SHARDED}::test_optimizers_that_mix_values_are_refused[optimizer1]",
    ),
    Mutant(
        "in a pipeline",
        "parallel/clipping.py",
        "axes = tuple(sorted(_compat.varying_axes(jax.typeof(leaf))))",
        'axes = tuple(sorted(_compat.varying_axes(jax.typeof(leaf)) - {"pipe"}))',
        "parallel/test_pipeline.py::test_with_a_state_in_parts[interleaved 2-3]",
    ),
    # ---- Optimizers, memory and calls ------------------------------------------------------------
    Mutant(
        "their state is whole, or lies otherwise, inside `chain`, `masked`, `inject_hyperparams` "
        "and `MultiSteps`",
        "parallel/optimizer_state.py",
        "return spec if leaf.shape == param.shape else P()",
        "return P()",
        f"{SHARDED}::test_optimizers_that_work_element_by_element[3-optimizer1]",
    ),
    Mutant(
        "stages end with different parameters",
        "parallel/zero.py",
        "start = lax.axis_index(self.axis_name) * count",
        "start = (lax.axis_size(self.axis_name) - 1 - lax.axis_index(self.axis_name)) * count",
        f"{STRATEGIES}[ZeRO-1-data 4-linen-sgd-accumulate1]",
    ),
    Mutant(
        "more calls than needed, or over other axes",
        "parallel/step.py",
        "wholes, metrics = all_reduce((as_sent(wholes), metrics), axes)",
        "wholes, metrics = all_reduce(as_sent(wholes), axes), all_reduce(metrics, axes)",
        f"{SHARDED}::test_how_often_ranks_communicate[2-1-1-2-2]",
    ),
    Mutant(
        "gathered parameters stay until the way back, or don't where they should",
        "parallel/piecewise.py",
        "stays = self._keeps or piece is self._program.pieces[-1]",
        "stays = True",
        "parallel/test_layer_by_layer.py::test_memory_for_one_layer_whatever_the_depth",
    ),
    Mutant(
        "more layers ahead of their time than were asked for",
        "parallel/piecewise.py",
        "not schedule.reshard_after_forward, bool(schedule.prefetch)",
        "not schedule.reshard_after_forward, True",
        "parallel/test_layer_by_layer.py::test_memory_for_two_layers_whatever_the_depth",
    ),
    Mutant(
        "whole gradients of stage 2 wait for the end of the way back",
        "parallel/step.py",
        "zero.stage == 2 and accumulate == 1",
        "zero.stage == 2 and accumulate == 0",
        "parallel/test_layer_by_layer.py::test_memory_for_one_gradient_whatever_the_depth",
    ),
    Mutant(
        "gradients in buckets wait for the end of the way back",
        "parallel/step.py",
        "    leaves, treedef = jax.tree.flatten(grads)\n    buckets: list",
        "    leaves, treedef = jax.tree.flatten(lax.optimization_barrier(grads))\n"
        "    buckets: list",
        "parallel/test_what_is_communicated.py::test_buckets_wait_for_their_layers_alone",
    ),
    Mutant(
        "an axis that should stay on a host leads to others",
        "mesh.py",
        "return [device for of_host in hosts.values() for device in of_host]",
        "return list(devices)",
        "parallel/test_mesh.py::test_host_by_host",
    ),
    Mutant(
        "a state is moved to another layout through copies of all of it, or shares memory with "
        "the old one",
        "parallel/reshard.py",
        "return _copy_to(sharding)(leaf)",
        "return jax.device_put(leaf, sharding)",
        "parallel/test_reshard.py::test_layouts_share_no_memory",
    ),
    Mutant(
        "each micro-batch is summed over the ranks (stage 3 shall scatter each)",
        "parallel/step.py",
        "        return grads, metrics, others\n",
        "        mean = all_reduce(grads, axes, 'mean')\n"
        "        return jax.tree.map(lambda x: varying(x, axes), mean), metrics, others\n",
        f"{SHARDED}::test_how_often_ranks_communicate[0-3-1-0-0]",
    ),
    Mutant(
        "a device makes the whole of a parameter first",
        "parallel/state.py",
        "static_argnums=(0, 1, 2), out_shardings=shardings)",
        "static_argnums=(0, 1, 2), out_shardings=NamedSharding(mesh, P()))",
        f"{SHARDED}::test_initialized_in_parts[pair]",
    ),
    Mutant(
        "a rank has all layers, or the whole of what it should have a part of",
        "parallel/pipe.py",
        "if is_whole else own[i] for i in numbers",
        "if is_whole\n"
        "            else layers.part(layers.placed(own[i], rank), rank) for i in numbers",
        "parallel/test_what_is_communicated.py::test_a_step[1F1B]",
    ),
    # ---- Derivatives, order of calls, custom calls -----------------------------------------------
    Mutant(
        "forward, reverse, of second order, of `jit`, of `checkpoint`, of a loop or a branch, "
        "inside `custom_vjp`",
        "collectives/all_reduce.py",
        'share = cotangents[i] / size if op == "mean" else cotangents[i]',
        "share = cotangents[i]",
        "collectives/test_gradients.py::test_derivatives_are_those_of_lax"
        "[all_reduce_mean-first_order-check_vma-size2]",
    ),
    Mutant(
        "a result that the loss does not read",
        "collectives/all_reduce.py",
        "given = [i for i, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]",
        "given = list(range(len(cotangents)))",
        "collectives/test_gradients.py::test_results_that_the_loss_does_not_read",
    ),
    Mutant(
        "an op without derivative gives zeros",
        "collectives/all_reduce.py",
        "    if not moving:\n",
        '    if not moving or op == "prod":\n',
        "collectives/test_gradients.py::test_ops_without_derivative_say_so",
    ),
    Mutant(
        "what is computed again meets another call of another rank",
        "collectives/all_reduce.py",
        "return treedef.unflatten(_reduce(leaves, axes, op, resolved))",
        "return treedef.unflatten([_reduce([x], axes, op, resolved)[0] for x in leaves])",
        "collectives/test_trees.py::test_a_tree_stays_one_native_call[remat]",
    ),
    Mutant(
        "under a predicate that ranks see differently",
        "_predicates.py",
        "    if not varying:\n",
        "    if True:\n",
        "collectives/test_predicates.py::test_a_predicate_that_varies_is_logged",
    ),
    Mutant(
        "types that vary are lost in a loop's carry",
        "collectives/all_reduce.py",
        "varying=mat.varying - set(axes))",
        "varying=mat.varying)",
        "collectives/test_transformations.py::test_values_and_types_are_those_of_lax"
        "[all_reduce_sum-scan-check_vma-size2]",
    ),
    Mutant(
        "`vmap`, inside and around",
        "collectives/all_reduce.py",
        "        return results, dims\n",
        "        return results, [0] * len(results)\n",
        "collectives/test_vmap.py::test_over_a_batched_operand",
    ),
    Mutant(
        "an operand lies in memory in another order",
        "_lowering.py",
        "tuple(reversed(range(ir.RankedTensorType(leaf.type).rank)))",
        "tuple(range(ir.RankedTensorType(leaf.type).rank))",
        "collectives/test_programs.py::test_every_op_in[all_gather_0-operands_in_another_layout]",
    ),
    Mutant(
        "under `jit` on sharded arrays, every device gets the whole",
        "collectives/_arguments.py",
        "    check_mapped(call, names, tree)\n",
        "",
        "collectives/test_context_errors.py::test_under_jit_with_named_sharding",
    ),
    # ---- What a model keeps, versions of JAX -----------------------------------------------------
    Mutant(
        "batch statistics differ between ranks, or forget a micro-batch",
        "parallel/step.py",
        "with_others = dataclasses.replace(state, variables={**state.variables, **others})",
        "with_others = state",
        f"{STEP}::test_batch_statistics_are_averaged[None-Normed-2]",
    ),
    Mutant(
        "statistics and random states in a pipeline",
        "parallel/step.py",
        "            if jnp.issubdtype(leaf.dtype, jnp.inexact):\n",
        "            if False:\n",
        "parallel/test_pipeline_models.py::test_models_that_cannot_be_cut",
    ),
    Mutant(
        "a mesh with explicit axes, by default",
        "mesh.py",
        "axis_types = AxisType.Auto\n",
        "axis_types = AxisType.Explicit\n",
        "parallel/test_mesh.py::test_sizes_and_names",
    ),
    Mutant(
        "devices that a mesh has no use for are left out",
        "mesh.py",
        "if needed < len(devices) and not allow_unused:",
        "if False:",
        "parallel/test_mesh.py::test_errors",
    ),
]

ENGINE = "a rule of the engine: tests/cpp/mutants.py breaks those"
KEYS = "keys are arguments: what is computed again has the same ones"

# Pitfalls that no edit of a line here brings about, and why.
WITHOUT = {
    "copies drift apart, with them": "types refuse every edit that makes copies differ",
    "others where a layer is computed again": f"{KEYS}; of a pipeline, see 'of stages and ticks'",
    "others where parameters are gathered again": KEYS,
    "nothing, one value, one more than a window": ENGINE,
    "a sum of halves is rounded at each rank, or at each step of a ring": ENGINE,
    "random keys among the leaves": "JAX's arrays of keys travel as others do",
    "`MultiSteps` counts, or skips, differently inside a map": "Optax counts",
    "a mask by paths meets other paths": "parameters have the model's tree everywhere",
    "two independent calls begin in another order on another rank": ENGINE,
    "a call goes into a branch that one rank takes, or is dropped by one": "XLA orders calls",
    "a permutation that leaves a rank without a block": ENGINE,
    "an axis of one rank, several axes, a part of the mesh": "each op has several rules for it",
    "one rank raises, or never comes": ENGINE,
    "a donated or shared buffer is overwritten too early": ENGINE,
    "a batch norm that shall see all ranks sees one": "Flax names the axis",
    "layers that share a parameter have two after a step": "Flax splits and merges modules",
    "a name that we use is gone or means something else": "the tests take names away themselves",
    "a deprecated name, which still works today: every warning is an error in the tests": (
        "JAX warns"
    ),
    "`pmap`, for as long as it is there": "JAX maps",
}


def check(mutant: Mutant) -> str | None:
    """Returns how the test noticed the mutant, or None.

    Raises:
        RuntimeError: there is no such test or text, or the module can't be imported any more.
    """
    command = [sys.executable, BROKEN, mutant.module, mutant.old, mutant.new, mutant.test]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    found = re.search(r"^(?:E +|/.*?:\d+: )(.*)", done.stdout, re.MULTILINE)
    return (found[1] if found else "fails") if done.returncode else None


def main() -> int:
    mutants = [m for m in MUTANTS if len(sys.argv) < 2 or sys.argv[1] in m.pitfall]
    problems = 0
    for mutant in mutants:
        start = time.monotonic()
        how = check(mutant)
        problems += how is None
        print(
            f"{'caught' if how else 'MISSED':6}  {mutant.pitfall}: {mutant.test} "
            f"{how or 'passes'} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    print(f"{len(mutants)} mutants, {problems} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
