"""From an equation to a native custom call, or to lax: the choice and the call.

All rules end in `lower`: those of our own primitives, and those that `_lax_rules` puts in the place
of lax's. Every choice is noted for `jaxcoll.explain`, so that what it says is what runs.

Every native call on CPU has the operands (logical id, token, leaves...) and the results (token,
leaves...); a large single result stands alone. The token comes from the block's previous native
call, so that the order of the program stands in the HLO (_order.py); which call meets which does
not depend on it. On GPUs, where NCCL pairs calls by their order alone, it does; there the ids of
the devices stand in the call, and no logical id is needed. Nor is it where each device of the mesh
has a process of its own (all processes have the same program): XLA takes 10 to 40 ns for each
operand.
"""

import dataclasses
import functools as ft
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jaxcoll import (
    _compat,
    _crossovers,
    _cuda,
    _decisions,
    _engine,
    _in_place,
    _native,
    _order,
    _processes,
)
from jaxcoll._config import logger, watch_forks
from jaxcoll._decisions import Path
from jaxcoll._errors import NativeUnavailableError
from jaxcoll._hosts import Levels, TwoLevel, levels_of
from jaxcoll._types import MARK, Backend
from jaxcoll.diagnosis import watcher
from jaxcoll.diagnosis.records import OVER_NCCL, OVER_PEERS

# Devices of a call that the black box names: there is room for 2 KiB.
_MOST_DESCRIBED = 64
# csrc/host/recorder.h, kMaxDevices: how records number the devices of a process.
_MOST_OF_A_PROCESS = 2048
# csrc/host/work.h, kMaxRanks: the engine keeps a pointer for each rank on the stack.
_MAX_GROUP = 256

Context = mlir.LoweringRuleContext
Groups = list[list[int]]


def marked(backend: Backend) -> AbstractContextManager[Any]:
    """Marks the lax collectives that are bound inside as ours."""
    return set_xla_metadata(**{MARK: backend})


@dataclasses.dataclass(frozen=True)
class Request:
    """What a collective equation asks for, whichever path serves it.

    Attributes:
        op: our name of the op; the native target is `jaxcoll_<op>`.
        axes: the mesh axes.
        axis_index_groups: the groups of axis indices, or None.
        backend: the choice that was made when the equation was traced.
        reduction: which, for ops that reduce.
        called: whose function was called.
        copied: the bytes of a rank's operand, for an op that "auto" leaves to lax where that copies
            faster; None for others.
        parameters: of our function, those that ranks may differ in, as texts show them: `root=1`.
    """

    op: str
    axes: tuple[str, ...]
    backend: Backend
    axis_index_groups: Any = None
    reduction: str | None = None
    called: Literal["jaxcoll", "jax.lax"] = "jaxcoll"
    copied: int | None = None
    parameters: str = ""


@dataclasses.dataclass(frozen=True)
class Call:
    """A native call, all but its operands.

    Attributes:
        attributes: what the op's csrc/ffi file reads besides the groups.
        result_types: one for each leaf.
        in_place: whether result i takes the memory of operand i, unless that would be copied.
        operands: the leaves, where they are not the equation's own.
        finish: what is left to do with the results.
        over_peers: whether it is done over memory that GPUs read of each other, not over NCCL, as
            far as that is known before the first run.
    """

    attributes: Mapping[str, int | Sequence[int]]
    result_types: Sequence[ir.Type]
    in_place: bool = False
    operands: Sequence[ir.Value] | None = None
    finish: Callable[[Sequence[ir.Value]], Sequence[ir.Value]] | None = None
    over_peers: bool = False


def native_platform(ctx: Context) -> Literal["cpu", "cuda"] | None:
    """Returns the platform of native calls that a program is for, or None."""
    platforms = tuple(ctx.module_context.platforms)
    return "cpu" if platforms == ("cpu",) else "cuda" if platforms == ("cuda",) else None


def lower(
    ctx: Context,
    request: Request,
    make_call: Callable[[Groups], Call | str],
    operands: Sequence[ir.Value],
    lower_to_lax: Callable[[], Sequence[ir.Value]],
    on_hosts: Callable[[TwoLevel], Callable[..., Any]] | None = None,
    in_two_steps: Callable[[], Sequence[ir.Value]] | None = None,
) -> Sequence[ir.Value]:
    """Lowers one collective natively where that is possible, else through `lower_to_lax`.

    `make_call` gets the groups and returns the call, or says why there is none for these operands.
    `on_hosts` returns a function of the operands for groups over several hosts; None where there is
    none that is better than lax's. `in_two_steps` lowers a call that does more than communicate to
    another of ours and the rest, for operands and groups that have no native call.
    """
    watch_forks()
    if native_platform(ctx) == "cpu":
        _warn_about_threads()
    groups = _compat.replica_groups(ctx, request.axes, request.axis_index_groups)
    reason = _lax_reason(ctx, request.backend) or _group_reason(ctx, groups)
    is_served = reason is None
    call: Call | None = None
    if reason is None and groups is not None:
        made = make_call(groups)
        call, reason = (None, made) if isinstance(made, str) else (made, None)
    if call is not None and groups is not None and native_platform(ctx) == "cpu":
        levels = _levels(ctx, request, groups)
        if isinstance(levels, Levels) and on_hosts is not None:
            note(ctx, request, groups, "", path="two-level")
            function = on_hosts(TwoLevel(request.axes, levels, request.backend))
            several = bool(ctx.primitive and ctx.primitive.multiple_results)
            with _decisions.silence(), _compat.without_varying_axes():
                lowered = mlir.lower_fun(function, multiple_results=several)
                return lowered(_compat.untyped(ctx), *operands)
        if isinstance(levels, Levels):
            reason = "the group spans several hosts"
        else:
            reason = levels or _faster_on_lax(ctx, request, groups)
        call = call if reason is None else None
    if call is None and is_served and request.backend == "auto" and in_two_steps is not None:
        note(ctx, request, groups, reason or "", path="two-step")
        with _decisions.silence():
            return in_two_steps()
    alone = groups is not None and max(map(len, groups)) == 1
    if call is None and request.backend == "native" and not alone:
        raise NativeUnavailableError(
            f'{ctx.primitive}: backend="native" can\'t be served: {reason}. '
            'Use backend="auto" to let this call run on jax.lax.'
        )
    if call is None or groups is None:
        note(ctx, request, groups, reason or "")
        # What it binds has been decided about.
        with _decisions.silence(), marked("lax"):
            return lower_to_lax()
    site, results = _emit(ctx, request, groups, call, operands)
    by_rank = call.over_peers or native_platform(ctx) == "cpu"
    note(ctx, request, groups, "", site, by_rank=by_rank)
    return results


def note(
    ctx: Context,
    request: Request,
    groups: Groups | None,
    reason: str,
    site: int | None = None,
    path: Path | None = None,
    by_rank: bool = True,
) -> None:
    """Notes a decision; `site` is None but for one native call, `by_rank` is of that."""
    path = path or ("lax" if site is None else "native")
    decision = _decisions.Decision(
        op=request.op,
        reduction=request.reduction,
        axes=tuple(request.axes),
        shapes=tuple(tuple(aval.shape) for aval in ctx.avals_in),
        dtypes=tuple(str(aval.dtype) for aval in ctx.avals_in),
        bytes=sum(aval.size * aval.dtype.itemsize for aval in ctx.avals_in),
        group_size=None if groups is None else max(map(len, groups)),
        path=path,
        reason=reason,
        source=_compat.source_line(ctx),
        called=request.called,
        site=site,
        platform="cuda" if native_platform(ctx) == "cuda" else "cpu",
        by_rank=by_rank,
    )
    _decisions.note(decision)


def _lax_reason(ctx: Context, backend: Backend) -> str | None:
    """Says why no native call can stand in this program, or None."""
    if backend == "lax":
        return 'backend="lax" was asked for'
    if native_platform(ctx) is None:
        platforms = ", ".join(ctx.module_context.platforms)
        return f"the program is for {platforms}, not for CPU or CUDA alone"
    if _compat.lowers_for_export(ctx):
        return "the program is lowered for export"
    manual = _compat.manual_axes(ctx)
    if manual is not None and (left := manual[1] - manual[0]):
        return f"shard_map leaves the mesh axes {sorted(left)} to the compiler"
    jax.process_count()  # starts JAX's clients, which registration needs
    if native_platform(ctx) == "cuda":
        knows_devices = _compat.mesh_devices(ctx) is not None
        problem = None if knows_devices else "its mesh has no devices (AbstractMesh)"
        if backend == "auto" and not _cuda.IS_FASTER:
            problem = 'not all of it is as fast as XLA\'s own there; backend="native" asks for it'
        problem = problem or _native.gpu_problem() or _engine.problem_of_agreement()
        return problem and f"the program is for cuda, and {problem}"
    return _native.unavailable_reason() or _engine.problem()


@ft.cache
def _warn_about_threads() -> None:
    try:
        num_devices = jax.local_device_count("cpu")
    except RuntimeError:  # lowered for CPU by a process that has none
        return
    if problem := _processes.threads_problem(num_devices):
        logger.warning("jaxcoll: %s", problem)


def _group_reason(ctx: Context, groups: Groups | None) -> str | None:
    if groups is None:
        return "the call is not in a manual region (shard_map or pmap)"
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        return f"the groups differ in size ({sorted(sizes)})"
    if max(sizes) == 1:
        return "a rank alone has nobody to communicate with"
    if max(sizes) > _MAX_GROUP and native_platform(ctx) == "cpu":
        return f"a group has {max(sizes)} members, more than {_MAX_GROUP}"
    return None


def _levels(ctx: Context, request: Request, groups: Groups) -> Levels | str | None:
    """Returns the levels of groups over several hosts, why there are none, or None on one host."""
    if jax.process_count() == 1:
        return None
    devices = _compat.mesh_devices(ctx)
    if devices is None:
        return "the mesh has no devices (AbstractMesh), and the job has several processes"
    hosts = [[_engine.host_of(devices[rank].process_index) for rank in group] for group in groups]
    if all(len(set(group)) == 1 for group in hosts):
        for group in groups:
            if problem := _engine.window_problem([devices[rank].process_index for rank in group]):
                return problem
        return None
    if request.axis_index_groups is not None:
        return "a group of axis_index_groups spans several hosts"
    return levels_of(hosts)


def spans_processes(ctx: Context, groups: Groups) -> bool:
    """Tells whether a group has ranks in several processes."""
    devices = _compat.mesh_devices(ctx) if jax.process_count() > 1 else None
    if devices is None:
        return False
    return any(len({devices[rank].process_index for rank in group}) > 1 for group in groups)


def _placement(ctx: Context, groups: Groups) -> dict[str, list[int]]:
    """Returns the attributes that tell the engine where members are; empty in one process.

    On GPUs these are the global ids of the devices, also in one process.
    """
    is_on_gpus = native_platform(ctx) == "cuda"
    needs = is_on_gpus or jax.process_count() > 1
    devices = _compat.mesh_devices(ctx) if needs else None
    members = [] if devices is None else [devices[m] for group in groups for m in group]
    placement = {"devices": [device.id for device in members]}
    if not is_on_gpus:
        placement["processes"] = [device.process_index for device in members]
    return placement


def _one_a_process(ctx: Context) -> bool:
    """Tells whether each device of the mesh is in a process of its own, of several."""
    devices = _compat.mesh_devices(ctx) if jax.process_count() > 1 else None
    return devices is not None and len({d.process_index for d in devices}) == len(devices)


def _faster_on_lax(ctx: Context, request: Request, groups: Groups) -> str | None:
    """Says so of a copy inside processes, where "auto" may choose; else None."""
    if request.backend != "auto" or request.copied is None:
        return None
    if spans_processes(ctx, groups):
        return None  # lax is Gloo there, which does not say who is missing
    least = _crossovers.lax_from_bytes(request.op, len(groups[0]))
    if least is None or request.copied < least:
        return None
    return f"lax is faster from {least} bytes on"


def _emit(
    ctx: Context, request: Request, groups: Groups, call: Call, operands: Sequence[ir.Value]
) -> tuple[int, Sequence[ir.Value]]:
    """Emits the custom call; returns its site id and its results."""
    memory = _compat.module_memory(ctx)
    position = memory["calls"] = memory.get("calls", 0) + 1
    types = ", ".join(_type_text(operand.type) for operand in operands[:4])
    types += f" and {len(operands) - 4} more" if len(operands) > 4 else ""
    place = (_compat.module_name(ctx), position)
    site = _site_id(place, (request.op, groups, sorted(call.attributes.items()), types))
    placement = _placement(ctx, groups)
    if not _decisions.is_recording():  # else it is never run: `explain`
        path = _path_text(ctx, placement, call.over_peers)
        _describe(ctx, site, request, groups, types, placement, path)
    watcher.start()

    leaves = operands if call.operands is None else call.operands
    layouts = [tuple(reversed(range(ir.RankedTensorType(leaf.type).rank))) for leaf in leaves]
    result_layouts = [
        tuple(reversed(range(ir.RankedTensorType(t).rank))) for t in call.result_types
    ]
    attributes: dict[str, int | Sequence[int]] = {
        "site": site,
        "group_size": len(groups[0]),
        **placement,
        **call.attributes,
    }
    order = _order.order_here(memory)
    before = [order.token()]
    num_bytes = sum(aval.size * aval.dtype.itemsize for aval in ctx.avals_out)
    gives_token = _order.gives_token(len(call.result_types), num_bytes)
    if native_platform(ctx) == "cuda":
        target, gives_token = f"jaxcoll_cuda_{request.op}", True
    else:
        target = f"jaxcoll_{request.op}"
        if not _one_a_process(ctx):
            before.insert(0, stablehlo.partition_id())
        attributes["groups"] = [member for group in groups for member in group]
    tokens = [_order.token_type()] if gives_token else []
    kept = _in_place.kept(ctx, leaves) if call.in_place else [True] * len(leaves)
    aliases = {i + len(before): i + len(tokens) for i, is_kept in enumerate(kept) if not is_kept}
    custom_call = _compat.custom_call(
        target,
        result_types=[*tokens, *call.result_types],
        operands=[*before, *leaves],
        backend_config={name: _attribute(value) for name, value in attributes.items()},
        operand_layouts=[*([()] * len(before)), *layouts],
        result_layouts=[*([()] * len(tokens)), *result_layouts],
        operand_output_aliases=aliases or None,
    )
    order.last = custom_call.results[0]
    results = list(custom_call.results)[len(tokens) :]
    return site, results if call.finish is None else call.finish(results)


def _describe(
    ctx: Context,
    site: int,
    request: Request,
    groups: Groups,
    types: str,
    placement: Mapping[str, list[int]],
    path: str,
) -> None:
    """Notes what stands at a site, for errors and for the black box."""
    axes = ", ".join(f'"{axis}"' for axis in request.axes)
    size = sum(aval.size * aval.dtype.itemsize for aval in ctx.avals_in)
    source = _compat.source_line(ctx)
    details: dict[str, Any] = {
        "op": request.op if request.reduction is None else f"{request.op} {request.reduction}",
        "axes": request.axes,
        "operands": types,
        "bytes": int(size),
        "parameters": request.parameters,
        "ranks": len(groups[0]),
        "path": path,
        "program": _compat.module_name(ctx),
        "source": source,
    }
    # Who is in which group: for those that have not come. Large jobs go without.
    if len(groups) * len(groups[0]) <= _MOST_DESCRIBED:
        members = [int(member) for group in groups for member in group]
        devices = _compat.mesh_devices(ctx)
        details["devices"] = placement["devices"] or members
        details["ordinals"] = [m if devices is None else _ordinal(ctx, devices[m]) for m in members]
        details["processes"] = []
        if devices is not None and jax.process_count() > 1:
            details["processes"] = [devices[m].process_index for m in members]
    what = ", ".join(filter(None, [f"{size:,} bytes", request.parameters]))
    text = f"{request.op} over {axes or 'no axis'} of {types} ({what}), called at {source}"
    _native.describe_site(site, text, details)


def _ordinal(ctx: Context, device: Any) -> int:
    """Returns how records name a device: on CPU by its number in its process."""
    if native_platform(ctx) == "cuda":
        return device.id
    local = device.local_hardware_id  # None for those of other processes
    return device.id % _MOST_OF_A_PROCESS if local is None else local


def _path_text(ctx: Context, placement: Mapping[str, Sequence[int]], over_peers: bool) -> str:
    if native_platform(ctx) == "cuda":
        return OVER_PEERS if over_peers else OVER_NCCL
    return "native, between processes" if placement["processes"] else "native, in one process"


def _type_text(tensor: ir.Type) -> str:
    """Returns a type as in f32[8,128]."""
    ranked = ir.RankedTensorType(tensor)
    return f"{ranked.element_type}[{','.join(map(str, ranked.shape))}]"


def _attribute(value: int | Sequence[int]) -> ir.Attribute:
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
    return ir.DenseI64ArrayAttr.get(list(value))


def _site_id(place: tuple[Any, ...], call: tuple[Any, ...]) -> int:
    """Identifies a call site by where it stands and what it is: the same on every process.

    The upper 24 of its 63 bits tell the place alone, so that the engine knows different calls in
    one place (csrc/host/segment.h, CallName::place).
    """
    return _hash(place, 24) << 39 | _hash((place, call), 39)


def _hash(what: tuple[Any, ...], bits: int) -> int:
    digest = hashlib.sha256(repr(what).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - bits)
