"""A rank that does not come: what the others get, in a program lowered for GPUs."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from checks import auto_is_native, mesh, zero_late
from jax._src import dispatch

import jaxcoll
from jaxcoll import _cuda

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")


def test_a_late_rank_is_named(gpus: Callable[[], str], monkeypatch: pytest.MonkeyPatch):
    def total(x: jax.Array, lateness: float) -> jax.Array:
        return jaxcoll.all_reduce(x + zero_late("x", 1, lateness), "x")

    def run(lateness: float) -> jax.Array:
        f = jax.shard_map(
            lambda x: total(x, lateness), mesh=mesh(3), in_specs=jax.P("x"), out_specs=jax.P(),
            check_vma=False,
        )  # fmt: skip
        return jax.block_until_ready(jax.jit(f)(np.ones((3, 4), np.float32)))

    assert run(0)[0, 0] == 3
    monkeypatch.setattr(jaxcoll.config, "timeout_s", 0.3)
    num_known = len(_cuda.failures())
    with pytest.raises(jaxcoll.CollectiveError) as caught, jaxcoll.watch():
        run(1.5)
    info = jaxcoll.error_info(caught.value)
    assert info is not None
    assert (info.op, info.kind, info.axes) == ("all_reduce", "missing", ("x",))
    assert [late.rank for late in info.missing] == [1]
    assert info.arrived == (0, 2)
    assert "test_failing.py" in (info.source or "")
    assert len(_cuda.failures()) == num_known + 1
    # Until communicators are made anew.
    with pytest.raises(jaxcoll.CollectiveError, match="waited"), jaxcoll.watch():
        run(0.001)
    assert "abort" in gpus()
    dispatch.runtime_tokens.clear()  # or JAX raises the errors once more at exit
