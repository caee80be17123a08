"""Scenarios of failing: the error names who is missing, and the next program runs."""

import time
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from stress.world import World, check_equal, in_python, scenario, timeout

import jaxcoll


def _check_error(text: str, parts: Sequence[str]) -> None:
    for part in parts:
        assert part in text, f"expected {part!r} in the error: {text}"


@scenario
def deadline(world: World) -> None:
    """A rank that is late: an error on all ranks that says who and where, and then life goes on."""
    size = world.size
    late = size - 1
    nap_s = 0.0

    def sleep(rank: int) -> None:
        if rank == late:
            time.sleep(nap_s)

    def body(x: jax.Array) -> jax.Array:
        before = jaxcoll.all_reduce(x[0], "x")
        return jaxcoll.all_reduce(in_python(before, sleep) + x[0], "x", op="sum")[None]

    x = world.integers(size, 20)
    total = x.sum(0, dtype=np.int32)
    expected = np.broadcast_to(size * total + total, x.shape)
    step = world.per_rank(body)
    check_equal("in time", step(x), expected)
    for _ in range(world.rounds):
        with timeout(0.3):
            nap_s = 0.9
            start = time.monotonic()
            try:
                jax.block_until_ready(step(x))
            except jax.errors.JaxRuntimeError as error:
                text = str(error)
            else:
                raise AssertionError("a rank was late and no error came")
            assert time.monotonic() - start < 5, "the error came late"
            came = ", ".join(f"{r} (device {r})" for r in range(size - 1))
            _check_error(
                text,
                (
                    "jaxcoll.CollectiveError: ",
                    'all_reduce over "x" of i32[20]',
                    f"for rank {late} (device {late}) of {size}",
                    f"arrived: rank {came};",
                    "failing.py:",
                ),
            )
            nap_s = 0.0
        check_equal("the next step", step(x), expected)


@scenario
def one_of_many_fails(world: World) -> None:
    """A failure among un-awaited steps that don't depend on each other stays in its own step."""
    size = world.size
    bad_step, num_steps = 7, 20
    calls = [0] * size

    def sleep(rank: int) -> None:
        calls[rank] += 1
        if rank == 0 and calls[rank] == bad_step + 1:
            time.sleep(0.8)

    def body(x: jax.Array) -> jax.Array:
        y = jaxcoll.all_reduce(in_python(x[0], sleep), "x")
        return (lax.psum(y, "x") + jaxcoll.all_reduce(y, "x", op="max"))[None]

    x = world.integers(size, 20)
    expected = np.broadcast_to((size + 1) * x.sum(0, dtype=np.int32), x.shape)
    step = world.per_rank(body)
    for _ in range(world.rounds):
        calls[:] = [-1] * size
        check_equal("alone", step(x), expected)
        with timeout(0.25):
            results = [step(x) for _ in range(num_steps)]
            for i, result in enumerate(results):
                try:
                    got = np.asarray(result)
                except jax.errors.JaxRuntimeError as error:
                    assert i == bad_step, f"step {i} failed: {error}"  # noqa: PT017
                    _check_error(str(error), ("jaxcoll.CollectiveError: ", "for rank 0 (device 0)"))
                else:
                    assert i != bad_step, "the late rank's step succeeded"
                    check_equal(f"step {i}", got, expected)


@scenario
def a_device_raises(world: World) -> None:
    """An error on one device before a collective: an error, no hang, and the next step runs."""
    size = world.size
    bad = -1

    def act(rank: int) -> None:
        if rank == bad:
            raise ArithmeticError("this device can't go on")

    def body(x: jax.Array) -> jax.Array:
        before = jaxcoll.all_reduce(x[0], "x")
        beside = jaxcoll.all_reduce(x[0] + 1, "x")
        return (jaxcoll.all_reduce(in_python(before, act), "x") + beside)[None]

    x = world.integers(size, 20)
    total = x.sum(0, dtype=np.int32)
    expected = np.broadcast_to(size * total + total + size, x.shape)
    step = world.per_rank(body)
    check_equal("at first", step(x), expected)
    for _ in range(world.rounds):
        with timeout(0.3):
            bad = world.rng.randrange(size)
            try:
                jax.block_until_ready(step(x))
            except jax.errors.JaxRuntimeError as error:
                text = str(error)
            else:
                raise AssertionError("a device raised and no error came")
            assert "can't go on" in text or "jaxcoll.CollectiveError: " in text, text
            bad = -1
        check_equal("the next step", step(x), expected)
