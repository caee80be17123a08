"""How a program says in which order its native calls run, and what is made in place of a result."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import auto_is_native, mesh
from jax import lax

import jaxcoll

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")

SMALL, LARGE = 16, 1 << 18  # float32 of a rank; 1 MiB and more count as large
CALL = re.compile(r"(%\w+)\S* = stablehlo\.custom_call @jaxcoll_(\w+)\(([^)]*)\)")

Parts = tuple[Any, Any]
Body = Callable[[Any], Any]


def total(x: Any) -> Any:
    return jaxcoll.all_reduce(x, "x", backend="native")


def program(body: Body) -> Any:
    spec = jax.P("x")
    return jax.jit(
        jax.shard_map(body, mesh=mesh(2), in_specs=spec, out_specs=spec, check_vma=False)
    )


def operand(count: int) -> Any:
    values = np.arange(2 * count, dtype=np.float32) % 8
    return jax.device_put(values, jax.NamedSharding(mesh(2), jax.P("x")))


def after(body: Body, count: int) -> list[str]:
    """Returns of each call whose token it takes, sorted: bodies of loops stand here or there.

    "its own": that of the call before it in its block; "made": one made of that call's result;
    "new": nobody's.
    """
    found, made = [], dict[str, str]()
    last: dict[int, str] = {}  # by how far a block's text is indented
    for line in program(body).lower(operand(count)).as_text().splitlines():
        if "func.func" in line:
            last, made = {}, {}
        call = CALL.search(line)
        if call is None:
            continue
        result, target, operands = call.groups()
        names = operands.split(", ")
        if target == "token":
            made[result] = names[0]
            continue
        depth = len(line) - len(line.lstrip())
        token, before = names[1], last.get(depth)  # behind the logical id
        if before is not None and token == f"{before}#0":
            found.append("its own")
        else:
            found.append("made" if before is not None and made.get(token) == before else "new")
        last[depth] = result
    return sorted(found)


def loop(x: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, y: total(total(y)), total(x)) + total(x + 1)


BODIES: dict[str, tuple[Body, list[str]]] = {
    # what: the body; how its calls come after another where results are large
    "of the result": (lambda x: total(total(x)), ["new", "made"]),
    "of something else": (lambda x: total(x) + total(x + 1), ["new", "made"]),
    "three": (lambda x: total(total(x)) + total(x + 1), ["new", "made", "made"]),
    "in a loop": (loop, ["new", "made", "new", "made"]),
    "after a tree": (lambda x: total(sum(total((x, 2 * x)))), ["new", "its own"]),
    "before a tree": (lambda x: sum(total((total(x), x))), ["new", "made"]),
}


@pytest.mark.parametrize("what", BODIES)
def test_the_next_call_comes_after(what: str):
    body, how = BODIES[what]
    assert after(body, LARGE) == sorted(how)
    assert after(body, SMALL) == sorted(h.replace("made", "its own") for h in how)


OPS = {
    "all_reduce": total,
    "ppermute": lambda x: jaxcoll.ppermute(x, "x", [(0, 1), (1, 0)], backend="native"),
    "all_to_all": lambda x: jaxcoll.all_to_all(
        x, "x", split_axis=0, concat_axis=0, tiled=True, backend="native"
    ),
    "broadcast": lambda x: jaxcoll.broadcast(x, "x", root=0, backend="native"),
    "all_gather": lambda x: jaxcoll.all_gather(x, "x", tiled=True, backend="native")[: x.shape[0]],
    "reduce_scatter": lambda x: jaxcoll.reduce_scatter(
        jnp.concatenate([x, x]), "x", scatter_dimension=0, tiled=True, backend="native"
    ),
}


@pytest.mark.parametrize("op", ["ppermute", "all_to_all"])
def test_what_is_computed_of_a_large_result_takes_its_place(op: str):
    call = OPS[op]

    def body(x: Any) -> Any:
        for _ in range(4):
            x = call(x) * 0.5
        return call(x)

    memory = program(body).lower(operand(LARGE)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.1 * 4 * LARGE  # beside the program's result


@pytest.mark.product(one=tuple(OPS), other=tuple(OPS), count=(SMALL, LARGE))
def test_values(one: str, other: str, count: int):
    """Calls that compute with each other, and calls that don't, alternate."""

    def body(x: Any) -> Any:
        y = OPS[one](x)
        z = OPS[other](y + 1)
        return y, z, OPS[one](x + 2)

    got = program(body)(operand(count))
    y = OF_NUMPY[one](np.asarray(operand(count)))
    expected = y, OF_NUMPY[other](y + 1), OF_NUMPY[one](np.asarray(operand(count)) + 2)
    for actual, wanted in zip(got, expected, strict=True):
        assert (np.asarray(actual) == wanted).all()


def _of_blocks(f: Callable[[Any, Any], Parts]) -> Callable[[Any], Any]:
    return lambda x: np.concatenate(f(*np.split(x, 2)))


def _exchanged(a: Any, b: Any) -> Parts:
    half = a.size // 2
    return np.concatenate([a[:half], b[:half]]), np.concatenate([a[half:], b[half:]])


OF_NUMPY = {
    "all_reduce": _of_blocks(lambda a, b: (a + b, a + b)),
    "ppermute": _of_blocks(lambda a, b: (b, a)),
    "all_to_all": _of_blocks(_exchanged),
    "broadcast": _of_blocks(lambda a, _: (a, a)),
    "all_gather": _of_blocks(lambda a, _: (a, a)),
    "reduce_scatter": _of_blocks(lambda a, b: (a + b, a + b)),
}
