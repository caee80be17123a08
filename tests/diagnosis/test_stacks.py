"""Stacks of threads that go on meanwhile."""

import subprocess
import sys

import pytest
from checks import native_missing

# A thread whose function, called from C, lets the others go on while its frame is taken apart.
CLOSES = """
import pathlib, sys, threading, time
from jaxcoll.diagnosis import stacks

path = pathlib.Path(sys.argv[1])
ends = time.monotonic() + 1.0

def close(_):
    file = path.open("wb", buffering=1 << 22)
    file.write(b"x" * ((1 << 22) - 1))

def closing():
    while time.monotonic() < ends:
        list(map(close, [0]))

thread = threading.Thread(target=closing, name="closing")
thread.start()
looks, seen = 0, 0
while thread.is_alive():
    looks += 1
    seen += any(name.startswith("closing") and text for name, text in stacks.all_threads().items())
print(looks, seen)
"""


@pytest.mark.skipif(native_missing() is not None, reason="the extension takes them")
def test_a_thread_between_two_frames(tmp_path):
    command = [sys.executable, "-c", CLOSES, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    looks, seen = map(int, done.stdout.split())
    assert looks > 10
    assert seen > 0
