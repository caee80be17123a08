"""Training steps between two hosts on a slow link, with gradients in full, 16 and 8 bits.

    sudo python benchmarks/compression.py [--rate 1gbit] [--processes 1] [--rounds 10]

The hosts are two network namespaces, joined by a pair of virtual interfaces whose rate `tc` limits.
In turn and in one run: a data-parallel step of a Transformer with each compression. Beside the
time: how far one mean is off, and the loss after some steps from one start.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environment import environment
from shared import command, head, save

PORT = 7787
COMPRESSIONS: tuple[Any, ...] = (None, "bf16", "int8")
CONVERGENCE_STEPS = 60


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[list[tuple[str, str]]]:
    """Yields the names and addresses of two namespaces with a link between them."""

    def call(*command: str) -> None:
        subprocess.run(command, check=True)

    names = [f"jaxcoll-{os.getpid()}-{letter}" for letter in "ab"]
    links = [f"jb{os.getpid()}{letter}" for letter in "ab"]
    found = []
    with contextlib.ExitStack() as stack:
        for name in names:
            call("ip", "netns", "add", name)
            stack.callback(call, "ip", "netns", "del", name)
        call("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for i, (name, link) in enumerate(zip(names, links, strict=True)):
            address = f"10.213.8.{i + 1}"
            call("ip", "link", "set", link, "netns", name)
            call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            call("ip", "-n", name, "link", "set", link, "up")
            call("ip", "-n", name, "link", "set", "lo", "up")
            shape = ["tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", rate]
            call("ip", "netns", "exec", name, *shape, "burst", "256kb", "latency", "50ms")
            etc = Path("/etc/netns", name)  # what `ip netns exec` puts over /etc
            etc.mkdir(parents=True)
            stack.callback(shutil.rmtree, etc)
            (etc / "hosts").write_text(f"{address} {socket.gethostname()}\n127.0.0.1 localhost\n")
            found.append((name, address))
        yield found


def measure(rounds: int) -> list[dict[str, Any]]:
    """Measures on all devices of this job; one row for each compression."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxcoll
    from jaxcoll.models import TransformerLM

    jaxcoll.initialize()
    mesh = jaxcoll.make_mesh({"data": -1})
    model = TransformerLM(256, 4, 384, num_heads=6)
    shape = (8 * mesh.size, 65)
    # Bytes that can be learned: counted up from anywhere.
    starts = np.random.default_rng(0).integers(0, 256, (CONVERGENCE_STEPS, shape[0], 1))
    windows = ((starts + np.arange(shape[1])) % 256).astype(np.int32)
    sharding = NamedSharding(mesh, P("data"))

    def tokens(i: int) -> Any:
        whole = windows[i % CONVERGENCE_STEPS]
        return jax.make_array_from_callback(shape, sharding, whole.__getitem__)

    def batch(t: Any) -> Any:
        return t[:, :-1], t[:, 1:]

    steps, first = {}, {}
    for compression in COMPRESSIONS:
        optimizer = optax.chain(
            jaxcoll.optax.synchronize("data", compression, mesh=mesh), optax.adamw(1e-3)
        )
        state = jaxcoll.create_train_state(
            model, optimizer, jax.random.key(0), batch(tokens(0)), mesh
        )
        train_step = jaxcoll.data_parallel_train_step(model)
        mapped = jax.shard_map(
            lambda state, t, f=train_step: f(state, batch(t)),
            mesh=mesh,
            in_specs=(state.specs, P("data")),
            out_specs=(state.specs, P()),
        )
        steps[compression], first[compression] = jax.jit(mapped), state

    def off(compression: Any) -> float:
        """How far the mean of random gradients is from the exact one, over its norm."""
        optimizer = jaxcoll.optax.synchronize("data", compression, mesh=mesh)
        state = optimizer.init(jnp.zeros(1 << 20))
        specs = dataclasses.replace(state, error=P("data"))

        def compare(key: Any, state: Any) -> Any:
            key = jax.random.fold_in(key, jax.lax.axis_index("data"))
            grads = jax.random.normal(key, (1 << 20,))
            mean, _ = optimizer.update(grads, state)
            right = jaxcoll.all_reduce(grads, "data", op="mean")
            return jnp.linalg.norm(mean - right) / jnp.linalg.norm(right)

        mapped = jax.shard_map(compare, mesh=mesh, in_specs=(P(), specs), out_specs=P())
        return float(jax.jit(mapped)(jax.random.key(1), state))

    losses = {}
    for compression, step in steps.items():
        state = first[compression]
        for i in range(CONVERGENCE_STEPS):
            state, metrics = step(state, tokens(i))
        losses[compression] = float(metrics["loss"])
    seconds: dict[Any, list[float]] = {compression: [] for compression in COMPRESSIONS}
    data = tokens(0)
    for number in range(rounds):
        for compression in COMPRESSIONS[:: 1 if number % 2 else -1]:
            begin = time.perf_counter()
            jax.block_until_ready(steps[compression](first[compression], data))
            seconds[compression].append(time.perf_counter() - begin)
    return [
        {
            "compression": compression or "none",
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(first[compression].params)),
            "ms": 1e3 * statistics.median(seconds[compression]),
            "ratio": statistics.median(
                a / b for a, b in zip(seconds[None], seconds[compression], strict=True)
            ),
            "error": off(compression),
            "loss": losses[compression],
        }
        for compression in COMPRESSIONS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc takes it")
    parser.add_argument("--processes", type=int, default=1, help="of a host")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        import jax

        for row in measure(chosen.rounds):
            if jax.process_index() == 0:
                print(json.dumps(row), flush=True)
        return
    of = environment()
    with two_hosts(chosen.rate) as hosts:
        launchers = []
        for i, (name, _) in enumerate(hosts):
            program = ["ip", "netns", "exec", name, sys.executable, "-m", "jaxcoll", "run"]
            program += ["-n", str(chosen.processes), "--hosts", "2", "--host-id", str(i)]
            program += ["--coordinator", f"{hosts[0][1]}:{PORT}", __file__, "--child"]
            program += ["--rounds", str(chosen.rounds)]
            launchers.append(
                subprocess.Popen(
                    program,
                    env={**os.environ, "JAXCOLL_HOST_ID": name},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [launcher.communicate(timeout=900)[0] for launcher in launchers]
    if any(launcher.returncode for launcher in launchers):
        sys.exit("\n".join(said))
    lines = [line.partition("] ")[2] for line in said[0].splitlines()]
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    result = {"command": command(), "environment": of, "rate": chosen.rate, "rows": rows}
    text = [
        *head("Gradients in fewer bits between two hosts", result),
        f"Two network namespaces of one machine, a link of {chosen.rate}, {chosen.processes} "
        f"process(es) on each. A data-parallel step of a Transformer of {rows[0]['parameters']:,} "
        f"parameters, AdamW; medians of {chosen.rounds} rounds, in turn. *error*: the norm of what "
        "one mean of random gradients is off, over that of the mean. *loss*: after "
        f"{CONVERGENCE_STEPS} steps from the same start.",
        "",
        "| between hosts | a step, ms | none / this | error | loss |",
        "|---|--:|--:|--:|--:|",
        *(
            f"| {row['compression']} | {row['ms']:.0f} | {row['ratio']:.2f} | {row['error']:.1e} | "
            f"{row['loss']:.4f} |"
            for row in rows
        ),
    ]
    save("compression", result, "\n".join(text) + "\n", chosen.out)


if __name__ == "__main__":
    main()
