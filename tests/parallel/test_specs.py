"""How a Transformer's parameters lie under products of strategies, as they did before."""

import jax
import numpy as np
import optax
import pytest
from jax import P

import jaxcoll
from jaxcoll.models import TransformerLM

LEAVES = (
    "blocks/attention/out/kernel",
    "blocks/attention/qkv/kernel",
    "blocks/attention_norm/scale",
    "blocks/mlp/down/kernel",
    "blocks/mlp/up/kernel",
    "blocks/mlp_norm/scale",
    "embed/embedding",
    "final_norm/scale",
)
ROWS, COLUMNS = ("tensor", None), (None, "tensor")
ROWS_OF_PARTS, COLUMNS_OF_PARTS = ("tensor", "fsdp"), ("fsdp", "tensor")
# Of blocks the first dimension is the layer. What is small is not fully sharded.
SPECS = {
    ("pipe", "data", "tensor"): (
        *(P("pipe", *ROWS), P("pipe", *COLUMNS), P("pipe")),
        *(P("pipe", *ROWS), P("pipe", *COLUMNS), P("pipe")),
        *(P(*ROWS), P()),
    ),
    ("data", "fsdp", "tensor"): (
        *(P(None, *ROWS_OF_PARTS), P(None, *COLUMNS_OF_PARTS), P()),
        *(P(None, *ROWS_OF_PARTS), P(None, *COLUMNS_OF_PARTS), P()),
        *(P(*ROWS), P()),
    ),
    ("pipe", "fsdp", "tensor"): (
        *(P("pipe", *ROWS_OF_PARTS), P("pipe", *COLUMNS_OF_PARTS), P("pipe")),
        *(P("pipe", *ROWS_OF_PARTS), P("pipe", *COLUMNS_OF_PARTS), P("pipe")),
        *(P(*ROWS), P()),
    ),
}


@pytest.mark.parametrize("axes", SPECS, ids=" x ".join)
def test_specs_of_a_transformer(axes: tuple[str, ...]):
    """Of its parameters, and of both moments of AdamW."""
    plan = jaxcoll.ParallelPlan(dict.fromkeys(axes, 2))
    model = TransformerLM(32, 4, 16, num_heads=4, axis_name="tensor", mesh=plan.mesh)
    tokens = np.zeros((16, 8), np.int32)
    batch = plan.shard_batch((tokens, tokens))
    state = plan.init(model, optax.adamw(1e-3), jax.random.key(0), batch)
    moments = state.opt_state[0]
    for tree in (state.params, moments.mu, moments.nu):
        found = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.spec
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        assert found == dict(zip(LEAVES, SPECS[axes], strict=True))
