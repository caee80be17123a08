"""What the threads of this process do in Python, and their stacks as text."""

import concurrent.futures
import dataclasses
import linecache
import os
import sys
import sysconfig
import threading
from types import FrameType
from typing import NamedTuple

import jax

from jaxcoll import _native
from jaxcoll.diagnosis import black_box

_JAX = os.path.join(os.path.dirname(jax.__file__), "_src", "")
_OWN = os.path.dirname(os.path.dirname(__file__))
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
# Of files in jax/_src, by what a frame in them means.
_COMPILES = (
    "compiler.py",
    *(os.path.join("interpreters", name) for name in ("mlir.py", "partial_eval.py")),
)
_CALLS_BACK = ("buffer_callback.py", "callback.py", "python_callback.py")
_AWAITS = ("api.py", "array.py")
_AWAITING = ".block_until_ready("
# Who waits for another thread is in one of these: to join it, or for an event or a future's result.
_WAITS_FOR_THREADS = (threading.__file__, os.path.dirname(concurrent.futures.__file__))
_NOT_THE_USERS = (
    *(os.path.join(_OWN, name) for name in ("_launched.py", "_watch.py")),
    "<frozen runpy>",
)
_MOST_FRAMES = 16


@dataclasses.dataclass(frozen=True)
class _Frame:
    file: str
    line: int
    function: str

    @property
    def awaits(self) -> bool:
        """Whether its line asks for results; the function that waits is not Python's."""
        return _AWAITING in linecache.getline(self.file, self.line)

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


class Look(NamedTuple):
    """What this process does.

    Attributes:
        phase: one of black_box's.
        stack: the main thread's, those of callbacks, and of others that compile or await results.
        callbacks: threads that are in one.
        functions: of the main thread and of those in callbacks, by thread, but for Python's own:
            who polls is in the same ones.
    """

    phase: int
    stack: str
    callbacks: int
    functions: tuple[tuple[int, tuple[str, ...]], ...] = ()


# What others than the main thread do, of which to say more.
_OTHERS = {
    black_box.CALLBACK: "in a callback",
    black_box.COMPILING: "compiling, in another thread",
    black_box.AWAITING: "waiting for results, in another thread",
}


def look(thread: int | None = None) -> Look:
    """Looks at all threads; `thread`, by its identifier, in the place of the main one."""
    threads = _frames()
    main_thread = threading.main_thread().ident or 0
    main = threads.pop(main_thread if thread not in threads else thread, [])
    phase = _phase_of(main)
    own = {thread.ident for thread in threading.enumerate() if thread.name.startswith("jaxcoll-")}
    others = [(_phase_of(frames), t, frames) for t, frames in threads.items() if t not in own]
    stack = [_text_of(main)]
    for of_others, name in _OTHERS.items():
        stack += [f"{name}:\n{_text_of(frames)}" for of, _, frames in others if of == of_others]
    in_callbacks = {t: frames for of, t, frames in others if of == black_box.CALLBACK}
    callbacks = len(in_callbacks)
    functions = [(t, _functions_of(frames)) for t, frames in sorted(in_callbacks.items())]
    functions.append((main_thread, _functions_of(main)))
    if callbacks and phase == black_box.AWAITING:
        phase = black_box.CALLBACK
    # It may be that thread for which it waits; that takes no longer than a compile.
    waits = phase == black_box.PYTHON and bool(main) and main[0].file.startswith(_WAITS_FOR_THREADS)
    if waits and any(of == black_box.COMPILING for of, *_ in others):
        phase = black_box.COMPILING
    callbacks += _phase_of(main) == black_box.CALLBACK
    return Look(phase, "\n".join(stack), callbacks, tuple(functions))


def all_threads() -> dict[str, str]:
    """Returns the stacks of all threads, by name."""
    named = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{named.get(number, 'of the runtime')} ({number})": _text_of(frames)
        for number, frames in _frames().items()
    }


def _frames() -> dict[int, list[_Frame]]:
    """Returns the frames of each thread, the innermost first.

    Not by faulthandler, which ends Python 3.12 and 3.13 where a thread is between two frames. The
    extension takes them while no thread can go on; what does without it looks rarely.
    """
    core = _native.core()
    if core is not None:
        return {
            thread: [_Frame(*frame) for frame in frames] for thread, frames in core.frames().items()
        }
    return {thread: _walk(top) for thread, top in sys._current_frames().items()}


def _walk(frame: FrameType | None) -> list[_Frame]:
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(_Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return frames


def _phase_of(frames: list[_Frame]) -> int:
    """Returns what a thread does that is at these frames: one of black_box's phases."""
    for frame in frames:
        if frame.file.startswith(_JAX):
            file = frame.file[len(_JAX) :]
            if file in _CALLS_BACK:
                return black_box.CALLBACK
            if file in _COMPILES:
                return black_box.COMPILING
    if frames and (frames[0].file in {_JAX + file for file in _AWAITS} or frames[0].awaits):
        return black_box.AWAITING
    return black_box.PYTHON


def _functions_of(frames: list[_Frame]) -> tuple[str, ...]:
    """Returns where a thread is as long as it goes on in the same functions, wherever in these."""
    return tuple(f"{f.file} {f.function}" for f in frames if not _is_of_python(f.file))


def _is_of_python(file: str) -> bool:
    return file.startswith(_PYTHON) and "-packages" not in file.removeprefix(_PYTHON)


def _text_of(frames: list[_Frame]) -> str:
    """Returns a stack as Python prints one, without source lines; of JAX the last two frames."""
    lines = [
        str(frame)
        for i, frame in enumerate(frames)
        if not frame.file.startswith(_NOT_THE_USERS) and (i < 2 or not frame.file.startswith(_JAX))
    ]
    if len(lines) > _MOST_FRAMES:
        lines = [*lines[:_MOST_FRAMES], f"... {len(lines) - _MOST_FRAMES} more"]
    return "\n".join(reversed(lines))
