"""The BLAS that multiplies for the collective matmuls, beside XLA's own matmul, on one core.

    python benchmarks/blas.py

XLA's matmul can't be called from within a custom call, so that the collective matmuls need one of
their own: SciPy's, which every installation of JAX has. Half precision is converted to float32 for
it, which is timed with it.
"""

import argparse
import functools as ft
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts cores

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import paired_rounds  # noqa: E402
from environment import environment  # noqa: E402
from scipy.linalg import blas  # noqa: E402
from shared import command, head, save  # noqa: E402

from jaxcoll import _blas  # noqa: E402

SHAPES = [
    *((m, 4096, 128) for m in (64, 256, 1024)),
    *((m, 1024, 1024) for m in (64, 256, 1024)),
    *((256, 256, 256), (1024, 256, 1024), (1024, 128, 4096), (64, 4096, 4096)),
]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
BUDGET_S = 1.0


def measure(shape: tuple[int, int, int], name: str) -> dict[str, Any]:
    """Returns medians in ms, and of the ratio in each round."""
    m, k, n = shape
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, of).astype(DTYPES[name]) for of in ((m, k), (k, n)))
    x, w = jnp.array(a), jnp.array(b)
    y = np.zeros((m, n), np.float32)
    wide = jax.jit(lambda *of: [o.astype(jnp.float32) for o in of])
    matmul = jax.jit(ft.partial(jnp.matmul, preferred_element_type=jnp.float32))

    def by_blas() -> None:
        left, right = (np.asarray(of) for of in (wide(x, w) if name != "float32" else (x, w)))
        # Rows first as everywhere in JAX: the BLAS multiplies the transposed ones.
        blas.sgemm(1.0, right.T, left.T, beta=0.0, c=y.T, overwrite_c=1)

    by_blas()
    wrong = int((np.asarray(matmul(x, w)) != y).sum())
    programs = {"xla": [ft.partial(matmul, x, w)], "blas": [by_blas]}
    seconds = paired_rounds.measure(programs, lambda: None, BUDGET_S, 5)
    xla, ours = (np.array(seconds[way][0]) for way in ("xla", "blas"))
    return {
        "dtype": name, "m": m, "k": k, "n": n, "wrong": wrong, "rounds": len(xla),
        "xla_ms": float(np.median(xla) * 1e3), "blas_ms": float(np.median(ours) * 1e3),
        "blas_over_xla": float(np.median(ours / xla)),
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """Returns the results file."""
    lines = [
        *head("SciPy's BLAS and XLA's matmul", result),
        f"On one core, one thread; kernels of the BLAS for {result['blas']}. Medians of rounds in "
        "turn; above 1 XLA's matmul is faster. bfloat16 is converted to float32 for the BLAS, "
        "which is timed with it.",
        "",
        "| dtype | m, k, n | XLA ms | BLAS ms | BLAS / XLA | rounds | wrong |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['dtype']} | {row['m']}, {row['k']}, {row['n']} | {row['xla_ms']:.3f} "
        f"| {row['blas_ms']:.3f} | {row['blas_over_xla']:.2f} | {row['rounds']} | {row['wrong']} |"
        for row in result["rows"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    of = environment()
    rows = [measure(shape, name) for name in DTYPES for shape in SHAPES]
    result = {"command": command(), "environment": of, "blas": _blas.kernels(), "rows": rows}
    save("blas", result, markdown(result), chosen.out)
    if any(row["wrong"] for row in rows):
        sys.exit("results differ")


if __name__ == "__main__":
    main()
