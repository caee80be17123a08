"""A collective matmul where the BLAS of one process has been told to take other kernels."""

import os

import jax
import numpy as np
from world import assert_blocks, mapped, mesh, put, say

import jaxcoll

if jax.process_index() == 1:
    os.environ["OPENBLAS_CORETYPE"] = "Prescott"  # before the BLAS is loaded
jaxcoll.reset()  # tells the other process
over = mesh()
f = mapped(lambda x, w: jaxcoll.all_gather_matmul(x, w, over.axis_names), over)
operand = put(np.ones((over.size, 4, 4), np.float32), over)
with jaxcoll.using(backend="auto"):
    (row,) = jaxcoll.explain(f, operand, operand).rows
    say(f"{row.path}: {row.reason}")
    assert_blocks(f(operand, operand), np.full((over.size, 4 * over.size, 4), 4, np.float32), "y")
say("all products are right")
