"""Limits on waits: what is allowed, and what the environment asks for."""

from collections.abc import Mapping

DEFAULT_TIMEOUT_S = 300.0
DEFAULT_COMPILE_TIMEOUT_S = 3600.0
# Three years: XLA's limits, which follow, are whole seconds of 32 bits.
MOST_TIMEOUT_S = 1e8


def checked_timeout(call: str, argument: str, value: object) -> float | None:
    """Returns a limit on waits, or raises ValueError."""
    if value is None:
        return None
    is_bool = isinstance(value, bool)  # which is an int
    if isinstance(value, int | float) and not is_bool and 0 < value <= MOST_TIMEOUT_S:
        return float(value)
    raise ValueError(_no_timeout(call, argument, value))


def timeout_from(
    environment: Mapping[str, str],
    variable: str = "JAXCOLL_TIMEOUT_S",
    default: float = DEFAULT_TIMEOUT_S,
) -> float | None:
    """Returns a limit on waits that the environment asks for, in seconds; None: no limit."""
    value = environment.get(variable, "").strip()
    if not value:
        return default
    if value.lower() == "none":
        return None
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number <= MOST_TIMEOUT_S:
        raise ValueError(_no_timeout("environment", variable, value))
    return number


def _no_timeout(call: str, argument: str, value: object) -> str:
    return (
        f"{call}: {argument}: expected a positive number of seconds, at most {MOST_TIMEOUT_S:.0e}, "
        f"or None to wait for ever, got {value!r}."
    )
