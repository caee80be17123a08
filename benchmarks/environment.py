"""What a results file says of the machine that made it."""

import os
import platform
import re
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


def machine(of: dict[str, Any]) -> str:
    """Returns the part of a results file's name that says where it was made, and when."""
    cpu = re.sub(r"\(\w+\)|@.*|\b(CPU|Processor)\b", " ", of["cpu"])
    cpu = re.sub(r"[^\w]+", "-", cpu.strip())
    return f"{of['cores']}-cores-{cpu}_{of['date'].replace('-', '')}".lower()
