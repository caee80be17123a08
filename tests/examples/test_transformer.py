"""The language model of `jaxcoll.models`."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcoll.models import TransformerLM


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    return TransformerLM(vocab_size=11, num_layers=2, width=8, num_heads=2)


@pytest.fixture(scope="module")
def params(model):
    return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))


def test_a_position_sees_no_later_token(model, params):
    tokens = jnp.arange(7)[None]  # (1, T)
    changed = tokens.at[0, 4].set(9)
    before, after = (np.asarray(model.apply(params, t))[0] for t in (tokens, changed))  # (T, V)
    assert before.shape == (7, 11)
    np.testing.assert_array_equal(before[:4], after[:4])
    assert (before[4:] != after[4:]).any(axis=1).all()


def test_a_position_knows_where_the_earlier_tokens_stand(model, params):
    logits = model.apply(params, jnp.array([[1, 2, 3], [2, 1, 3]]))  # (2, T, V)
    assert not np.allclose(logits[0, -1], logits[1, -1], atol=1e-6)


def test_the_first_loss_is_that_of_a_guess(model, params):
    logits = model.apply(params, jnp.arange(10)[None])
    assert float(jnp.abs(jax.nn.log_softmax(logits) + np.log(11)).max()) < 0.5


def test_the_default_has_about_a_million_parameters():
    shapes = jax.eval_shape(
        TransformerLM().init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    )
    norms = (2 * 3 + 1) * 160
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert count == 256 * 160 + 3 * (4 + 2 * 4) * 160**2 + norms
    assert 0.9e6 < count < 1.1e6


def test_heads_of_odd_width_are_refused():
    with pytest.raises(ValueError, match=r"multiple of 2 \* num_heads = 8, got 12"):
        TransformerLM(width=12, num_heads=4).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))


def test_the_package_of_models_loads_no_flax():
    code = (
        "import sys, jaxcoll.models\n"
        "assert 'flax' not in sys.modules\n"
        "assert 'TransformerLM' in dir(jaxcoll.models)\n"
        "try: jaxcoll.models.Transformer\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "has no attribute 'Transformer'" in done.stdout
