"""What a handler does with buffers that are not those of its attributes: nothing but an error."""

from typing import Any

import jax
import numpy as np
import pytest
from checks import auto_is_native, mesh
from jax.extend.mlir import ir

import jaxcoll
from jaxcoll import _compat, _lowering

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")


@pytest.mark.parametrize(
    ("attribute", "more", "problem"),
    [
        ("inner", 8, "operand 0 has the wrong size"),
        ("outer", 1, "operand 0 has the wrong size"),
        ("group_size", -1, "result 0 has the wrong size"),
    ],
)
def test_buffers_of_other_sizes_are_refused_in_each_run(
    monkeypatch: pytest.MonkeyPatch, attribute: str, more: int, problem: str
) -> None:
    made = _compat.custom_call

    def changed(target: str, **arguments: Any) -> Any:
        config = dict(arguments["backend_config"])
        number = ir.IntegerAttr(config[attribute]).value
        config[attribute] = _lowering._attribute(number + more)
        return made(target, **{**arguments, "backend_config": config})

    def gathered(x: Any) -> Any:
        return jaxcoll.all_gather(x, "x", backend="native")

    monkeypatch.setattr(_compat, "custom_call", changed)
    x = np.arange(8, dtype=np.float32)
    f = jax.shard_map(
        gathered, mesh=mesh(2), in_specs=jax.P("x"), out_specs=jax.P(), check_vma=False
    )
    compiled = jax.jit(f).lower(x).compile()
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"all_gather over.*{problem}"):
            jax.block_until_ready(compiled(x))
