"""The order of a block's native calls, as it stands in the HLO.

A call gives a token, which the block's next one takes. The token is a part of the call's result,
which so is a tuple, and of a tuple's parts XLA makes nothing in place: what is computed of a large
result would take as much memory again, which nobody has touched yet. So a large single result
stands alone, and a target of ours makes a token of it for the next call.
"""

import dataclasses
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxcoll import _compat

# csrc/ffi/token.cc
_TARGET = "jaxcoll_token"
# Of a result that stands alone. Measured between 2 and 4 processes: chains of 128 to 256 KiB, for
# which there is room in cache, take 1.01 to 1.06 of the time so.
_LEAST_ALONE_BYTES = 1 << 20


@dataclasses.dataclass
class Order:
    """What the next native call of a block must come after.

    Attributes:
        last: the last call's token, or its result if that stands alone; None before the first.
    """

    last: ir.Value | None = None

    def token(self) -> ir.Value:
        """Returns what the next call takes."""
        if self.last is None:
            return stablehlo.create_token()
        if self.last.type == token_type():
            return self.last
        rank = ir.RankedTensorType(self.last.type).rank
        made = _compat.custom_call(
            _TARGET,
            result_types=[token_type()],
            operands=[self.last],
            backend_config={},
            operand_layouts=[tuple(reversed(range(rank)))],
            result_layouts=[()],
        )
        return made.results[0]


def gives_token(num_results: int, num_bytes: int) -> bool:
    """Tells whether a call with so many results, of so many bytes together, gives a token."""
    return num_results != 1 or num_bytes < _LEAST_ALONE_BYTES


def order_here(memory: dict[Any, Any]) -> Order:
    """Returns the order of the block that is being lowered; `memory` is the module's."""
    block = ir.InsertionPoint.current.block
    return memory.setdefault("order", {}).setdefault(block, Order())


def token_type() -> ir.Type:
    """Returns the type of tokens."""
    return stablehlo.TokenType.get()
