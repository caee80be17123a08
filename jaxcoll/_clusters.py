"""Whether the environment says that this process is one of several, and really so.

JAX waits for minutes for processes that never come where it takes the variables of an allocation,
or of a pod, for those of a job. Each function here knows one manager and looks at nothing but its
argument.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Decision(NamedTuple):
    """Whether to call `jax.distributed.initialize`, why, and with what."""

    join: bool
    reason: str
    arguments: Mapping[str, Any] = {}


def decide(environment: Mapping[str, str], has_package: Callable[[str], bool]) -> Decision:
    """Returns what the first manager that shows in the environment says.

    The order is JAX's: what Open MPI starts inside of a Slurm allocation has both's variables,
    and those of Slurm are of the helper that Open MPI runs on each node.
    """
    for manager in (_explicit, _open_mpi, _slurm):
        decision = manager(environment)
        if decision is not None:
            return decision
    return _kubernetes(environment, has_package) or Decision(False, "nothing has started several")


def _explicit(environment: Mapping[str, str]) -> Decision | None:
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        return None
    arguments = {
        name: int(environment[variable])
        for name, variable in (
            ("num_processes", "JAX_NUM_PROCESSES"),
            ("process_id", "JAX_PROCESS_ID"),
        )
        if environment.get(variable)
    }
    return Decision(True, f"JAX_COORDINATOR_ADDRESS is {address}", arguments)


def _open_mpi(environment: Mapping[str, str]) -> Decision | None:
    size = environment.get("OMPI_COMM_WORLD_SIZE")
    if size is None:
        return None
    if int(size) == 1:
        return Decision(False, "Open MPI has started this process alone")
    # Open MPI 5 has no such variable, and JAX can read nothing else there.
    is_old = "OMPI_MCA_orte_hnp_uri" in environment
    arguments = {} if is_old else {"cluster_detection_method": "mpi4py"}
    return Decision(True, f"Open MPI has started {size} processes", arguments)


def _slurm(environment: Mapping[str, str]) -> Decision | None:
    if "SLURM_JOB_ID" not in environment:
        return None
    if not environment.keys() >= {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"}:
        return Decision(False, "a Slurm allocation, but srun has not started this process")
    # Of this step. SLURM_NTASKS may still be the allocation's, as in an interactive shell.
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))
    if tasks == 1:
        return Decision(False, "srun has started this process alone")
    return Decision(True, f"srun has started {tasks} tasks", {"num_processes": tasks})


def _kubernetes(
    environment: Mapping[str, str], has_package: Callable[[str], bool]
) -> Decision | None:
    if "KUBERNETES_SERVICE_HOST" not in environment:
        return None
    if "JOB_COMPLETION_INDEX" not in environment:
        return Decision(False, "a Kubernetes pod, but not one of an indexed Job")
    if not has_package("kubernetes"):
        return Decision(
            False, "an indexed Job of Kubernetes, but pip install 'jax[k8s]' is missing"
        )
    return Decision(True, "an indexed Job of Kubernetes")
