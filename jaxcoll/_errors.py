"""Error types and the pieces of error texts.

Every text says what call, which argument, what was expected, what came, and how to mend it.
"""

import difflib
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any


class CollectiveError(RuntimeError):
    """A collective could not be completed: a rank is missing, failed, or called another one.

    From compiled code JAX raises its own `jax.errors.JaxRuntimeError`, also a RuntimeError, whose
    text holds `jaxcoll.CollectiveError:` and the details.
    """


MARK = "jaxcoll.CollectiveError: "  # before the details, in whatever text


class NativeUnavailableError(RuntimeError):
    """`backend="native"` was asked for where the native path can't run; the text says why."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Returns ' Did you mean "x"?' for the nearest known name, or nothing."""
    near = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""


def listed(names: Iterable[object]) -> str:
    """Returns the names quoted and comma-separated, as in `"a", "b"`."""
    return ", ".join(f'"{name}"' for name in names)


def one_of(call: str, argument: str, value: object, known: Sequence[str]) -> str:
    """Returns the text for an argument that is not one of a fixed set."""
    hint = did_you_mean(value, known) if isinstance(value, str) else ""
    return f"{call}: {argument}: expected one of {listed(known)}, got {value!r}.{hint}"


def checked_count(call: str, argument: str, value: Any, least: int) -> int:
    """Returns a whole number, which may be written as 25e6.

    Raises:
        TypeError: an argument is none.
        ValueError: it is too small.
    """
    is_whole = isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not (is_whole or isinstance(value, Integral)):
        raise TypeError(
            f"{call}: {argument}: expected a whole number, at least {least}, got {value!r}."
        )
    if value < least:
        raise ValueError(f"{call}: {argument}: expected at least {least}, got {value}.")
    return int(value)


def names_of_axes(call: str, argument: str, value: Any) -> tuple[str, ...]:
    """Returns the names of one axis or several.

    Raises:
        TypeError: they are no texts.
    """
    names = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    names = tuple(names)
    if all(isinstance(name, str) for name in names):
        return names
    raise TypeError(
        f'{call}: {argument}: expected the name of a mesh axis, such as "data", or several, got '
        f"{value!r}."
    )
