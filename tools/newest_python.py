"""Prints the newest Python from PATH or pyenv that can have the newest JAX, or nothing.

python tools/newest_python.py
"""

import glob
import os
import pathlib
import shutil
import subprocess

MINORS = (14, 13, 12)  # the newest JAX has dropped 3.11


def newest_python() -> str | None:
    """Returns the path of an interpreter that can make environments, or None."""
    pyenv = os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")
    for minor in MINORS:
        name = f"python3.{minor}"
        for path in (shutil.which(name), *glob.glob(f"{pyenv}/versions/3.{minor}.*/bin/{name}")):
            if path is not None and _makes_environments(path):
                return path
    return None


def _makes_environments(python: str) -> bool:
    probe = [python, "-c", "import ensurepip, venv"]
    return subprocess.run(probe, capture_output=True).returncode == 0


if __name__ == "__main__":
    print(newest_python() or "")
