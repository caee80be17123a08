"""Checkpoints of one plan restored under another: leaves stay, and training goes on the same."""

import functools as ft
import pathlib
from typing import Any

import jax
import numpy as np
import optax
import pytest
from plans import batch, loss_fn, of_linen
from training import assert_same, assert_trained_as

from jaxcoll import Checkpoints, ParallelPlan


class Run:
    """A plan on eight devices, its fresh state and its step."""

    def __init__(self, axes: dict[str, int], **options: Any) -> None:
        plan = ParallelPlan(axes, **options)
        model = of_linen("tensor", plan.mesh)
        self.fresh = plan.init(model, optax.adamw(0.02), jax.random.key(0), batch())
        self.step = plan.build_train_step(ft.partial(loss_fn, "tensor"), donate=False)

    def train(self, state: Any, steps: int = 2) -> tuple[Any, list[float]]:
        losses = []
        for _ in range(steps):
            state, metrics = self.step(state, batch())
            losses.append(float(metrics["loss"]))
        return state, losses


def assert_goes_on(found: tuple[Any, list[float]], undisturbed: tuple[Any, list[float]]) -> None:
    """Compares to 1e-10: of each loss, and of the largest value of a parameter or a moment."""
    (state, losses), (wanted, wanted_losses) = found, undisturbed
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-10)
    state, wanted = state.unpadded(), wanted.unpadded()
    assert_trained_as((state.params, state.opt_state), (wanted.params, wanted.opt_state))


@pytest.mark.full
def test_from_one_triple_to_another_and_back(tmp_path: pathlib.Path):
    """Five layers on two stages of two chunks: stored in another order, with room for more."""
    with jax.enable_x64(True):
        parts = {"min_weight_size": 16}
        flat = Run({"data": 2, "fsdp": 2, "tensor": 2}, fsdp=parts)
        cut = Run({"pipe": 2, "data": 2, "tensor": 2}, schedule="interleaved", num_micro_batches=3)

        saved, _ = flat.train(flat.fresh)
        undisturbed = flat.train(saved)
        with Checkpoints(tmp_path / "flat") as checkpoints:
            checkpoints.save(saved)
            assert_same(flat.train(checkpoints.restore(flat.fresh)), undisturbed)
            moved = checkpoints.restore(cut.fresh)
        assert_same(moved.unpadded(), saved.unpadded())
        after = cut.train(moved)
        assert_goes_on(after, undisturbed)

        with Checkpoints(tmp_path / "cut") as checkpoints:
            checkpoints.save(after[0])
            again = cut.train(checkpoints.restore(cut.fresh))
            back = checkpoints.restore(flat.fresh)
        assert_same(again, cut.train(after[0]))
        assert_same(back.unpadded(), after[0].unpadded())
        assert_goes_on(flat.train(back), again)
        assert_goes_on(flat.train(back), flat.train(undisturbed[0]))
