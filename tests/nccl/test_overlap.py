"""Our calls in JAX's stream annotations, with which XLA runs them beside what is computed."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from checks import auto_is_native, mesh
from jax.experimental import compute_on as streams

import jaxcoll

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")

STREAMS = ("collective", "1")
# As JAX 0.10 calls it, and as 0.12 does.
compute_on: Any = getattr(streams, "compute_on2", streams.compute_on)
_ON_STREAM = (
    r"func\.call @(compute_on\w*)\(.*_xla_stream_annotation = \"{}\".*inlineable = \"false\""
)


def step(stream: str) -> Callable[..., Any]:
    """Returns the sum of x on a stream, and a product beside it."""

    def f(x: Any, w: Any) -> tuple[Any, Any]:
        total = compute_on(
            lambda x: jaxcoll.all_reduce(x, "x"),
            compute_type=f"gpu_stream:{stream}",
            out_memory_spaces=jax.memory.Space.Device,
        )
        return total(x), x @ w

    return jax.shard_map(
        f, mesh=mesh(2), in_specs=(jax.P("x"), jax.P()), out_specs=(jax.P(), jax.P("x")),
    )  # fmt: skip


X, W = np.ones((4, 3), np.float32), np.ones((3, 3), np.float32)


def lowered(f: Callable[..., Any]) -> str:
    return jax.jit(f).trace(X, W).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("stream", STREAMS)
def test_the_program_says_so(stream: str, gpus: Callable[[], str]):
    """The call of a function of its own has the annotation, and in it stands ours alone."""
    del gpus
    text = lowered(step(stream))
    (name,) = re.findall(_ON_STREAM.format(stream), text)
    body = text.partition(f"@{name}(%arg0")[2].partition("\n  }")[0]
    assert "@jaxcoll_cuda_all_reduce" in body
    assert "dot_general" not in body
    assert "dot_general" in text


def test_gradients_are_on_the_stream_too(gpus: Callable[[], str]):
    """What is transposed to a sum of ours stands in an annotated call as well."""
    del gpus

    def loss(x: Any, w: Any) -> Any:
        gather = compute_on(
            lambda x: jaxcoll.all_gather(x, "x", tiled=True),
            compute_type="gpu_stream:collective",
            out_memory_spaces=jax.memory.Space.Device,
        )
        return jax.lax.psum((gather(x) @ w).sum(), "x")

    f = jax.shard_map(
        jax.grad(loss), mesh=mesh(2), in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x"),
    )  # fmt: skip
    text = lowered(f)
    names = re.findall(_ON_STREAM.format("collective"), text)
    bodies = [text.partition(f" @{name}(%arg0")[2].partition("\n  }")[0] for name in names]
    assert any("@jaxcoll_cuda_reduce_scatter" in body for body in bodies), text


@pytest.mark.parametrize("stream", STREAMS)
def test_it_computes_the_same(stream: str, gpus: Callable[[], str]):
    total, product = jax.jit(step(stream))(X, W)
    np.testing.assert_array_equal(total, np.full((2, 3), 2))
    np.testing.assert_array_equal(product, np.full((4, 3), 3))
    assert "all_reduce" in gpus()
