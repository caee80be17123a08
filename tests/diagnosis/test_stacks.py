"""Stacks of threads that go on meanwhile."""

import concurrent.futures.thread
import queue
import subprocess
import sys
import threading

import jax
import pytest
from checks import native_missing

from jaxcoll.diagnosis import black_box, stacks

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


def frames(*those: tuple[str, int, str]) -> list[stacks._Frame]:
    """Of a thread, the innermost first."""
    return [stacks._Frame(*each) for each in those]


@pytest.fixture
def threads(monkeypatch):
    """Sets what the main thread does, and others by their number."""

    def do(main, **others):
        number = threading.main_thread().ident
        told = {number: main, **{int(name[1:]): those for name, those in others.items()}}
        monkeypatch.setattr(stacks, "_frames", lambda: dict(told))
        return stacks.look()

    return do


def test_a_callback_that_polls_stays_in_its_functions(threads):
    awaits = frames((stacks._JAX + "array.py", 1, "_value"), ("train.py", 3, "main"))

    def polls(line, *inside):
        of_jax = (stacks._JAX + "callback.py", 9, "_flat_callback")
        return frames(*inside, ("data.py", line, "load"), of_jax)

    seen = threads(
        awaits, t7=polls(12, (threading.__file__, 90, "wait"), (queue.__file__, 8, "get"))
    )
    assert (seen.phase, seen.callbacks) == (black_box.CALLBACK, 1)
    later = threads(awaits, t7=polls(15))
    assert later.functions == seen.functions
    assert later.stack != seen.stack
    for other in (
        threads(awaits, t8=polls(15)),  # another thread's
        threads(awaits, t7=polls(15, ("data.py", 20, "parse"))),
        threads(awaits[:1], t7=polls(15)),
        threads(awaits, t7=polls(15, ("lib/site-packages/queue.py", 20, "get"))),
        threads(awaits, t7=polls(15, (stacks._PYTHON + "site-packages/a.py", 20, "get"))),
    ):
        assert other.functions != seen.functions


def test_who_waits_for_a_thread_that_compiles(threads):
    compiles = frames((stacks._JAX + "compiler.py", 5, "backend_compile"), ("train.py", 7, "train"))
    for file, function in (
        (threading.__file__, "join"),
        (threading.__file__, "wait"),
        (concurrent.futures.thread.__file__, "submit"),
    ):
        seen = threads(frames((file, 1, function), ("train.py", 3, "main")), t7=compiles)
        assert seen.phase == black_box.COMPILING
    for main in (
        frames(("train.py", 3, "main")),
        frames(("data.py", 9, "read"), (threading.__file__, 1, "run")),
        [],
    ):
        assert threads(main, t7=compiles).phase == black_box.PYTHON


def test_a_thread_that_compiles_counts_as_the_process():
    """A training need not run in the main thread. One of ours that lists collectives is none.

    Nor is one for which the main thread does not wait.
    """
    began, goes_on = threading.Event(), threading.Event()

    @jax.jit
    def traced_slowly(x):
        began.set()
        goes_on.wait(20)
        return x

    def look_while_it_waits(thread):
        found = []
        looks = threading.Timer(0.1, lambda: found.extend([stacks.look(), stacks.look(thread)]))
        looks.start()
        looks.join()
        return found

    for name, phase in (("training", black_box.COMPILING), ("jaxcoll-watch", black_box.PYTHON)):
        thread = threading.Thread(target=traced_slowly, args=(len(name),), name=name)
        traced_slowly.clear_cache()
        thread.start()
        began.wait(20)
        seen, of_thread = look_while_it_waits(thread.ident)
        assert stacks.look().phase == black_box.PYTHON
        goes_on.set()
        thread.join()
        assert seen.phase == phase
        assert ("compiling, in another thread:\n" in seen.stack) == (phase == black_box.COMPILING)
        assert "in traced_slowly" in of_thread.stack.partition("in another thread")[0]
        began.clear()
        goes_on.clear()
