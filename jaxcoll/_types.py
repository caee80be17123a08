"""The vocabulary of every layer: reductions, element types and their numbers in native programs."""

from typing import Any, Literal, TypeAlias, get_args

ReduceOp: TypeAlias = Literal["sum", "mean", "max", "min", "prod", "and", "or"]
Backend: TypeAlias = Literal["auto", "native", "lax"]
AxisName: TypeAlias = str | tuple[str, ...]
AxisIndexGroups: TypeAlias = list[list[int]] | tuple[tuple[int, ...], ...]

BACKENDS: tuple[str, ...] = get_args(Backend)

# The numbers are csrc/core/types.h's; lowered programs hold them, so they never change meaning.
REDUCE_OPS: dict[str, int] = {
    "sum": 0,
    "mean": 1,
    "max": 2,
    "min": 3,
    "prod": 4,
    "and": 5,
    "or": 6,
}
DTYPES: dict[str, int] = {
    "bool": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "uint8": 5,
    "uint16": 6,
    "uint32": 7,
    "uint64": 8,
    "float16": 9,
    "bfloat16": 10,
    "float32": 11,
    "float64": 12,
    "complex64": 13,
    "complex128": 14,
}

# Summed in float32 and rounded once, on every path.
HALF_PRECISION: frozenset[str] = frozenset({"float16", "bfloat16"})


def reduction_problem(op: str, dtype: Any) -> str | None:
    """Says why `op` has no meaning for a dtype of NumPy or JAX, or None where it has one."""
    name = str(dtype)
    if name not in DTYPES:
        return f"dtype {name} is not supported; use one of {', '.join(DTYPES)}"
    if op in ("max", "min") and name.startswith("complex"):
        return f"{op} has no meaning for {name}: complex numbers have no order"
    if op in ("and", "or") and not (name == "bool" or "int" in name):
        return f"{op!r} is for bool and integers, got {name}"
    return None


# An entry of `set_xla_metadata`, which survives every transformation: the backend of a collective
# of lax that one of our functions bound.
MARK = "jaxcoll"
