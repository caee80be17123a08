"""Parameters as the model has them, of states that store them otherwise: still in parts."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from training import batch, mesh_of

from jaxcoll import create_train_state, fully_shard, pipelined, reshard, sequential

WIDTH = 12


class Deep(nn.Module):
    num_layers: int

    @nn.compact
    def __call__(self, x: Any, pipeline: Any = sequential) -> Any:
        shape = (self.num_layers, WIDTH, WIDTH)
        kernels = self.param("kernels", nn.initializers.normal(), shape, x.dtype)
        x = pipeline(lambda kernel, x: x + x @ kernel, kernels, x[:, :WIDTH])
        return nn.Dense(4)(x)


@pytest.mark.parametrize(
    ("num_layers", "chunks", "stage", "spec", "part"),
    [
        (8, 2, None, jax.P("pipe", None, None), (4, WIDTH, WIDTH)),
        (5, 1, None, jax.P(None, None, "pipe"), (5, WIDTH, WIDTH // 2)),
        (5, 1, 3, jax.P(None, "pipe", "data"), (5, WIDTH // 2, WIDTH // 3)),
    ],
    ids=["interleaved", "uneven", "uneven, ZeRO-3"],
)
def test_layers_of_stages(num_layers: int, chunks: int, stage: Any, spec: Any, part: Any):
    mesh = mesh_of(data=3, pipe=2)
    model: Any = Deep(num_layers)
    if stage:
        model = fully_shard(model, stage=stage, min_weight_size=16)
    schedule = {"schedule": "interleaved", "num_chunks": chunks} if chunks > 1 else {}
    state = create_train_state(
        pipelined(model, 4, **schedule), optax.adam(1e-3), jax.random.key(0), batch(), mesh
    )
    plain = state.unpadded()
    alone = create_train_state(Deep(num_layers), optax.adam(1e-3), jax.random.key(0), batch())
    for found in (plain.params, plain.opt_state[0].mu):
        kernels = found["kernels"]
        assert kernels.sharding.spec == spec
        assert kernels.addressable_shards[0].data.shape == part
    jax.tree.map(np.testing.assert_array_equal, plain.params, alone.params)
    back = reshard(plain, state.specs)
    jax.tree.map(np.testing.assert_array_equal, back.params, state.params)
    assert back.specs == state.specs


def test_none_of_whose_dimensions_the_ranks_divide():
    mesh = mesh_of(data=8)
    model = fully_shard(Deep(5), stage=3, min_weight_size=16)
    state = create_train_state(model, optax.sgd(0.1), jax.random.key(0), batch(), mesh)
    assert state.params["kernels"].shape == (5, WIDTH, 16)
    kernels = state.unpadded().params["kernels"]
    assert kernels.shape == (5, WIDTH, WIDTH)
    assert kernels.sharding.is_fully_replicated
