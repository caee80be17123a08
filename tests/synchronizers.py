"""Optimizers with `synchronize` under other transformations, made of its options."""

from typing import Any

import optax

from jaxcoll.optax import synchronize


def sgd_with(learning_rate: float, compression: Any, mesh: Any, hosts: Any = None) -> Any:
    synchronized = synchronize("data", compression, mesh=mesh, hosts=hosts)
    return optax.chain(synchronized, optax.sgd(learning_rate))


OPTIMIZERS = {
    "chain": lambda **o: optax.chain(synchronize(**o), optax.sgd(0.5, momentum=0.9)),
    "after another": lambda **o: optax.chain(optax.scale(2.0), synchronize(**o), optax.sgd(0.25)),
    "masked": lambda **o: optax.chain(
        optax.masked(synchronize(**o), {"hidden_layer": True, "output_layer": False}),
        optax.sgd(0.5, momentum=0.9),
    ),
    "partitioned": lambda **o: optax.chain(
        optax.masked(synchronize(**o), {"hidden_layer": True, "output_layer": False}),
        optax.masked(synchronize(**o), {"hidden_layer": False, "output_layer": True}),
        optax.sgd(0.5),
    ),
    "flatten": lambda **o: optax.flatten(
        optax.chain(synchronize(**o), optax.sgd(0.5, momentum=0.9))
    ),
    "inject_hyperparams": lambda **o: optax.inject_hyperparams(
        sgd_with, static_args=("compression", "mesh", "hosts")
    )(learning_rate=0.1, **o),
    "MultiSteps": lambda **o: optax.MultiSteps(
        optax.chain(synchronize(**o), optax.sgd(0.5)), every_k_schedule=2
    ),
    # Of four steps' gradients, the last one waits for more.
    "before MultiSteps": lambda **o: optax.chain(
        synchronize(**o),
        optax.MultiSteps(optax.sgd(0.5), every_k_schedule=3).gradient_transformation(),
    ),
}
