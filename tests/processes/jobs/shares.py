"""What crosses between two hosts of two ranks each: the reduced share of each, or its own block."""

import re
from typing import Any

import jax
import numpy as np
from world import mapped, mesh, on_two_hosts, say

import jaxcoll

# XLA's own collectives, and the types of their first operands.
COLLECTIVE = re.compile(r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)\"?\(")
OPERAND = re.compile(r": \(tensor<([\dx]+)x(\w+)>\) ->")


def crossing(f: Any, shape: tuple[int, ...]) -> str:
    """Returns the collectives that are left to XLA, and what each takes of a rank."""
    program: Any = mapped(f, mesh())
    text = program.lower(jax.ShapeDtypeStruct((mesh().size, *shape), np.float32)).as_text()
    found = []
    for collective in COLLECTIVE.finditer(text):
        operand = OPERAND.search(text, collective.end())
        assert operand is not None
        count = int(np.prod([int(n) for n in operand[1].split("x")]))
        found.append(f"{collective[1]} of {count} {operand[2]}")
    return ", ".join(found)


on_two_hosts()
AXES = mesh().axis_names
say(f"all_reduce: {crossing(lambda x: jaxcoll.all_reduce(x, AXES), (1200,))}")
say(f"reduce_scatter: {crossing(lambda x: jaxcoll.reduce_scatter(x, AXES), (4, 300))}")
say(f"all_gather: {crossing(lambda x: jaxcoll.all_gather(x, AXES), (1200,))}")
say(f"broadcast: {crossing(lambda x: jaxcoll.broadcast(x, AXES), (1200,))}")
