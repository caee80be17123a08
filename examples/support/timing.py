"""Time training steps: what one costs, and the same step on different paths, alternately."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcoll
from support.together import agree, say

# (state, *inputs) to (state, loss)
Step = Callable[..., tuple[Any, jax.Array]]


@jax.jit
def _copy(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)


class _Runner:
    """Runs one variant of a step on its own copy of the state, which the step donates."""

    def __init__(
        self,
        step: Step,
        state: Any,
        inputs: tuple[Any, ...],
        backend: Literal["native", "lax", "auto"],
    ):
        self._step, self._inputs = step, inputs
        self._backend: Literal["native", "lax", "auto"] = backend
        self._state = _copy(state)

    def seconds(self) -> float:
        """Run one step and return how long it took."""
        with jaxcoll.using(backend=self._backend):
            start_s = time.perf_counter()
            self._state, loss = self._step(self._state, *self._inputs)
            jax.block_until_ready((self._state, loss))
            return time.perf_counter() - start_s


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Times of one training step, measured in rounds that run each variant once.

    The arrays belong together: entry i of each is from round i, so that what disturbs the
    machine for a while disturbs all alike, and differences and ratios are taken per round.

    Attributes:
        native_s: Seconds per step with jaxcoll's native all-reduce. Shape `(rounds,)`.
        lax_s: Seconds per step with the same call on `jax.lax`. Shape `(rounds,)`.
        compute_s: Seconds per step with no gradient sync at all. Shape `(rounds,)`; None where
            the step communicates for more than that.
    """

    native_s: np.ndarray
    lax_s: np.ndarray
    compute_s: np.ndarray | None

    @property
    def speedup(self) -> float:
        """Median over the rounds of lax's time by native's."""
        return float(np.median(self.lax_s / self.native_s))

    def step_s(self, path: str) -> np.ndarray:
        """Return the seconds per step on `path`, `"native"` or `"lax"`, per round."""
        return {"native": self.native_s, "lax": self.lax_s}[path]

    def sync_s(self, path: str) -> np.ndarray:
        """Return the sync's own seconds per step on `path`, per round."""
        assert self.compute_s is not None
        return self.step_s(path) - self.compute_s


def without_sync(mesh: Mesh, model: Any, loss_fn: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a data-parallel step without its sync: each device trains alone, to time the rest.

    Args:
        mesh: Of an axis `"data"` alone.
        model: A linen module.
        loss_fn: Maps its outputs and the batch to a sum and its weight.
    """

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        def loss(params: Any) -> jax.Array:
            total, weight = loss_fn(model.apply({"params": params}, batch[0]), batch)
            return total / weight

        value, grads = jax.value_and_grad(loss)(state.params)
        updates, opt_state = state.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
        return new, {"loss": value}

    # The results differ between devices, which check_vma would rightly refuse.
    mapped = jax.shard_map(
        train_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return a 95% confidence interval of the median: from the sign test, so of any distribution.

    Args:
        values: Independent measurements. Shape `(n,)`; below 6 they span less than 95%.
    """
    ordered, n = np.sort(values), len(values)
    below = max(0, int(n / 2 - 0.98 * n**0.5))
    return float(ordered[below]), float(ordered[n - 1 - below])


def compare(
    step: Step,
    step_without_sync: Step | None,
    state: Any,
    inputs: tuple[Any, ...],
    limit_s: float,
) -> Comparison | None:
    """Time the step on both paths and without its sync, alternately.

    Args:
        step: Compiled anew for each path.
        step_without_sync: The same step, but with no collective in it; None if there is none.
        state: Left as it is; each variant trains a copy.
        inputs: What the step takes beside the state.
        limit_s: Stop after this many seconds, compilation excluded, but not before 3 rounds.

    Returns:
        The times; None if `limit_s` is 0 or jaxcoll's native path can't run here.
    """
    if not limit_s:
        return None
    say(f"timing the step on native and on lax, {limit_s:g} s and two compilations", flush=True)
    # Collective matmuls are one native call only where that is faster: "auto" knows.
    ours = "auto" if step_without_sync is None else "native"
    runners = [
        _Runner(step, state, inputs, ours),
        _Runner(step, state, inputs, "lax"),
    ]
    if step_without_sync is not None:
        runners.append(_Runner(step_without_sync, state, inputs, "auto"))
    try:
        for runner in 2 * runners:
            runner.seconds()  # compiles, then runs once to warm up
    except jaxcoll.NativeUnavailableError as error:
        say(f"not timed: {error}")
        return None
    samples: list[list[float]] = []
    deadline_s = time.perf_counter() + limit_s
    while len(samples) < 3 or agree(deadline_s - time.perf_counter()) > 0:
        sample = [0.0] * len(runners)
        for i in range(len(runners)):
            which = (i + len(samples)) % len(runners)  # none is always the one after another
            sample[which] = runners[which].seconds()
        samples.append(sample)
    native_s, lax_s, *compute_s = np.array(samples).T
    return Comparison(native_s, lax_s, compute_s[0] if compute_s else None)
