"""The demo's training step, data-parallel, ours beside lax and beside the same without the sync."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcoll
from jaxcoll.models import TransformerLM

AXIS = "x"
# examples/train_lm.py's: bytes, blocks, features, heads; windows of a rank, bytes of a window.
MODEL, WINDOWS, CONTEXT = (256, 3, 160, 4), 2, 128
_CHECKED_STEPS = 3
_TOLERANCE = 1e-3


class Step:
    """The step on all devices of a job, by each way to take the mean of the gradients."""

    def __init__(self, mesh: Any, with_lax: bool) -> None:
        self._model, self._optimizer = TransformerLM(*MODEL), optax.adamw(1e-3)
        self._mesh = mesh
        shape = (WINDOWS * mesh.size, CONTEXT + 1)
        self._tokens = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
        sharding = jax.NamedSharding(mesh, jax.P(AXIS))
        placed = jax.make_array_from_callback(shape, sharding, self._tokens.__getitem__)
        init = jax.jit(self._init, out_shardings=jax.NamedSharding(mesh, jax.P()))
        self._start = lambda: init(jax.random.key(0))
        params, _ = jax.eval_shape(self._init, jax.random.key(0))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        syncs: dict[str, Callable[[Any], Any]] = {
            "ours": lambda tree: jaxcoll.all_reduce(tree, AXIS, "mean", backend="native"),
            "lax": lambda tree: jax.lax.pmean(tree, AXIS),
            "alone": lambda tree: tree,
        }
        if not with_lax:
            del syncs["lax"]
        self._steps = {name: self._mapped(sync) for name, sync in syncs.items()}
        self._placed = placed
        self.ways = {name: self._way(step) for name, step in self._steps.items()}

    def wrong(self) -> int:
        """Returns in how many steps our loss is not that of one device with the whole batch."""
        step = self._steps["ours"]
        params, opt_state = self._start()
        own = jax.tree.map(lambda leaf: leaf.addressable_data(0), self._start())
        alone = jax.jit(self._step, static_argnums=3)
        differ = 0
        for _ in range(_CHECKED_STEPS):
            params, opt_state, loss = step(params, opt_state, self._placed)
            *own, expected = alone(*own, self._tokens, _same)
            found = float(np.asarray(loss.addressable_data(0)))
            differ += abs(found - float(expected)) > _TOLERANCE
        return differ

    def _init(self, key: Any) -> Any:
        params = self._model.init(key, jnp.zeros((1, 1), jnp.int32))
        return params, self._optimizer.init(params)

    def _step(self, params: Any, opt_state: Any, tokens: Any, sync: Callable[[Any], Any]) -> Any:
        def loss(params: Any) -> Any:
            logits = self._model.apply(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = sync(jax.value_and_grad(loss)(params))
        updates, opt_state = self._optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def _mapped(self, sync: Callable[[Any], Any]) -> Callable[..., Any]:
        spec = jax.P()
        mapped = jax.shard_map(
            lambda params, opt_state, tokens: self._step(params, opt_state, tokens, sync),
            mesh=self._mesh, in_specs=(spec, spec, jax.P(AXIS)), out_specs=spec,
            check_vma=False,  # or JAX sums the gradients itself
        )  # fmt: skip
        return jax.jit(mapped, donate_argnums=(0, 1))

    def _way(self, step: Callable[..., Any]) -> Callable[[], None]:
        state = list(self._start())

        def run() -> None:
            state[:] = jax.block_until_ready(step(*state, self._placed))[:2]

        return run


def _same(tree: Any) -> Any:
    return tree
