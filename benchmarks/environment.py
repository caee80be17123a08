"""What a results file says of the machine that made it."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import jax


def environment() -> dict[str, Any]:
    """Describes machine and versions, for the head of a results file."""
    cpu = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": __import__("jaxlib").__version__,
    }
