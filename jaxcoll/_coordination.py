"""JAX's coordination service, run without importing JAX: that takes longer than all else here."""

import os
from typing import Any

# After which a process that does not answer is lost to the others, and one that comes back ends
# itself. Long: what starts the processes sees the death of one at once, and a process that was
# stopped for a while, in a debugger say, is to live.
HEARTBEAT_S = 600

# As JAX has it, before jaxlib reads it: the service says much that is of no use.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def problem() -> str | None:
    """Says that this jaxlib has no such service, or None."""
    from importlib.metadata import version

    from jaxlib import _jax

    if hasattr(_jax, "get_distributed_runtime_service"):
        return None
    return (
        f"jax {version('jax')} is not known to this version of jaxcoll "
        "(jaxlib._jax.get_distributed_runtime_service is missing)"
    )


def start(address: str, num_processes: int) -> Any:
    """Starts the service, as process 0 does in JAX; one that survives a death.

    The address must be free: XLA ends the process where it is not.
    """
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=HEARTBEAT_S, recoverable=True
    )
