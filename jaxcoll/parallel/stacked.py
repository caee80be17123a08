"""Which parameters hold layers that a model scans over."""

from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat
from jaxcoll.parallel.pieces import scanned
from jaxcoll.parallel.pure_model import PureModel


def stacked_params(
    model: PureModel, variables: dict[str, Any], specs: Any, inputs: Any, mesh: Mesh
) -> frozenset[int]:
    """Returns the numbers of parameters whose first dimension a `jax.lax.scan` goes over.

    Args:
        model: which.
        variables: shapes and dtypes of what it keeps.
        specs: of its parameters.
        inputs: shapes and dtypes of an example.
        mesh: on whose axes it may compute.
    """

    def program(params: Any, rest: Any, inputs: Any, rng: Any) -> Any:
        return model.apply({"params": params, **rest}, inputs, rng)

    rest = {name: value for name, value in variables.items() if name != "params"}
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=(specs, P(), P(), P()), out_specs=P(), check_vma=False
    )
    try:
        closed = jax.make_jaxpr(mapped)(variables["params"], rest, inputs, jax.random.key(0))
    except Exception:  # whatever is wrong with the model, its step will say in the user's terms
        return frozenset()
    (equation,) = closed.jaxpr.eqns
    inner = _compat.open_jaxpr(equation.params["jaxpr"])
    number = {v: i for i, v in enumerate(closed.jaxpr.invars)}
    found = (number.get(equation.invars[i]) for i in scanned(inner))
    num_params = len(jax.tree.leaves(variables["params"]))
    return frozenset(i for i in found if i is not None and i < num_params)
