"""How a reduction travels on GPUs: in which type, and what is left to do with the result."""

import dataclasses

from jaxcoll._types import HALF_PRECISION


@dataclasses.dataclass(frozen=True)
class Carried:
    """A reduction as NCCL does it.

    Attributes:
        dtype: of what travels.
        op: NCCL's reduction, by our name.
        divides: whether the result is to be divided by the number of ranks.
        bits_of: floats whose bits travel, as integers in the same order.
    """

    dtype: str
    op: str
    divides: bool = False
    bits_of: str | None = None


# NCCL has no 16-bit integers; a sum or product wraps around alike in 32 bits.
_WIDER = {"int16": "int32", "uint16": "uint32"}


def carried(dtype: str, op: str, ranks: int) -> Carried | str:
    """Returns how a reduction of a dtype travels, or says why it can't.

    As csrc/cuda/reductions.h: NCCL's mean multiplies by 1 / ranks before it adds, which is exact
    for powers of two alone, and there not for the smallest numbers, which float16 alone has where
    gradients are. NCCL rounds half precision at every step, and so twice from three ranks on. Both
    travel as float32. NCCL's max and min of floats drop NaN, XLA's don't; NaN is the first or last
    of the integers that travel instead.
    """
    if op in ("and", "or") and dtype != "bool":
        return f"NCCL has no bitwise {op!r}"
    if dtype == "bool" and op in ("sum", "mean", "prod"):
        return f"bool has no native {op}"
    if dtype.startswith("complex") and op == "prod":
        return f"NCCL has no product of {dtype}"
    if op in ("max", "min") and (dtype.startswith("float") or dtype in HALF_PRECISION):
        floats = "float32" if dtype in HALF_PRECISION else dtype
        return Carried(floats.replace("float", "int"), op, bits_of=floats)
    divides = op == "mean" and ranks & (ranks - 1) != 0
    is_rounded_twice = ranks > 2 or (dtype == "float16" and op == "mean")
    if dtype in HALF_PRECISION and op in ("sum", "mean", "prod") and is_rounded_twice:
        dtype = "float32"
    return Carried(_WIDER.get(dtype, dtype), "sum" if divides else op, divides)
