"""Prints the quickest of PATH's Pythons of this one's version that can make environments.

Built without optimisation, as pyenv's are, one takes half as long again for the same code, and
two fifths of the tests' time is Python's own. `python3` from PATH stays where no other is quicker
by a fifth.

python3 tools/quickest_python.py
"""

import os
import pathlib
import subprocess
import sys

# Prints how many seconds it takes; fails where environments with extensions can't be made.
PROBE = """
import ensurepip, pathlib, sysconfig, time, timeit, venv
assert pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists()
def work(counts):
    for i in range(20_000):
        counts[i % 100] = counts.get(i % 100, 0) + sum([len(str(j)) for j in range(3)])
print(min(timeit.repeat(lambda: work({}), timer=time.process_time, number=1, repeat=9)))
"""
MUCH = 0.8
ROUNDS = 3


def quickest_python() -> str:
    """Returns the path of an interpreter; of this one where no other is much quicker."""
    name = "python{}.{}".format(*sys.version_info)
    folders = map(pathlib.Path, os.environ["PATH"].split(os.pathsep))
    paths = [sys.executable, *(str(path) for f in folders if (path := f / name).exists())]
    least = {path: float("inf") for path in paths}
    for _ in range(ROUNDS):  # all see the machine's moods
        for path in least:
            least[path] = min(least[path], _seconds(path))
    quickest = min(least, key=least.__getitem__)
    return quickest if least[quickest] < MUCH * least[sys.executable] else sys.executable


def _seconds(python: str) -> float:
    probe = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    return float(probe.stdout) if probe.returncode == 0 else float("inf")


if __name__ == "__main__":
    print(quickest_python())
