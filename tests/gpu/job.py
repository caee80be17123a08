"""A process of a job on GPUs, or, to be tried, on CPU devices: job.py KIND.

KIND: `whole` and `few`: the table of ops, and training as on one device. `small`: see
small_sums.py; `blocks`: blocks.py. Others: see faults.py.
"""

import importlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))
# For a moment: benchmarks have modules of the same names as tests.
sys.path.append(str(ROOT / "benchmarks"))
gpu_jobs = importlib.import_module("gpu_jobs")
del sys.path[-1]


def main(what: str) -> None:
    gpu_jobs.join()
    import blocks
    import conformance
    import faults
    import jax
    import parity
    import small_sums

    import jaxcoll

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    print(jaxcoll.info(), flush=True)
    if what in faults.FAULTS:
        faults.break_down(what, mesh)
        return
    if what == "small":
        with jax.enable_x64(True):
            found = list(small_sums.sums(mesh))
        small = [one.order for one in found if one.sent <= small_sums.MOST_BYTES]
        print(f"right: {len(found)}, small: {len(small)}, by rank: {small.count('by rank')}")
        return
    if what == "blocks":
        if jax.default_backend() == "gpu":
            blocks.on_gpus(mesh)
        else:
            print(f"on CPU: {len(list(blocks.products(mesh)))} products")
        return
    table = conformance.rows if what == "whole" else conformance.a_few
    with jax.enable_x64(True):
        outcome = conformance.conform(mesh, list(table(mesh.size)))
    for text in outcome.on_lax:
        print(f"on lax: {text}")
    print(f"right: {outcome.right}, on lax: {len(outcome.on_lax)}", flush=True)
    done = parity.train_alike(jax.devices())
    print(f"as on one device: {'; '.join(done)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
