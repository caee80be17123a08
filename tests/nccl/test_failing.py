"""A rank that does not come: what the others get, in a program lowered for GPUs."""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from checks import auto_is_native, mesh
from jax._src import dispatch

import jaxcoll
from jaxcoll import _cuda
from jaxcoll.diagnosis import doctor

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")


@pytest.mark.slow
def test_a_late_rank_is_named(
    gpus: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    lateness_s = 0.0

    def late(rank: Any) -> np.ndarray:
        if rank == 1 and lateness_s:
            time.sleep(lateness_s)
            jaxcoll.dump(tmp_path)  # before it comes
        return np.zeros((), np.float32)

    def total(x: jax.Array) -> jax.Array:
        zero = jax.pure_callback(
            late, jax.ShapeDtypeStruct((), np.float32), jax.lax.axis_index("x")
        )
        return jaxcoll.all_reduce(x + zero, "x")

    f = jax.jit(
        jax.shard_map(total, mesh=mesh(3), in_specs=jax.P("x"), out_specs=jax.P(), check_vma=False)
    )

    def run() -> jax.Array:
        return jax.block_until_ready(f(np.ones((3, 4), np.float32)))

    assert run()[0, 0] == 3  # a first run has another limit
    monkeypatch.setattr(jaxcoll.config, "timeout_s", 0.3)
    lateness_s = 1.5
    num_known = len(_cuda.failures())
    with pytest.raises(jaxcoll.CollectiveError) as caught, jaxcoll.watch():
        run()
    info = jaxcoll.error_info(caught.value)
    assert info is not None
    assert (info.op, info.kind, info.axes) == ("all_reduce", "missing", ("x",))
    assert [late.rank for late in info.missing] == [1]
    assert info.missing[0].last_call.startswith("last call, ended ")
    assert "all_reduce over" in info.missing[0].last_call
    assert info.arrived == (0, 2)
    assert "test_failing.py" in (info.source or "")
    assert len(_cuda.failures()) == num_known + 1
    report, status = doctor.report([tmp_path])
    assert status == doctor.BEHIND
    assert "rank 1 (process 0, device 1) is behind: it did not come to" in report
    # Until communicators are made anew.
    lateness_s = 0.0
    with pytest.raises(jaxcoll.CollectiveError, match="waited"), jaxcoll.watch():
        run()
    assert "abort" in gpus()
    dispatch.runtime_tokens.clear()  # or JAX raises the errors once more at exit
