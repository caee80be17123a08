"""From which size on `backend="auto"` leaves copies to lax: known defaults, or what was measured.

Copies alone, which give the same bits on both paths. `jaxcoll bench` writes what it measured on a
machine; `auto` reads it once a process.
"""

import functools as ft
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from jaxcoll._config import logger

COPIES = ("all_gather", "all_to_all", "broadcast", "ppermute")

# op -> ranks of a group -> bytes of a rank's operand; None where lax is never faster
Table = dict[str, dict[int, int | None]]

# Where benchmarks/results shows native behind, whatever the number of ranks.
_DEFAULTS = {"ppermute": 4 << 20}


def lax_from_bytes(op: str, ranks: int) -> int | None:
    """Returns the size from which on lax is faster, or None where it is not."""
    table = _measured()
    if table is None:
        return _DEFAULTS.get(op)
    by_ranks = table.get(op, {})
    if ranks in by_ranks:
        return by_ranks[ranks]
    # Not measured: what holds for the next larger group, which is nearer to the memory's limit.
    return next((by_ranks[r] for r in sorted(by_ranks) if r > ranks), _DEFAULTS.get(op))


def fingerprint() -> str:
    """Returns what two processes must share to decide alike."""
    return json.dumps(_measured(), sort_keys=True)


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
    merged = {op: dict(by_ranks) for op, by_ranks in (_read() or {}).items()}
    for op in set(found) & set(COPIES):
        size = found[op]
        if size is None:
            known = merged.get(op, {}).get(ranks, _DEFAULTS.get(op))
            size = known if known is not None and known > largest else None
        merged.setdefault(op, {})[ranks] = size
    path().parent.mkdir(parents=True, exist_ok=True)
    new = path().with_suffix(f".{os.getpid()}.tmp")  # nobody reads half a file
    new.write_text(json.dumps({"machine": _machine(), "lax_from_bytes": merged}, indent=1) + "\n")
    new.replace(path())
    _measured.cache_clear()
    return path()


@ft.cache
def _measured() -> Table | None:
    return _read()


def _read() -> Table | None:
    """Returns the file's table, or None where there is none for this machine."""
    file: object = "jaxcoll's file of crossovers"
    try:
        file = path()
        if not file.exists():
            return None
        content = json.loads(file.read_text())
        if content["machine"] != _machine():
            return None
        return {
            op: {
                int(ranks): None if size is None else int(size) for ranks, size in by_ranks.items()
            }
            for op, by_ranks in content["lax_from_bytes"].items()
        }
    except (OSError, RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
        logger.warning(
            "jaxcoll: %s can't be read (%r) and is ignored; `jaxcoll bench` writes it anew.",
            file,
            error,
        )
        return None


def _machine() -> dict[str, object]:
    """What a measurement depends on."""
    return {
        "node": platform.node(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "jaxlib": version("jaxlib"),
    }
