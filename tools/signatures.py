"""Prints the signature of every public name of jaxcoll, one per line: the contract with users.

`make signatures` writes it to tests/repo/signatures.txt; a test compares.
"""

import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator

import jaxcoll

_PREFIX = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])|\btyping\.")
# Flax adds these to every module; they are its business.
_FLAX_MEMBERS = {"name", "parent", "scope"}


class _Verbatim:
    """Text that `inspect` prints as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _annotation(annotation: object) -> str:
    """An annotation in one spelling for all Python versions: `int | None`, not Optional[int]."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_annotation, arguments))
    if annotation is types.NoneType:
        return "None"
    if isinstance(annotation, str):
        return annotation
    # Where a library keeps its class differs from version to version.
    return _PREFIX.sub("", inspect.formatannotation(annotation))


def _signature(function: object) -> str:
    """`(x, axis_name: str, *, axis: int = 0) -> jax.Array`, nothing that prints an address."""
    try:
        # An NNX module's own signature is that of its metaclass.
        has_init = _is_flax(function) and "__init__" in vars(function)
        signature = inspect.signature(function.__init__ if has_init else function)  # pyright: ignore
    except (TypeError, ValueError):  # implemented in C, or a class without a constructor
        return "(...)"
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.annotation is not inspect.Parameter.empty:
            parameter = parameter.replace(annotation=_Verbatim(_annotation(parameter.annotation)))
        default = parameter.default
        if default is not inspect.Parameter.empty and hasattr(default, "__name__"):
            parameter = parameter.replace(default=_Verbatim(default.__name__))
        if not (_is_flax(function) and parameter.name in {*_FLAX_MEMBERS, "self"}):
            parameters.append(parameter)
    returns = signature.return_annotation
    if returns is not inspect.Signature.empty:
        returns = _Verbatim(_annotation(returns))
    return str(signature.replace(parameters=parameters, return_annotation=returns))


def _is_flax(value: object) -> bool:
    return any(base.__module__.startswith("flax.") for base in getattr(value, "__mro__", ()))


def _members(name: str, cls: type) -> Iterator[str]:
    """The lines of a class's own public attributes."""
    for member, value in sorted(vars(cls).items()):
        if member.startswith("_") or (_is_flax(cls) and member in _FLAX_MEMBERS):
            continue
        if isinstance(value, staticmethod | classmethod):
            yield f"  @{type(value).__name__} {name}.{member}{_signature(value.__func__)}"
        elif isinstance(value, property | functools.cached_property):
            yield f"  {name}.{member}: property"
        elif isinstance(value, enum.Enum):
            yield f"  {name}.{member} = {value.value!r}"
        else:
            is_own = callable(value) and getattr(value, "__module__", "").startswith("jaxcoll.")
            yield f"  {name}.{member}{_signature(value) if is_own else ''}"


def lines(name: str, value: object) -> Iterator[str]:
    """The lines of a public name: its own, and those of a module's or a class's public members."""
    if isinstance(value, types.ModuleType):
        for member in sorted(value.__all__):
            yield from lines(f"{name}.{member}" if name else member, getattr(value, member))
    elif isinstance(value, type):
        yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
        if not issubclass(value, enum.Enum | BaseException):
            yield f"  {name}{_signature(value)}"
        yield from _members(name, value)
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"
        if type(value).__module__.startswith("jaxcoll."):
            yield from _members(name, type(value))


if __name__ == "__main__":
    print("\n".join(lines("", jaxcoll)))
