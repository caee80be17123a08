"""What the processes of a job do as one: say something once, and agree on a number."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def say(*texts: Any, **how: Any) -> None:
    """Print on the first process alone."""
    if jax.process_index() == 0:
        print(*texts, **how)


def agree(value: float) -> float:
    """Return the first process's value on all, such as what its clock says."""
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))
