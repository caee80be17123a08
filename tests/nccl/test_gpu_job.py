"""What `make test-gpu` runs on GPUs, on the engine for these, with CUDA and NCCL on the CPU."""

from collections.abc import Callable

import jax
import pytest
from checks import auto_is_native, mesh
from gpu import conformance, parity

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")


@pytest.mark.parametrize("size", [2])
def test_a_part_of_the_table(size: int, gpus: Callable[[], str]):
    with jax.enable_x64(True):
        outcome = conformance.conform(mesh(size), list(conformance.a_few(size)))
    assert outcome.right == 2 * size * 7
    assert len(outcome.on_lax) == 1
    assert "all_reduce_or" in outcome.on_lax[0]
    assert "init rank" in gpus()


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_the_whole_table(size: int, gpus: Callable[[], str]):
    del gpus
    with jax.enable_x64(True):
        outcome = conformance.conform(mesh(size), list(conformance.rows(size)))
    assert outcome.right > 0
    assert len(outcome.on_lax) <= 4, outcome.on_lax


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_training(size: int, gpus: Callable[[], str]):
    done = parity.train_alike(jax.devices()[:size])
    assert len(done) == 6
    log = gpus()
    assert "reduce_scatter" in log
    assert "send" in log  # the ring's
