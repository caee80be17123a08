"""What `backend="auto"` takes by size: known defaults, or what was measured.

From which size on copies are left to lax (copies alone, which give the same bits on both paths),
and up to which a collective matmul is one native call. `jaxcoll bench` writes what it measured on a
machine; `auto` reads it once a process.
"""

import contextlib
import dataclasses
import functools as ft
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxcoll._config import logger

COPIES = ("all_gather", "all_to_all", "broadcast", "ppermute")
MATMULS = ("all_gather_matmul", "matmul_reduce_scatter")
Within = Literal["one process", "several processes"]  # the ranks of a group

# op -> ranks of a group -> bytes of a rank's operand; None where lax is never faster
Table = dict[str, dict[int, int | None]]


class OneCall(NamedTuple):
    """What was measured of one native call beside two steps, on square blocks.

    Attributes:
        to_products: up to how many multiplications of all ranks one call serves.
        lost_at: the most at which two steps were faster; 0: nowhere.
    """

    to_products: int
    lost_at: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a file says.

    Attributes:
        lax_from_bytes: of copies.
        one_call: of collective matmuls, by where the ranks are, then as `Table`.
    """

    lax_from_bytes: Table
    one_call: dict[str, dict[str, dict[int, OneCall]]]


# Where benchmarks/results shows native behind, whatever the number of ranks.
_DEFAULTS = {"ppermute": 4 << 20}
# From there on XLA's matmul gains more than the step that one call saves: on 2 cores of Intel Xeon
# within a process, of AMD EPYC across processes.
_DEFAULT_PRODUCTS = {"one process": 1 << 23, "several processes": 1 << 26}
# And from such a w on, whatever x is.
_DEFAULT_W = {"one process": 1 << 18, "several processes": 1 << 17}


def lax_from_bytes(op: str, ranks: int) -> int | None:
    """Returns the size from which on lax is faster, or None where it is not."""
    measured = _measured()
    by_ranks = {} if measured is None else measured.lax_from_bytes.get(op, {})
    group = _nearest(by_ranks, ranks)
    return _DEFAULTS.get(op) if group is None else by_ranks[group]


def one_call_to_products(op: str, ranks: int, within: Within) -> int:
    """Returns up to how many multiplications of all ranks one native call is the fastest.

    Args:
        op: which.
        ranks: of a group.
        within: where they are.
    """
    _, found = _measured_matmul(op, ranks, within)
    return _DEFAULT_PRODUCTS[within] if found is None else found.to_products


def two_steps_won_at(op: str, ranks: int, within: Within) -> int:
    """Returns the largest side of square blocks that two steps were measured to be faster with.

    0 where they were not. Arguments as above.
    """
    group, found = _measured_matmul(op, ranks, within)
    return 0 if found is None else _side(found.lost_at, group)


def one_call_to_w(op: str, ranks: int, within: Within, rows: int) -> int:
    """Returns up to how many elements of a rank's w one native call is the fastest.

    Args:
        op: which.
        ranks: of a group.
        within: where they are.
        rows: of a block. With as many as the squares that were measured, a w as large as theirs.
    """
    group, found = _measured_matmul(op, ranks, within)
    side = 0 if found is None else _side(found.to_products, group)
    return max(_DEFAULT_W[within], side**2 if rows >= side else 0)


def _side(products: int, ranks: int) -> int:
    return round((products / ranks**2) ** (1 / 3))


def _measured_matmul(op: str, ranks: int, within: Within) -> tuple[int, OneCall | None]:
    """Returns the group that was measured, and what was found; None where there is none."""
    measured = _measured()
    by_ranks = {} if measured is None else measured.one_call.get(within, {}).get(op, {})
    group = _nearest(by_ranks, ranks)
    return (ranks, None) if group is None else (group, by_ranks[group])


def _nearest(by_ranks: Mapping[int, object], ranks: int) -> int | None:
    """Returns the group that was measured, or the next larger one, nearer to the limits."""
    return next((group for group in sorted(by_ranks) if group >= ranks), None)


def fingerprint() -> str:
    """Returns what two processes must share to decide alike."""
    measured = _measured()
    return json.dumps(measured and dataclasses.asdict(measured), sort_keys=True)


def path() -> Path:
    """Returns the file: `JAXCOLL_CROSSOVERS`, or one in the user's cache folder.

    Raises:
        RuntimeError: there is no home folder.
    """
    if chosen := os.environ.get("JAXCOLL_CROSSOVERS"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jaxcoll" / "crossovers.json"


def write(found: Mapping[str, int | None], ranks: int, largest: int) -> Path:
    """Stores what was measured for groups of `ranks`, beside what the file holds.

    Args:
        found: of each op that was measured, from which size on lax is faster; None if it is not.
        ranks: of the groups.
        largest: the largest size that was measured; of larger ones the file keeps what it knows.

    Raises:
        OSError: the file can't be written.
    """
    known = _read() or Measured({}, {})
    merged = {op: dict(by_ranks) for op, by_ranks in known.lax_from_bytes.items()}
    for op in set(found) & set(COPIES):
        size = found[op]
        if size is None:
            before = merged.get(op, {}).get(ranks, _DEFAULTS.get(op))
            size = before if before is not None and before > largest else None
        merged.setdefault(op, {})[ranks] = size
    return _store(dataclasses.replace(known, lax_from_bytes=merged))


def write_matmuls(found: Mapping[str, OneCall], ranks: int, within: Within, largest: int) -> Path:
    """Stores what was measured of collective matmuls, beside what the file holds.

    Args:
        found: of each op that was measured.
        ranks: of the groups.
        within: where they were.
        largest: the most multiplications that were measured; of more the file keeps what it knows.

    Raises:
        OSError: the file can't be written.
    """
    known = _read() or Measured({}, {})
    merged = {
        place: {op: dict(by_ranks) for op, by_ranks in ops.items()}
        for place, ops in known.one_call.items()
    }
    of_place = merged.setdefault(within, {})
    for op, (products, lost_at) in found.items():
        before = of_place.get(op, {}).get(ranks, OneCall(_DEFAULT_PRODUCTS[within], 0))
        if products >= largest:
            products = max(products, before.to_products)
        if before.lost_at > largest:
            lost_at = before.lost_at
        of_place.setdefault(op, {})[ranks] = OneCall(products, lost_at)
    return _store(dataclasses.replace(known, one_call=merged))


def _store(measured: Measured) -> Path:
    path().parent.mkdir(parents=True, exist_ok=True)
    new = path().with_suffix(f".{os.getpid()}.tmp")  # nobody reads half a file
    content = {"machine": _machine(), **dataclasses.asdict(measured)}
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(path())
    _measured.cache_clear()
    return path()


@ft.cache
def _measured() -> Measured | None:
    return _read()


def _read() -> Measured | None:
    """Returns what the file says, or None where there is none for this machine."""
    file: object = "jaxcoll's file of crossovers"
    try:
        file = path()
        if not file.exists():
            return None
        content = json.loads(file.read_text())
        if content["machine"] != _machine():
            return None
        return Measured(
            _by_ranks(content["lax_from_bytes"]),
            {
                place: {
                    op: {int(ranks): OneCall(*map(int, one)) for ranks, one in by_ranks.items()}
                    for op, by_ranks in ops.items()
                }
                for place, ops in content.get("one_call", {}).items()
            },
        )
    except (OSError, RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
        logger.warning(
            "jaxcoll: %s can't be read (%r) and is ignored; `jaxcoll bench` writes it anew.",
            file,
            error,
        )
        return None


def _by_ranks(table: Any) -> Any:
    """Returns a table as it was before JSON made texts of its numbers."""
    return {
        op: {int(ranks): None if size is None else int(size) for ranks, size in by_ranks.items()}
        for op, by_ranks in table.items()
    }


def _processor() -> str:
    """Returns its kind, and where Linux says that, its model: its instructions decide on a lot."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "CPU part"):
                return f"{platform.machine()}, {value.strip()}"
    return platform.machine()


def _machine() -> dict[str, object]:
    """What a measurement depends on."""
    return {
        "node": platform.node(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "jaxlib": version("jaxlib"),
    }
