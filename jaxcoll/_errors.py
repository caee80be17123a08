"""Error types and the pieces of error texts.

Every text says what call, which argument, what was expected, what came, and how to mend it.
"""

import difflib
from collections.abc import Iterable, Sequence


class CollectiveError(RuntimeError):
    """A collective could not be completed: a rank is missing, failed, or called another one.

    From compiled code JAX raises its own `jax.errors.JaxRuntimeError`, also a RuntimeError, whose
    text holds `jaxcoll.CollectiveError:` and the details.
    """


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
