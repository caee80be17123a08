"""Cross entropy over a vocabulary of which each rank has a part."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SIZES
from training import mesh_of

import jaxcoll
from jaxcoll import vocab_parallel_cross_entropy

VOCABULARY = 48


def examples(dtype: Any) -> tuple[Any, Any]:
    """Returns logits, some of them large, and labels of every rank."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 12, VOCABULARY)) * 4
    logits[0, 0, 5], logits[1, 1], logits[2, 2, 40] = 300.0, -200.0, -np.inf
    return logits.astype(dtype), np.arange(48).reshape(4, 12) * 7 % VOCABULARY


@pytest.mark.product(
    dtype=("float32", "float64", "bfloat16", "float16"), size=SIZES, check_vma=(True, False)
)
def test_values_and_gradients_are_those_of_optax(dtype: str, size: int, check_vma: bool):
    with jax.enable_x64(dtype == "float64"):
        logits, labels = examples(jnp.dtype(dtype))
        weights = np.linspace(0, 1, labels.size, dtype=np.float32).reshape(labels.shape)

        def alone(logits: Any) -> Any:
            wide = logits.astype(jnp.promote_types(logits.dtype, np.float32))
            losses = optax.softmax_cross_entropy_with_integer_labels(wide, labels)
            return (losses * weights).sum(), losses

        def on_rank(logits: Any) -> Any:
            def f(logits: Any) -> Any:
                losses = vocab_parallel_cross_entropy(logits, labels)
                return (losses * weights).sum(), losses

            return jax.value_and_grad(f, has_aux=True)(logits)

        split = jax.P(None, None, "tensor")
        mapped = jax.shard_map(
            on_rank,
            mesh=mesh_of(tensor=size),
            in_specs=split,
            out_specs=((jax.P(), jax.P()), split),
            check_vma=check_vma,
        )
        got, want = jax.jit(mapped)(logits), jax.value_and_grad(alone, has_aux=True)(logits)
        assert got[0][1].dtype == want[0][1].dtype
        assert got[1].dtype == logits.dtype
        rtol = {"float64": 1e-12, "float32": 1e-5}.get(dtype, 1e-2)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = (np.asarray(c, np.float64) for c in (a, b))
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def test_no_rank_has_all_logits():
    """What travels is one number for each position, and then two."""
    logits, labels = examples(np.float32)
    split = jax.P(None, None, "tensor")
    mapped = jax.shard_map(
        jax.grad(lambda logits: vocab_parallel_cross_entropy(logits, labels).sum()),
        mesh=mesh_of(tensor=4),
        in_specs=split,
        out_specs=split,
    )
    rows = jaxcoll.explain(mapped, logits).rows
    assert [(row.op, row.shapes) for row in rows] == [
        ("all_reduce", ((4, 12),)),
        ("all_reduce", ((4, 12), (4, 12))),
    ]


def test_on_global_arrays_and_on_one_device():
    logits, labels = examples(np.float32)
    want = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    mesh = mesh_of(data=2, tensor=4)
    on_mesh = jax.jit(lambda x: vocab_parallel_cross_entropy(x, labels, mesh=mesh))(logits)
    for got in (on_mesh, vocab_parallel_cross_entropy(logits, labels, None)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_examples_without_a_sequence_are_shared_out():
    """Over the mesh's other axes: no rank computes the examples of another."""
    logits, labels = (leaf.reshape(48, *leaf.shape[2:]) for leaf in examples(np.float32))
    mesh = mesh_of(data=2, tensor=4)

    def loss(f: Any) -> Any:
        def of_logits(logits: Any) -> Any:
            losses = f(logits, labels)
            return (losses * np.arange(48, dtype=np.float32)).sum(), losses

        return jax.value_and_grad(of_logits, has_aux=True)

    ours = loss(lambda logits, labels: vocab_parallel_cross_entropy(logits, labels, mesh=mesh))
    want = loss(optax.softmax_cross_entropy_with_integer_labels)(logits)
    for a, b in zip(jax.tree.leaves(jax.jit(ours)(logits)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    embed = jaxcoll.VocabParallelEmbed(VOCABULARY, 8, mesh=mesh)
    table = embed.init(jax.random.key(0), labels)
    for f, x, width in ((ours, logits, ()), (lambda x: embed.apply(table, x), labels, (8,))):
        assert {row.shapes[0] for row in jaxcoll.explain(f, x).rows} == {(24, *width)}


def test_errors():
    logits, labels = examples(np.float32)
    mesh = mesh_of(tensor=4)
    with pytest.raises(ValueError, match='cross_entropy: mesh: axis "tensor" is not mapped here'):
        vocab_parallel_cross_entropy(logits, labels)
    with pytest.raises(ValueError, match="the vocabulary: 47 can't be split over the 4 ranks"):
        vocab_parallel_cross_entropy(logits[..., 1:], labels, mesh=mesh)
    with pytest.raises(ValueError, match=r"labels: expected shape \(4, 12\), .* got \(12,\)"):
        vocab_parallel_cross_entropy(logits, labels[0], mesh=mesh)
    with pytest.raises(TypeError, match="labels: expected integers, got float32"):
        vocab_parallel_cross_entropy(logits, labels.astype(np.float32), mesh=mesh)
