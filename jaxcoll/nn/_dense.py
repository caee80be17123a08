"""What the dense layers for linen and NNX share: shapes, specs, checks, and the call."""

import dataclasses
from typing import Any

import jax
from flax.linen.dtypes import promote_dtype
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcoll._errors import one_of
from jaxcoll.nn._place import Place
from jaxcoll.parallel.tensor import Mode, bias_spec, column_dense, dense, kernel_spec, row_dense

_TP_MODES = ("gather", "scatter", "none")


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense layer over the ranks of an axis.

    Attributes:
        place: where.
        mode: how weight and activations are split; see `jaxcoll.parallel.tensor`.
        overlap: communication beside computation.
        sequence_parallel: of a column the input's sequence is split, of a row the output's.
        gather_output: of a column, every rank gets all features.
    """

    place: Place
    mode: Mode
    overlap: bool = False
    sequence_parallel: bool = False
    gather_output: bool = False

    @property
    def kernel_spec(self) -> P:
        """How the kernel `(in, out)` lies."""
        return kernel_spec(self.mode, self.place.axis_name)

    @property
    def bias_spec(self) -> P:
        """How the bias `(out,)` lies."""
        return bias_spec(self.mode, self.place.axis_name)

    @property
    def _split_in(self) -> int | None:
        """The dimension of the input that is split, from its end."""
        whole = -2 if self.sequence_parallel else None
        return {"column": whole, "none": None}.get(self.mode, -1)

    @property
    def _split_out(self) -> int | None:
        """That of the result."""
        of_column = None if self.gather_output else -1
        of_row = -2 if self.sequence_parallel else None
        return {"column": of_column, "row": of_row, "none": None}.get(self.mode, -1)

    def in_features(self, x: jax.Array) -> int:
        """Returns the input's features, of all ranks."""
        return self.place.whole(x.shape[-1]) if self._split_in == -1 else x.shape[-1]

    def check_features(self, **counts: int) -> None:
        """Raises ValueError for features, those of the input first, that the ranks can't share."""
        for (name, count), mode in zip(counts.items(), ("row", "column"), strict=True):
            if self.mode in (mode, "gather", "scatter"):
                self.place.check_divides(name, count)

    def __call__(
        self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None, dtype: Any
    ) -> jax.Array:
        """Returns the layer's output, in `dtype` or that of input and weight."""
        if self.sequence_parallel and x.ndim < 2:
            raise ValueError(
                f"{self.place.call}: x: expected (..., s, in), with a sequence to split, got shape "
                f"{x.shape}."
            )
        has_whole_sequence = self.mode == "row" or not self.place.is_mapped
        if self.sequence_parallel and has_whole_sequence:
            self.place.check_divides("the input's sequence", x.shape[-2])
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=dtype)
        return self.place.run(
            _on_parts,
            [(x, self._split_in)],
            [(kernel, self.kernel_spec), (bias, self.bias_spec)],
            (x.ndim, self._split_out),
            mode=self.mode,
            gather_output=self.gather_output,
            sequence_parallel=self.sequence_parallel,
            overlap=self.overlap,
        )


def _on_parts(
    x: Any, kernel: Any, bias: Any, axis_name: Any, *, mode: Mode, gather_output: bool, **split: Any
) -> jax.Array:
    if mode == "column":
        return column_dense(x, kernel, bias, axis_name, gather_output=gather_output, **split)
    if mode == "row":
        return row_dense(x, kernel, bias, axis_name, **split)
    return dense(x, kernel, bias, axis_name, mode, overlap=split["overlap"])


def tp_dense(
    call: str, axis_name: str | None, mesh: Mesh | None, tp_mode: Any, *, overlap: bool
) -> Dense:
    """Returns the core of `TPDense` and `TPAsyncDense`."""
    if tp_mode not in _TP_MODES:
        raise ValueError(one_of(call, "tp_mode", tp_mode, _TP_MODES))
    return Dense(Place(call, None if tp_mode == "none" else axis_name, mesh), tp_mode, overlap)
