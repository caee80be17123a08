"""Chains of mpi4jax's collectives, to measure beside ours."""

from typing import Any


def chains(op: str, lengths: tuple[int, ...]) -> list[Any]:
    """Returns mpi4jax's chains on this process's block; empty where it has no such op."""
    import jax
    import jax.numpy as jnp
    import mpi4jax
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    p, rank = comm.Get_size(), comm.Get_rank()

    def permute(x: Any) -> Any:
        return mpi4jax.sendrecv(x, x, source=(rank - 1) % p, dest=(rank + 1) % p, comm=comm)

    calls: dict[str, tuple[Any, Any]] = {
        "all_reduce": (lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm), lambda y: y),
        "all_gather": (
            lambda x: mpi4jax.allgather(x, comm=comm).reshape(-1),
            lambda y: y[: y.shape[0] // p],
        ),
        "all_to_all": (
            lambda x: mpi4jax.alltoall(x.reshape(p, -1), comm=comm).reshape(-1),
            lambda y: y,
        ),
        "ppermute": (permute, lambda y: y),
        "broadcast": (lambda x: mpi4jax.bcast(x, 0, comm=comm), lambda y: y),
    }
    if op not in calls:
        return []
    call, back = calls[op]

    def made(length: int) -> Any:
        def run(x: Any) -> Any:
            for _ in range(length - 1):
                x = back(call(x)) * jnp.float32(0.5)
            return call(x)

        return jax.jit(run)

    return [made(length) for length in lengths]
