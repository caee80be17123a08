"""Stacks of threads that go on meanwhile."""

import concurrent.futures.thread
import queue
import re
import runpy
import selectors
import subprocess
import sys
import threading
import time
import types

import jax
import pytest
from checks import native_missing

from jaxcoll import _native
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


def test_what_python_does_to_import_is_not_shown(threads):
    imports = [(f"<frozen importlib.{name}>", 1, "_load") for name in ("_bootstrap", "_abc") * 9]
    seen = threads(frames(("data.py", 1, "<module>"), *imports, ("train.py", 3, "main")))
    assert seen.stack == ('File "train.py", line 3, in main\nFile "data.py", line 1, in <module>')


def test_who_waits_for_a_thread_that_compiles(threads, tmp_path):
    compiles = frames((stacks._JAX + "compiler.py", 5, "backend_compile"), ("train.py", 7, "train"))
    for file, function in (
        (threading.__file__, "join"),
        (threading.__file__, "wait"),
        (concurrent.futures.thread.__file__, "submit"),
        (selectors.__file__, "select"),  # of asyncio
    ):
        seen = threads(frames((file, 1, function), ("train.py", 3, "main")), t7=compiles)
        assert seen.phase == black_box.COMPILING
    looks = tmp_path / "train.py"
    looks.write_text("while thread.is_alive():\n    time.sleep(0.5)\n")
    assert threads(frames((str(looks), 2, "main")), t7=compiles).phase == black_box.COMPILING
    for main in (
        frames((str(looks), 1, "main")),
        frames(("train.py", 3, "main")),
        frames(("data.py", 9, "read"), (threading.__file__, 1, "run")),
        [],
    ):
        assert threads(main, t7=compiles).phase == black_box.PYTHON


@pytest.mark.parametrize("has_extension", [True, False])
@pytest.mark.parametrize(
    "line",
    [
        "(y.sleep(), y.block_until_ready())",
        "y.sleep(); y.block_until_ready()",
        "y.block_until_ready(y.sleep() and -1)",
        "y.block_until_ready(y.sleep(\n) and\n -1)",
        "(y.acquire(), y.block_until_ready())",  # a name that says nothing of time
    ],
)
def test_who_sleeps_on_a_line_that_awaits_does_not_await_yet(
    line, has_extension, tmp_path, monkeypatch
):
    if has_extension and native_missing() is not None:
        pytest.skip("there is none")
    if not has_extension:
        monkeypatch.setattr(_native, "core", lambda: None)
    first, second = threading.Lock(), threading.Lock()
    y = types.SimpleNamespace(
        sleep=first.acquire, acquire=first.acquire, block_until_ready=second.acquire
    )
    program = tmp_path / "program.py"
    program.write_text(f"def main(y):\n    {line}\n")
    found = runpy.run_path(str(program))
    thread = threading.Thread(target=found["main"], args=(y,), daemon=True)
    first.acquire()
    second.acquire()
    thread.start()

    def phase(expected):
        """Of the thread, once it is the one that is expected, or after a while another."""
        until = time.monotonic() + 10
        while (seen := stacks.look(thread.ident).phase) != expected and time.monotonic() < until:
            time.sleep(0.01)
        return seen

    time.sleep(0.1)
    assert phase(black_box.PYTHON) == black_box.PYTHON
    first.release()
    assert phase(black_box.AWAITING) == black_box.AWAITING
    second.release()
    thread.join()


def test_a_line_of_which_python_does_not_say_where_it_is(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("y.block_until_ready()\ntime.sleep(5); y.block_until_ready()\n")
    (awaits, may_sleep) = frames((str(program), 1, "main"), (str(program), 2, "main"))
    assert (awaits.awaits, may_sleep.awaits) == (True, False)


def test_who_waits_for_threads_is_shown_with_them(threads):
    waits = frames((threading.__file__, 1, "wait"), ("train.py", 3, "main"))
    loads = frames(
        (queue.__file__, 8, "put"), ("data.py", 9, "load"), (threading.__file__, 1, "run")
    )
    idle = frames(
        (concurrent.futures.thread.__file__, 81, "_worker"), (threading.__file__, 1, "run")
    )
    monitors = frames(("lib/site-packages/bar.py", 5, "monitor"), (threading.__file__, 1, "run"))
    of_jax = frames((stacks._JAX + "array.py", 5, "fetch"), (threading.__file__, 1, "run"))
    seen = threads(waits, t7=loads, t8=idle, t9=monitors, t10=of_jax, t11=loads).stack
    main, *others = seen.split("in another thread, ")
    assert "in main" in main
    (other,) = others
    assert other.startswith("7 and 1 more:\n")
    assert 'File "data.py", line 9, in load' in other
    # What a library does is shown where the program itself has no thread.
    assert "in monitor" in threads(waits, t8=idle, t9=monitors).stack
    many = {f"t{i}": frames(("data.py", i, "load")) for i in range(10, 20)}
    seen = threads(waits, **many).stack
    assert (seen.count("in load"), "... 7 more threads" in seen) == (3, True)
    # Who computes waits for none.
    assert "in load" not in threads(frames(("train.py", 3, "main")), t7=loads).stack
    assert threads(frames(("data.py", 3, "x")), t8=idle).stack == 'File "data.py", line 3, in x'


def test_a_loader_that_is_stuck(tmp_path):
    """The main thread waits in C, for an element of its queue."""
    program = tmp_path / "program.py"
    program.write_text(
        "def load(goes_on, elements):\n"
        "    goes_on.wait()\n"
        "    elements.put(1)\n"
        "def main(elements):\n"
        "    return elements.get()\n"
    )
    found = runpy.run_path(str(program))
    goes_on, elements = threading.Event(), queue.SimpleQueue()
    loader = threading.Thread(target=found["load"], args=(goes_on, elements), name="loader")
    main = threading.Thread(target=found["main"], args=(elements,))
    loader.start()
    main.start()
    until = time.monotonic() + 20
    while "in load" not in (stack := stacks.look(main.ident).stack) and time.monotonic() < until:
        time.sleep(0.01)
    goes_on.set()
    main.join()
    loader.join()
    assert re.search(
        r"line 5, in main\n(.*\n)*in another thread, loader:\n(.*\n)*.* in load", stack
    )


def test_what_runs_while_jax_takes_a_function_apart_is_not_compiled():
    """As the gradient of a rematerialised function outside of `jit`."""
    apart = (f"{stacks._JAX}interpreters/partial_eval.py", 3, "process_primitive")
    for runs in ("dispatch.py", "apply_primitive"), ("interpreters/pxla.py", "__call__"):
        inner = (f"{stacks._JAX}{runs[0]}", 7, runs[1])
        assert stacks._phase_of(frames(inner, apart)) == black_box.PYTHON
        assert stacks._phase_of(frames(apart, inner)) == black_box.COMPILING
        callback = (f"{stacks._JAX}callback.py", 9, "pure_callback_impl")
        assert stacks._phase_of(frames(inner, apart, callback)) == black_box.CALLBACK


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
