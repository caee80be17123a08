"""Steps of each strategy as the compiler leaves them: how often ranks communicate, and of what.

`test_what_is_communicated.py` counts in traced programs: the compiler might join calls or make two
of one, drop what nothing needs, and lay out arrays that nobody wrote.
"""

import collections
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import native_missing
from training import batch, mesh_of, start

import jaxcoll
from jaxcoll import data_parallel_train_step, fully_shard

RANKS = 4
LAYERS = ((16, 24), (24, 40), (40, 20))  # no other array has one of these shapes
EACH, LARGEST = len(LAYERS), 24 * 40


def init(rng: Any, x: Any) -> Any:
    del x
    keys = zip(jax.random.split(rng, EACH), LAYERS, strict=True)
    return {"scale": jnp.ones(20), "weights": [jax.random.normal(*each) for each in keys]}


def apply(params: Any, x: Any) -> Any:
    for weight in params["weights"]:
        x = jnp.tanh(x @ weight)
    return x * params["scale"]


# The loss, and what is not split, are one sum, on lax too. Of layers there is a call for each.
PARTS = {"all_reduce": 1, "reduce_scatter": EACH, "all_gather": EACH}
# On the way back the last layer is still there, and nothing needs the first.
AGAIN = EACH - 2
# Options of `fully_shard`; how often ranks meet; of the parameters and both moments of Adam, how
# many a rank has whole before and after a step.
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, int], int]] = {
    "data": (None, {"all_reduce": 1}, 3),
    "ZeRO-1": ({"stage": 1}, {"all_reduce": 1, "all_gather": EACH}, 1),
    "ZeRO-2": ({"stage": 2}, PARTS, 1),
    "ZeRO-3": ({"stage": 3}, PARTS | {"all_gather": EACH + AGAIN}, 0),
    "ZeRO-3, kept": ({"stage": 3, "reshard_after_forward": False}, PARTS, 0),
}
CALLS = {
    "native": re.compile(r'custom_call_target="jaxcoll_(?!token)(\w+)"'),
    "lax": re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-\w+)\w*\("),
}


@pytest.mark.product(case=tuple(CASES), backend=tuple(CALLS))
def test_a_compiled_step(case: str, backend: Any):
    if backend == "native" and native_missing():
        pytest.skip(str(native_missing()))
    options, expected, num_whole = CASES[case]
    text = compiled(options, backend)
    found = {name: collections.Counter(calls.findall(text)) for name, calls in CALLS.items()}
    of_lax = {name.replace("_", "-"): count for name, count in expected.items()}
    assert found == {"native": {}, "lax": {}} | {backend: of_lax if backend == "lax" else expected}
    # No array has more than the largest layer: nowhere are several, or all, brought together.
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) == LARGEST
    whole = {",".join(map(str, shape)) for shape in LAYERS}
    (layout,) = re.findall(r"entry_computation_layout=\{(.*)\}, ", text.partition("\n")[0])
    for side in layout.split("->"):
        assert {shape: side.count(f"f32[{shape}]") for shape in whole} == dict.fromkeys(
            whole, num_whole
        )
    # The optimizer computes with what a rank keeps of its moments.
    roots = set(re.findall(r" = f32\[([\d,]+)\]\S* sqrt\(", text))
    assert roots
    assert roots & whole == (whole if options is None else set())


def compiled(options: dict[str, Any] | None, backend: Any) -> str:
    """Returns the program of a rank's step, with a piece for each layer, optimized."""
    x, labels = batch(8 * RANKS)
    data, mesh = (x.astype(np.float32), labels.astype(np.int32)), mesh_of(data=RANKS)
    model: Any = (init, apply)
    if options is not None:
        model = fully_shard(model, min_weight_size=100, bucket_bytes=1, **options)
    state = start(model, data, mesh, optax.adam(0.1))
    step = jax.shard_map(
        data_parallel_train_step(model),
        mesh=mesh,
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
    )
    with jaxcoll.using(backend=backend):
        return str(jax.jit(step).lower(state, data).compile().as_text())
