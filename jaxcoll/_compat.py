"""What differs between JAX versions, and the private names that the lowering needs.

The only file that touches `jax._src`. `problem()` tries every name once, and where one is missing
nothing else here is used: all collectives are lax's then, with that reason logged.
"""

import dataclasses
import functools as ft
import importlib
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.source_info_util import register_exclusion
from jax.interpreters import mlir

from jaxcoll import _coordination

_OWN = os.path.dirname(__file__) + os.sep

# ---- Axes ----------------------------------------------------------------------------------------


def bound_axes() -> Mapping[Hashable, int]:
    """Returns name and size of the mapped axes that surround the code being traced."""
    from jax._src import core

    return core.get_axis_env().axis_sizes


def is_named_by_user(axis: Hashable) -> bool:
    """Tells a name that a user gave from the one that `jax.pmap` makes up where there is none."""
    return isinstance(axis, str) and axis != "_internal_pmap_axis_name"


def vmapped(axes: Sequence[str]) -> list[str]:
    """Returns those of the mapped axes that come from `jax.vmap`, not from a mesh."""
    return [axis for axis in axes if axis not in jax.sharding.get_abstract_mesh().axis_names]


def named_axis_effects(axes: Sequence[str]) -> set[Any]:
    """Returns the effects by which JAX knows that an equation depends on named axes."""
    from jax._src import core

    return {core.NamedAxisEffect(axis) for axis in axes}


def tracks_varying_axes() -> bool:
    """Tells whether the code being traced is under `shard_map(check_vma=True)`."""
    from jax._src import config

    return config._check_vma.value


@contextmanager
def without_varying_axes() -> Iterator[None]:
    """Traces without typed axes, for code that is only lowered: lax then takes groups anywhere."""
    from jax._src import config

    with config._check_vma(False):
        yield


def casts_implicitly() -> bool:
    """Tells whether `jax_auto_pcast` makes replicated operands varying where that is needed."""
    from jax._src import config

    return config.auto_pcast.value


def runs_eagerly() -> bool:
    """Tells whether nothing records a program here, but at most derivatives or batches."""
    from jax._src import core

    trace = core.trace_ctx.trace
    while hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
    return isinstance(trace, core.EvalTrace)


def without_weak_type(aval: Any) -> Any:
    """Returns the type with `weak_type=False`."""
    return aval.update(weak_type=False)


def backends_are_initialized() -> bool:
    """Tells whether JAX has made its clients, after which devices are fixed."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


# ---- Lowering ------------------------------------------------------------------------------------


def replica_groups(
    ctx: mlir.LoweringRuleContext, axes: Sequence[str], axis_index_groups: Any
) -> list[list[int]] | None:
    """Returns the logical ids of every group, in rank order; None outside of a manual region."""
    if manual_axes(ctx) is None:
        return None
    from jax._src.lax import parallel

    groups = parallel._replica_groups(ctx.module_context.axis_context, axes, axis_index_groups)
    return [list(group) for group in groups]


def manual_axes(ctx: mlir.LoweringRuleContext) -> tuple[frozenset[str], frozenset[str]] | None:
    """Returns the manual axes and all axes of the mesh, or None outside of a manual region."""
    axis_context = ctx.module_context.axis_context
    if type(axis_context).__name__ != "SPMDAxisContext":
        return None
    return frozenset(axis_context.manual_axes), frozenset(axis_context.mesh.axis_names)


def mesh_devices(ctx: mlir.LoweringRuleContext) -> list[Any] | None:
    """Returns the device behind each logical id, or None where only the mesh's shape is known."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None


def lower_for_devices(primitives: Sequence[Primitive]) -> None:
    """Has programs with these primitives lowered anew for each list of devices."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.update(primitives)


def untyped(ctx: mlir.LoweringRuleContext) -> mlir.LoweringRuleContext:
    """Returns the context with types that say nothing of varying axes."""

    def strip(aval: Any) -> Any:
        return aval.update(manual_axis_type=type(aval.manual_axis_type)())

    return ctx.replace(
        avals_in=[strip(aval) for aval in ctx.avals_in],
        avals_out=[strip(aval) for aval in ctx.avals_out],
    )


def lowers_for_export(ctx: mlir.LoweringRuleContext) -> bool:
    """Tells whether the program is lowered by `jax.export`."""
    return ctx.module_context.lowering_parameters.for_export


def module_memory(ctx: mlir.LoweringRuleContext) -> dict[Any, Any]:
    """Returns a dictionary that lives as long as the lowering of this module does."""
    return ctx.module_context.lowering_cache.setdefault("jaxcoll", {})  # pyright: ignore


def module_name(ctx: mlir.LoweringRuleContext) -> str:
    """Returns the name of the module being lowered, such as `jit_train_step`."""
    return str(ctx.module_context.module.operation.attributes["sym_name"]).strip('"')


def has_computed_nothing(ctx: mlir.LoweringRuleContext) -> bool:
    """Tells whether nothing stands yet before what is lowered, in the program and what it calls."""
    for op in ctx.module_context.module.body.operations:
        if op.operation.name != "func.func":
            continue
        last = [inner.operation.name for block in op.regions[0].blocks for inner in block][-1:]
        # Another one without an end is being lowered, too, and calls what is lowered now.
        if last != ([] if _is_main(op) else ["func.return"]):
            return False
    return True


def arguments_of_main(ctx: mlir.LoweringRuleContext) -> list[Any]:
    """Returns the attributes of each argument of the program."""
    for op in ctx.module_context.module.body.operations:
        if op.operation.name == "func.func" and _is_main(op) and "arg_attrs" in op.attributes:
            attributes: Any = op.attributes["arg_attrs"]
            return list(attributes)
    return []


def _is_main(function: Any) -> bool:
    return function.attributes["sym_name"].value == "main"


def equation_metadata(ctx: mlir.LoweringRuleContext) -> Mapping[str, Any]:
    """Returns what `set_xla_metadata` held when the equation was traced."""
    context = ctx.jaxpr_eqn_ctx
    return (context.xla_metadata if context is not None else None) or {}


def source_line(ctx: mlir.LoweringRuleContext) -> str:
    """Returns the user's `file:line (function)` of the equation, or "unknown line".

    Where all of the program is ours, such as a training step: the line that has it lowered.
    """
    return _line(ctx.traceback)


def _line(traceback: Any) -> str:
    from jax._src import source_info_util

    hide_own_frames()
    frame = source_info_util.user_frame(traceback)
    if frame is not None:
        return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    # JAX's traceback begins in the function that it traces.
    for caller, line in walk_stack(None):
        file = caller.f_code.co_filename
        if not file.startswith(_OWN) and source_info_util.is_user_filename(file):
            return f"{file}:{line} ({caller.f_code.co_qualname})"
    return "unknown line"


def equation_line(equation: Any) -> str:
    """Returns the user's `file:line (function)` of an equation that is not being lowered."""
    return _line(equation.source_info.traceback)


@ft.cache
def hide_own_frames() -> None:
    """Makes JAX take our callers' lines for the user's, not ours."""
    for folder in ("collectives", "nn", "nnx", "optax", "parallel"):
        register_exclusion(_OWN + folder)


def platforms_with_rules(primitive: Primitive) -> list[str | None]:
    """Returns CPU, the platforms for which lax has a rule of their own, and None for the others."""
    from jax._src.interpreters import mlir as private

    rules = private._platform_specific_lowerings.items()
    return ["cpu", *(p for p, known in rules if primitive in known and p != "cpu"), None]


@ft.cache
def lax_rule(primitive: Primitive, platform: str | None) -> Callable[..., Any]:
    """Returns lax's own lowering rule, as it was before ours was registered."""
    from jax._src.interpreters import mlir as private

    entry = private._platform_specific_lowerings[platform].get(primitive) if platform else None
    return (entry or private._lowerings[primitive]).rule


def lax_primitives() -> list[tuple[str, str | None, Primitive]]:
    """Returns lax's primitives that the native path can serve, each after our op and reduction."""
    from jax._src.lax import parallel

    return [
        ("all_reduce", "sum", parallel.psum_p),
        ("all_reduce", "sum", parallel.psum_invariant_p),
        ("all_reduce", "max", parallel.pmax_p),
        ("all_reduce", "min", parallel.pmin_p),
        ("all_gather", None, parallel.all_gather_p),
        ("all_gather", None, parallel.all_gather_invariant_p),
        ("reduce_scatter", "sum", parallel.reduce_scatter_p),
        ("all_to_all", None, parallel.all_to_all_p),
        ("ppermute", None, parallel.ppermute_p),
    ]


def branching_primitives() -> tuple[Primitive, Primitive]:
    """Returns those of `lax.cond` (and `switch`), and of `lax.while_loop`."""
    from jax._src.lax.control_flow import conditionals, loops

    return conditionals.cond_p, loops.while_p


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the mesh axes over which a type says that values differ."""
    return frozenset(aval.manual_axis_type.varying)


def open_jaxpr(value: Any) -> Any:
    """Returns the jaxpr of a closed or open one, or None for anything else."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None


def scan_counts(scan: Any) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are carried."""
    if "num_consts" in scan.params:
        return scan.params["num_consts"], scan.params["num_carry"]
    consts, carry, _ = scan.params["ft_in"].update(scan.invars).unpack()
    return len(list(consts)), len(list(carry))


def repeating_primitives() -> tuple[Primitive, Primitive]:
    """Returns those of `jax.jit` and `jax.checkpoint`: JAX lowers equal equations of them once."""
    from jax._src import ad_checkpoint, pjit

    return pjit.jit_p, ad_checkpoint.remat_p


def remembered_functions(ctx: mlir.LoweringRuleContext) -> dict[Any, Any]:
    """Returns what was lowered to a function of the module, and is called where it comes again."""
    return ctx.module_context.cached_primitive_lowerings


_COMMUNICATING = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_matmul": "all_gather_matmul",
    "all_gather_reduced": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "broadcast_from_root": "broadcast",
    "compressed_mean": "compressed_mean",
    "matmul_reduce_scatter": "matmul_reduce_scatter",
    "pbroadcast": "pbroadcast",
    "pbroadcast_dynamic": "pbroadcast",
    "pmax": "pmax",
    "pmin": "pmin",
    "ppermute": "ppermute",
    "psum": "psum",
    "psum_invariant": "psum",
    "ragged_all_to_all": "ragged_all_to_all",
    "reduce_scatter": "reduce_scatter",
    "unreduced_pmax": "pmax",
    "unreduced_pmin": "pmin",
    "unreduced_psum": "psum",
    "unreduced_reduce_scatter": "reduce_scatter",
}


def communicates(equation: Any) -> bool:
    """Tells whether an equation is a collective over named axes."""
    return equation.primitive.name in _COMMUNICATING and bool(equation_axes(equation))


def op_name(equation: Any) -> str:
    """Returns the name under which a user knows a collective."""
    return _COMMUNICATING[equation.primitive.name]


def equation_axes(equation: Any) -> list[str]:
    """Returns the named axes of a collective equation."""
    params = equation.params
    axes = params["axes"] if "axes" in params else params.get("axis_name", ())
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    return [axis for axis in axes if isinstance(axis, str)]


def custom_call(target: str, **arguments: Any) -> Any:
    """Emits a typed-FFI custom call; arguments as jax's own helper takes them."""
    from jax._src.interpreters import mlir as private

    return private.custom_call(target, api_version=4, **arguments)


def on_runtime_error(call: Callable[[str], None]) -> None:
    """Has `call` get the text of each `JaxRuntimeError` that is raised, in any thread."""
    error = jax.errors.JaxRuntimeError
    original = error.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        call(str(args[0]) if args else "")

    error.__init__ = init


def on_callback_error(call: Callable[[BaseException], None]) -> None:
    """Has `call` get what a callback of the user's has raised, as JAX logs it, in its thread."""

    def look(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            call(record.exc_info[1])
        return True  # a filter, as a handler of ours would keep others from being asked

    for module in ("callback", "debugging"):
        logging.getLogger(f"jax._src.{module}").addFilter(look)


# ---- Processes -----------------------------------------------------------------------------------

CONNECT_S = 300


def connect(address: str, process_id: int, num_processes: int) -> None:
    """Makes this one of several processes, whose coordination service runs elsewhere."""
    from jax._src import distributed
    from jaxlib import _jax

    state = distributed.global_state
    state.coordinator_address = address
    state.process_id = process_id
    state.num_processes = num_processes
    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=CONNECT_S,
        use_compression=True,
        heartbeat_timeout=_coordination.HEARTBEAT_S,
    )
    client.connect()
    state.client = client
    state.initialize_preemption_sync_manager()


def replace_distributed_initialize(call: Callable[..., None]) -> None:
    """Has `jax.distributed.initialize` call something else from now on."""
    from jax._src import distributed

    distributed.initialize = jax.distributed.initialize = call


def before_distributed_shutdown(call: Callable[[], None]) -> None:
    """Has JAX, at exit or when a user asks for it, call something before it disconnects."""
    from jax._src import distributed

    state = distributed.global_state
    original = state.shutdown

    def shutdown() -> None:
        if state.client is not None:
            call()
        original()

    state.shutdown = shutdown


def distributed_client() -> Any:
    """Returns the client of JAX's coordination service; None in a process that is alone."""
    from jax._src import distributed

    return distributed.global_state.client


def process_id_and_count() -> tuple[int, int]:
    """Returns what `jax.process_index` and `jax.process_count` do, without starting JAX."""
    from jax._src import distributed

    return distributed.global_state.process_id, distributed.global_state.num_processes


# ---- XLA's own collectives -----------------------------------------------------------------------


def before_loading(call: Callable[[Any, Sequence[Any]], None]) -> None:
    """Has JAX call something before a compiled program can run: with it and its devices."""
    from jax._src.interpreters import pxla

    original = pxla.UnloadedMeshExecutable.load

    @ft.wraps(original)
    def load(self: Any) -> Any:
        call(self.xla_executable, tuple(self.device_list))
        return original(self)

    pxla.UnloadedMeshExecutable.load = load


def before_cpu_client(call: Callable[[], None]) -> None:
    """Has JAX call something right before it makes its client for CPU."""
    from jax._src import xla_bridge

    registration = xla_bridge._backend_factories["cpu"]

    def make(*arguments: Any) -> Any:
        call()
        return registration.factory(*arguments)

    xla_bridge._backend_factories["cpu"] = dataclasses.replace(registration, factory=make)


# ---- What is there -------------------------------------------------------------------------------

# Module of jax -> the names in it that are used above; "Class.name" for one of a class.
PRIVATE_NAMES = {
    "jax._src.config": ("_check_vma", "auto_pcast"),
    "jax._src.core": ("get_axis_env", "trace_ctx", "EvalTrace", "NamedAxisEffect"),
    "jax._src.dispatch": ("prim_requires_devices_during_lowering",),
    "jax._src.interpreters.mlir": (
        *("_lowerings", "_platform_specific_lowerings", "custom_call"),
        *("LoweringParameters.for_export", "LoweringRuleContext.jaxpr_eqn_ctx"),
        *("LoweringRuleContext.traceback", "ModuleContext.axis_context"),
        "ModuleContext.cached_primitive_lowerings",
        *("ModuleContext.lowering_cache", "ModuleContext.lowering_parameters"),
    ),
    "jax._src.ad_checkpoint": ("remat_p",),
    "jax._src.pjit": ("jit_p",),
    "jax._src.lax.control_flow.conditionals": ("cond_p",),
    "jax._src.lax.control_flow.loops": ("while_p",),
    "jax._src.lax.parallel": (
        *("_replica_groups", "psum_p", "psum_invariant_p", "pmax_p", "pmin_p", "all_gather_p"),
        *("all_gather_invariant_p", "reduce_scatter_p", "all_to_all_p", "ppermute_p"),
    ),
    "jax._src.source_info_util": ("is_user_filename", "user_frame"),
    "jax._src.xla_bridge": ("backends_are_initialized",),
}

# Of the part about processes, without which programs of one process are served all the same.
DISTRIBUTED_NAMES = {
    "jax._src.distributed": (
        *(
            "_ENABLE_RECOVERABILITY",
            "global_state",
            "initialize",
            "State.client",
            "State.coordinator_address",
        ),
        *("State.initialize_preemption_sync_manager", "State.num_processes", "State.process_id"),
        "State.shutdown",
    ),
    "jaxlib._jax": ("get_distributed_runtime_client",),
}

# Of the part about XLA's own collectives.
DOOR_NAMES = {
    "jax._src.interpreters.pxla": (
        *("UnloadedMeshExecutable.load", "UnloadedMeshExecutable.xla_executable"),
        "UnloadedMeshExecutable.device_list",
    ),
    "jax._src.xla_bridge": ("_backend_factories", "BackendRegistration.factory"),
    "jaxlib._hlo": ("HloPrintOptions.fingerprint",),
    "jaxlib._jax": ("make_mpi_collectives",),
}


@ft.cache
def problem() -> str | None:
    """Says what this JAX lacks of the above, or None. Costs an import of what JAX has imported."""
    return _missing(PRIVATE_NAMES)


@ft.cache
def distributed_problem() -> str | None:
    """Says what this JAX lacks of what several processes need, or None."""
    return _missing(DISTRIBUTED_NAMES)


@ft.cache
def door_problem() -> str | None:
    """Says what this JAX lacks of what its own collectives need to run on the engine, or None."""
    return _missing(DOOR_NAMES)


def _missing(table: Mapping[str, Sequence[str]]) -> str | None:
    for module, names in table.items():
        for name in names:
            if not _has(module, name):
                return (
                    f"jax {jax.__version__} is not known to this version of jaxcoll "
                    f"({module}.{name} is missing)"
                )
    return None


def _has(module: str, name: str) -> bool:
    try:
        holder: Any = importlib.import_module(module)
    except ImportError:
        return False
    *owner, last = name.split(".")
    for part in owner:
        if (holder := getattr(holder, part, None)) is None:
            return False
    return hasattr(holder, last) or last in getattr(holder, "__annotations__", {})
