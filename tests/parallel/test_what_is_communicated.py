"""Every strategy, alone and beside the others: how often ranks communicate, and what none holds.

Of steps as they are traced: an equation is one call, and one in a loop counts once.
"""

import collections
import itertools as it
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import native_missing
from equations import GATHERS, SUMS, equations, needed_for, on_a_rank
from training import batch, mesh_of, start

import jaxcoll
from jaxcoll import ParallelPlan, data_parallel_train_step, sequential, stacked_layers

WIDTH, HIDDEN, LAYERS = 8, 20, 4


class Block(nn.Module):
    axis: str | None
    mesh: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        split: dict[str, Any] = {"axis_name": self.axis, "mesh": self.mesh}
        y = nn.tanh(jaxcoll.ColumnParallelDense(HIDDEN, **split)(x))
        return x + jaxcoll.RowParallelDense(WIDTH, **split)(y)


class Model(nn.Module):
    """Its layers, stacked, are what tensor and pipeline parallelism split."""

    axis: str | None
    mesh: Any

    @nn.compact
    def __call__(self, x: Any, pipeline: Any = sequential) -> Any:
        x = nn.Dense(WIDTH, name="in")(x)
        block = Block(self.axis, self.mesh, parent=None)
        layer, stacked = stacked_layers(self, "blocks", block, LAYERS, x)
        return nn.Dense(4, name="out")(pipeline(layer, stacked, x))


def sums(over: str) -> dict[str, int]:
    return {f"all_reduce over {over}": 1}


# All that is summed over the same axes is one call. In layers, what comes out is, and on the way
# back the gradient of what went in; layers are one loop.
IN_LAYERS = {"all_reduce over tensor": 2}
# Of three kernels, that of the model's input and, in a loop, the two of a layer: once; and in stage
# 3 those of a layer on the way back again. Biases, and the kernel of the output, are whole.
PARTS, AGAIN = 3, 2
GATHERS_OF_1 = {"all_gather over fsdp": PARTS}
OF_2 = GATHERS_OF_1 | {"reduce_scatter over fsdp": PARTS}
OF_3 = OF_2 | {"all_gather over fsdp": PARTS + AGAIN}
# Parts have copies on the ranks of "data".
HYBRID = sums("data") | sums("data, fsdp")
# In one loop, or in one forward and one back; gradients of what is outside of the layers.
PIPELINE = {"ppermute over pipe": 2} | sums("pipe")
# Where layers communicate nothing is left out in a tick, but there are loops for the ticks of
# forward passes alone, of both, and of backward passes alone, which begin with a forward one.
OF_TENSOR_RANKS = {"ppermute over pipe": 1 + 2 + 1, "all_reduce over tensor": 1 + 3 + 2}
CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, int]]] = {
    "data": ({"data": 4}, {}, sums("data")),
    "tensor": ({"tensor": 2}, {}, IN_LAYERS),
    "data x tensor": ({"data": 2, "tensor": 2}, {}, sums("data") | IN_LAYERS),
    "ZeRO-1": ({"fsdp": 2}, {"stage": 1}, sums("fsdp") | GATHERS_OF_1),
    "ZeRO-2": ({"fsdp": 2}, {"stage": 2}, sums("fsdp") | OF_2),
    "ZeRO-3": ({"fsdp": 2}, {"stage": 3}, sums("fsdp") | OF_3),
    "ZeRO-1 x tensor": (
        {"fsdp": 2, "tensor": 2},
        {"stage": 1},
        sums("fsdp") | GATHERS_OF_1 | IN_LAYERS,
    ),
    "ZeRO-2 x tensor": (
        {"fsdp": 2, "tensor": 2},
        {"stage": 2},
        sums("fsdp") | OF_2 | IN_LAYERS,
    ),
    "ZeRO-3 x tensor": (
        {"fsdp": 2, "tensor": 2},
        {"stage": 3},
        sums("fsdp") | OF_3 | IN_LAYERS,
    ),
    "hybrid, ZeRO-1": ({"data": 2, "fsdp": 2}, {"stage": 1}, sums("data, fsdp") | GATHERS_OF_1),
    "hybrid, ZeRO-2": ({"data": 2, "fsdp": 2}, {"stage": 2}, HYBRID | OF_2),
    "hybrid": ({"data": 2, "fsdp": 2}, {"stage": 3}, HYBRID | OF_3),
    "hybrid x tensor": (
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"stage": 3},
        HYBRID | OF_3 | IN_LAYERS,
    ),
    "GPipe": ({"pipe": 2}, {"schedule": "gpipe"}, PIPELINE),
    "1F1B": ({"pipe": 2}, {"schedule": "1f1b"}, PIPELINE),
    "interleaved": ({"pipe": 2}, {"schedule": "interleaved"}, PIPELINE),
    "1F1B x data x tensor": (
        {"pipe": 2, "data": 2, "tensor": 2},
        {},
        PIPELINE | sums("data") | OF_TENSOR_RANKS,
    ),
    # A stage's parameters are gathered once.
    "1F1B x ZeRO-3 x tensor": (
        {"pipe": 2, "fsdp": 2, "tensor": 2},
        {"stage": 3},
        PIPELINE | sums("fsdp") | OF_2 | OF_TENSOR_RANKS,
    ),
}
# Others hold what these do.
LESS = ("hybrid, ZeRO-1", "ZeRO-1 x tensor", "ZeRO-2 x tensor", "hybrid", "data")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case in LESS)) for case in CASES]
)
def test_a_step(case: str):
    axes, options, expected = CASES[case]
    of_fsdp = {"stage": options["stage"], "min_weight_size": 100} if "stage" in options else None
    of_pipe = {"schedule": options["schedule"]} if "schedule" in options else {}
    count = int(np.prod(list(axes.values())))
    plan = ParallelPlan(axes, devices=jax.devices()[:count], fsdp=of_fsdp, **of_pipe)
    model = Model("tensor", plan.mesh) if "tensor" in axes else Model(None, None)
    state = plan.init(model, optax.adam(0.1), jax.random.key(0), batch())
    program = on_a_rank(plan.build_train_step(), state, batch())
    assert communicated(program) == expected
    # Nor does any stand where some ranks may not come by.
    for branch in equations(program, "cond"):
        assert not any(communicated(each.jaxpr) for each in branch.params["branches"])
    # The optimizer computes with what a rank keeps of its state alone.
    moments = jax.tree.leaves(state.opt_state[0].nu)
    kept = {leaf.sharding.shard_shape(leaf.shape) for leaf in moments}
    assert {shape_of(root) for root in equations(program, "sqrt")} == kept
    made = {shape_of(each) for each in equations(program)}
    for leaf in jax.tree.leaves(state.params["blocks"]):
        if leaf.ndim == 3:  # the shape of a kernel is no other's
            assert not made & set(shapes_of_more(leaf, axes))


def communicated(program: Any) -> dict[str, int]:
    """Returns how often which ranks meet, as `{"all_reduce over data": 1}`."""
    names = dict.fromkeys(SUMS, "all_reduce") | dict.fromkeys(GATHERS, "all_gather")
    names |= {name: name for name in ("reduce_scatter", "ppermute", "all_to_all")}
    found = []
    for call in equations(program, *names):
        axes = call.params["axes"] if "axes" in call.params else call.params["axis_name"]
        if axes:  # of a batch that is on one rank
            over = ", ".join([axes] if isinstance(axes, str) else axes)
            found.append(f"{names[call.primitive.name]} over {over}")
    return dict(collections.Counter(found))


def shape_of(equation: Any) -> tuple[int, ...]:
    return equation.outvars[0].aval.shape if equation.outvars else ()


def shapes_of_more(leaf: Any, axes: dict[str, int]) -> list[tuple[int, ...]]:
    """Returns shapes that no rank may have: of stacked layers, more than it keeps of an axis.

    But for those of a stage, which stage 3 gathers beside a pipeline.
    """
    part, spec = leaf.sharding.shard_shape(leaf.shape), leaf.sharding.spec
    whole = [leaf.shape] if part != leaf.shape else []
    for i, axis in enumerate(spec):
        if axis is not None and not (axis == "fsdp" and "pipe" in axes):
            whole.append((*part[:i], leaf.shape[i], *part[i + 1 :]))
    return whole


# ---- Buckets of gradients ------------------------------------------------------------------------

DEPTH, BYTES = 4, 16 * 16 * 4


def init(rng: Any, x: Any) -> Any:
    del x
    return [jax.random.normal(key, (16, 16), jnp.float32) for key in jax.random.split(rng, DEPTH)]


def apply(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return x[:, :4]


def step_in_buckets(bucket_bytes: int | None, accumulate: int = 1) -> Any:
    """Returns a step of four layers, mapped over four ranks, and what it takes."""
    x, labels = batch()
    data, mesh = (x.astype(np.float32), labels.astype(np.int32)), mesh_of(data=4)
    step = data_parallel_train_step((init, apply), bucket_bytes=bucket_bytes, accumulate=accumulate)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
    return mapped, start((init, apply), data), data


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    # Products of matrices before a call: four forward; on the way back one for each later layer,
    # and one for each gradient of the bucket.
    [(1, [5, 6, 7, 8]), (2 * BYTES, [7, 9]), (3 * BYTES, [9, 8]), (None, [11])],
)
def test_buckets_wait_for_their_layers_alone(bucket_bytes: int | None, expected: list[int]):
    """The last layers' gradients travel while those of the first are computed."""
    program = on_a_rank(*step_in_buckets(bucket_bytes))
    needed = [needed_for(program, call.invars) for call in equations(program, *SUMS)]
    assert [products(before) for before in needed] == expected


def products(needed: list[Any]) -> int:
    return sum(each.primitive.name == "dot_general" for each in needed)


def test_micro_batches_are_added_before_their_buckets_meet():
    """The first micro-batch, and a loop over the others, in which no ranks meet."""
    program = on_a_rank(*step_in_buckets(1, accumulate=3))
    assert len(equations(program, *SUMS)) == DEPTH
    (loop,) = equations(program, "scan")
    assert not equations(loop.params["jaxpr"].jaxpr, *SUMS)
    for call in program.eqns:
        if call.primitive.name in SUMS:
            assert any(each is loop for each in needed_for(program, call.invars))


@pytest.mark.parametrize(
    ("stage", "dtype", "weights"),
    [(0, "float32", 0), (0, "bfloat16", 1), (1, "float32", 0), (1, "bfloat16", 1)],
)
def test_of_16_bits_the_weights_of_micro_batches_meet(stage: Any, dtype: str, weights: int):
    """Once for each, and nothing else: the first one, and those of the loop. Gradients do once."""

    def lowered(rng: Any, x: Any) -> Any:
        return [leaf.astype(dtype) for leaf in init(rng, x)]

    x, labels = batch()
    data, mesh = (x.astype(np.float32), labels.astype(np.int32)), mesh_of(data=4)
    policy = jaxcoll.MixedPrecisionPolicy(dtype, output_dtype="float32")
    model: Any = (init if stage else lowered, apply)
    if stage:
        model = jaxcoll.fully_shard(model, stage=stage, min_weight_size=1, mp_policy=policy)
    state = start(model, data, mesh)
    mapped = jax.shard_map(
        data_parallel_train_step(model, accumulate=3),
        mesh=mesh,
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
    )
    program = on_a_rank(mapped, state, data)
    (loop,) = equations(program, "scan")
    in_loop = equations(loop.params["jaxpr"].jaxpr, *SUMS)
    *before, last = (call for call in program.eqns if call.primitive.name in SUMS)
    assert [summed(call) for call in before] == [[()]] * weights
    assert [summed(call) for call in in_loop] == [[()]] * weights
    assert summed(last).count((16, 16)) == DEPTH
    assert len(equations(program, *SUMS)) == 2 * weights + 1


def summed(call: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of what is summed in a call."""
    return [v.aval.shape for v in call.invars]


@pytest.mark.skipif(native_missing() is not None, reason="XLA may join its own calls")
def test_buckets_stay_apart_where_they_are_compiled():
    """Each call needs more of the way back than the one before."""
    step, *arguments = step_in_buckets(1)
    text = str(jax.jit(step).lower(*arguments).compile().as_text())
    lines = dict(re.findall(r"^ +(?:ROOT )?%([\w.-]+) = (.*)$", text[text.index("ENTRY ") :], re.M))
    operands = {
        name: re.findall(r"%([\w.-]+)", line.split(", metadata=")[0])
        for name, line in lines.items()
    }

    def way_back(name: str) -> set[str]:
        seen, waiting = set(), [name]
        while waiting:
            new = [each for each in operands.get(waiting.pop(), ()) if each not in seen]
            seen.update(new)
            waiting += new
        return {each for each in seen if "transpose(jvp(" in lines.get(each, "")}

    calls = [name for name, line in lines.items() if '"jaxcoll_all_reduce"' in line]
    assert len(calls) == DEPTH
    of_calls = sorted((way_back(call) for call in calls), key=len)
    assert all(fewer < more for fewer, more in it.pairwise(of_calls))
