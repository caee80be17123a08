"""Which way "auto" takes for collective matmuls between two processes of one device."""

import jax
import numpy as np
from matmuls import function
from world import mapped, mesh, say

import jaxcoll
from jaxcoll import _blas, _engine

# Of a rank's block between two processes of one device each, and what "auto" takes.
SHAPES = [
    ("gather_rows", (128, 512, 256), "native"),
    ("gather_rows", (128, 512, 257), "two-step"),  # w is larger
    ("gather_rows", (257, 512, 128), "two-step"),  # as much to multiply
    ("gather_rows", (1024, 4096, 1024), "native"),  # in two steps, a large buffer
    ("gather_rows", (1023, 4096, 1024), "two-step"),
    ("gather_rows", (1024, 4096, 1025), "two-step"),
    ("gather_inner", (1024, 4096, 1024), "two-step"),
    ("gather_rows", (2048, 1024, 1024), "two-step"),  # only within a process
    ("scatter_rows", (1024, 1024, 4096), "native"),  # a large buffer
    ("scatter_rows", (1023, 1024, 4096), "two-step"),
    ("scatter_rows", (1024, 1025, 4096), "two-step"),
    ("scatter_columns", (1024, 1024, 4096), "two-step"),
]
# The same where the BLAS keeps up with XLA's matmul.
SHAPES_OF_BLAS = [
    ("gather_rows", (512, 1024, 1024), "native"),
    ("gather_rows", (511, 1024, 1024), "two-step"),
    ("gather_inner", (512, 1024, 1024), "two-step"),
    ("scatter_rows", (512, 4096, 128), "native"),
    ("scatter_rows", (511, 4096, 128), "two-step"),
    ("scatter_columns", (512, 1024, 1024), "two-step"),
]


def main() -> None:
    over = mesh()
    _engine._state.has_spare_cores = False  # whatever this machine has: nothing runs
    jaxcoll.config.backend = "auto"
    _blas.is_behind = lambda sets: None
    cases = [(np.float32, False, *shape) for shape in SHAPES]
    for dtype in (np.float32, jax.numpy.bfloat16):
        cases += [(dtype, True, *shape) for shape in SHAPES_OF_BLAS]
    for dtype, keeps_up, kind, (rows, inner, columns), path in cases:
        _blas.keeps_up = lambda sets, keeps_up=keeps_up: keeps_up
        ranks = over.size
        x = (ranks, rows * (ranks if kind == "scatter_rows" else 1), inner)
        w = inner * (ranks if kind == "gather_inner" else 1)
        w = (ranks, w, columns * (ranks if kind == "scatter_columns" else 1))
        program = mapped(lambda x, w, kind=kind: function(kind)(x, w, over.axis_names), over)
        operands = [jax.ShapeDtypeStruct(of, dtype) for of in (x, w)]
        (row,) = jaxcoll.explain(program, *operands).rows
        assert row.path == path, (keeps_up, kind, rows, inner, columns, row)
    say("all ways are the faster ones")


main()
