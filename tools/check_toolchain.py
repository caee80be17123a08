"""Says in one line what a build would miss: a new enough Python, venv, headers, a C++ compiler.

Kept to what an old Python 3 can run, so that it can say that it is too old.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig


def missing():
    """Returns a sentence on the first thing that is missing, or None."""
    if sys.version_info < (3, 11):  # noqa: UP036
        return (
            f"jaxcoll needs Python >= 3.11, but {sys.executable} is "
            f"{sys.version_info[0]}.{sys.version_info[1]}; try: make PYTHON=python3.12 ..."
        )
    if importlib.util.find_spec("ensurepip") is None:
        return f"{sys.executable} can't make environments; install python3-venv (Debian, Ubuntu)"
    headers = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return (
            f"{sys.executable} has no headers: {headers}/Python.h is missing; install "
            "python3-dev (Debian, Ubuntu) or python3-devel (Fedora)"
        )
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler.split()[0]) for compiler in compilers):
        return (
            f"no C++ compiler (looked for {', '.join(compilers)}); install g++ >= 11 or "
            "clang++ >= 14, or set CXX"
        )
    return None


if __name__ == "__main__":
    problem = missing()
    sys.exit(f"error: {problem}" if problem else 0)
