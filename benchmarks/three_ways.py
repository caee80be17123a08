"""What `zero_step.py` and `plan_step.py` share: a training step in three ways, in turn."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import lost_time
from shared import peak_bytes

# Way -> what it is called, and its color. The first is ours; GSPMD: `jax.jit` of the plain step on
# arrays with the same shardings.
WAYS = {"auto": ("jaxcoll", "#1b7837"), "lax": ("lax", "#bbbbbb"), "GSPMD": ("GSPMD", "#7b7b9d")}
# For pipelines, GSPMD in as many micro-batches: tells what these cost from what else differs.
ACCUMULATED = "GSPMD, micro-batches"
# Of the time of the better of both, over ours.
NOT_SLOWER = 0.95
# Of the time of lax over ours, between processes.
AIM = 1.3


def windows(of: Any) -> tuple[Any, Any]:
    """Returns inputs and labels of a step of a model: (width, heads, layers, windows, bytes)."""
    import numpy as np

    *_, count, length = of
    tokens = np.random.default_rng(0).integers(0, 256, (count, length + 1), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def placed(arrays: Any, sharding: Any) -> Any:
    """Returns global arrays of what every process has."""
    import jax

    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), arrays
    )


def by_gspmd(model: Any, like: Any, batch: Any, num_micro_batches: int = 1) -> tuple[Any, Any, Any]:
    """Returns the plain step on arrays with the shardings of a state, its state and its batch."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    like = like.unpadded()
    optimizer, mesh = like.optimizer, batch[0].sharding.mesh
    shardings = jax.tree.map(
        lambda leaf: NamedSharding(mesh, leaf.sharding.spec), (like.params, like.opt_state)
    )

    def train_step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def loss(params: Any, micro: Any) -> Any:
            logits = model.apply({"params": params}, micro[0])
            return optax.softmax_cross_entropy_with_integer_labels(logits, micro[1]).mean()

        def add(sums: Any, micro: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, micro)), None

        if num_micro_batches == 1:
            value, grads = jax.value_and_grad(loss)(params, batch)
        else:
            # Every device keeps its examples: micro-batch i has the i-th part of each device's.
            parts = [
                x.reshape(x.shape[0] // num_micro_batches, num_micro_batches, -1).swapaxes(0, 1)
                for x in batch
            ]
            zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            sums, _ = jax.lax.scan(add, zeros, parts)
            value, grads = jax.tree.map(lambda x: x / num_micro_batches, sums)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    step = jax.jit(
        train_step,
        in_shardings=(shardings, jax.tree.map(lambda x: x.sharding, batch)),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return step, (like.params, like.opt_state), batch


def compare(
    make: Callable[[str], tuple[Any, Any, Any]],
    rounds: int,
    ways: Sequence[str] = tuple(WAYS),
    bubble: float = 0.0,
) -> dict[str, Any]:
    """Measures ways in turn.

    Args:
        make: returns a way's jitted step, `(state, batch)` to a state and metrics with a loss, and
            its state, which is donated, and its batch.
        rounds: how many.
        ways: all of `WAYS`, and more.
        bubble: the share of a step in which a core has nothing to do, however fast calls are.

    Returns:
        A row: times, ratios of rounds, bytes, and losses. `lost` is the share of the cores' time
        that calls took from our steps, `limit` what the ratio to lax would be if that were the
        bubble alone.
    """
    import jax

    import jaxcoll

    steps, peaks = {}, {}
    for way in ways:
        with jaxcoll.using(backend="lax" if way == "lax" else "auto"):
            step, state, batch = make(way)
            compiled = step.lower(state, batch).compile()
        peaks[way], steps[way] = peak_bytes(compiled), (compiled, state, batch)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses = {}
    for number in range(rounds + 2):
        for way in ways[:: 1 if number % 2 else -1]:
            step, state, batch = steps[way]
            begin = time.perf_counter()
            state, metrics = jax.block_until_ready(step(state, batch))
            if number > 1:  # warm
                seconds[way].append(time.perf_counter() - begin)
            steps[way], losses[way] = (step, state, batch), float(metrics["loss"])
    lost = lost_time.of_steps(*steps["auto"])
    better = [min(pair) for pair in zip(seconds["lax"], seconds["GSPMD"], strict=True)]

    def over_ours(times: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(times, seconds["auto"], strict=True))

    over_lax = over_ours(seconds["lax"])
    more = {way: over_ours(seconds[way]) for way in ways if way not in WAYS}
    return {
        "ms": {way: 1e3 * statistics.median(times) for way, times in seconds.items()},
        "ratio": {"lax": over_lax, "better": over_ours(better), **more},
        "lost": lost,
        "limit": over_lax / (1 - max(0.0, lost - bubble)),
        "peak bytes": peaks,
        "losses": losses,
        "equal": max(losses.values()) - min(losses.values()) < 2e-3,
    }


# ---- Pages and pictures --------------------------------------------------------------------------


def tokens(row: dict[str, Any]) -> int:
    """Returns how many tokens a step has."""
    return row["model"][3] * row["model"][4]


def model_text(row: dict[str, Any]) -> str:
    """Returns width, layers and tokens."""
    return f"{row['model'][0]} x {row['model'][2]}, {tokens(row)}"


def rate(row: dict[str, Any], way: str) -> float:
    """Returns tokens per second."""
    return tokens(row) / row["ms"][way] * 1e3


def peaks_text(row: dict[str, Any]) -> str:
    """Returns megabytes on a device, of each way."""
    return ", ".join(f"{row['peak bytes'][way] / 1e6:.1f}" for way in WAYS)


def ratios_text(row: dict[str, Any]) -> str:
    """Returns three cells: lax / ours, what that is at most, and the better of both / ours."""
    ratio = row["ratio"]
    return f"{ratio['lax']:.2f} | {row['limit']:.2f} | {ratio['better']:.2f}"


def losing(rows: list[dict[str, Any]], name_of: Callable[[dict[str, Any]], str]) -> list[str]:
    """Returns a section on the rows that are behind the better of both."""
    lines = [
        "",
        f"## Below {NOT_SLOWER} of the better of both",
        "",
        "Our calls are the cause as far as the same step is faster on lax, which a row says where "
        f"that is more than {1 - NOT_SLOWER:.0%}; of the rest it is GSPMD: what `jax.jit` makes of "
        "the step is faster than what XLA makes of one under `jax.shard_map`. A pipeline works in "
        "micro-batches; then the last figure is the time of GSPMD in as many, over ours.",
        "",
        "| row | better of both / ours | lax / ours | cause |",
        "|---|--:|--:|---|",
    ]
    for row in sorted(rows, key=lambda row: row["ratio"]["better"]):
        better, lax = row["ratio"]["better"], row["ratio"]["lax"]
        if better < NOT_SLOWER:
            cause = "GSPMD" if lax >= NOT_SLOWER else f"our calls, {1 - lax:.0%}; GSPMD"
            if ACCUMULATED in row["ratio"]:
                cause += f"; in as many micro-batches {row['ratio'][ACCUMULATED]:.2f}"
            lines.append(f"| {_place(row, name_of)} | {better:.2f} | {lax:.2f} | {cause} |")
    return lines


def below_aim(rows: list[dict[str, Any]], name_of: Callable[[dict[str, Any]], str]) -> list[str]:
    """Returns a section on the rows of several processes that are not far enough before lax."""
    lines = [
        "",
        f"## Below {AIM} of lax between processes",
        "",
        f"*At most*, as above, is of a step whose calls take no time. Where it is below {AIM}, the "
        "rest of the step, computing and a pipeline's bubble, is too long for any calls to reach "
        "that. The share of our calls has what they wait for other processes in it, but not a "
        "pipeline's bubble.",
        "",
        "| row | lax / ours | at most | cause |",
        "|---|--:|--:|---|",
    ]
    for row in sorted(rows, key=lambda row: row["ratio"]["lax"]):
        lax, limit = row["ratio"]["lax"], row["limit"]
        if row["processes"] > 1 and lax < AIM:
            cause = f"our calls take {1 - lax / limit:.1%} of the cores' time"
            if limit < AIM:
                cause += f": no faster ones reach {AIM}"
            lines.append(f"| {_place(row, name_of)} | {lax:.2f} | {limit:.2f} | {cause} |")
    return lines


def _place(row: dict[str, Any], name_of: Callable[[dict[str, Any]], str]) -> str:
    return f"{row['processes']} x {row['devices']}, {name_of(row)}, {model_text(row)}"


def losses_text(row: dict[str, Any]) -> str:
    """Says whether losses are equal."""
    return "equal" if row["equal"] else "DIFFERENT"


def bars(axes: Any, rows: list[dict[str, Any]], labels: list[str], title: str) -> None:
    """Draws tokens per second of each way, for each row."""
    for i, (way, (name, color)) in enumerate(WAYS.items()):
        places = [j + 0.27 * (i - 1) for j in range(len(rows))]
        axes.bar(places, [rate(row, way) for row in rows], 0.25, label=name, color=color)
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylabel("tokens/s", fontsize=8)
    axes.set_title(title, fontsize=9)


def suptitle(figure: Any, result: dict[str, Any]) -> None:
    """Says over a picture what it shows, and where that was measured."""
    of = result["environment"]
    figure.suptitle(
        f"Training steps of processes x devices; {of['cores']} cores of {of['cpu']}, {of['date']}",
        fontsize=10,
    )
