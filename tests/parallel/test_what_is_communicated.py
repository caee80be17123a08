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


# Of a step: with 64 values, kernels of the layers and of what goes into them are split, two of
# them in a loop over the layers; biases and the kernel of what comes out are not.
CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, int]]] = {
    "data": ({"data": 4}, {}, {}),
    "tensor": ({"tensor": 2}, {}, {}),
    "data x tensor": ({"data": 2, "tensor": 2}, {}, {}),
    "ZeRO-1": ({"fsdp": 2}, {"stage": 1}, {}),
    "ZeRO-2": ({"fsdp": 2}, {"stage": 2}, {}),
    "ZeRO-3": ({"fsdp": 2}, {"stage": 3}, {}),
    "ZeRO-1 x tensor": ({"fsdp": 2, "tensor": 2}, {"stage": 1}, {}),
    "ZeRO-2 x tensor": ({"fsdp": 2, "tensor": 2}, {"stage": 2}, {}),
    "ZeRO-3 x tensor": ({"fsdp": 2, "tensor": 2}, {"stage": 3}, {}),
    "hybrid, ZeRO-1": ({"data": 2, "fsdp": 2}, {"stage": 1}, {}),
    "hybrid, ZeRO-2": ({"data": 2, "fsdp": 2}, {"stage": 2}, {}),
    "hybrid": ({"data": 2, "fsdp": 2}, {"stage": 3}, {}),
    "hybrid x tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, {"stage": 3}, {}),
    "GPipe": ({"pipe": 2}, {"schedule": "gpipe"}, {}),
    "1F1B": ({"pipe": 2}, {"schedule": "1f1b"}, {}),
    "interleaved": ({"pipe": 2}, {"schedule": "interleaved"}, {}),
    "pipeline x data x tensor": ({"pipe": 2, "data": 2, "tensor": 2}, {}, {}),
    "pipeline x ZeRO-3 x tensor": ({"pipe": 2, "fsdp": 2, "tensor": 2}, {"stage": 3}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step(case: str):
    axes, options, expected = CASES[case]
    of_fsdp = {"stage": options["stage"], "min_weight_size": 64} if "stage" in options else None
    of_pipe = {"schedule": options["schedule"]} if "schedule" in options else {}
    count = int(np.prod(list(axes.values())))
    plan = ParallelPlan(axes, devices=jax.devices()[:count], fsdp=of_fsdp, **of_pipe)
    model = Model("tensor", plan.mesh) if "tensor" in axes else Model(None, None)
    state = plan.init(model, optax.adam(0.1), jax.random.key(0), batch())
    program = on_a_rank(plan.build_train_step(), state, batch())
    print(case, communicated(program))
    assert communicated(program) == expected
    # The optimizer works on what this rank keeps of it alone.
    moments = jax.tree.leaves(state.opt_state[0].nu)
    kept = {leaf.sharding.shard_shape(leaf.shape) for leaf in moments}
    assert {shape_of(root) for root in equations(program, "sqrt")} == kept
    made = {shape_of(each) for each in equations(program)}
    for leaf in jax.tree.leaves(state.params["blocks"]):
        assert not made & set(shapes_of_more(leaf, axes))


def communicated(program: Any) -> dict[str, int]:
    """Returns how often which ranks meet, as `{"all_reduce over data": 1}`."""
    names = {name: "all_reduce" for name in SUMS} | {name: "all_gather" for name in GATHERS}
    names |= {name: name for name in ("reduce_scatter", "ppermute")}
    found = []
    for call in equations(program, *names):
        axes = call.params["axes"] if "axes" in call.params else call.params["axis_name"]
        over = ", ".join([axes] if isinstance(axes, str) else axes)
        found.append(f"{names[call.primitive.name]} over {over}")
    return dict(collections.Counter(found))


def shape_of(equation: Any) -> tuple[int, ...]:
    return getattr(equation.outvars[0].aval, "shape", ())


def shapes_of_more(leaf: Any, axes: dict[str, int]) -> list[tuple[int, ...]]:
    """Returns shapes that no rank may have: of stacked layers, more than it keeps of an axis.

    Stage 3 beside a pipeline gathers the layers of a stage.
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
    needed = [needed_for(program, call) for call in equations(program, *SUMS)]
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
            assert any(each is loop for each in needed_for(program, call))


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
