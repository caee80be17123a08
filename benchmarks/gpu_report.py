"""The page of `gpu.py`'s results."""

from collections.abc import Sequence
from typing import Any

from shared import head

_WAYS = ("ours", "lax", "nccl", "copy", "alone")
_NOTE = (
    "Medians in us of one call, and medians of ratios of the same rounds: above 1 ours is faster. "
    "*lax*: the same program on XLA's NCCL, where that runs. *nccl*: NCCL alone, called in C with "
    "no program around it; for a collective matmul its collective alone. *copy*: a copy of a "
    "rank's operand on its own GPU. *alone*: the matmul of all blocks, or the step, without "
    "communication; of matmuls each call but *nccl* also changes an element of an operand, so that "
    "XLA makes them all. *bus GB/s*: what a rank has to send at least, over the time. *order*: of "
    "sums; "
    "`by rank` over peer memory. *wrong*: elements "
    "of ours that differ from what the ranks' numbers say, and of the step, losses."
)


def num_wrong(layouts: Sequence[dict[str, Any]]) -> int:
    """Returns how many elements were wrong."""
    return sum(row.get("wrong", 0) for of in layouts for row in of["rows"])


def section(of: dict[str, Any]) -> str:
    """Returns the table of a layout."""
    lines = [f"## {of['layout']}", ""]
    if of["not beside"]:
        lines += [f"Lax or NCCL alone do not run so here ({of['not beside']}).", ""]
    if of["failed"]:
        lines += [f"**It has failed**: {of['failed']}", ""]
    ratios = [f"{way} / ours" for way in _WAYS[1:]]
    columns = ["call", "of", *_WAYS, *ratios, "bus GB/s", "order", "rounds", "wrong"]
    lines += [f"| {' | '.join(columns)} |", "|---|---|" + "--:|" * (len(columns) - 2)]
    lines += [_line(row, len(columns)) for row in of["rows"]]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any], columns: int) -> str:
    cells = [row["call"], row["of"]]
    if reason := row.get("left out"):
        cells += [f"left out: {reason}"] + [""] * (columns - 3)
    else:
        cells += [_number(row["us"].get(way), ".1f") for way in _WAYS]
        cells += [_number(row["over ours"].get(way), ".2f") for way in _WAYS[1:]]
        cells += [_number(row.get("bus GB/s"), ".1f"), row.get("order", "")]
        cells += [str(row["rounds"]), str(row["wrong"])]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def page(result: dict[str, Any]) -> str:
    """Returns the whole page."""
    gpus = result["gpus"]
    versions = ", ".join(f"{name} {version}" for name, version in gpus["versions"].items())
    lines = [*head("GPUs: jaxcoll beside jax.lax and NCCL", result)]
    lines += [f"{gpus['count']} x {gpus['kind']}. {versions}", "", _NOTE, ""]
    if result["not shared"]:
        lines += [f"No processes that share a GPU: {result['not shared']}.", ""]
    elif result["no mps"]:
        lines += [f"No processes at once on a GPU: {result['no mps']}.", ""]
    return "\n".join(lines) + "\n" + "\n".join(map(section, result["layouts"]))
