"""Variants of a program, timed in turn in the rounds of one job: their ratios can be paired."""

import random
import time
from collections.abc import Callable
from typing import Any

# A variant's programs, such as chains of different lengths.
Programs = dict[str, list[Callable[[], Any]]]


def measure(
    programs: Programs,
    meet: Callable[[], Any],
    budget_s: float,
    least_rounds: int,
    most_rounds: int = 60,
) -> dict[str, list[list[float]]]:
    """Returns seconds by variant, program and round; all programs run in each round.

    Their order is drawn anew for each round: what runs after Gloo has its threads beside it, and a
    launch depends on what ran before, so that with a fixed order it would not drop out between a
    variant's chains. Times are from when all processes are ready, which `meet` sees to, until the
    last has its result: a root that sends may go on long before, and who computes alone waits for
    nobody, which would charge the next variant with what the others have yet to do.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    for of in programs.values():
        for program in of:
            jax.block_until_ready(program())
    begin = time.perf_counter()
    for of in programs.values():
        for program in of:
            jax.block_until_ready(program())
    once = time.perf_counter() - begin
    wanted = np.int32(min(most_rounds, max(least_rounds, budget_s / once)))
    rounds = int(multihost_utils.broadcast_one_to_all(wanted))  # the same on all
    seconds: dict[str, list[list[float]]] = {
        name: [[] for _ in of] for name, of in programs.items()
    }
    all_programs = [(name, i) for name, of in programs.items() for i in range(len(of))]
    order = random.Random(0)  # the same on all
    for _ in range(rounds):
        for name, i in order.sample(all_programs, len(all_programs)):
            jax.block_until_ready(meet())
            start = time.perf_counter()
            jax.block_until_ready(programs[name][i]())
            seconds[name][i].append(time.perf_counter() - start)
    if jax.process_count() == 1:
        return seconds
    of_all = multihost_utils.process_allgather([np.array(of) for of in seconds.values()])
    return {name: of.max(axis=0).tolist() for name, of in zip(seconds, of_all, strict=True)}
